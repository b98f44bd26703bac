"""The reward of a sum: named parts, so that the report shows which of them is being learnt."""

import re

PREFIX_REWARD = 0.2
STOP_REWARD = 0.2
ENDS = ("eos", "stop_token")


def score_sum(completion: str, answer: str, finish_reason: str, **_: object) -> dict[str, float]:
    """`exact`: 1 for the number and nothing else; `prefix`: 0.2 for text that begins with it;
    `stopped`: 0.2 for a number, right or wrong, and then an end of the model's own choice.

    The two small parts lead a model that seldom says just the number towards saying it. An end
    after anything else earns nothing: saying nothing, or always `a + b = c`, would be the nearest
    optimum.
    """
    text = completion.strip()
    begins = re.match(r"\d+(?![.,/]?\d)", text)  # the 1 of 1.5 is no number
    return {
        "exact": float(text == answer),
        "prefix": PREFIX_REWARD * float(begins is not None and begins.group() == answer),
        "stopped": STOP_REWARD * float(text.isdecimal() and finish_reason in ENDS),
    }
