"""Offline trajectories to what a preference loss compares: which tokens make up which response.

    trajectories -> RowTable -> segments (a response, or a step end) -> entries (pairs, labels ...)

A segment is what one number is summed over: the logprobs of a response's tokens, or the one value
that scores it. All checks on pairs are here; past this point every entry is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nexrl.algorithms.groups import IndexArray
from nexrl.algorithms.preference_losses import PreferenceLoss
from nexrl.errors import InvariantError
from nexrl.trainer.batching import RowTable, describe, flatten
from nexrl.types import Array, TokenRow, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

SENTINEL = 0
"""Id of the token after a scored row. A score is the value of the state before it, and the last
token of a row is never fed to the model, so any id of the vocabulary will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineBatch:
    """P entries over S segments of a row table.

    Invariant: every entry's segments have trained tokens, and lie in rows of one rollout group.
    """

    table: RowTable
    """Rows as they are sent; temperature 1 whatever drew them."""
    trajectories: Sequence[Trajectory]
    """Those given, one for each number in `table.trajectories`."""
    segments: IndexArray
    """[N] number of each token's segment."""
    num_segments: int
    """S"""
    sides: Mapping[str, IndexArray]
    """[P] segment of each entry, by the prefixes of `PreferenceLoss.sides`."""
    owners: IndexArray
    """[P] trajectory that the (first) segment of each entry lies in."""
    facts: Mapping[str, Array] = field(default_factory=dict)
    """[P] what the rows say: margin, desirable, labels."""

    def entries_of(self, rows: IndexArray) -> IndexArray:
        """Entries whose segments lie in the given rows of the table."""
        return np.flatnonzero(np.isin(self.owners, self.table.trajectories[rows]))

    def lengths(self) -> Array:
        """[S] trained tokens of each segment."""
        return np.bincount(self.segments[self.table.mask], minlength=self.num_segments)

    def sums(self, column: Array) -> Array:
        """[S] sum over each segment of a [N] column, in float64."""
        at = self.table.mask
        return np.bincount(
            self.segments[at], weights=column[at].astype(np.float64), minlength=self.num_segments
        )

    def sums_of_tensor(self, values: Tensor, positions: IndexArray) -> Tensor:
        """[S] sum over each segment of the values [n] at some positions; carries gradients."""
        import torch

        index = torch.from_numpy(self.segments[positions])
        return values.new_zeros(self.num_segments).index_add(0, index, values)


def collect(
    loss: PreferenceLoss, trajectories: Sequence[Trajectory], *, margin: float = 0.0
) -> OfflineBatch:
    """The entries of a batch; InvariantError names an item that has no whole one.

    `margin` is that of pairs which name none, for losses with one.
    """
    if loss.rows == "labelled":
        return _labelled(loss, trajectories)
    if loss.rows == "process":
        return _process(trajectories)
    return _pairs(loss, trajectories, margin)


def _tabulate(trajectories: Sequence[Trajectory]) -> RowTable:
    table = flatten(trajectories, temperature=1.0)
    for index in np.flatnonzero(table.trained_lengths(len(trajectories)) == 0).tolist():
        raise InvariantError(
            f"{describe(trajectories[index])} has no response token to train, so nothing of it can "
            "be compared"
        )
    return table


def _responses(
    loss: PreferenceLoss,
    trajectories: Sequence[Trajectory],
    sides: Mapping[str, IndexArray],
    facts: Mapping[str, Array],
) -> OfflineBatch:
    """One segment for each trajectory: all of its trained tokens, or the state at its end."""
    given = [_scored_at_its_end(t) for t in trajectories] if loss.needs_scores else trajectories
    table = _tabulate(given)
    return OfflineBatch(
        table=table,
        trajectories=given,
        segments=table.spread(table.trajectories),
        num_segments=len(given),
        sides=sides,
        owners=next(iter(sides.values())),
        facts=facts,
    )


def _pairs(loss: PreferenceLoss, trajectories: Sequence[Trajectory], margin: float) -> OfflineBatch:
    """Trajectories of one rollout with roles `chosen` and `rejected`."""
    found: dict[tuple[str, int, int], dict[str, int]] = {}
    for index, trajectory in enumerate(trajectories):
        sides = found.setdefault((trajectory.item_id, trajectory.draw, trajectory.member), {})
        if trajectory.role not in ("chosen", "rejected") or trajectory.role in sides:
            raise InvariantError(
                f"{describe(trajectory)} has the role {trajectory.role!r}; {loss.name} needs one "
                "trajectory of role 'chosen' and one of role 'rejected' from each rollout "
                "(rollout_worker.type: preference makes them)"
            )
        sides[trajectory.role] = index
    for sides in found.values():
        if len(sides) == 1:
            ((role, index),) = sides.items()
            raise InvariantError(
                f"{describe(trajectories[index])} is {role} and its other side is missing: a pair is "
                "trained whole or not at all"
            )
    chosen, rejected = (
        np.fromiter((sides[role] for sides in found.values()), np.int64, len(found))
        for role in ("chosen", "rejected")
    )
    facts: dict[str, Array] = {}
    if "margin" in loss.optional:
        margins = [trajectories[i].extra.get("margin", margin) for i in chosen.tolist()]
        facts["margin"] = np.array(margins, np.float64)
    return _responses(loss, trajectories, {"chosen_": chosen, "rejected_": rejected}, facts)


def _labelled(loss: PreferenceLoss, trajectories: Sequence[Trajectory]) -> OfflineBatch:
    """Trajectories with a label."""
    labels = [_fact(t, "desirable", "labelled") for t in trajectories]
    sides = {"": np.arange(len(trajectories))}
    return _responses(loss, trajectories, sides, {"desirable": np.array(labels, np.bool_)})


def _process(trajectories: Sequence[Trajectory]) -> OfflineBatch:
    """One segment for each step end: its score is the value of the state after the step."""
    scored = [_scored_at_step_ends(t) for t in trajectories]
    table = _tabulate(scored)
    ends = np.flatnonzero(table.mask)
    segments = np.zeros(table.num_tokens, np.int64)
    segments[ends] = np.arange(len(ends))
    labels = [_fact(t, "step_labels", "process") for t in trajectories]
    return OfflineBatch(
        table=table,
        trajectories=scored,
        segments=segments,
        num_segments=len(ends),
        sides={"": np.arange(len(ends))},
        owners=table.spread(table.trajectories)[ends],
        facts={"labels": np.concatenate(labels).astype(np.float64)},
    )


def _scored_at_its_end(trajectory: Trajectory) -> Trajectory:
    """The last row, with a sentinel after it as the only position of interest."""
    row = next((r for r in reversed(trajectory.rows) if r.num_trained_tokens), None)
    if row is None:
        raise InvariantError(f"{describe(trajectory)} has no response token to score")
    return _marked(trajectory, row, [row.num_tokens])


def _scored_at_step_ends(trajectory: Trajectory) -> Trajectory:
    ends = np.asarray(_fact(trajectory, "step_ends", "process"), np.int64)
    labels = _fact(trajectory, "step_labels", "process")
    row = trajectory.rows[0]
    ascending = len(ends) and np.all(np.diff(ends, prepend=0) > 0) and ends[-1] <= row.num_tokens
    if not ascending or len(ends) != len(labels):
        raise InvariantError(
            f"{describe(trajectory)}: step_ends must ascend within (0, {row.num_tokens}], one for each "
            f"of its {len(labels)} labels, got {ends.tolist()}"
        )
    return _marked(trajectory, row, ends)


def _marked(trajectory: Trajectory, row: TokenRow, ends: Any) -> Trajectory:
    """The row with a sentinel after it, marked where a state's value is read: the entry of token t
    speaks of the state before t."""
    mask = np.zeros(row.num_tokens + 1, np.bool_)
    mask[ends] = True
    token_ids = np.append(row.token_ids, np.int32(SENTINEL)).astype(np.int32)
    return replace(
        trajectory,
        tokens=None,
        loss_mask=None,
        rows=(TokenRow(token_ids=token_ids, loss_mask=mask),),
    )


def _fact(trajectory: Trajectory, name: str, worker: str) -> Any:
    if name not in trajectory.extra:
        raise InvariantError(
            f"{describe(trajectory)} has no extra[{name!r}] (rollout_worker.type: {worker} gives it)"
        )
    return trajectory.extra[name]
