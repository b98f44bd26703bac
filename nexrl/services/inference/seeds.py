"""Which seed each choice of one call is drawn with; the same rule on every side of the wire."""

from __future__ import annotations

import os

from nexrl.errors import ConfigError
from nexrl.types import Sampling, derive_seed


def choice_seeds(sampling: Sampling, n: int) -> tuple[int, ...]:
    """One seed for each of n choices.

    `seeds` as given; else choice 0 has `seed` itself and choice i `derive_seed(seed, i)`. Without
    either they are fresh entropy, so that two replicas never repeat each other (FR-058).
    """
    if n < 1:
        raise ConfigError(f"n must be at least 1, got {n}")
    if sampling.seeds:
        if len(sampling.seeds) != n:
            raise ConfigError(
                f"sampling.seeds has {len(sampling.seeds)} entries for n = {n} choices"
            )
        return sampling.seeds
    if sampling.seed is not None:
        return (sampling.seed, *(derive_seed(sampling.seed, i) for i in range(1, n)))
    return tuple(int.from_bytes(os.urandom(8), "little") >> 1 for _ in range(n))
