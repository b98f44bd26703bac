"""A policy's whole training state as a folder without pickle, restored bit by bit.

    hf/                     a Hugging Face model folder in float32, for anyone to load; of a value
                            policy the backbone, with the head in value_head.safetensors
    optimizer.safetensors   moments by `<moment>/<parameter>`
    rng.safetensors         random number generators
    state.json              counters and the schema version

Weights are read back through `hf/`, so that what users load is what training continues from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nexrl.atomic import atomic_folder
from nexrl.errors import ConfigError, InvariantError
from nexrl.services.train.backends.hf_model import (
    HEAD_TENSOR,
    LoadedModel,
    export_side_files,
    export_tensors,
    load_model,
    to_named_tensor,
)
from nexrl.services.train.publication import write_model_files, write_safetensors

if TYPE_CHECKING:
    from nexrl.services.train.backends.torch_policy import TorchPolicy

SCHEMA_VERSION = 1
_OPTIMIZER_FILE, _RNG_FILE, _STATE_FILE = "optimizer.safetensors", "rng.safetensors", "state.json"


def save_policy(policy: TorchPolicy, path: str) -> None:
    """Write the folder, flushed to the disk before it appears."""
    if policy.pending.exists:
        raise InvariantError(
            f"save_state of policy {policy.name!r}: it holds a gradient that no optim_step has "
            "used, and gradients are not saved; save after optim_step or reset_optimizer"
        )
    state = {
        "schema_version": SCHEMA_VERSION,
        "head": policy.model.head,
        "optimizer_step": policy.optimizer_step,
        "num_moment_updates": policy.optimizer.num_steps,
    }
    with atomic_folder(path, durable=True) as folder:
        write_model_files(
            folder / "hf",
            export_tensors(policy.model, torch.float32),
            export_side_files(policy.model, torch.float32),
        )
        _write_tensors(folder / _OPTIMIZER_FILE, policy.optimizer.state())
        _write_tensors(folder / _RNG_FILE, _rng_state())
        (folder / _STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def load_policy(policy: TorchPolicy, path: str, *, with_optimizer: bool) -> None:
    """Read the folder into the policy; on an error the policy stays as it was."""
    folder = Path(path)
    state = _read_state(folder)
    head = policy.model.head
    if state["head"] != head:
        raise ConfigError(
            f"load_state: {path!r} holds a policy with head={state['head']!r}, policy "
            f"{policy.name!r} has head={head!r}"
        )
    loaded = load_model(str(folder), setting="load_state", device=policy.device, head=head)
    optimizer: dict[str, Tensor] = {}
    if with_optimizer:
        optimizer = _read_tensors(folder / _OPTIMIZER_FILE)
        rng = _read_tensors(folder / _RNG_FILE)
    _copy_weights(loaded, policy.model, folder)
    policy.reset_optimizer()
    policy.optimizer_step = int(state["optimizer_step"])
    if with_optimizer:
        policy.optimizer.load_state(optimizer, int(state["num_moment_updates"]))
        _restore_rng(rng)


def _read_state(folder: Path) -> dict[str, Any]:
    file = folder / _STATE_FILE
    if not file.is_file():
        raise ConfigError(f"load_state: {str(folder)!r} is not a folder of save_state")
    try:
        state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        version = int(state["schema_version"])
        state.setdefault("head", "lm")
    except (ValueError, KeyError, TypeError) as error:
        raise InvariantError(f"{file}: damaged: {error!r}") from error
    if version > SCHEMA_VERSION:
        raise ConfigError(f"{file}: schema version {version}, this code reads {SCHEMA_VERSION}")
    return state


def _copy_weights(source: LoadedModel, target: LoadedModel, folder: Path) -> None:
    new, old = source.module.state_dict(), target.module.state_dict()
    if source.value_head is not None and target.value_head is not None:
        new[HEAD_TENSOR], old[HEAD_TENSOR] = source.value_head.weight, target.value_head.weight
    different = {k for k in {*new, *old} if k not in new or k not in old}
    different |= {k for k in new.keys() & old.keys() if new[k].shape != old[k].shape}
    if different:
        raise ConfigError(
            f"load_state: {folder} holds another model than the one hosted; tensors that differ: "
            f"{sorted(different)[:4]}"
        )
    with torch.no_grad():
        for name, values in new.items():
            old[name].copy_(values)


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state.update({f"cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())})
    return state


def _restore_rng(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    for i in range(torch.cuda.device_count()):
        if f"cuda{i}" in state:
            torch.cuda.set_rng_state(state[f"cuda{i}"], i)


def _write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    write_safetensors(file, [to_named_tensor(name, t) for name, t in tensors.items()])


def _read_tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise InvariantError(f"{file}: damaged or missing: {error}") from error
    return tensors
