"""RewardModel: a trained reward model as a reward.

    rollout_worker:
      reward: nexrl.services.reward.model:RewardModel
      reward_arguments: {path: runs/preferences/.../publications/actor-0001-00000100}

Between a completion and its trajectory, as any reward. The folder is a publication (or a folder of
`save_state`) of a run with `trainer.algorithm: reward_model`; a completion is scored as the rows of
that run were: prompt, response, and the value of the state after its last token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nexrl.blocking_pool import BlockingPool
from nexrl.errors import ConfigError, RewardError
from nexrl.rendering.renderer import HfRenderer, load_renderer
from nexrl.services.reward.protocol import RewardResult
from nexrl.types import Completion, IntArray

if TYPE_CHECKING:
    from nexrl.services.train.backends.hf_model import LoadedModel

_Waiting = tuple[IntArray, "asyncio.Future[float]"]


class RewardModel:
    """RewardService over a policy with a value head.

    Calls that wait at the same moment are scored together, at most `batch_size` at a time and in
    order of arrival. Invariant: a score depends on nothing but its own row, up to the rounding of
    a batched forward pass; with `batch_size` 1 to the last bit.
    """

    def __init__(
        self,
        path: str,
        *,
        recipe_dir: Path,
        batch_size: int = 32,
        prompt_key: str = "prompt",
        messages_key: str = "messages",
        system_prompt: str | None = None,
        chat_template: bool = False,
        add_eos: bool = True,
        device: str = "cpu",
    ) -> None:
        """Loads the model: blocking. The settings are those that the training rows were made with;
        they matter where the policy has another tokenizer. ConfigError names a folder that will
        not do."""
        if batch_size < 1:
            raise ConfigError(
                f"rollout_worker.reward_arguments.batch_size must be at least 1, got {batch_size}"
            )
        self._folder = _find(path, recipe_dir)
        self._batch_size = batch_size
        self._prompt_key, self._messages_key = prompt_key, messages_key
        self._system_prompt, self._chat_template = system_prompt, chat_template
        self._add_eos = add_eos
        self._renderer: HfRenderer = load_renderer(self._folder)
        self._model, self._digest = _load(self._folder, device)
        self._thread = BlockingPool(1, name="reward model")
        self._waiting: list[_Waiting] = []
        self._scoring: asyncio.Task[None] | None = None

    @property
    def contract(self) -> str:
        """Folder and the hash of its value head."""
        return f"{type(self).__module__}:{type(self).__name__}({self._folder})#{self._digest}"

    def check_row(self, row: Mapping[str, Any]) -> None:
        """ConfigError when a row has no prompt that could be scored."""
        self._prompt_of(row)

    async def score(
        self, completion_text: str, row: Mapping[str, Any], completion: Completion | None = None
    ) -> RewardResult:
        """The score of prompt and completion, unbounded; RewardError when the model cannot take
        the row."""
        token_ids = self._tokens(completion_text, row, completion)
        longest = self._model.max_positions
        if len(token_ids) > longest:
            raise RewardError(
                f"the reward model in {self._folder} takes at most {longest} tokens, prompt and "
                f"completion have {len(token_ids)}"
            )
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((token_ids, future))
        if self._scoring is None:
            self._scoring = asyncio.create_task(self._score_waiting(), name="reward model")
        return RewardResult(value=await future)

    async def aclose(self) -> None:
        """End the thread; calls that still wait are cancelled. Idempotent."""
        if self._scoring is not None:
            self._scoring.cancel()
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        await self._thread.aclose()

    async def _score_waiting(self) -> None:
        """Consumes waiting rows until there are none; woken by the first `score` after that."""
        try:
            while self._waiting:
                size = self._batch_size
                batch, self._waiting = self._waiting[:size], self._waiting[size:]
                await self._score_batch(batch)
        finally:
            self._scoring = None

    async def _score_batch(self, batch: Sequence[_Waiting]) -> None:
        """Every caller of the batch gets its score or the error; a failed batch stops no other."""
        try:
            rows = [token_ids for token_ids, _ in batch]
            scores = await self._thread.run(partial(_score, self._model, rows))
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)
        except Exception as error:  # noqa: BLE001 - handed to the callers
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
        finally:
            for _, future in batch:
                future.cancel()  # those of a batch that closing interrupted

    # --- rows -------------------------------------------------------------------------------------

    def _tokens(self, text: str, row: Mapping[str, Any], completion: Completion | None) -> IntArray:
        """The row as the training rows were made: drawn ids where this tokenizer reads them as the
        same text, else the text tokenised."""
        if completion is not None and self._reads(completion, row):
            prompt, response = completion.prompt_token_ids, completion.token_ids
        else:
            prompt = self._prompt_of(row)
            response = self._renderer.encode(text, add_special_tokens=False)
            if completion is None or completion.finish_reason in ("eos", "stop_token"):
                response = np.append(response, self._renderer.eos_token_ids[:1])
        if not self._add_eos and len(response) and response[-1] in self._renderer.eos_token_ids:
            response = response[:-1]
        return np.concatenate([prompt, response]).astype(np.int32)

    def _reads(self, completion: Completion, row: Mapping[str, Any]) -> bool:
        """Whether drawn ids mean here what they meant to the policy."""
        ids = np.concatenate([completion.prompt_token_ids, completion.token_ids])
        if len(ids) and int(ids.max()) >= self._renderer.vocab_size:
            return False
        source = self._source(row)
        said = source if isinstance(source, str) else str(source[-1].get("content", ""))
        return said in self._renderer.decode(completion.prompt_token_ids) and self._renderer.decode(
            completion.token_ids
        ).startswith(completion.text)

    def _prompt_of(self, row: Mapping[str, Any]) -> IntArray:
        source = self._source(row)
        if not isinstance(source, str):
            return self._renderer.render(source)
        if not self._chat_template:
            return self._renderer.encode(source)
        system = [] if self._system_prompt is None else [("system", self._system_prompt)]
        return self._renderer.render(
            [{"role": role, "content": content} for role, content in (*system, ("user", source))]
        )

    def _source(self, row: Mapping[str, Any]) -> Any:
        for key in (self._prompt_key, self._messages_key):
            value = row.get(key)
            if value and isinstance(value, str | list | tuple):
                return value
        raise ConfigError(
            f"rollout_worker.reward: the reward model needs column {self._prompt_key!r} "
            f"(reward_arguments.prompt_key) or {self._messages_key!r} (messages_key); the row has: "
            f"{', '.join(sorted(map(str, row))) or 'none'}"
        )


def _find(path: str, recipe_dir: Path) -> Path:
    """The model folder: relative to the recipe folder, then to the working directory."""
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"rollout_worker.reward_arguments.path must be a model folder, got {path!r} (accepted: "
            "a publication of a run with trainer.algorithm: reward_model)"
        )
    tried = [recipe_dir / path, Path(path)]
    for folder in tried:
        for inside in (folder, folder / "hf"):
            if (inside / "config.json").is_file():
                return inside.absolute()
    raise ConfigError(
        f"rollout_worker.reward_arguments.path: {path!r} is not a model folder (no config.json in "
        f"{' or '.join(dict.fromkeys(str(t.absolute()) for t in tried))}); accepted: a publication "
        "of a run with trainer.algorithm: reward_model"
    )


def _load(folder: Path, device: str) -> tuple[LoadedModel, str]:
    from nexrl.services.train.backends.hf_model import HEAD_FILE, load_value_model

    setting = "rollout_worker.reward_arguments.path"
    model = load_value_model(str(folder), setting=setting, device=device)
    return model, blake2b((folder / HEAD_FILE).read_bytes(), digest_size=8).hexdigest()


def _score(model: LoadedModel, rows: list[IntArray]) -> list[float]:
    from nexrl.services.train.backends.hf_model import row_values

    scores: list[float] = row_values(model, rows).tolist()
    return scores
