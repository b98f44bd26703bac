"""What every `InferenceService` must do, as checks to run against any of them.

`DRAWING_CHECKS` and `CONTROL_CHECKS` hold for fakes too; `MODEL_CHECKS` need real weights behind
the service. Run each against a fresh service: see tests/unit/inference/test_inference_contract.py.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nexrl.errors import ContextOverflowError, NexRLError
from nexrl.services.inference.protocol import InferenceService
from nexrl.types import (
    Completion,
    PolicyVersion,
    Prompt,
    RowChunk,
    Sampling,
    TensorInfo,
    WeightManifest,
    derive_seed,
)
from nexrl.weight_manifest import make_manifest, tensor_checksum, write_manifest

V0, V1 = PolicyVersion(), PolicyVersion(number=1)
PROMPT = Prompt(token_ids=np.array([3, 4, 5, 6], np.int32))
SAMPLING = Sampling(max_tokens=6, temperature=1.0, seed=7)
LOGPROB_TOLERANCE = 1e-4
_DTYPE_NAMES = {"float32": "F32", "float16": "F16", "float64": "F64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSubject:
    """What a check is given."""

    service: InferenceService
    """Fresh: version 0 is active and nothing runs. Ids 3 to 6 are in its vocabulary."""
    publication: WeightManifest
    """Version 1, with other weights where the service has any."""


Check = Callable[[InferenceSubject], Awaitable[None]]


def publish_model(model_folder: Path, folder: Path, version: PolicyVersion) -> WeightManifest:
    """The float32 weights of a model folder as a publication of some version."""
    from safetensors.numpy import load_file

    folder.mkdir(parents=True)
    tensors: list[TensorInfo] = []
    num_bytes = 0
    for path in sorted(model_folder.glob("*.safetensors")):
        shutil.copy(path, folder)
        for name, values in load_file(path).items():
            num_bytes += values.nbytes
            tensors.append(
                TensorInfo(
                    name=name,
                    shape=values.shape,
                    dtype=_DTYPE_NAMES[values.dtype.name],
                    checksum=tensor_checksum(values),
                )
            )
    manifest = make_manifest(version, folder, tensors, num_bytes=num_bytes)
    write_manifest(manifest, folder)
    return manifest


def same_draw(a: Completion, b: Completion) -> bool:
    """Equal tokens and equal bits of logprobs."""
    if a.logprobs is None or b.logprobs is None:
        return False
    return np.array_equal(a.token_ids, b.token_ids) and a.logprobs.tobytes() == b.logprobs.tobytes()


async def load_and_activate(subject: InferenceSubject) -> None:
    """A whole sync to the subject's publication."""
    await subject.service.pause("keep")
    await subject.service.load_weights(subject.publication)
    await subject.service.activate(subject.publication.version)
    await subject.service.resume()


async def refused(call: Awaitable[object]) -> NexRLError:
    """The error of a call that must fail."""
    try:
        await call
    except NexRLError as error:
        return error
    raise AssertionError("the call was accepted")


# --- drawing ----------------------------------------------------------------------------------


async def check_choices_are_whole(subject: InferenceSubject) -> None:
    """n choices; ids and logprobs of equal length, at most max_tokens, fed prompt echoed."""
    completions = await subject.service.generate(PROMPT, sampling=SAMPLING, n=3)
    assert len(completions) == 3
    for completion in completions:
        assert completion.logprobs is not None
        assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= SAMPLING.max_tokens
        assert np.isfinite(completion.logprobs).all()
        assert completion.logprobs.max() <= 0.0
        assert np.array_equal(completion.prompt_token_ids, PROMPT.token_ids)


async def check_every_token_is_stamped(subject: InferenceSubject) -> None:
    """Version spans cover all tokens with the active version."""
    for completion in await subject.service.generate(PROMPT, sampling=SAMPLING, n=2):
        (span,) = completion.versions
        assert (span.start, span.end) == (0, len(completion.token_ids))
        assert span.version == V0


async def check_a_seed_repeats_its_draw(subject: InferenceSubject) -> None:
    """The same seed gives the same tokens, another seed others."""
    wide = replace(SAMPLING, max_tokens=16)
    first = await subject.service.generate(PROMPT, sampling=wide)
    again = await subject.service.generate(PROMPT, sampling=wide)
    others = await subject.service.generate(PROMPT, sampling=replace(wide, seed=8), n=8)
    assert np.array_equal(first[0].token_ids, again[0].token_ids)
    assert any(not np.array_equal(first[0].token_ids, c.token_ids) for c in others)


async def check_a_choice_equals_a_call_with_its_seed(subject: InferenceSubject) -> None:
    """Choice 0 has the seed itself, choice i one derived from it; `seeds` states them."""
    together = await subject.service.generate(PROMPT, sampling=SAMPLING, n=3)
    seeds = (7, derive_seed(7, 1), derive_seed(7, 2))
    assert tuple(c.seed for c in together) == seeds
    stated = await subject.service.generate(
        PROMPT, sampling=replace(SAMPLING, seed=None, seeds=seeds), n=3
    )
    for a, b in zip(together, stated, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)


async def check_calls_without_a_seed_differ(subject: InferenceSubject) -> None:
    """Fresh entropy, so that replicas never repeat each other (FR-058)."""
    unseeded = replace(SAMPLING, seed=None, max_tokens=16)
    calls = await asyncio.gather(
        *(subject.service.generate(PROMPT, sampling=unseeded) for _ in range(8))
    )
    assert len({c.seed for (c,) in calls}) == 8
    assert len({c.token_ids.tobytes() for (c,) in calls}) > 1


async def check_a_prompt_without_room_is_refused(subject: InferenceSubject) -> None:
    """Both numbers are named and nothing runs (FR-077)."""
    limit = (await subject.service.info()).max_context
    full = Prompt(token_ids=np.full(limit, 3, np.int32))
    error = await refused(subject.service.generate(full, sampling=SAMPLING))
    assert isinstance(error, ContextOverflowError)
    assert str(error).count(str(limit)) >= 2


async def check_wrong_number_of_seeds_is_refused(subject: InferenceSubject) -> None:
    """One seed for each choice, or none."""
    await refused(subject.service.generate(PROMPT, sampling=replace(SAMPLING, seeds=(1, 2)), n=3))


async def check_an_unknown_policy_is_refused(subject: InferenceSubject) -> None:
    """Tokens of one policy are never taken for those of another."""
    error = await refused(
        subject.service.generate(PROMPT, sampling=SAMPLING, policy="no_such_policy")
    )
    assert "no_such_policy" in str(error)


async def check_a_cancelled_call_leaves_others_alone(subject: InferenceSubject) -> None:
    """Cancellation of one call for a prompt does not disturb another for the same prompt."""
    keep = asyncio.create_task(subject.service.generate(PROMPT, sampling=SAMPLING))
    drop = asyncio.create_task(subject.service.generate(PROMPT, sampling=SAMPLING))
    await asyncio.sleep(0)
    drop.cancel()
    assert len(await keep) == 1
    assert drop.cancelled() or await asyncio.gather(drop, return_exceptions=True)


# --- control ----------------------------------------------------------------------------------


async def check_info_names_the_active_version(subject: InferenceSubject) -> None:
    """Version by policy; what matters to a weight sync is stated."""
    info = await subject.service.info()
    assert info.versions == {V0.policy: V0}
    assert info.healthy
    assert info.capabilities["token_ids"]


async def check_calls_wait_while_paused(subject: InferenceSubject) -> None:
    """A call that arrives in a pause is answered after it."""
    await subject.service.pause("keep")
    call = asyncio.create_task(subject.service.generate(PROMPT, sampling=SAMPLING))
    await subject.service.info()
    assert not call.done()
    await subject.service.resume()
    assert len(await call) == 1


async def check_a_sync_restamps_new_tokens(subject: InferenceSubject) -> None:
    """Pause, load, activate, resume: later tokens carry the new version."""
    await load_and_activate(subject)
    (completion,) = await subject.service.generate(PROMPT, sampling=SAMPLING)
    assert [s.version for s in completion.versions] == [V1]
    assert (await subject.service.info()).versions == {V1.policy: V1}


async def check_the_load_is_acknowledged(subject: InferenceSubject) -> None:
    """Version and checksum of what was loaded; the active version has not changed yet."""
    await subject.service.pause("keep")
    ack = await subject.service.load_weights(subject.publication)
    assert ack.version == V1
    assert ack.checksum in ("", subject.publication.checksum)
    assert (await subject.service.info()).versions == {V0.policy: V0}
    await subject.service.activate(V1)
    await subject.service.resume()


async def check_activation_of_what_was_not_loaded_is_refused(subject: InferenceSubject) -> None:
    """An engine never claims a version it does not hold."""
    await subject.service.pause("keep")
    error = await refused(subject.service.activate(PolicyVersion(number=9)))
    assert str(PolicyVersion(number=9)) in str(error)
    await subject.service.resume()


async def check_score_works_while_paused_and_agrees_with_the_draw(
    subject: InferenceSubject,
) -> None:
    """Entry 0 of each row is 0; drawn tokens score what they were drawn with (FR-083)."""
    (completion,) = await subject.service.generate(PROMPT, sampling=SAMPLING)
    row = np.concatenate([completion.prompt_token_ids, completion.token_ids])
    await subject.service.pause("keep")
    scores = await subject.service.score(RowChunk.from_rows([row, row[:3]]))
    await subject.service.resume()
    num_prompt = len(completion.prompt_token_ids)
    assert len(scores) == len(row) + 3
    assert scores[0] == scores[len(row)] == 0.0
    assert completion.logprobs is not None
    np.testing.assert_allclose(
        scores[num_prompt : len(row)], completion.logprobs, atol=LOGPROB_TOLERANCE
    )


async def check_closing_twice_is_harmless(subject: InferenceSubject) -> None:
    """Shutdown paths overlap."""
    await subject.service.aclose()
    await subject.service.aclose()


# --- real weights -----------------------------------------------------------------------------


async def check_greedy_ignores_the_seed(subject: InferenceSubject) -> None:
    """Temperature 0 is the likeliest token at each step."""
    greedy = replace(SAMPLING, temperature=0.0)
    a, b = await subject.service.generate(PROMPT, sampling=greedy, n=2)
    assert np.array_equal(a.token_ids, b.token_ids)


async def check_loading_changes_what_is_scored(subject: InferenceSubject) -> None:
    """The weights that answer are the ones loaded last, before activation already."""
    chunk = RowChunk.from_rows([PROMPT.token_ids])
    before = await subject.service.score(chunk)
    await subject.service.pause("keep")
    await subject.service.load_weights(subject.publication)
    after = await subject.service.score(chunk)
    assert np.abs(after - before).max() > LOGPROB_TOLERANCE


async def check_resume_between_load_and_activation_is_refused(subject: InferenceSubject) -> None:
    """Tokens of new weights are never stamped with the old version."""
    await subject.service.pause("keep")
    await subject.service.load_weights(subject.publication)
    assert str(V1) in str(await refused(subject.service.resume()))


async def check_loading_the_same_weights_changes_nothing(subject: InferenceSubject) -> None:
    """No-op sync: identical draws and scores (FR-106, FR-110)."""
    await load_and_activate(subject)
    before = await subject.service.generate(PROMPT, sampling=SAMPLING)
    again = replace(subject.publication, version=PolicyVersion(number=2))
    await load_and_activate(InferenceSubject(service=subject.service, publication=again))
    after = await subject.service.generate(PROMPT, sampling=SAMPLING)
    assert same_draw(before[0], after[0])


DRAWING_CHECKS: tuple[Check, ...] = (
    check_choices_are_whole,
    check_every_token_is_stamped,
    check_a_seed_repeats_its_draw,
    check_a_choice_equals_a_call_with_its_seed,
    check_calls_without_a_seed_differ,
    check_a_prompt_without_room_is_refused,
    check_wrong_number_of_seeds_is_refused,
    check_an_unknown_policy_is_refused,
    check_a_cancelled_call_leaves_others_alone,
)
CONTROL_CHECKS: tuple[Check, ...] = (
    check_info_names_the_active_version,
    check_calls_wait_while_paused,
    check_a_sync_restamps_new_tokens,
    check_the_load_is_acknowledged,
    check_activation_of_what_was_not_loaded_is_refused,
    check_score_works_while_paused_and_agrees_with_the_draw,
    check_closing_twice_is_harmless,
)
MODEL_CHECKS: tuple[Check, ...] = (
    check_greedy_ignores_the_seed,
    check_loading_changes_what_is_scored,
    check_resume_between_load_and_activation_is_refused,
    check_loading_the_same_weights_changes_nothing,
)
