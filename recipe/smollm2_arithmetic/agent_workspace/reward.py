"""The reward of a sum: named parts, so that the report shows which of them is being learnt."""

import re

PREFIX_REWARD = 0.2
STOP_REWARD = 0.2


def score_sum(completion: str, answer: str, finish_reason: str, **_: object) -> dict[str, float]:
    """`exact`: 1 for the number and nothing else; `prefix`: 0.2 for text that begins with it;
    `stopped`: 0.2 for an end of the model's own choice.

    The two small parts lead a model that never says just the number towards saying it.
    """
    text = completion.strip()
    begins = re.match(r"\d+(?![.,/]?\d)", text)  # the 1 of 1.5 is no number
    return {
        "exact": float(text == answer),
        "prefix": PREFIX_REWARD * float(begins is not None and begins.group() == answer),
        "stopped": STOP_REWARD * float(finish_reason in ("eos", "stop_token")),
    }
