"""The nouns refuse what would corrupt training silently."""

from __future__ import annotations

import numpy as np
import pytest

from nexrl.errors import FailureClass, InvariantError
from nexrl.types import (
    Column,
    Completion,
    Failure,
    LedgerSnapshot,
    PolicyVersion,
    RowChunk,
    TensorInfo,
    TokenRow,
    Trajectory,
    TrajectoryStatus,
    Turn,
    VersionSpan,
    WeightManifest,
    derive_seed,
)

V3 = PolicyVersion(policy="actor", incarnation=1, number=3)
V4 = V3.next()


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def flags(*values: int) -> np.ndarray:
    return np.array(values, np.bool_)


def make_completion(**changes: object) -> Completion:
    fields: dict[str, object] = {
        "token_ids": ints(5, 6, 2),
        "logprobs": np.array([-0.1, -0.2, -0.3], np.float32),
        "versions": (VersionSpan(start=0, end=3, version=V3),),
        "text": "hi",
        "finish_reason": "eos",
        "prompt_token_ids": ints(8, 9),
    }
    return Completion(**{**fields, **changes})  # type: ignore[arg-type]


def test_five_fields_make_a_trajectory_with_one_row() -> None:
    t = Trajectory(prompt="2+2=", response="4", tokens=[5, 6, 7], loss_mask=[0, 0, 1], reward=1.0)  # type: ignore[arg-type]
    assert len(t.rows) == 1
    assert t.rows[0].loss_mask.tolist() == [False, False, True]
    assert t.tokens is not None
    assert t.tokens.dtype == np.int32


def test_a_completion_trains_exactly_the_drawn_tokens() -> None:
    """FR-016, FR-026: the mask comes from what was drawn, the stop token included."""
    row = make_completion().to_trajectory(prompt="p", reward=1.0).rows[0]
    assert row.token_ids.tolist() == [8, 9, 5, 6, 2]
    assert row.loss_mask.tolist() == [False, False, True, True, True]
    assert row.behavior_logprobs is not None
    assert row.behavior_logprobs[2:].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert row.versions == (VersionSpan(start=2, end=5, version=V3),)


def test_a_draw_that_ended_by_length_is_truncated_and_keeps_its_last_token() -> None:
    """FR-022, FR-025: the finish reason decides, and no token is replaced by EOS."""
    t = make_completion(finish_reason="length", token_ids=ints(5, 6, 7)).to_trajectory()
    assert t.status is TrajectoryStatus.TRUNCATED
    assert t.truncation_cause == "length"
    assert t.rows[0].token_ids.tolist() == [8, 9, 5, 6, 7]


def test_a_foreign_end_marker_is_not_truncation() -> None:
    """FR-022: the last id is not compared with the tokenizer's EOS."""
    t = make_completion(token_ids=ints(5, 6, 163585), finish_reason="stop_token").to_trajectory()
    assert t.status is TrajectoryStatus.COMPLETED


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": flags(1)}, "loss_mask has length 1"),
        ({"sampled": flags(1, 1, 0)}, "sampled has length 3"),
        ({"sampled": flags(0, 1)}, "did not sample"),
        ({"behavior_logprobs": np.zeros(2, np.float32)}, "without `sampled`"),
        (
            {"sampled": flags(1, 1), "behavior_logprobs": np.array([0, np.nan], np.float32)},
            "NaN",
        ),
        ({"versions": (VersionSpan(start=1, end=3, version=V3),)}, "outside"),
    ],
)
def test_a_row_whose_arrays_disagree_is_refused(fields: dict[str, object], message: str) -> None:
    """FR-004: ids, mask, logprobs and versions are one structure, checked at the door."""
    with pytest.raises(InvariantError, match=message):
        TokenRow(**{"token_ids": ints(1, 2), "loss_mask": flags(1, 1), **fields})  # type: ignore[arg-type]


def test_routed_experts_that_do_not_cover_a_row_are_refused() -> None:
    """FR-100: 6 tokens, 2 layers, 2 experts each; 4 entries are not enough."""
    routes = Column(values=np.zeros((4, 2, 2), np.int32), alignment="state_at_token")
    with pytest.raises(InvariantError, match="'routed_experts' has length 4, token_ids has 6"):
        TokenRow(
            token_ids=np.arange(6, dtype=np.int32),
            loss_mask=np.ones(6, np.bool_),
            columns={"routed_experts": routes},
        )


def test_a_completion_with_fewer_logprobs_than_tokens_is_refused() -> None:
    with pytest.raises(InvariantError, match="3 tokens but 2 logprobs"):
        make_completion(logprobs=np.zeros(2, np.float32))


def test_staleness_speaks_of_trained_tokens_only() -> None:
    row = TokenRow(
        token_ids=ints(1, 2, 3),
        sampled=flags(1, 1, 1),
        loss_mask=flags(0, 1, 1),
        versions=(VersionSpan(start=0, end=1, version=V3), VersionSpan(start=1, end=3, version=V4)),
    )
    assert row.oldest_trained_version() == V4


def test_a_failed_trajectory_needs_a_failure_and_is_never_trained() -> None:
    with pytest.raises(InvariantError, match="exactly when"):
        Trajectory(status=TrajectoryStatus.FAILED)
    failure = Failure(failure_class=FailureClass.INFRASTRUCTURE, message="gone")
    t = Trajectory(tokens=[1], status=TrajectoryStatus.FAILED, failure=failure)  # type: ignore[arg-type]
    assert not t.trainable
    assert t.reward is None


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(InvariantError, match="finite or None"):
        Trajectory(tokens=[1], reward=float("nan"))  # type: ignore[arg-type]


def test_versions_are_written_and_read_back() -> None:
    assert PolicyVersion.parse(str(V3)) == V3
    for text in ("actor", "actor@3", "@1.2", "actor@x.y"):
        with pytest.raises(InvariantError, match="not a policy version"):
            PolicyVersion.parse(text)


def test_equal_numbers_of_two_policies_or_incarnations_are_different_versions() -> None:
    assert PolicyVersion(policy="critic", incarnation=1, number=3) != V3
    assert PolicyVersion(policy="actor", incarnation=2, number=3) != V3


def test_a_chunk_whose_inputs_do_not_cover_its_tokens_is_refused() -> None:
    with pytest.raises(InvariantError, match="weight has 2 entries, lengths sum to 3"):
        RowChunk(lengths=ints(1, 2), token_ids=ints(1, 2, 3), inputs={"weight": np.ones(2)})


def test_a_chunk_keeps_row_borders() -> None:
    chunk = RowChunk.from_rows([ints(1, 2), ints(3)], {"weight": [np.ones(2), np.zeros(1)]})
    assert chunk.offsets.tolist() == [0, 2, 3]
    assert chunk.inputs["weight"].tolist() == [1, 1, 0]
    assert RowChunk.from_rows([]).num_tokens == 0


def test_a_manifest_checksum_sees_every_tensor_property() -> None:
    def checksum(**changes: object) -> str:
        fields: dict[str, object] = {"name": "w", "shape": (2,), "dtype": "F32", "checksum": "aa"}
        info = TensorInfo(**{**fields, **changes})  # type: ignore[arg-type]
        return WeightManifest(version=V3, path="x", tensors=(info,), num_bytes=8).checksum

    others = [
        checksum(name="v"),
        checksum(shape=(1, 2)),
        checksum(dtype="BF16"),
        checksum(checksum="ab"),
    ]
    assert len({checksum(), *others}) == 5
    assert checksum() == checksum()


def test_ledgers_of_stages_add_up() -> None:
    def ledger(trained: int, reason: str) -> LedgerSnapshot:
        return LedgerSnapshot(
            admitted=trained + 1,
            in_flight=0,
            ready=0,
            handed_out=0,
            trained=trained,
            filtered={},
            failed={reason: 1},
            stale={},
            cancelled={},
        )

    total = LedgerSnapshot.sum([ledger(2, "a"), ledger(3, "b"), ledger(1, "a")])
    assert total.failed == {"a": 2, "b": 1}
    assert total.admitted == 9
    assert total.balanced


def test_an_unbalanced_ledger_says_so() -> None:
    broken = LedgerSnapshot(
        admitted=2,
        in_flight=0,
        ready=0,
        handed_out=0,
        trained=1,
        filtered={},
        failed={},
        stale={},
        cancelled={},
    )
    assert not broken.balanced


def test_seeds_depend_on_every_part_and_on_their_borders() -> None:
    assert derive_seed(0, "ab", "c") != derive_seed(0, "a", "bc")
    assert derive_seed(1, "x") == derive_seed(1, "x")
    assert 0 <= derive_seed("y") < 2**63


@pytest.mark.parametrize(
    ("turn", "named"),
    [
        ({"start": 3, "end": 2}, r"turn \[3, 2\) is no range"),
        ({"start": -1, "end": 2}, r"turn \[-1, 2\) is no range"),
        ({"start": 0, "end": 2, "reward": float("nan")}, "finite or None, got nan"),
        ({"start": 0, "end": 2, "reward": float("inf")}, "finite or None, got inf"),
    ],
)
def test_a_turn_that_cannot_be_is_refused(turn: dict[str, float], named: str) -> None:
    with pytest.raises(InvariantError, match=named):
        Turn(**turn)  # type: ignore[arg-type]


@pytest.mark.parametrize("spans", [[(0, 2), (1, 3)], [(2, 3), (0, 2)], [(2, 4)]])
def test_turns_of_a_row_ascend_within_it(spans: list[tuple[int, int]]) -> None:
    turns = tuple(Turn(start=start, end=end) for start, end in spans)
    with pytest.raises(InvariantError, match="is out of order or outside"):
        TokenRow(token_ids=ints(1, 2, 3), loss_mask=flags(0, 1, 1), turns=turns)


def test_a_completion_passes_on_what_is_known_of_its_turn() -> None:
    """FR-077: with the finish reason of its own call."""
    t = make_completion(finish_reason="length").to_trajectory(turn_reward=0.5, anchor="hall")
    assert t.reward is None
    assert t.rows[0].turns == (
        Turn(start=2, end=5, finish_reason="length", reward=0.5, anchor="hall"),
    )
