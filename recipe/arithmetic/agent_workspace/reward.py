"""The reward of this recipe."""

from nexrl.services.reward.signature import instant


@instant  # one comparison: not worth a thread
def exact_match(completion: str, answer: str, **_: object) -> float:
    """1 for the answer and nothing else, else 0."""
    return float(completion == answer)
