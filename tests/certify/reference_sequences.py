"""Policy losses that couple the tokens of a row, once more: one row at a time, from the papers.

Each function is (tokens of a row, settings) -> (terms, jacobian), jacobian[t][j] the derivative of
term t with respect to the logprob of token j. Tokens are those of `reference_policy`: what stands
inside a stop-gradient reads `frozen`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.certify.reference_policy import Settings, Token, surrogate

Row = Sequence[Token]
GradedRow = tuple[list[float], list[list[float]]]


def _mean_log_ratio(row: Row, which: str = "logprobs") -> float:
    return math.fsum(t[which] - t["proximal_logprobs"] for t in row) / len(row)


def gspo(row: Row, s: Settings) -> GradedRow:
    """GSPO 2025, eqs. 5 and 7: ratio exp(mean log rho) of the row, each logprob has 1/n of it."""
    sequence = math.exp(_mean_log_ratio(row))
    graded = [surrogate(sequence, token["advantage"], s) for token in row]
    jacobian = [[slope / len(row)] * len(row) for _, slope in graded]
    return [term for term, _ in graded], jacobian


def gspo_token(row: Row, s: Settings) -> GradedRow:
    """GSPO 2025, eqs. 13 and 14: sg(s) pi / sg(pi): the row's ratio, each token's own gradient."""
    frozen = math.exp(_mean_log_ratio(row, "frozen"))
    terms, jacobian = [], []
    for t, token in enumerate(row):
        own = frozen * math.exp(token["logprobs"] - token["frozen"])
        term, slope = surrogate(own, token["advantage"], s)
        terms.append(term)
        jacobian.append([slope if j == t else 0.0 for j in range(len(row))])
    return terms, jacobian


def gmpo(row: Row, s: Settings) -> GradedRow:
    """GMPO 2025: geometric mean of ratios clipped to exp(-low), exp(high) in log space.

    min(rho A, clip(rho) A) has one side: A > 0 caps a ratio from above, A < 0 from below.
    """
    n, terms, jacobian = len(row), [], []
    for judged in row:
        logs, inside = [], []
        for token in row:
            log = token["logprobs"] - token["proximal_logprobs"]
            if judged["advantage"] > 0:
                bounded = min(log, s["clip_high"])
            else:
                bounded = max(log, -s["clip_low"])
            logs.append(bounded)
            inside.append(1.0 if bounded == log else 0.0)
        term = -judged["advantage"] * math.exp(math.fsum(logs) / n)
        terms.append(term)
        jacobian.append([term * live / n for live in inside])
    return terms, jacobian


def _weighted_reinforce(row: Row, weights: Sequence[float]) -> GradedRow:
    """-sg(weight) A logp of each token."""
    slopes = [-w * token["advantage"] for w, token in zip(weights, row, strict=True)]
    terms = [slope * token["logprobs"] for slope, token in zip(slopes, row, strict=True)]
    n = len(row)
    return terms, [[slopes[t] if j == t else 0.0 for j in range(n)] for t in range(n)]


def _row_ratio(row: Row) -> float:
    """W = exp(sum of log rho), inside a stop-gradient."""
    return math.exp(len(row) * _mean_log_ratio(row, "frozen"))


def topr(row: Row, s: Settings) -> GradedRow:
    """TOPR 2025: successes as they are, failures by the row's ratio cut to [0, 1 + clip_high]."""
    bounded = min(_row_ratio(row), 1.0 + s["clip_high"])
    return _weighted_reinforce(row, [1.0 if t["advantage"] >= 0 else bounded for t in row])


def vespo(row: Row, s: Settings) -> GradedRow:
    """VESPO 2026: weight W^k exp(lambda (1 - W)), k and lambda by the sign of A."""
    weights = []
    for token in row:
        side = "positive" if token["advantage"] >= 0 else "negative"
        k, rate, ratio = s[f"k_{side}"], s[f"lambda_{side}"], _row_ratio(row)
        weights.append(ratio**k * math.exp(rate * (1.0 - ratio)))
    return _weighted_reinforce(row, weights)


def kimi(row: Row, s: Settings) -> GradedRow:
    """Kimi k1.5 2025, eq. 3: -A log pi(row) + tau / 2 (sum of log rho)^2, shared out by tokens.

    Term t is -A logp_t + tau / 2 d_t D, so d term_t / d logp_j = tau / 2 d_t, and tau / 2 D - A more
    where j = t.
    """
    logs = [token["logprobs"] - token["proximal_logprobs"] for token in row]
    total, half = math.fsum(logs), s["tau"] / 2.0
    terms, jacobian = [], []
    for t, token in enumerate(row):
        terms.append(-token["advantage"] * token["logprobs"] + half * logs[t] * total)
        line = [half * logs[t]] * len(row)
        line[t] += half * total - token["advantage"]
        jacobian.append(line)
    return terms, jacobian


# LUSPO 2026 multiplies gspo by the row's length, here by its denominator: the weight 1 / R instead of
# 1 / (R n) under which gspo is defined.
ROWS: dict[str, Callable[[Row, Settings], GradedRow]] = {
    "gspo": gspo,
    "gspo_token": gspo_token,
    "luspo": gspo,
    "gmpo": gmpo,
    "topr": topr,
    "vespo": vespo,
    "kimi": kimi,
}
