"""The part of the train contract on what a forward pass gives and what can be differentiated:
candidates, top-K, values, losses over rows. `train.py` runs these checks with its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from nexrl.errors import ConfigError, InvariantError
from nexrl.services.train.protocol import TrainService
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
from nexrl.types import (
    CANDIDATE_IDS,
    OUTPUT_MASK,
    Array,
    FloatArray,
    LossSpec,
    ModelSpec,
    OptimParams,
    PolicyVersion,
    RowChunk,
)

CRITIC = "critic"
VALUE = LossSpec(name="value", config={"clip": None})
TOP_K = LossSpec(name="reverse_kl_top_k")
VALUES = ("values",)
CRITIC_STEP = OptimParams(lr=2e-3)
PLAIN_STEP = OptimParams(lr=0.05, eps=1.0)
"""Its step is nearly proportional to the gradient, so that small differences stay small."""


async def _create(subject: TrainSubject, *, head: bool = False) -> None:
    """The subject's model as `actor` and, if asked for, the same with a value head as `critic`."""
    await subject.service.create(subject.spec)
    if head:
        await subject.service.create(replace(subject.spec, policy=CRITIC, head="value"))


async def _values(service: TrainService, policy: str = CRITIC) -> FloatArray:
    return (await service.forward(policy, contract_chunk(), outputs=VALUES)).outputs["values"]


async def _train_critic(service: TrainService, *, steps: int = 2) -> list[float]:
    """Losses of some steps towards fixed returns."""
    losses = []
    for _ in range(steps):
        chunk = contract_chunk(loss="value")
        losses.append((await service.forward_backward(CRITIC, chunk, VALUE, outputs=VALUES)).loss)
        await service.optim_step(CRITIC, CRITIC_STEP)
    return losses


def _with(chunk: RowChunk, **inputs: Array) -> RowChunk:
    return replace(chunk, inputs={**chunk.inputs, **inputs})


# --- structure --------------------------------------------------------------------------------


async def check_outputs_are_aligned_and_start_at_zero(subject: TrainSubject) -> None:
    """Entry t of every output speaks of token t; entry 0 of each row is 0; K columns where asked."""
    info = await subject.service.create(subject.spec)
    names = tuple(name.replace(":K", ":3") for name in info.outputs)
    chunk = contract_chunk(loss="reverse_kl_top_k")
    result = await subject.service.forward(POLICY, chunk, outputs=names)
    assert result.lengths.tolist() == chunk.lengths.tolist()
    columns = {"logprobs": 1, "entropy": 1, "candidate_logprobs": 2, "top_logprobs:3": 3}
    num_scored = chunk.num_tokens - chunk.num_rows
    for name, num_columns in columns.items():
        values = result.outputs[name]
        assert values.dtype == np.float32
        assert values.shape == (chunk.num_tokens, num_columns)[: values.ndim]
        assert not values[chunk.offsets[:-1]].any()
        assert np.count_nonzero(values) == num_columns * num_scored
    top_ids = result.outputs["top_ids:3"]
    assert top_ids.shape == (chunk.num_tokens, 3)
    assert np.issubdtype(top_ids.dtype, np.integer)
    assert not top_ids[chunk.offsets[:-1]].any()
    assert ((top_ids >= 0) & (top_ids < info.vocab_size)).all()


async def check_value_policy_has_values_and_nothing_else(subject: TrainSubject) -> None:
    """Whatever needs the other kind of head is refused, and both names are in the message."""
    service, chunk = subject.service, contract_chunk()
    await _create(subject, head=True)
    info = await service.info(CRITIC)
    assert info.outputs == VALUES
    assert "value" in info.losses
    assert "value" not in (await service.info(POLICY)).losses
    await refused(service.forward(CRITIC, chunk), ConfigError, CRITIC, "logprobs", "values")
    await refused(service.forward(POLICY, chunk, outputs=VALUES), ConfigError, POLICY, "values")
    call = service.forward_backward(CRITIC, chunk, CROSS_ENTROPY, outputs=VALUES)
    await refused(call, ConfigError, "cross_entropy", "logprobs", CRITIC)
    call = service.forward_backward(POLICY, contract_chunk(loss="value"), VALUE)
    await refused(call, ConfigError, "'value'", "values", POLICY)
    call = service.backward(CRITIC, chunk, {"logprobs": chunk.inputs["weight"]})
    await refused(call, ConfigError, CRITIC, "logprobs")
    odd = ModelSpec(policy="odd", copy_of=CRITIC)
    await refused(service.create(odd), ConfigError, "value", "output head")


async def check_values_start_at_zero(subject: TrainSubject) -> None:
    """From a folder and from a hosted language model, frozen or not."""
    service = subject.service
    await _create(subject, head=True)
    spec = ModelSpec(policy="reference", copy_of=POLICY, head="value", trainable=False)
    assert (await service.create(spec)).num_parameters == 0
    for policy in (CRITIC, "reference"):
        values = await _values(service, policy)
        assert values.shape == (contract_chunk().num_tokens,)
        assert not values.any()


async def check_state_of_a_value_policy_comes_back(subject: TrainSubject) -> None:
    """And does not fit a language model, nor the other way round."""
    service, folder = subject.service, subject.folder
    await _create(subject, head=True)
    await _train_critic(service)
    version = PolicyVersion(policy=CRITIC)
    saved = await service.publish_weights(CRITIC, version, str(folder / "saved"))
    await service.save_state(CRITIC, str(folder / "critic"))
    await service.save_state(POLICY, str(folder / "actor"))
    await _train_critic(service)
    moved = await service.publish_weights(CRITIC, version, str(folder / "moved"))
    assert moved.checksum != saved.checksum
    assert (await service.load_state(CRITIC, str(folder / "critic"))).optimizer_step == 2
    again = await service.publish_weights(CRITIC, version, str(folder / "again"))
    assert again.checksum == saved.checksum
    await refused(service.load_state(CRITIC, str(folder / "actor")), ConfigError, "head")
    await refused(service.load_state(POLICY, str(folder / "critic")), ConfigError, "head")


async def check_candidates_are_checked_where_they_count(subject: TrainSubject) -> None:
    """Padding at positions that are not scored may be anything."""
    service, outputs = subject.service, ("candidate_logprobs",)
    vocab_size = (await service.create(subject.spec)).vocab_size
    plain = contract_chunk()

    async def refuse(ids: Array | None, *words: str) -> None:
        chunk = plain if ids is None else _with(plain, **{CANDIDATE_IDS: ids})
        call = service.forward(POLICY, chunk, outputs=outputs)
        await refused(call, ConfigError if ids is None else InvariantError, *words)

    await refuse(None, CANDIDATE_IDS)
    ids = np.full((plain.num_tokens, 2), 4, np.int32)
    await refuse(ids[:, 0], CANDIDATE_IDS, "[N, K]")
    await refuse(ids[:, :0], CANDIDATE_IDS, "[N, K]")
    await refuse(ids.astype(np.float32), CANDIDATE_IDS, "whole numbers")
    ids[6, 1] = vocab_size
    await refuse(ids, "row 1", "token 1", str(vocab_size))
    masked = _with(plain, **{CANDIDATE_IDS: ids, OUTPUT_MASK: np.arange(plain.num_tokens) != 6})
    found = (await service.forward(POLICY, masked, outputs=outputs)).outputs[outputs[0]]
    assert not found[6].any()
    assert found[8].all()


async def check_inputs_are_not_stretched_to_fit(subject: TrainSubject) -> None:
    """A teacher with fewer columns than candidates, or a weight with columns: refused, since
    arithmetic would broadcast them."""
    service, chunk = subject.service, contract_chunk(loss="reverse_kl_top_k")
    await service.create(subject.spec)
    teacher = chunk.inputs["teacher_candidate_logprobs"]
    narrow = _with(chunk, teacher_candidate_logprobs=teacher[:, :1])
    call = service.forward_backward(POLICY, narrow, TOP_K)
    await refused(call, InvariantError, "teacher_candidate_logprobs", f"({chunk.num_tokens}, 1)")
    wide = _with(contract_chunk(), weight=chunk.inputs["weight"][:, None])
    call = service.forward_backward(POLICY, wide, CROSS_ENTROPY)
    await refused(call, InvariantError, "weight", "[N]")


async def check_top_k_is_for_forward_only(subject: TrainSubject) -> None:
    """It has no gradient; K is at most the vocabulary."""
    service, chunk = subject.service, contract_chunk()
    vocab_size = (await service.create(subject.spec)).vocab_size
    call = service.forward_backward(POLICY, chunk, CROSS_ENTROPY, outputs=("top_logprobs:2",))
    await refused(call, ConfigError, "top_logprobs:2", "candidate_logprobs")
    gradients = {"top_logprobs:2": np.ones((chunk.num_tokens, 2), np.float32)}
    await refused(service.backward(POLICY, chunk, gradients), ConfigError, "top_logprobs:2")
    for name in (f"top_ids:{vocab_size + 1}", "top_ids:0", "top_ids", "top_ids:K"):
        await refused(service.forward(POLICY, chunk, outputs=(name,)), ConfigError, name)


async def check_gradients_have_the_shape_of_their_output(subject: TrainSubject) -> None:
    """One gradient for each candidate, finite where it counts; else the step is spoilt."""
    service, chunk = subject.service, contract_chunk(loss="reverse_kl_top_k")
    await service.create(subject.spec)
    given = np.ones((chunk.num_tokens, 2), np.float32)

    async def refuse(gradient: Array, *words: str) -> None:
        call = service.backward(POLICY, chunk, {"candidate_logprobs": gradient})
        await refused(call, InvariantError, "candidate_logprobs", *words)

    await refuse(given[:, :1], f"({chunk.num_tokens}, 1)", f"({chunk.num_tokens}, 2)")
    await refuse(given[:, 0], f"({chunk.num_tokens},)")
    bad = given.copy()
    bad[8, 1] = np.nan
    await refuse(bad, "nan", "row 2", "token 1")
    await refused(service.optim_step(POLICY, STEP), InvariantError, "candidate_logprobs")
    await service.backward(POLICY, chunk, {"candidate_logprobs": given})
    assert (await service.optim_step(POLICY, STEP)).applied


OUTPUT_STRUCTURE_CHECKS: tuple[Check, ...] = (
    check_outputs_are_aligned_and_start_at_zero,
    check_value_policy_has_values_and_nothing_else,
    check_values_start_at_zero,
    check_state_of_a_value_policy_comes_back,
    check_candidates_are_checked_where_they_count,
    check_inputs_are_not_stretched_to_fit,
    check_top_k_is_for_forward_only,
    check_gradients_have_the_shape_of_their_output,
)


# --- arithmetic -------------------------------------------------------------------------------


async def check_all_candidates_together_are_the_distribution(subject: TrainSubject) -> None:
    """Under the chunk's temperature: they sum to 1, their entropy is `entropy`, top-K are the
    largest of them, and the one of the token itself is `logprobs`."""
    service, chunk = subject.service, replace(contract_chunk(), temperature=0.7)
    num_ids = (await service.create(subject.spec)).vocab_size
    everything = np.tile(np.arange(num_ids, dtype=np.int32), (chunk.num_tokens, 1))
    names = ("logprobs", "entropy", "candidate_logprobs", "top_ids:3", "top_logprobs:3")
    chunk = _with(chunk, **{CANDIDATE_IDS: everything})
    found = (await service.forward(POLICY, chunk, outputs=names)).outputs
    scored = found["logprobs"] != 0
    log_p = found["candidate_logprobs"][scored].astype(np.float64)
    np.testing.assert_allclose(np.exp(log_p).sum(1), 1.0, atol=ROUNDING)
    np.testing.assert_allclose(-(np.exp(log_p) * log_p).sum(1), found["entropy"][scored], atol=1e-4)
    own = log_p[np.arange(len(log_p)), chunk.token_ids[scored]]
    np.testing.assert_allclose(own, found["logprobs"][scored], atol=ROUNDING)
    best = np.argsort(-log_p, axis=1)[:, :3]
    top_logprobs, top_ids = found["top_logprobs:3"][scored], found["top_ids:3"][scored]
    np.testing.assert_allclose(top_logprobs, np.take_along_axis(log_p, best, 1), atol=ROUNDING)
    np.testing.assert_allclose(
        np.take_along_axis(log_p, top_ids.astype(np.int64), 1), top_logprobs, atol=ROUNDING
    )


async def _after(
    subject: TrainSubject, policy: str, chunks: Sequence[RowChunk], loss: LossSpec
) -> tuple[float, float, FloatArray]:
    """(loss, gradient norm, outputs) of one step over the chunks, from the start."""
    service = subject.service
    await _create(subject, head=policy == CRITIC)
    asked = VALUES if policy == CRITIC else ("logprobs",)
    total = 0.0
    for chunk in chunks:
        total += (await service.forward_backward(policy, chunk, loss, outputs=asked)).loss
    step = await service.optim_step(policy, PLAIN_STEP)
    found = await service.forward(policy, contract_chunk(), outputs=asked)
    return total, step.grad_norm, found.outputs[asked[0]]


async def check_row_losses_candidates_and_values_split_like_any_other(
    subject: TrainSubject,
) -> None:
    """All rows at once, each row as a call of its own, or rows in another order: same loss,
    gradient and step (FR-029, FR-035)."""
    for policy, loss in ((POLICY, LossSpec(name="gspo")), (POLICY, TOP_K), (CRITIC, VALUE)):
        chunk = contract_chunk(loss=loss.name)
        rows = single_rows(chunk)
        whole = await _after(subject, policy, [chunk], loss)
        for chunks in (rows, rows[::-1]):
            cut = await _after(subject, policy, chunks, loss)
            np.testing.assert_allclose(whole[:2], cut[:2], rtol=1e-4)
            np.testing.assert_allclose(whole[2], cut[2], atol=ROUNDING)
        assert whole[1] > 0


async def _client_step(
    subject: TrainSubject, policy: str, chunk: RowChunk, gradients: Mapping[str, Array]
) -> tuple[float, FloatArray]:
    service = subject.service
    await _create(subject, head=policy == CRITIC)
    result = await service.backward(policy, chunk, gradients)
    assert (result.loss, dict(result.outputs)) == (0.0, {})
    norm = (await service.optim_step(policy, PLAIN_STEP)).grad_norm
    asked = VALUES if policy == CRITIC else ("logprobs",)
    return norm, (await service.forward(policy, contract_chunk(), outputs=asked)).outputs[asked[0]]


async def check_client_side_value_loss_equals_the_named_one(subject: TrainSubject) -> None:
    """`backward` with d loss / d value does what the named loss does."""
    chunk = contract_chunk(loss="value")
    named = await _after(subject, CRITIC, [chunk], VALUE)
    gradient = -chunk.inputs["weight"] * chunk.inputs["returns"]  # the values are 0 so far
    norm, values = await _client_step(subject, CRITIC, chunk, {"values": gradient})
    np.testing.assert_allclose(norm, named[1], rtol=1e-4)
    np.testing.assert_allclose(values, named[2], atol=ROUNDING)


async def check_candidate_that_is_the_token_has_the_gradient_of_its_logprob(
    subject: TrainSubject,
) -> None:
    """Also when it is named twice, and beside a candidate without weight."""
    chunk = contract_chunk()
    gradient = -chunk.inputs["weight"]
    plain = await _client_step(subject, POLICY, chunk, {"logprobs": gradient})
    other = np.full_like(chunk.token_ids, 3)
    ids = np.stack([chunk.token_ids, other, chunk.token_ids], 1)
    parts = np.stack([0.75 * gradient, 0.0 * gradient, 0.25 * gradient], 1)
    chunk = _with(chunk, **{CANDIDATE_IDS: ids})
    found = await _client_step(subject, POLICY, chunk, {"candidate_logprobs": parts})
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-4)
    np.testing.assert_allclose(found[1], plain[1], atol=ROUNDING)


async def check_gradients_of_several_outputs_add_up(subject: TrainSubject) -> None:
    """logprobs, entropy and candidates in one call equal three calls."""
    chunk = contract_chunk(loss="reverse_kl_top_k")
    weight = chunk.inputs["weight"]
    gradients = {
        "logprobs": -weight,
        "entropy": np.float32(0.5) * weight,
        "candidate_logprobs": np.stack([weight, -weight], 1),
    }
    together = await _client_step(subject, POLICY, chunk, gradients)
    await _create(subject)
    for name, gradient in gradients.items():
        await subject.service.backward(POLICY, chunk, {name: gradient})
    apart = (await subject.service.optim_step(POLICY, PLAIN_STEP)).grad_norm
    np.testing.assert_allclose(together[0], apart, rtol=1e-4)


async def check_outputs_that_are_only_reported_leave_the_gradient_alone(
    subject: TrainSubject,
) -> None:
    """A loss on logprobs, with every other output asked for."""
    chunk = contract_chunk(loss="reverse_kl_top_k")
    chunk = replace(chunk, inputs={k: chunk.inputs[k] for k in ("weight", CANDIDATE_IDS)})
    norms = []
    for outputs in ((), ("logprobs", "entropy", "candidate_logprobs")):
        await _create(subject)
        result = await subject.service.forward_backward(
            POLICY, chunk, CROSS_ENTROPY, outputs=outputs
        )
        scored = (await subject.service.forward(POLICY, chunk, outputs=outputs)).outputs
        assert set(result.outputs) == set(outputs)
        for name, values in result.outputs.items():
            np.testing.assert_allclose(values, scored[name], atol=ROUNDING)
        norms.append((await subject.service.optim_step(POLICY, STEP)).grad_norm)
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)


async def check_values_learn_the_returns(subject: TrainSubject) -> None:
    """The sign is right, the actor beside it does not move, and neither does a frozen copy."""
    service = subject.service
    await _create(subject, head=True)
    actor = (await service.forward(POLICY, contract_chunk())).outputs["logprobs"]
    losses = await _train_critic(service, steps=2)
    await service.create(ModelSpec(policy="old", copy_of=CRITIC, head="value", trainable=False))
    old = await _values(service, "old")
    np.testing.assert_array_equal(old, await _values(service))
    losses += await _train_critic(service, steps=2)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(old, await _values(service, "old"))
    assert np.abs(old - await _values(service)).max() > 1e-5
    again = (await service.forward(POLICY, contract_chunk())).outputs["logprobs"]
    np.testing.assert_array_equal(actor, again)


async def check_value_of_a_token_does_not_depend_on_the_token(subject: TrainSubject) -> None:
    """It is read from the state before it, so a row's score is the value at any token appended."""
    await _create(subject, head=True)
    await _train_critic(subject.service)
    chunk = contract_chunk((5, 7, 3))
    ids = chunk.token_ids.copy()
    ids[chunk.offsets[1:] - 1] = 0
    found = [
        (await subject.service.forward(CRITIC, c, outputs=VALUES)).outputs["values"]
        for c in (chunk, replace(chunk, token_ids=ids))
    ]
    np.testing.assert_array_equal(found[0], found[1])
    assert found[0][chunk.offsets[1:] - 1].all()


async def check_published_value_policy_is_hosted_again(subject: TrainSubject) -> None:
    """`create` with the folder finds the head: equal values."""
    service, path = subject.service, str(subject.folder / "critic")
    await _create(subject, head=True)
    await _train_critic(service)
    await service.publish_weights(CRITIC, PolicyVersion(policy=CRITIC), path)
    await service.create(ModelSpec(policy="again", path=path, head="value"))
    np.testing.assert_allclose(
        await _values(service, "again"), await _values(service), rtol=1e-6, atol=1e-8
    )
    call = service.create(ModelSpec(policy="odd", path=path))
    await refused(call, ConfigError, "value", "output head")


OUTPUT_ARITHMETIC_CHECKS: tuple[Check, ...] = (
    check_all_candidates_together_are_the_distribution,
    check_row_losses_candidates_and_values_split_like_any_other,
    check_client_side_value_loss_equals_the_named_one,
    check_candidate_that_is_the_token_has_the_gradient_of_its_logprob,
    check_gradients_of_several_outputs_add_up,
    check_outputs_that_are_only_reported_leave_the_gradient_alone,
    check_values_learn_the_returns,
    check_value_of_a_token_does_not_depend_on_the_token,
    check_published_value_policy_is_hosted_again,
)
