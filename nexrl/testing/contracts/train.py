"""What every `TrainService` must do, as checks to run against any of them.

`STRUCTURE_CHECKS` hold for fakes too; `ARITHMETIC_CHECKS` need a real model behind the service, and
`MOMENT_CHECKS` an optimizer that remembers something. Those on what a forward pass gives are in
train_outputs.py. Run each against a fresh service: see tests/unit/train/test_train_contract.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from nexrl.errors import ConfigError, InvariantError
from nexrl.services.train.protocol import TrainService
from nexrl.testing.contracts.train_outputs import OUTPUT_ARITHMETIC_CHECKS, OUTPUT_STRUCTURE_CHECKS
from nexrl.testing.contracts.train_subject import (
    CROSS_ENTROPY,
    POLICY,
    ROUNDING,
    STEP,
    Check,
    TrainSubject,
    contract_chunk,
    refused,
    single_rows,
)
from nexrl.types import FloatArray, LossSpec, ModelSpec, OptimParams, PolicyVersion
from nexrl.weight_manifest import read_manifest

# --- structure --------------------------------------------------------------------------------


async def check_output_mask_limits_outputs(subject: TrainSubject) -> None:
    """Outputs are the same where the mask is 1, and 0 elsewhere."""
    await subject.service.create(subject.spec)
    chunk = contract_chunk()
    mask = np.arange(chunk.num_tokens) % 3 == 0
    masked = replace(chunk, inputs={**chunk.inputs, "output_mask": mask})
    everywhere = (await subject.service.forward(POLICY, chunk)).outputs["logprobs"]
    chosen = (await subject.service.forward(POLICY, masked)).outputs["logprobs"]
    np.testing.assert_allclose(chosen, np.where(mask, everywhere, 0.0), atol=ROUNDING)
    trained = await subject.service.forward_backward(POLICY, masked, CROSS_ENTROPY)
    np.testing.assert_allclose(trained.outputs["logprobs"], chosen, atol=ROUNDING)


async def check_unknown_names_are_refused(subject: TrainSubject) -> None:
    """Policies, losses, settings, inputs and outputs: the error lists what is accepted."""
    service, chunk = subject.service, contract_chunk()
    await refused(service.info("nobody"), ConfigError, "nobody")
    await service.create(subject.spec)
    await refused(service.forward("nobody", chunk), ConfigError, "nobody", POLICY)
    loss = LossSpec(name="cross_entrpy")
    await refused(
        service.forward_backward(POLICY, chunk, loss), ConfigError, "cross_entrpy", "cross_entropy"
    )
    loss = LossSpec(name="cross_entropy", config={"smoothing": 0.1})
    await refused(service.forward_backward(POLICY, chunk, loss), ConfigError, "smoothing")
    loss = LossSpec(name="ppo")
    await refused(service.forward_backward(POLICY, chunk, loss), ConfigError, "advantage")
    outputs = ("logits",)
    await refused(
        service.forward(POLICY, chunk, outputs=outputs), ConfigError, "logits", "logprobs"
    )


async def check_bad_rows_are_named(subject: TrainSubject) -> None:
    """Too long, outside the vocabulary, not finite: refused before any arithmetic (FR-010)."""
    service = subject.service
    info = await service.create(subject.spec)
    chunk = contract_chunk()
    ids = chunk.token_ids.copy()
    ids[6] = info.vocab_size
    bad_id = replace(chunk, token_ids=ids)
    await refused(service.forward(POLICY, bad_id), InvariantError, str(info.vocab_size), "row 1")
    weight = chunk.inputs["weight"].copy()
    weight[8] = np.nan
    not_finite = replace(chunk, inputs={"weight": weight})
    call = service.forward_backward(POLICY, not_finite, CROSS_ENTROPY)
    await refused(call, InvariantError, "weight", "row 2", "token 1")
    wide = {**chunk.inputs, "teacher_logprobs": np.zeros((chunk.num_tokens, 1), np.float32)}
    call = service.forward_backward(
        POLICY, replace(chunk, inputs=wide), LossSpec(name="reverse_kl")
    )
    await refused(call, InvariantError, "teacher_logprobs", f"({chunk.num_tokens}, 1)")
    longest = info.max_positions + 1  # the last token of a row is not fed
    await service.forward(POLICY, contract_chunk((4, longest)))
    too_long = contract_chunk((4, longest + 1))
    await refused(
        service.forward(POLICY, too_long), InvariantError, "row 1", str(info.max_positions)
    )


async def check_refused_chunk_stops_the_step_it_belongs_to(subject: TrainSubject) -> None:
    """A step that is under way already must not train on the other chunks alone."""
    service, good = subject.service, contract_chunk()
    await service.create(subject.spec)
    bad = replace(good, inputs={})
    calls = [
        asyncio.ensure_future(service.forward_backward(POLICY, good, CROSS_ENTROPY)),
        asyncio.ensure_future(service.forward_backward(POLICY, bad, CROSS_ENTROPY)),
        asyncio.ensure_future(service.optim_step(POLICY, STEP)),
    ]
    _, refused, step = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(refused, ConfigError)
    assert isinstance(step, InvariantError)
    assert "weight" in str(step)
    await service.forward_backward(POLICY, good, CROSS_ENTROPY)
    assert (await service.optim_step(POLICY, STEP)).optimizer_step == 1


async def check_calls_take_effect_in_the_order_they_started(subject: TrainSubject) -> None:
    """A caller may start the next call before the last has returned."""
    service = subject.service
    await service.create(subject.spec)
    chunk = contract_chunk()
    start = asyncio.ensure_future
    steps, infos = [], []
    for _ in range(4):
        start(service.forward_backward(POLICY, chunk, CROSS_ENTROPY))
        steps.append(start(service.optim_step(POLICY, STEP)))
        infos.append(start(service.info(POLICY)))
    results = await asyncio.gather(*steps)
    assert [r.optimizer_step for r in results] == [1, 2, 3, 4]
    assert all(r.grad_norm > 0 for r in results)
    assert [i.optimizer_step for i in await asyncio.gather(*infos)] == [1, 2, 3, 4]


async def check_publication_is_whole_and_checksummed(subject: TrainSubject) -> None:
    """The folder appears with its manifest; equal weights have equal checksums, others not."""
    service, folder = subject.service, subject.folder
    await service.create(subject.spec)
    first = await service.publish_weights(POLICY, PolicyVersion(number=0), str(folder / "v0"))
    assert read_manifest(folder / "v0") == first
    assert sorted(p.name for p in folder.iterdir()) == ["v0"]
    same = await service.publish_weights(
        POLICY, PolicyVersion(number=1), str(folder / "v1"), unchanged=True
    )
    assert same.checksum == first.checksum
    assert read_manifest(folder / "v1").unchanged
    await service.forward_backward(POLICY, contract_chunk(), CROSS_ENTROPY)
    await service.optim_step(POLICY, STEP)
    other = await service.publish_weights(POLICY, PolicyVersion(number=2), str(folder / "v2"))
    assert other.checksum != first.checksum
    assert other.num_bytes == first.num_bytes
    assert [t.name for t in other.tensors] == sorted(t.name for t in first.tensors)


async def check_state_brings_weights_and_counters_back(subject: TrainSubject) -> None:
    """save_state, train on, load_state: as before."""
    service, folder = subject.service, subject.folder
    await service.create(subject.spec)
    await service.forward_backward(POLICY, contract_chunk(), CROSS_ENTROPY)
    await service.optim_step(POLICY, STEP)
    version = PolicyVersion(number=1)
    saved = await service.publish_weights(POLICY, version, str(folder / "saved"))
    await service.save_state(POLICY, str(folder / "state"))
    await service.forward_backward(POLICY, contract_chunk(seed=1), CROSS_ENTROPY)
    await service.optim_step(POLICY, STEP)
    info = await service.load_state(POLICY, str(folder / "state"))
    assert info.optimizer_step == 1
    again = await service.publish_weights(POLICY, version, str(folder / "again"))
    assert again.checksum == saved.checksum


async def check_state_with_a_pending_gradient_is_refused(subject: TrainSubject) -> None:
    """A gradient is not saved, so saving around it would lose it silently."""
    service, path = subject.service, str(subject.folder / "state")
    await service.create(subject.spec)
    await service.forward_backward(POLICY, contract_chunk(), CROSS_ENTROPY)
    await refused(service.save_state(POLICY, path), InvariantError, POLICY, "gradient")
    await service.reset_optimizer(POLICY)
    await service.save_state(POLICY, path)
    await refused(service.load_state(POLICY, path + "-not"), ConfigError, "state-not")


async def check_frozen_policy_accepts_forward_only(subject: TrainSubject) -> None:
    """A reference has no optimizer and no gradient."""
    service = subject.service
    await service.create(subject.spec)
    reference = ModelSpec(policy="reference", copy_of=POLICY, trainable=False)
    assert (await service.create(reference)).num_parameters == 0
    await service.forward("reference", contract_chunk())
    call = service.forward_backward("reference", contract_chunk(), CROSS_ENTROPY)
    await refused(call, ConfigError, "reference", "trainable")
    await refused(service.optim_step("reference", STEP), ConfigError, "trainable")
    spec = ModelSpec(policy="odd", path="somewhere", copy_of=POLICY)
    await refused(service.create(spec), ConfigError, "odd", "copy_of")


async def check_chunks_without_anything_to_score(subject: TrainSubject) -> None:
    """No rows, one-token rows, all weights 0: loss 0, no NaN, and the step is well defined
    (FR-032)."""
    service = subject.service
    await service.create(subject.spec)
    for chunk in (contract_chunk(()), contract_chunk((1, 1))):
        result = await service.forward_backward(POLICY, chunk, CROSS_ENTROPY)
        assert result.loss == 0.0
        assert not result.outputs["logprobs"].any()
    silent = contract_chunk()
    silent = replace(silent, inputs={"weight": np.zeros(silent.num_tokens, np.float32)})
    result = await service.forward_backward(POLICY, silent, CROSS_ENTROPY)
    assert result.loss == 0.0
    assert np.count_nonzero(result.outputs["logprobs"]) == silent.num_tokens - silent.num_rows
    step = await service.optim_step(POLICY, STEP)
    assert (step.grad_norm, step.applied) == (0.0, True)


async def check_dropped_policy_is_as_unknown_as_if_it_had_never_been(
    subject: TrainSubject,
) -> None:
    """Calls that started before end well, later ones are refused, its copy stays, and the name is
    free for a new beginning."""
    service, chunk, path = subject.service, contract_chunk(), str(subject.folder / "state")
    await service.create(subject.spec)
    await service.create(ModelSpec(policy="reference", copy_of=POLICY, trainable=False))
    await service.save_state(POLICY, path)
    last = asyncio.ensure_future(service.forward_backward(POLICY, chunk, CROSS_ENTROPY))
    await asyncio.gather(last, service.drop(POLICY))
    for call in (
        service.info(POLICY),
        service.forward(POLICY, chunk),
        service.forward_backward(POLICY, chunk, CROSS_ENTROPY),
        service.backward(POLICY, chunk, {"logprobs": chunk.inputs["weight"]}),
        service.optim_step(POLICY, STEP),
        service.save_state(POLICY, path),
        service.load_state(POLICY, path),
        service.publish_weights(POLICY, PolicyVersion(), path),
        service.reset_optimizer(POLICY),
        service.create(ModelSpec(policy="other", copy_of=POLICY)),
    ):
        await refused(call, ConfigError, f"no policy is named {POLICY!r}", "['reference']")
    await service.forward("reference", chunk)
    for policy in (POLICY, "nobody"):  # idempotent
        await service.drop(policy)
    assert (await service.create(subject.spec)).optimizer_step == 0
    assert (await service.optim_step(POLICY, STEP)).grad_norm == 0.0


async def check_closing_is_idempotent_and_final(subject: TrainSubject) -> None:
    """aclose twice is fine; an engine that is gone is no reason to hang."""
    await subject.service.create(subject.spec)
    await subject.service.aclose()
    await subject.service.aclose()


STRUCTURE_CHECKS: tuple[Check, ...] = (
    check_output_mask_limits_outputs,
    check_unknown_names_are_refused,
    check_bad_rows_are_named,
    check_refused_chunk_stops_the_step_it_belongs_to,
    check_calls_take_effect_in_the_order_they_started,
    check_publication_is_whole_and_checksummed,
    check_state_brings_weights_and_counters_back,
    check_state_with_a_pending_gradient_is_refused,
    check_frozen_policy_accepts_forward_only,
    check_chunks_without_anything_to_score,
    check_dropped_policy_is_as_unknown_as_if_it_had_never_been,
    check_closing_is_idempotent_and_final,
    *OUTPUT_STRUCTURE_CHECKS,
)


# --- arithmetic -------------------------------------------------------------------------------


async def _logprobs(service: TrainService, policy: str = POLICY) -> FloatArray:
    return (await service.forward(policy, contract_chunk())).outputs["logprobs"]


async def _restart(subject: TrainSubject) -> None:
    await subject.service.create(subject.spec)


async def check_splitting_into_chunks_gives_the_same_step(subject: TrainSubject) -> None:
    """All rows at once, or each row as a call of its own: same loss, gradient and step (FR-029)."""
    service, chunk = subject.service, contract_chunk(loss="ppo")
    found = []
    for chunks in ([chunk], single_rows(chunk)):
        await _restart(subject)
        losses = [
            (await service.forward_backward(POLICY, c, LossSpec(name="ppo"))).loss for c in chunks
        ]
        step = await service.optim_step(POLICY, OptimParams(lr=1e-2, eps=1.0))
        found.append((sum(losses), step.grad_norm, await _logprobs(service)))
    np.testing.assert_allclose(found[0][:2], found[1][:2], rtol=1e-4)
    np.testing.assert_allclose(found[0][2], found[1][2], atol=ROUNDING)


async def check_client_side_loss_equals_the_named_one(subject: TrainSubject) -> None:
    """`backward` with d loss / d logprob does what `forward_backward` does."""
    service, chunk = subject.service, contract_chunk()
    norms = []
    for named in (True, False):
        await _restart(subject)
        if named:
            await service.forward_backward(POLICY, chunk, CROSS_ENTROPY)
        else:
            await service.backward(POLICY, chunk, {"logprobs": -chunk.inputs["weight"]})
        norms.append((await service.optim_step(POLICY, STEP)).grad_norm)
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)


async def check_training_raises_the_likelihood(subject: TrainSubject) -> None:
    """The sign is right: cross entropy falls."""
    service, chunk = subject.service, contract_chunk()
    await _restart(subject)
    losses = []
    for _ in range(3):
        losses.append((await service.forward_backward(POLICY, chunk, CROSS_ENTROPY)).loss)
        await service.optim_step(POLICY, STEP)
    assert losses[0] > losses[1] > losses[2]


async def check_reference_stays_while_the_actor_moves(subject: TrainSubject) -> None:
    """A copy shares nothing with what it was copied from."""
    service = subject.service
    await _restart(subject)
    await service.create(ModelSpec(policy="reference", copy_of=POLICY, trainable=False))
    before = await _logprobs(service)
    np.testing.assert_array_equal(before, await _logprobs(service, "reference"))
    await service.forward_backward(POLICY, contract_chunk(), CROSS_ENTROPY)
    await service.optim_step(POLICY, STEP)
    np.testing.assert_array_equal(before, await _logprobs(service, "reference"))
    assert np.abs(before - await _logprobs(service)).max() > 1e-4


async def check_gradient_that_is_not_finite_is_not_applied(subject: TrainSubject) -> None:
    """The step is reported as skipped, the weights stay, the next step is clean."""
    service, chunk = subject.service, contract_chunk()
    await _restart(subject)
    before = await _logprobs(service)
    huge = replace(chunk, inputs={"weight": np.float32(3e38) * chunk.inputs["weight"]})
    await service.forward_backward(POLICY, huge, CROSS_ENTROPY)
    step = await service.optim_step(POLICY, STEP)
    assert (step.applied, step.optimizer_step) == (False, 0)
    assert not np.isfinite(step.grad_norm)
    np.testing.assert_array_equal(before, await _logprobs(service))
    await service.forward_backward(POLICY, chunk, CROSS_ENTROPY)
    assert (await service.optim_step(POLICY, STEP)).applied


async def _train(service: TrainService, *seeds: int) -> None:
    for seed in seeds:
        await service.forward_backward(POLICY, contract_chunk(seed=seed), CROSS_ENTROPY)
        await service.optim_step(POLICY, replace(STEP, weight_decay=0.1))


async def _checksum(subject: TrainSubject, name: str) -> str:
    version, path = PolicyVersion(number=9), str(subject.folder / name)
    return (await subject.service.publish_weights(POLICY, version, path)).checksum


async def check_resume_is_bit_identical(subject: TrainSubject) -> None:
    """Weights after save, load and two steps equal those after two steps without a break."""
    service, path = subject.service, str(subject.folder / "state")
    await _restart(subject)
    await _train(service, 0)
    await service.save_state(POLICY, path)
    await _train(service, 1, 2)
    straight = await _checksum(subject, "straight")
    await _restart(subject)
    await service.load_state(POLICY, path)
    await _train(service, 1, 2)
    assert await _checksum(subject, "resumed") == straight


async def check_optimizer_state_is_part_of_what_is_saved(subject: TrainSubject) -> None:
    """Without its moments the same chunks lead elsewhere."""
    service, path = subject.service, str(subject.folder / "state")
    await _restart(subject)
    await _train(service, 0)
    await service.save_state(POLICY, path)
    found = []
    for with_optimizer in (True, False):
        await service.load_state(POLICY, path, with_optimizer=with_optimizer)
        await _train(service, 1, 2)
        found.append(await _checksum(subject, f"moments-{with_optimizer}"))
    assert found[0] != found[1]


ARITHMETIC_CHECKS: tuple[Check, ...] = (
    check_splitting_into_chunks_gives_the_same_step,
    check_client_side_loss_equals_the_named_one,
    check_training_raises_the_likelihood,
    check_reference_stays_while_the_actor_moves,
    check_gradient_that_is_not_finite_is_not_applied,
    check_resume_is_bit_identical,
    *OUTPUT_ARITHMETIC_CHECKS,
)

MOMENT_CHECKS: tuple[Check, ...] = (check_optimizer_state_is_part_of_what_is_saved,)
