"""WeightSyncController: what engines serve is what was trained, or the run learns why not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexrl.config.schema import WeightConfig
from nexrl.errors import ConfigError, WeightSyncError
from nexrl.testing.faulty_engine import Fault, FaultyEngine, Phase
from nexrl.testing.makers import make_row, make_tracker
from nexrl.testing.toy_train_service import ToyTrainService
from nexrl.types import LoadAck, ModelSpec, PolicyVersion, RowChunk, TokenRow, WeightManifest
from nexrl.weight_sync.controller import WeightSyncController

V0, V1, V2 = (PolicyVersion(number=n) for n in range(3))
ROWS = (make_row(), make_row(prompt_ids=(3, 1), response_ids=(4, 1, 5)))


def make_controller(
    folder: Path,
    engines: Sequence[FaultyEngine],
    *,
    train: ToyTrainService | None = None,
    policy: str = "actor",
    **settings: Any,
) -> WeightSyncController:
    config = WeightConfig(**{"load_deadline_s": 0.2, "verify_deadline_s": 0.2, **settings})
    return WeightSyncController(
        train=train or ToyTrainService(),
        engines=engines,
        config=config,
        folder=folder,
        policy=policy,
        tracker=make_tracker(),
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def move(train: ToyTrainService, by: float = 0.5, policy: str = "actor") -> None:
    """What optimizer steps do."""
    shape = train.tables[policy].shape
    train.tables[policy] = train.tables[policy] + by * np.random.default_rng(1).normal(size=shape)


async def started(
    folder: Path, *, echo: Any = "truth", fault: Fault | None = None, **settings: Any
) -> tuple[WeightSyncController, ToyTrainService, FaultyEngine]:
    """A controller whose only engine serves version 0 and then has the fault."""
    train, engine = ToyTrainService(), FaultyEngine(echo=echo)
    controller = make_controller(folder, [engine], train=train, **settings)
    await controller.start(V0)
    engine.fault = fault
    return controller, train, engine


async def test_start_makes_every_engine_serve_the_present_weights(tmp_path: Path) -> None:
    engines, train = [FaultyEngine("a"), FaultyEngine("b")], ToyTrainService()
    controller = make_controller(tmp_path, engines, train=train)
    await controller.start(V0)
    assert [e.active for e in engines] == [V0, V0]
    assert not any(e.paused for e in engines)
    assert controller.active is not None
    assert controller.active.version == V0
    for engine in engines:
        assert engine.table is not None
        np.testing.assert_allclose(engine.table, train.tables["actor"], atol=1e-6)


async def test_a_sync_runs_its_phases_in_order(tmp_path: Path) -> None:
    controller, train, engine = await started(tmp_path)
    engine.calls.clear()
    move(train)
    await controller.sync(V1, probe_rows=ROWS)
    assert engine.calls == ["pause", "load", "score", "activate", "resume"]
    assert engine.active == V1


async def test_a_sync_reports_every_phase(tmp_path: Path) -> None:
    controller, train, _ = await started(tmp_path)
    move(train)
    metrics = await controller.sync(V1, probe_rows=ROWS)
    phases = {f"sync/{p}_s" for p in ("wait", "publish", "pause", "load", "verify")}
    assert phases < set(metrics)
    assert metrics["sync/bytes"] == 16 * 16 * 4
    assert metrics["sync/undecided"] == 0


async def test_loading_the_same_weights_twice_must_change_nothing(tmp_path: Path) -> None:
    """FR-110: a loader that builds on what it holds is found before the first rollout."""
    engine = FaultyEngine()
    engine.fault = Fault.NOT_IDEMPOTENT
    controller = make_controller(tmp_path, [engine])
    with pytest.raises(WeightSyncError, match=r"that hash to|again changed its logprobs"):
        await controller.start(V0)
    assert engine.active is None


async def test_a_loader_that_is_not_idempotent_is_found_by_logprobs_alone(tmp_path: Path) -> None:
    """FR-110, with an engine that echoes no checksum."""
    engine = FaultyEngine(echo="none")
    engine.fault = Fault.NOT_IDEMPOTENT
    with pytest.raises(WeightSyncError, match="loading the same weights again changed"):
        await make_controller(tmp_path, [engine]).start(V0)


@pytest.mark.parametrize("phase", ["pause", "load", "score", "activate", "resume"])
async def test_an_error_names_phase_engine_version_and_the_engines_text(
    tmp_path: Path, phase: Phase
) -> None:
    controller, train, engine = await started(tmp_path, fault=Fault.ERROR)
    engine.phase = phase
    move(train)
    with pytest.raises(WeightSyncError) as caught:
        await controller.sync(V1)
    text = str(caught.value)
    name = "verify" if phase == "score" else phase
    assert f"sync actor@0.1: {name} on engine 0 (toy 1)" in text
    assert f"CUDA out of memory during {phase}" in text


@pytest.mark.parametrize("phase", ["pause", "load", "score", "activate", "resume"])
async def test_an_engine_that_hangs_is_given_up_at_the_deadline(
    tmp_path: Path, phase: Phase
) -> None:
    controller, train, engine = await started(
        tmp_path, fault=Fault.HANG, load_deadline_s=0.02, verify_deadline_s=0.02
    )
    engine.phase = phase
    move(train)
    with pytest.raises(WeightSyncError, match=r"engine 0 \(toy 1\): no answer within 0.02 s"):
        await controller.sync(V1)


async def test_a_hanging_publication_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    controller, train, engine = await started(tmp_path, publish_deadline_s=0.02)

    async def never(*_: object, **__: object) -> Any:
        await asyncio.Event().wait()

    train.publish_weights = never  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="publish on the train service: no answer"):
        await controller.sync(V1)
    assert not engine.paused


@pytest.mark.parametrize("echo", ["truth", "parrot", "none"])
@pytest.mark.parametrize("fault", [Fault.LOAD_NOTHING, Fault.WRONG_TENSORS, Fault.STALE_CACHE])
async def test_an_engine_that_does_not_serve_the_new_weights_is_caught(
    tmp_path: Path, fault: Fault, echo: Any
) -> None:
    """FR-101, FR-106, FR-107: an acknowledgement proves nothing, logprobs do."""
    controller, train, engine = await started(tmp_path, echo=echo)
    move(train)
    await controller.sync(V1, probe_rows=ROWS)
    await _rolled_out(engine, ROWS)
    engine.fault = fault
    move(train)
    with pytest.raises(WeightSyncError, match=r"hash to|nearer the old|differ from the trainer"):
        await controller.sync(V2)
    assert engine.active == V1


async def _rolled_out(engine: FaultyEngine, rows: Sequence[TokenRow]) -> None:
    """Rollouts have put these rows into the engine's cache."""
    await engine.score(RowChunk.from_rows([row.token_ids for row in rows]))


async def test_a_load_of_another_version_is_refused(tmp_path: Path) -> None:
    """FR-116: a version is believed only when the acknowledgement names it."""
    controller, train, _ = await started(tmp_path, fault=Fault.WRONG_VERSION)
    move(train)
    with pytest.raises(WeightSyncError, match=r"acknowledged version actor@0\.8"):
        await controller.sync(V1)


async def test_tensor_names_an_engine_cannot_map_reach_the_user_before_any_rollout(
    tmp_path: Path,
) -> None:
    """FR-109: the engine's own list of names is in the error of `start`."""
    engine = FaultyEngine()

    async def refuse(manifest: WeightManifest) -> LoadAck:
        raise ConfigError("missing: model.layers.0.q; unexpected: model.language_model.layers.0.q")

    engine.load_weights = refuse  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"unexpected: model\.language_model"):
        await make_controller(tmp_path, [engine]).start(V0)


async def test_a_lagging_engine_is_caught_even_when_each_step_moves_little(tmp_path: Path) -> None:
    """FR-101: moves below the noise add up on rows that are kept until they tell."""
    controller, train, engine = await started(tmp_path, echo="none")
    controller._canary._noise = 0.01
    engine.fault = Fault.LOAD_NOTHING
    with pytest.raises(WeightSyncError, match="nearer the old"):
        await _small_steps(controller, train)


async def _small_steps(controller: WeightSyncController, train: ToyTrainService) -> None:
    for number in range(1, 30):
        move(train, by=0.005)
        await controller.sync(PolicyVersion(number=number), probe_rows=ROWS)


async def test_weights_that_never_move_raise_an_alarm(tmp_path: Path) -> None:
    controller, _, _ = await started(tmp_path, max_undecided=3)
    for number in range(1, 4):
        metrics = await controller.sync(PolicyVersion(number=number), probe_rows=ROWS)
        assert metrics["sync/undecided"] == number
    assert "last 3 weight syncs" in controller._tracker.warnings[0]  # type: ignore[attr-defined]


async def test_a_version_that_is_unchanged_by_design_is_not_undecided(tmp_path: Path) -> None:
    controller, _, engine = await started(tmp_path)
    metrics = await controller.sync(V1, probe_rows=ROWS, unchanged=True)
    assert metrics["sync/undecided"] == 0
    assert engine.active == V1
    assert controller.active is not None
    assert controller.active.unchanged


async def test_after_a_failed_load_engines_go_back_and_serve_the_previous_version(
    tmp_path: Path,
) -> None:
    train, engines = ToyTrainService(), [FaultyEngine("good"), FaultyEngine("bad")]
    controller = make_controller(tmp_path, engines, train=train)
    await controller.start(V0)
    before = engines[0].table
    engines[1].fault, engines[1].phase = Fault.ERROR, "score"
    move(train)
    with pytest.raises(WeightSyncError, match="engine 1"):
        await controller.sync(V1)
    assert [e.active for e in engines] == [V0, V0]
    assert not any(e.paused for e in engines)
    np.testing.assert_array_equal(engines[0].table, before)


async def test_an_engine_whose_weights_stay_in_doubt_stays_paused(tmp_path: Path) -> None:
    controller, train, engine = await started(tmp_path, fault=Fault.ERROR)
    move(train)
    with pytest.raises(WeightSyncError):
        await controller.sync(V1)
    assert engine.paused
    assert "stays paused" in controller._tracker.warnings[0]  # type: ignore[attr-defined]


async def test_a_failed_pause_leaves_the_other_engines_running(tmp_path: Path) -> None:
    engines = [FaultyEngine("good"), FaultyEngine("bad")]
    controller = make_controller(tmp_path, engines)
    await controller.start(V0)
    engines[1].fault, engines[1].phase = Fault.ERROR, "pause"
    with pytest.raises(WeightSyncError, match="pause on engine 1"):
        await controller.sync(V1)
    assert not engines[0].paused
    assert engines[0].loads == [V0, V0]


async def test_two_syncs_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    """FR-104: the second waits, and says for how long."""
    controller, train, engine = await started(tmp_path)
    move(train)
    engine.calls.clear()
    metrics = await asyncio.gather(controller.sync(V1), controller.sync(V2))
    one = ["pause", "load", "score", "activate", "resume"]
    assert engine.calls == one + one
    assert metrics[1]["sync/wait_s"] > metrics[0]["sync/wait_s"]


async def test_two_policies_share_a_folder_and_never_meet(tmp_path: Path) -> None:
    train = ToyTrainService()
    await train.create(ModelSpec(policy="judge", seed=7))
    engines = {name: FaultyEngine(name) for name in ("actor", "judge")}
    for name, engine in engines.items():
        controller = make_controller(
            tmp_path, [engine], train=train, policy=name, keep_publications=1
        )
        for number in range(2):
            version = PolicyVersion(policy=name, number=number)
            await (controller.sync(version) if number else controller.start(version))
            move(train, policy=name)
    assert {str(e.active) for e in engines.values()} == {"actor@0.1", "judge@0.1"}
    assert names_in(tmp_path) == [
        "actor-0000-00000001",
        "judge-0000-00000001",
    ]


async def test_only_the_newest_publications_are_kept(tmp_path: Path) -> None:
    controller, _, _ = await started(tmp_path, keep_publications=2)
    for number in range(1, 5):
        await controller.sync(PolicyVersion(number=number))
    names = names_in(tmp_path)
    assert names == ["actor-0000-00000003", "actor-0000-00000004"]


async def test_a_resumed_incarnation_is_newer_than_any_number_before(tmp_path: Path) -> None:
    controller, _, _ = await started(tmp_path, keep_publications=1)
    await controller.sync(PolicyVersion(number=9))
    resumed = make_controller(tmp_path, [FaultyEngine()], keep_publications=1)
    await resumed.start(PolicyVersion(incarnation=1, number=5))
    assert names_in(tmp_path) == ["actor-0001-00000005"]


async def test_checksum_verification_is_refused_when_an_engine_echoes_none(tmp_path: Path) -> None:
    controller = make_controller(tmp_path, [FaultyEngine(echo="none")], verify="checksum")
    with pytest.raises(WeightSyncError, match=r"echoes no checksum.*accepted: full"):
        await controller.start(V0)


async def test_verification_by_checksum_or_off_scores_nothing(tmp_path: Path) -> None:
    for verify in ("checksum", "off"):
        controller, train, engine = await started(tmp_path / verify, verify=verify)
        move(train)
        await controller.sync(V1, probe_rows=ROWS)
        assert "score" not in engine.calls
        assert engine.active == V1


async def test_a_mode_that_does_not_exist_yet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weight\.mode must be 'sync'"):
        make_controller(tmp_path, [FaultyEngine()], mode="batch-async")


async def test_a_version_of_another_policy_is_refused(tmp_path: Path) -> None:
    controller, _, _ = await started(tmp_path)
    with pytest.raises(WeightSyncError, match="this controller syncs 'actor'"):
        await controller.sync(PolicyVersion(policy="judge", number=1))


async def test_sync_before_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="start"):
        await make_controller(tmp_path, [FaultyEngine()]).sync(V0)


async def test_without_engines_it_publishes_and_nothing_more(tmp_path: Path) -> None:
    """A reward model has no logprobs that could be probed, and nobody draws from it."""
    train = ToyTrainService()
    await train.create(ModelSpec(head="value"))
    controller = make_controller(tmp_path, [], train=train)
    await controller.start(V0)
    await controller.sync(V1, probe_rows=ROWS)
    assert controller.active is not None
    assert controller.active.version == V1
    assert {verb for verb, _ in train.calls} == {"create", "publish_weights"}
