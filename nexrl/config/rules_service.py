"""Rules about services: where models come from and who answers at which URL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from nexrl.config.redact import redact_text
from nexrl.config.values import Values

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


def inference(values: Values) -> Iterator[str]:
    """An engine is either ours to start or already somewhere."""
    key = "service.inference_service"
    settings = values.config.service.inference_service
    if settings.engine == "openai" and not settings.url:
        yield (
            f"{key}.engine openai needs {key}.url, for example http://127.0.0.1:8000/v1"
            f"{values.at(f'{key}.engine')}"
        )
    if settings.engine == "openai" and settings.placement == "in_process":
        yield (
            f"{key}.placement in_process is only for engine builtin; an openai engine runs "
            f"elsewhere{values.at(f'{key}.placement')}"
        )
    elif settings.url and settings.placement == "in_process":
        yield _both_placed(values, key)
    yield from _address(values, key, settings.url, settings.api_key)
    yield from _device(values, key, settings.device)


def training(values: Values) -> Iterator[str]:
    """The model comes from exactly one place."""
    key = "service.train_service"
    settings = values.config.service.train_service
    if settings.model_path and settings.model_factory:
        yield (
            f"{key}.model_path and {key}.model_factory exclude each other, got both"
            f"{values.at(f'{key}.model_factory')}"
        )
    if not (settings.model_path or settings.model_factory or settings.url):
        yield (
            f"{key} needs a model: model_path (a Hugging Face model folder), model_factory "
            f"(`path.py:name`), or the url of a running train server; got none{values.at(key)}"
        )
    factory = settings.model_factory
    if factory and not re.fullmatch(r".+:[A-Za-z_]\w*", factory):
        yield (
            f"{key}.model_factory must be `path.py:name` or `package.module:name`, got "
            f"{factory!r}{values.at(f'{key}.model_factory')}"
        )
    if settings.url and settings.placement == "in_process":
        yield _both_placed(values, key)
    yield from _address(values, key, settings.url, settings.api_key)
    yield from _device(values, key, settings.device)


def determinism(values: Values) -> Iterator[str]:
    """Same bits whatever the order of requests: only our own engine promises it."""
    config = values.config
    if not config.deterministic:
        return
    engine = config.service.inference_service.engine
    if engine != "builtin":
        yield (
            f"deterministic: true needs service.inference_service.engine builtin, got {engine}: "
            f"other engines promise only the distribution{values.at('deterministic')}"
        )
    if config.weight.mode != "sync":
        yield (
            f"deterministic: true needs weight.mode sync, got {config.weight.mode}"
            f"{values.at('deterministic')}"
        )


SERVICE_RULES = (inference, training, determinism)


def _both_placed(values: Values, key: str) -> str:
    return (
        f"{key}.url says that the service already runs, {key}.placement in_process that it is "
        f"started here; leave one out{values.at(f'{key}.placement')}"
    )


def _address(values: Values, key: str, url: str | None, api_key: str | None) -> Iterator[str]:
    if url is not None and not _is_http(url):
        yield (
            f"{key}.url must be an http:// or https:// address, got {redact_text(url)!r}"
            f"{values.at(f'{key}.url')}"
        )
    if api_key and not url:
        yield f"{key}.api_key is sent to {key}.url, which is not set{values.at(f'{key}.api_key')}"


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def _device(values: Values, key: str, device: str) -> Iterator[str]:
    if not _DEVICE.fullmatch(device):
        yield (
            f"{key}.device must be auto, cpu, mps, cuda or cuda:N, got {device!r}"
            f"{values.at(f'{key}.device')}"
        )
