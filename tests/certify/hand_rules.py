"""Filters, shaping, entropy and learning rates worked by hand: literal inputs, literal results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.certify.hand_losses import LN_2

FILTERS_BY_HAND: Mapping[str, Sequence[tuple[Sequence[tuple[str, float | None]], str, bool]]] = {
    "constant_reward": (
        ((("a", 1.0), ("a", 0.0)), "..", False),
        ((("a", 1.0), ("a", 1.0)), "..", True),
        ((("a", 0.0), ("a", 0.0)), "tt", True),
        ((("a", 1.0), ("b", 0.0)), "..", True),
        ((("a", 1.0), ("b", 0.0), ("a", 0.5)), "...", False),
        ((("a", 1.0), ("a", None), ("a", 1.0)), "...", True),
        ((("a", None),), ".", True),
        ((("a", 1e9), ("a", 1e9 + 9.0)), "..", True),
        ((("a", 1e9), ("a", 1e9 + 11.0)), "..", False),
        ((("a", 0.0), ("a", 0.9e-8)), "..", True),
        ((("a", 0.0), ("a", 1.1e-8)), "..", False),
    ),
    "all_truncated": (
        ((("a", 1.0), ("a", 0.0)), "tt", True),
        ((("a", 1.0), ("a", 0.0)), "t.", False),
        ((("a", 1.0), ("a", 0.0)), "..", False),
        ((("a", 1.0), ("b", None)), "tt", True),
    ),
}
"""(baseline key, reward) of each member, `t` for a truncated one, and whether the group is dropped:
alone in a baseline is no signal, nor is a spread of 1e-8 x max(1, largest): 10 of 1e9."""

SHAPING_BY_HAND: Mapping[str, tuple[Mapping[str, float], Mapping[int, float]]] = {
    "overlong_cache": (
        {"overlong_cache": 4, "overlong_penalty": 1.0},
        {0: 1.0, 16: 1.0, 17: 0.75, 18: 0.5, 19: 0.25, 20: 0.0, 21: 0.0, 99: 0.0},
    ),
    "overlong_penalty": (
        {"overlong_cache": 4, "overlong_penalty": 0.5},
        {16: 1.0, 18: 0.75, 20: 0.5, 99: 0.5},
    ),
    "length_penalty": ({"length_penalty": 0.01}, {0: 1.0, 10: 0.9, 25: 0.75}),
}
"""Rewards of 1, the longest response 20: settings, and the shaped reward by length. With a cache of
4 the punishment at 18 is (16 - 18) / 4; 10 tokens at 0.01 cost 0.1."""

MASKED_BY_HAND = ((False, True, False, True), (3, 2, 4, 1), (1 / 7, 0.0, 1 / 7, 0.0))
"""mask_truncated: who is truncated, trained tokens, weights of token_mean: 3 + 4 tokens are left."""

ENTROPY_BY_HAND: Sequence[tuple[Sequence[float], float, float, Sequence[float]]] = (
    ((0.0, 0.0), 1.0, LN_2, (0.0, 0.0)),
    ((0.0, 0.0, 0.0, 0.0), 0.5, 2 * LN_2, (0.0, 0.0, 0.0, 0.0)),
    ((2 * LN_2, 0.0), 2.0, 0.636514168294813, (-0.07701635339554949, 0.07701635339554949)),
)
"""Logits, temperature, entropy, its slopes. The last: p = 2/3, 1/3, H = ln 3 - 2/3 ln 2, slope
-2/3 (ln 2/3 + H) / 2 = -(2/9 ln 2) / 2."""

HELD_BY_HAND: Mapping[str, tuple[float, float | None, float, Sequence[float], Sequence[float]]] = {
    "coefficient": (0.03, None, 0.01, (0.1, 9.0), (0.03, 0.03, 0.03)),
    "target": (
        0.02,
        0.5,
        0.01,
        (0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        (0.02, 0.03, 0.03, 0.02, 0.01, 0, 0),
    ),
    "rate": (0.05, 0.5, 0.04, (0.4, 0.4, 0.4, 0.6), (0.05, 0.09, 0.1, 0.1, 0.06)),
}
"""First coefficient, target, rate, entropies of batches, coefficients: up below the target, down
above, as it is at it; never below 0 and never above 0.1."""

RATES_BY_HAND: Mapping[str, Sequence[float]] = {
    "constant": (0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    "linear": (0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1),
    "cosine": (0.5, 1.0, 1.0, 0.8681980515339464, 0.55, 0.23180194846605363, 0.1, 0.1),
}
"""Peak 1, two steps of warm-up, six in all, lowest share 0.1: 1/2, 2/2, then 0.1 + 0.9 x the share
left: 1, 3/4, 1/2, 1/4, 0; and (1 + cos(pi i / 4)) / 2 = 1, 0.8536, 1/2, 0.1464, 0."""
