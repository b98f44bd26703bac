"""Rules of services: where they run, with which model, and that a context holds what is drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from nexrl.config.redact import redact_text
from nexrl.config.rule import Broken, is_reference, not_a_reference
from nexrl.config.schema import RunConfig, SamplingConfig

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


def lengths(config: RunConfig) -> Iterator[Broken]:
    """A prompt and its completion fit into the context."""
    context = config.service.inference_service.max_context
    if context is None:
        return
    longest = config.data.max_prompt_tokens
    drawn: list[tuple[str, SamplingConfig]] = [
        ("rollout_worker.sampling", config.rollout_worker.sampling)
    ]
    if config.validate_.enabled:
        drawn.append(("validate.sampling", config.validate_.sampling))
    for key, parameters in drawn:
        if parameters.max_tokens >= context:
            yield (
                f"{key}.max_tokens must be less than service.inference_service.max_context = "
                f"{context}, got {parameters.max_tokens}",
                f"{key}.max_tokens",
            )
    if longest is not None and longest >= context:
        yield (
            "data.max_prompt_tokens must be less than service.inference_service.max_context = "
            f"{context}, got {longest}",
            "data.max_prompt_tokens",
        )


def inference(config: RunConfig) -> Iterator[Broken]:
    """An engine is either ours to start or already somewhere."""
    key = "service.inference_service"
    settings = config.service.inference_service
    if settings.engine == "openai" and not settings.url:
        yield (
            f"{key}.engine openai needs {key}.url, for example http://127.0.0.1:8000/v1",
            f"{key}.engine",
        )
    if settings.engine == "openai" and settings.placement == "in_process":
        yield (
            f"{key}.placement in_process is only for engine builtin; an openai engine runs "
            f"elsewhere",
            f"{key}.placement",
        )
    elif settings.url and settings.placement == "in_process":
        yield _both_placed(key)
    yield from _address(key, settings.url, settings.api_key)
    yield from _device(key, settings.device)


def training(config: RunConfig) -> Iterator[Broken]:
    """The model comes from exactly one place."""
    key = "service.train_service"
    settings = config.service.train_service
    if settings.model_path and settings.model_factory:
        yield (
            f"{key}.model_path and {key}.model_factory exclude each other, got both",
            f"{key}.model_factory",
        )
    if not (settings.model_path or settings.model_factory or settings.url):
        yield (
            f"{key} needs a model: model_path (a Hugging Face model folder), model_factory "
            f"(`path.py:name`), or the url of a running train server; got none",
            key,
        )
    if settings.model_factory and not is_reference(settings.model_factory):
        yield not_a_reference(f"{key}.model_factory", settings.model_factory)
    if settings.url and settings.placement == "in_process":
        yield _both_placed(key)
    yield from _address(key, settings.url, settings.api_key)
    yield from _device(key, settings.device)


def determinism(config: RunConfig) -> Iterator[Broken]:
    """Same bits whatever the order of requests: only our own engine promises it."""
    if not config.deterministic:
        return
    engine = config.service.inference_service.engine
    if engine != "builtin":
        yield (
            f"deterministic: true needs service.inference_service.engine builtin, got {engine}: "
            f"other engines promise only the distribution",
            "deterministic",
        )
    if config.weight.mode != "sync":
        yield (
            f"deterministic: true needs weight.mode sync, got {config.weight.mode}",
            "deterministic",
        )


SERVICE_RULES = (lengths, inference, training, determinism)


def _both_placed(key: str) -> Broken:
    return (
        f"{key}.url says that the service already runs, {key}.placement in_process that it is "
        f"started here; leave one out",
        f"{key}.placement",
    )


def _address(key: str, url: str | None, api_key: str | None) -> Iterator[Broken]:
    if url is not None and not _is_http(url):
        yield (
            f"{key}.url must be an http:// or https:// address, got {redact_text(url)!r}",
            f"{key}.url",
        )
    if api_key and not url:
        yield f"{key}.api_key is sent to {key}.url, which is not set", f"{key}.api_key"


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def _device(key: str, device: str) -> Iterator[Broken]:
    if not _DEVICE.fullmatch(device):
        yield (
            f"{key}.device must be auto, cpu, mps, cuda or cuda:N, got {device!r}",
            f"{key}.device",
        )
