"""What a plan checks of the machine: folders, packages, devices, ports and endpoints."""

from __future__ import annotations

import importlib.util
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from nexrl.cli.plan_text import Finding, problem
from nexrl.config.loader import LoadedConfig
from nexrl.config.schema import RunConfig

_ENDPOINT_DEADLINE_S = 2.0
"""Seconds that an endpoint has to answer."""
_EXTRAS = {
    "torch": "torch",
    "transformers": "torch",
    "tokenizers": "torch",
    "tensorboardX": "loggers",
    "wandb": "loggers",
}
"""Package by the extra of NexRL that brings it."""


def inspect_machine(loaded: LoadedConfig) -> list[Finding]:
    """Every finding about the machine that this run would start on."""
    config = loaded.config
    return [
        *_folders(config),
        *_packages(config),
        *_devices(config),
        *_loopback(config),
        *_endpoints(config),
    ]


def _folders(config: RunConfig) -> Iterator[Finding]:
    root = Path(config.launch.run_root).absolute()
    existing = next(p for p in (root, *root.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield problem(f"launch.run_root {root} cannot be written ({existing} is not writable)")
    if config.resume not in (None, "latest") and not Path(config.resume or "").is_dir():
        yield problem(f"resume: there is no run folder {config.resume!r}")


def _packages(config: RunConfig) -> Iterator[Finding]:
    wanted = {"tokenizers": "service.train_service"}
    if config.service.train_service.url is None:
        wanted["torch"] = wanted["transformers"] = "service.train_service"
    if config.service.inference_service.url is None:
        wanted["torch"] = wanted["transformers"] = "service.inference_service"
    if "tensorboard" in config.logger:
        wanted["tensorboardX"] = "logger tensorboard"
    if "wandb" in config.logger:
        wanted["wandb"] = "logger wandb"
    for package, key in wanted.items():
        if importlib.util.find_spec(package) is None:
            extra = _EXTRAS[package]
            yield problem(f'{key} needs the package {package}: pip install "nexrl[{extra}]"')


def _devices(config: RunConfig) -> Iterator[Finding]:
    """FR-157: asking for a device that is not there fails here, not in a hang."""
    for key in ("train_service", "inference_service"):
        service = getattr(config.service, key)
        if service.url is not None or not service.device.startswith("cuda"):
            continue
        if importlib.util.find_spec("torch") is None:
            continue  # reported as a missing package
        import torch

        count = torch.cuda.device_count()
        wanted = int(service.device.partition(":")[2] or 0)
        if wanted >= count:
            yield problem(
                f"service.{key}.device is {service.device}, and this machine has "
                f"{count} CUDA device{'' if count == 1 else 's'}; use cpu or auto"
            )


def _loopback(config: RunConfig) -> Iterator[Finding]:
    """Services get ports of the system's choice; all that can fail is having no loopback."""
    services = (config.service.train_service, config.service.inference_service)
    if not any(s.url is None and s.placement == "process" for s in services):
        return
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        yield problem(f"no port on 127.0.0.1 can be opened for services: {error.strerror}")


def _endpoints(config: RunConfig) -> Iterator[Finding]:
    for key in ("train_service", "inference_service"):
        service = getattr(config.service, key)
        if service.url is not None:
            yield _endpoint(f"service.{key}.url", service.url, service.api_key)


def _endpoint(key: str, url: str, api_key: str | None) -> Finding:
    """Any HTTP answer shows that somebody listens; `/health` says more where it exists."""
    parts = urlsplit(url)
    health = f"{parts.scheme}://{parts.netloc}/health"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(health, headers=headers)  # noqa: S310 - http(s) by a rule
    # A proxy of the environment is for the outside; services are on the cluster's own network.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ENDPOINT_DEADLINE_S) as response:
            status = response.status
    except urllib.error.HTTPError as error:
        error.close()
        status = error.code
    except OSError as error:
        reason = getattr(error, "reason", error)
        return problem(
            f"{key}: nobody answers at {health} within {_ENDPOINT_DEADLINE_S:g} s: {reason}"
        )
    if status in (401, 403):
        return problem(f"{key}: {health} answered {status}; check service api_key")
    if status >= 500:
        return problem(f"{key}: {health} answered {status}: the service is not healthy")
    return Finding(severity="ok", text=f"{key}: {health} answered {status}")
