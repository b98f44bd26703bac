"""Settings of the services that draw tokens and compute gradients."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nexrl.config.section import Section


class InferenceServiceConfig(Section):
    """Where tokens are drawn."""

    engine: Literal["builtin"] = "builtin"
    """The engine that comes with NexRL: others cannot be given a run's weights yet."""
    placement: Literal["process", "in_process"] = "process"
    """Builtin engine as a supervised child process behind HTTP, or inside the controller's
    process."""
    url: str | None = None
    """Address of an engine that already runs, for example http://127.0.0.1:8000."""
    api_key: str | None = None
    """Bearer token for that URL; use ${oc.env:NAME}."""
    model: str = "actor"
    """Model name in requests."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of the builtin engine."""
    device: str = "auto"
    """cpu, cuda, cuda:0 ... or auto."""
    max_batch: int = Field(256, ge=1)
    """Sequences decoded at once."""
    max_context: int | None = Field(None, ge=2)
    """Longest prompt plus completion, in tokens; default: the model's own limit."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads; default: all cores, or one for a model under 4 million parameters."""
    request_deadline_s: float = Field(120.0, gt=0)
    """Seconds for one request before it counts as an infrastructure failure."""
    connect_deadline_s: float = Field(30.0, gt=0)
    """Seconds for opening a connection."""
    start_deadline_s: float = Field(180.0, gt=0)
    """Seconds for the engine to come up."""


class TrainServiceConfig(Section):
    """Where gradients are computed."""

    backend: Literal["torch"] = "torch"
    """Training back end."""
    placement: Literal["process", "in_process"] = "process"
    """As a supervised child process behind HTTP, or inside the controller's process."""
    url: str | None = None
    """URL of a train server that already runs."""
    api_key: str | None = None
    """Bearer token for that URL; use ${oc.env:NAME}."""
    model_path: str | None = None
    """Hugging Face model folder: the initial weights, configuration and tokenizer."""
    model_factory: str | None = None
    """Function `path.py:name` of (folder, seed) that writes such a folder; used when model_path is
    null. Its optional attribute `tokenizer`, a function of (folder), writes only tokenizer and
    config.json, for `nexrl plan`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: autocast over float32 master weights."""
    device: str = "auto"
    """cpu, cuda, cuda:0 ... or auto."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Most tokens, padding included, in one micro-batch."""
    packing: bool = False
    """Put several rows into one sequence with block-diagonal attention instead of padding."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads; default: all cores."""
    request_deadline_s: float = Field(1800.0, gt=0)
    """Seconds for one call."""
    start_deadline_s: float = Field(180.0, gt=0)
    """Seconds for the server to come up."""


class ServiceConfig(Section):
    """The services a run uses."""

    inference_service: InferenceServiceConfig = InferenceServiceConfig()
    train_service: TrainServiceConfig = TrainServiceConfig()
