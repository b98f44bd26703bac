"""SupervisedWorker: prompt and answer of a data item as one row to imitate. No inference.

The built-in worker of `rollout_worker.type: supervised`; its rows are trained by
`trainer.algorithm: sft`. Nothing was sampled, so rows carry no logprobs, no versions and no reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from nexrl.errors import DataError
from nexrl.rollout.prompts import BoundedCache, Messages
from nexrl.rollout.rollout_worker import RolloutWorker, WorkerContext
from nexrl.types import IntArray, TokenRow, Trajectory

_NUM_CACHED_ROWS = 16384


class ImitationWorker(RolloutWorker):
    """Base of workers whose rows are texts at hand, trained or judged, not drawn.

    The response follows the prompt as it follows it in sampling: both are tokenised apart.
    Invariant: a row is tokenised once, however often its item is drawn; its mask is 1 on the
    response and its end-of-sequence token, 0 on the prompt.
    """

    uses_inference: ClassVar[bool] = False

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._rows: BoundedCache[tuple[str, TokenRow]] = BoundedCache(_NUM_CACHED_ROWS)
        """Text of the prompt, and the row."""

    def imitation(self, data_item: Mapping[str, Any], text: str) -> Trajectory:
        """The item's prompt followed by a response."""

        def make_row() -> tuple[str, TokenRow]:
            prompt = self.prompts.of_row(data_item)
            answer = self.renderer.encode(text, add_special_tokens=False)
            return prompt.text, self._row(prompt.token_ids, answer)

        key = f"{self.prompts.source_of(data_item)!r}\x1f{text}"
        prompt, row = self._rows.get(key, make_row)
        return Trajectory(prompt=prompt, response=text, rows=(row,))

    def imitation_of(self, data_item: Mapping[str, Any], column: str, setting: str) -> Trajectory:
        """The item's prompt followed by the text of a column; DataError when there is none."""
        text = data_item.get(column)
        if not isinstance(text, str) or not text:
            raise DataError(
                f"column {column!r} ({setting}) must be a non-empty string, got "
                f"{found_in(data_item, column)}"
            )
        return self.imitation(data_item, text)

    def _row(self, prompt: IntArray, answer: IntArray) -> TokenRow:
        """The answer ends with its last end-of-sequence token; what a template writes after it
        (a newline) is no part of it (FR-016)."""
        ends = np.flatnonzero(np.isin(answer, self.renderer.eos_token_ids))
        if len(ends):
            answer = answer[: ends[-1] + 1] if self.config.add_eos else answer[: ends[-1]]
        elif self.config.add_eos:
            if not self.renderer.eos_token_ids:
                raise DataError(
                    "rollout_worker.add_eos is on but the tokenizer has no end-of-sequence token"
                )
            answer = np.append(answer, self.renderer.eos_token_ids[0])
        if not len(answer):
            raise DataError("the answer has no tokens, so the row would train nothing")
        return row_of(prompt, answer)


class SupervisedWorker(ImitationWorker):
    """Rows whose mask is 1 on the answer and its end-of-sequence token, 0 on the prompt.

    With an answer column the answer follows the prompt as it follows it in sampling: both are
    tokenised apart. Without one the last assistant message of `messages` is the answer.
    """

    async def step(self, data_item: dict[str, Any]) -> Trajectory:
        """The item as a row; tokenised once, however often it is drawn."""
        source = self.prompts.source_of(data_item)
        answer = data_item.get(self.context.data.answer_key)
        if answer is None and not isinstance(source, str):
            messages: Messages = source
            prompt, row = self._rows.get(repr(messages), lambda: self._row_of_messages(messages))
            response = str(messages[-1].get("content"))
            return Trajectory(prompt=prompt, response=response, rows=(row,))
        return self.imitation(data_item, self._answer_text(data_item, answer))

    def _answer_text(self, data_item: Mapping[str, Any], answer: Any) -> str:
        if isinstance(answer, str) and answer:
            return answer
        if isinstance(answer, int) and not isinstance(answer, bool):
            return str(answer)
        key = self.context.data.answer_key
        raise DataError(
            f"a supervised row needs a non-empty string in column {key!r} (data.answer_key), or "
            f"messages that end with an assistant message, got {found_in(data_item, key)}"
        )

    def _row_of_messages(self, messages: Messages) -> tuple[str, TokenRow]:
        if messages[-1].get("role") != "assistant" or len(messages) < 2:
            raise DataError(
                "supervised messages must end with an assistant message after at least one other, "
                f"got roles {[m.get('role') for m in messages]}"
            )
        built = self.prompts.build(messages[:-1])
        prompt = built.token_ids
        whole = self.renderer.render(messages, add_generation_prompt=False)
        same = whole[: len(prompt)] == prompt if len(whole) > len(prompt) else np.zeros(1, bool)
        if not same.all():
            raise DataError(
                "the chat template does not continue its own generation prompt: rendering with the "
                f"last assistant message differs from the prompt at token {int(np.argmin(same))} of "
                f"{len(prompt)}, so the answer's tokens cannot be told from the prompt's"
            )
        return built.text, self._row(prompt, whole[len(prompt) :])


def row_of(prompt: IntArray, answer: IntArray) -> TokenRow:
    """Prompt and answer as a row of which the answer is trained."""
    token_ids = np.concatenate([prompt, answer]).astype(np.int32)
    return TokenRow(token_ids=token_ids, loss_mask=np.arange(len(token_ids)) >= len(prompt))


def found_in(data_item: Mapping[str, Any], column: str) -> str:
    """A column's value for an error; what there is instead where it is absent."""
    if column in data_item:
        return f"{data_item[column]!r:.80}"
    return f"nothing; the row has: {', '.join(sorted(map(str, data_item)))}"
