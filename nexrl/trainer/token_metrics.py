"""Metrics over the trained tokens of a batch: the policy against its reference, its engine, itself.

    table, outcome, frozen columns -> kl/*, entropy, mismatch/*

Evaluated on numpy in float64 with the functions that the service differentiates, so that what is
reported is what was used (FR-098), for any split into chunks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nexrl.algorithms.metrics import MetricSums, add_mismatch, add_reference_kl
from nexrl.config.schema_algorithm import KLConfig
from nexrl.trainer.batched_trainer import Outcome
from nexrl.trainer.batching import RowTable
from nexrl.types import Array, BoolArray

POSITION_BOUNDS = (64, 512, 4096)
"""mismatch/abs_mean by position among a row's trained tokens: a drift that grows with length shows
here and hardly in the mean (FR-091)."""


def add_policy_metrics(
    sums: MetricSums,
    table: RowTable,
    outcome: Outcome,
    columns: Mapping[str, Array],
    kl: KLConfig,
) -> None:
    """kl/<estimator> and entropy over all trained tokens.

    In the loss, KL is that of the weights trained; in the reward, that of the policy before the
    batch: what was used, each time.
    """
    if "reference_logprobs" in columns:
        in_reward = kl.placement == "reward"
        present = columns["proximal_logprobs"] if in_reward else outcome.columns["logprobs"]
        add_reference_kl(
            sums,
            present[table.mask].astype(np.float64),
            columns["reference_logprobs"][table.mask].astype(np.float64),
            kl.estimator,
        )
    if "entropy" in outcome.columns:
        sums.add_mean("entropy", outcome.columns["entropy"][table.mask])


def add_engine_metrics(
    sums: MetricSums,
    table: RowTable,
    at_start: Array,
    compared: BoolArray,
    *,
    version: int,
) -> None:
    """mismatch/*: `at_start` [N] logprobs under the weights that the batch began with, known where
    `compared` [N]. Only there do trainer and engine speak of one policy."""
    known = table.spread(table.known)
    sums.add_mean("mismatch/unknown_share", ~known[table.mask])
    at = np.flatnonzero(compared & known & table.mask)
    trained, behavior = at_start[at].astype(np.float64), table.behavior_logprobs[at]
    stale = (table.oldest_versions >= 0) & (table.oldest_versions < version)
    add_mismatch(sums, trained, behavior, table.spread(stale)[at])
    counts = np.cumsum(table.mask)
    before = table.spread(counts[table.starts] - table.mask[table.starts])
    positions, distances = (counts - 1 - before)[at], np.abs(trained - behavior)
    lower = 0
    for upper in (*POSITION_BOUNDS, None):
        inside = (positions >= lower) & (positions < (upper or np.inf))
        name = f"from_{lower}" if upper is None else f"to_{upper}"
        sums.add_mean(f"mismatch/abs_mean_{name}", distances[inside])
        lower = upper or lower
