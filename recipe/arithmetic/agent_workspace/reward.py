"""The reward of this recipe."""


def exact_match(completion: str, answer: str, **_: object) -> float:
    """1 for the answer and nothing else, else 0."""
    return float(completion == answer)
