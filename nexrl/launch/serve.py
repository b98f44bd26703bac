"""`nexrl serve inference|train`: one service by itself, until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from nexrl.config.loader import settings_alone
from nexrl.errors import ConfigError
from nexrl.launch.process import TOKEN_VARIABLE
from nexrl.types import ModelSpec


def serve_service(
    service: Literal["inference", "train"],
    *,
    model_folder: Path,
    host: str,
    port: int,
    deterministic: bool,
    overrides: Sequence[str],
) -> int:
    """Serve until SIGTERM or Ctrl-C; the bearer token comes from NEXRL_SERVICE_TOKEN."""
    if not (model_folder / "config.json").is_file():
        raise ConfigError(f"--model: {model_folder} has no config.json; give a model folder")
    config = settings_alone([f"service.{service}_service.{text}" for text in overrides]).service
    token = os.environ.get(TOKEN_VARIABLE) or None
    print(f"loading {model_folder}; the ready line names the port", file=sys.stderr)  # noqa: T201
    if service == "train":
        from nexrl.services.train.server import run_server as run_train_server

        spec = ModelSpec(path=str(model_folder.resolve()))
        asyncio.run(
            run_train_server(
                config.train_service,
                deterministic=deterministic,
                host=host,
                port=port,
                token=token,
                models=[spec],
            )
        )
    else:
        from nexrl.services.inference.server import ServerSettings
        from nexrl.services.inference.server import run_server as run_inference_server

        settings = ServerSettings(
            model_folder=model_folder.resolve(),
            deterministic=deterministic,
            host=host,
            port=port,
            service=config.inference_service,
        )
        asyncio.run(run_inference_server(settings, token))
    return 0
