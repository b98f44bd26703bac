"""A Hugging Face causal LM as the back end sees it: loaded, queried at chosen positions, exported.

Everything that knows about transformers' folders and module conventions is here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nexrl.errors import ConfigError, InvariantError
from nexrl.services.train.batching import MicroBatch, micro_batches
from nexrl.services.train.publication import NamedTensor

_SIDE_FILE_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_NOT_SIDE_FILES = ("manifest.json",)
_SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PACKING_TOLERANCE = 1e-4
"""Relative, in float32: far above rounding, far below what leaking attention does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and what stood beside its weights."""

    module: Any
    """transformers' PreTrainedModel, in float32."""
    side_files: dict[str, bytes]
    """config.json, generation_config.json, tokenizer and chat template, by relative name."""

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: ids must be below it."""
        return int(self.module.get_input_embeddings().weight.shape[0])

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model's configuration allows."""
        config = self.module.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", 0) or (1 << 31) - 1)

    def copied(self) -> LoadedModel:
        """An independent model with the same weights and no gradients."""
        gradients = [(p, p.grad) for p in self.module.parameters()]
        for p, _ in gradients:
            p.grad = None
        try:
            return LoadedModel(module=copy.deepcopy(self.module), side_files=self.side_files)
        finally:
            for p, grad in gradients:
                p.grad = grad


def load_model(path: str, *, setting: str, device: torch.device) -> LoadedModel:
    """Load a folder in float32; ConfigError names what is wrong with it."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{setting}: {path!r} is not a Hugging Face model folder (no config.json in it)"
        )
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{setting}: cannot load the model in {path!r}: {error}") from error
    wrong = {k: sorted(map(str, v)) for k, v in report.items() if v}
    if wrong:
        # transformers would go on with random numbers in place of what is missing.
        raise ConfigError(f"{setting}: the weights in {path!r} do not fit the model: {wrong}")
    _disable_dropout(module)
    module.eval()
    module.to(device)
    for tensor in (*module.parameters(), *module.buffers()):
        # Out of the mapped file: its alignment is arbitrary, and it may be overwritten.
        tensor.data = tensor.data.clone()
    return LoadedModel(module=module, side_files=_read_side_files(folder, module))


def _read_side_files(folder: Path, module: Any) -> dict[str, bytes]:
    files = [
        *(f for f in sorted(folder.iterdir()) if f.suffix in _SIDE_FILE_SUFFIXES),
        *sorted(folder.glob("additional_chat_templates/*.jinja")),
    ]
    kept = {
        f.relative_to(folder).as_posix(): f.read_bytes()
        for f in files
        if f.is_file() and f.name not in _NOT_SIDE_FILES and not f.name.endswith(".index.json")
    }
    if "generation_config.json" not in kept and getattr(module, "generation_config", None):
        kept["generation_config.json"] = module.generation_config.to_json_string().encode()
    return kept


def _disable_dropout(module: nn.Module) -> None:
    """Dropout and router noise would make the policy that is trained another one than the policy that sampled;
    eval() alone is not enough, since gradient checkpointing needs training mode."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if ("dropout" in name or "jitter" in name) and isinstance(value, float):
                setattr(part, name, 0.0)


def enable_checkpointing(module: Any) -> None:
    """Recompute activations in the backward pass; acts while the module is in training mode."""
    if not module.supports_gradient_checkpointing:
        raise ConfigError(
            f"train_service.gradient_checkpointing: {type(module).__name__} does not support it "
            "(accepted for it: false)"
        )
    # transformers renamed the method within 5.x; both take the keywords of torch's checkpoint.
    enable = getattr(module, "activation_checkpointing_enable", None)
    (enable or module.gradient_checkpointing_enable)({"use_reentrant": False})


def logits_at(model: LoadedModel, batch: MicroBatch) -> Tensor:
    """[M, V] logits at the batch's predicting positions, and nowhere else.

    The output head sees only the chosen hidden states; whatever the model does to logits after
    its head (soft caps, scales) still happens.
    """
    module = model.module
    device = module.device
    slots = torch.from_numpy(batch.slots).to(device)
    arguments: dict[str, Any] = {
        "input_ids": torch.from_numpy(batch.token_ids).to(device),
        "use_cache": False,
    }
    if batch.position_ids is not None:
        # transformers makes attention block-diagonal where positions restart, if there is no mask.
        arguments["position_ids"] = torch.from_numpy(batch.position_ids).to(device)
    head = module.get_output_embeddings()
    if head is None:
        all_logits: Tensor = module(**arguments).logits
        return all_logits.flatten(0, 1).index_select(0, slots)
    with _only_positions(head, slots):
        logits: Tensor = module(**arguments).logits
    if logits.shape[:2] != (1, len(slots)):
        raise InvariantError(
            f"{type(module).__name__} gave logits of shape {tuple(logits.shape)} for "
            f"{len(slots)} positions; its output head is used in an unknown way"
        )
    return logits[0]


@contextmanager
def _only_positions(head: nn.Module, slots: Tensor) -> Iterator[None]:
    """The head's input [B, L, H] becomes [1, M, H]. Right padding needs no attention mask, since
    causal attention never looks to the right."""

    def choose(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, 1).index_select(0, slots).unsqueeze(0), *inputs[1:])

    handle = head.register_forward_pre_hook(choose)
    try:
        yield
    finally:
        handle.remove()


def check_packing(model: LoadedModel) -> None:
    """Refuse packing where a model ignores restarting positions (recurrent layers, for example)."""
    lengths = np.array([7, 4, 3], np.int32)
    token_ids = (np.arange(14, dtype=np.int64) * 7919 % model.vocab_size).astype(np.int32)
    wanted = np.ones(14, np.bool_)
    found = []
    for packing in (False, True):
        values = torch.empty(0)
        logits = torch.zeros(14, model.vocab_size)
        for batch in micro_batches(
            token_ids, lengths, range(3), wanted, max_tokens=64, packing=packing
        ):
            with torch.no_grad():
                values = logits_at(model, batch).float().cpu()
            logits[torch.from_numpy(batch.targets)] = values
        found.append(logits)
    scale = float(found[0].abs().max()) or 1.0
    difference = float((found[0] - found[1]).abs().max()) / scale
    if difference > _PACKING_TOLERANCE:
        raise ConfigError(
            f"train_service.packing: {type(model.module).__name__} gives other logits packed than "
            f"padded (relative difference {difference:.3g}); accepted for it: packing=false"
        )


def export_tensors(model: LoadedModel, dtype: torch.dtype) -> list[NamedTensor]:
    """Every tensor under its Hugging Face checkpoint name; tied tensors once.

    The bytes may be those of the live weights: use them before the next optimizer step.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    module = model.module
    state = remove_tied_weights_from_state_dict(dict(module.state_dict()), module)
    state = revert_weight_conversion(module, state)
    return [
        to_named_tensor(name, t.to(dtype) if t.is_floating_point() else t)
        for name, t in state.items()
    ]


def to_named_tensor(name: str, tensor: Tensor) -> NamedTensor:
    """A tensor's bytes on the CPU, shared with the tensor where it lies there already."""
    tensor = tensor.detach().cpu().contiguous()
    return NamedTensor(
        name=name,
        dtype=_SAFETENSORS_DTYPES[tensor.dtype],
        shape=tuple(tensor.shape),
        data=tensor.reshape(-1).view(torch.uint8).numpy(),
    )


def export_side_files(model: LoadedModel, dtype: torch.dtype) -> dict[str, bytes]:
    """The side files, with the dtype of the exported tensors in config.json."""
    config = json.loads(model.side_files["config.json"])
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    return {**model.side_files, "config.json": json.dumps(config, indent=2).encode()}
