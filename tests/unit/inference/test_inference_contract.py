"""The inference contract, against the fake, the builtin engine in process, and over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from nexrl.services.inference.client import HttpInferenceService
from nexrl.services.inference.engines.builtin.service import BuiltinInference
from nexrl.services.inference.protocol import InferenceService
from nexrl.testing.contracts.inference import (
    CONTROL_CHECKS,
    DRAWING_CHECKS,
    MODEL_CHECKS,
    V1,
    Check,
    InferenceSubject,
    publish_model,
)
from nexrl.testing.instant_inference import InstantInference
from nexrl.testing.tiny_models import make_micro_model
from nexrl.types import WeightManifest

Serve = Callable[[BuiltinInference], AbstractAsyncContextManager[HttpInferenceService]]


@pytest.fixture(scope="module")
def publication(tmp_path_factory: pytest.TempPathFactory) -> WeightManifest:
    folder = tmp_path_factory.mktemp("publication")
    return publish_model(make_micro_model(folder / "model", seed=1), folder / "v1", V1)


@asynccontextmanager
async def make_service(kind: str, model: Path, serve: Serve) -> AsyncIterator[InferenceService]:
    if kind == "instant":
        yield InstantInference(max_context=64)
        return
    builtin = BuiltinInference(model, deterministic="deterministic" in kind)
    try:
        if "http" in kind:
            async with serve(builtin) as client:
                yield client
        else:
            yield builtin
    finally:
        await builtin.aclose()


def _name(check: Check) -> str:
    return getattr(check, "__name__", "check").removeprefix("check_")


REAL = ("in_process", "http", "deterministic")


@pytest.mark.parametrize("check", DRAWING_CHECKS + CONTROL_CHECKS, ids=_name)
@pytest.mark.parametrize("kind", ["instant", *REAL])
async def test_every_service_keeps_the_contract(
    kind: str, check: Check, micro_model: Path, publication: WeightManifest, serve: Serve
) -> None:
    async with make_service(kind, micro_model, serve) as service:
        await check(InferenceSubject(service=service, publication=publication))


@pytest.mark.parametrize("check", MODEL_CHECKS, ids=_name)
@pytest.mark.parametrize("kind", REAL)
async def test_services_over_real_weights_keep_their_part(
    kind: str, check: Check, micro_model: Path, publication: WeightManifest, serve: Serve
) -> None:
    async with make_service(kind, micro_model, serve) as service:
        await check(InferenceSubject(service=service, publication=publication))
