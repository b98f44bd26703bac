"""The train service inside this process: picks the back end that the configuration names."""

from __future__ import annotations

from nexrl.config.schema import TrainServiceConfig
from nexrl.services.train.protocol import TrainService


def make_local_train_service(
    config: TrainServiceConfig, *, deterministic: bool = False
) -> TrainService:
    """The configured back end; torch is loaded here and not before."""
    from nexrl.services.train.backends.torch_backend import TorchTrainService

    return TorchTrainService(config, deterministic=deterministic)
