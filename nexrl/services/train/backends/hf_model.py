"""A Hugging Face model as the back end sees it: loaded, queried at chosen positions, exported.

Everything that knows about transformers' folders and module conventions is here. A value policy is
the same kind of model with its output head replaced by one linear row (`value_head`); its folder
holds the backbone as `AutoModel` loads it, `"nexrl_head": "value"` in config.json, and the row in
value_head.safetensors.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nexrl.errors import ConfigError, InvariantError
from nexrl.services.train.batching import MicroBatch, micro_batches
from nexrl.services.train.outputs import Head
from nexrl.services.train.publication import NamedTensor
from nexrl.types import FloatArray, IntArray, RowChunk

HEAD_KEY = "nexrl_head"
"""Entry of config.json that says `value` in the folder of a value policy."""
HEAD_FILE = "value_head.safetensors"
HEAD_TENSOR = "value_head.weight"
"""[1, H] float32 in HEAD_FILE: value = weight . (state that an output head would see)."""

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
    """transformers' PreTrainedModel, in float32; of a value policy the backbone alone."""
    side_files: dict[str, bytes]
    """config.json, generation_config.json, tokenizer and chat template, by relative name."""
    value_head: nn.Linear | None = None
    """H -> 1 without bias, in float32; None for a language model."""

    @property
    def head(self) -> Head:
        """What the model ends in."""
        return "lm" if self.value_head is None else "value"

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: ids must be below it."""
        return int(self.module.get_input_embeddings().weight.shape[0])

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model's configuration allows."""
        config = self.module.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", 0) or (1 << 31) - 1)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Every weight once, the value head among them."""
        named: dict[str, nn.Parameter] = dict(self.module.named_parameters())
        if self.value_head is not None:
            (named[HEAD_TENSOR],) = self.value_head.parameters()
        return named

    def copied(self, head: Head | None = None) -> LoadedModel:
        """An independent model with the same weights and no gradients.

        With head="value" a language model becomes a value model that starts at 0.
        """
        head = head or self.head
        if head == "lm" and self.head == "value":
            raise ConfigError(
                "a value policy has no output head, so its copy cannot be a language model "
                "(accepted: head='value')"
            )
        if head == self.head:  # a parameter's copy has no gradient
            module, value_head = copy.deepcopy((self.module, self.value_head))
        else:
            module = copy.deepcopy(_backbone(self.module))
            value_head = _new_value_head(self.module)
        return LoadedModel(module=module, side_files=self.side_files, value_head=value_head)


def load_model(path: str, *, setting: str, device: torch.device, head: Head = "lm") -> LoadedModel:
    """Load a folder (also one of `save_state`) in float32; ConfigError names what is wrong with it.

    With head="value" the head that the folder holds is loaded; the folder of a language model gets
    one that is 0.
    """
    folder = _model_folder(path, setting)
    saved_head = _saved_head(folder)
    if head == "lm" and saved_head == "value":
        raise ConfigError(
            f"{setting}: {path!r} holds a value policy, which has no output head (accepted: "
            "head='value')"
        )
    module = _load_module(folder, setting, has_output_head=saved_head == "lm")
    value_head: nn.Linear | None = None
    if head == "value":
        if saved_head == "value":
            value_head = _read_value_head(folder, setting)
        else:
            value_head, module = _new_value_head(module), _backbone(module)
        value_head.to(device)
    _disable_dropout(module)
    module.eval()
    module.to(device)
    for tensor in (*module.parameters(), *module.buffers()):
        # Out of the mapped file: its alignment is arbitrary, and it may be overwritten.
        tensor.data = tensor.data.clone()
    side_files = _read_side_files(folder, module)
    return LoadedModel(module=module, side_files=side_files, value_head=value_head)


def load_value_model(
    path: str, *, setting: str = "value model", device: str = "cpu"
) -> LoadedModel:
    """A trained value policy (a publication, or a folder of `save_state`) to score rows with in
    this process; ConfigError when the folder holds no value head."""
    if _saved_head(_model_folder(path, setting)) != "value":
        raise ConfigError(
            f"{setting}: {path!r} holds no value head (config.json has no {HEAD_KEY!r}: 'value'); "
            "accepted: a folder that publish_weights or save_state wrote for a policy with "
            "head='value'"
        )
    model = load_model(path, setting=setting, device=torch.device(device), head="value")
    model.module.requires_grad_(False)
    return model


def row_values(
    model: LoadedModel, rows: Sequence[IntArray], *, max_tokens: int = 16384
) -> FloatArray:
    """[R] value of the state after each row's last token: the score of a whole row, equal to the
    output `values` at a token appended to it. `max_tokens` bounds one pass, padding included."""
    longest = model.max_positions
    if wrong := [len(row) for row in rows if not 0 < len(row) <= longest]:
        raise InvariantError(
            f"rows to score must have 1 to {longest} tokens, got {min(wrong)} to {max(wrong)}"
        )
    chunk = RowChunk.from_rows([np.append(row, 0).astype(np.int32) for row in rows])
    ends = chunk.offsets[1:] - 1
    wanted = np.zeros(chunk.num_tokens, np.bool_)
    wanted[ends] = True
    values = np.zeros(chunk.num_tokens, np.float32)
    for batch in micro_batches(
        chunk, range(len(rows)), wanted, max_tokens=max_tokens, packing=False
    ):
        with torch.no_grad():
            values[batch.targets] = values_at(model, batch).cpu().numpy()
    found: FloatArray = values[ends]
    return found


def _model_folder(path: str, setting: str) -> Path:
    """The folder itself, or the model inside a folder of `save_state`."""
    for folder in (Path(path), Path(path) / "hf"):
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(
        f"{setting}: {path!r} is not a Hugging Face model folder (no config.json in it)"
    )


def _saved_head(folder: Path) -> Head:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'}: not readable: {error}") from error
    return "value" if config.get(HEAD_KEY) == "value" else "lm"


def _load_module(folder: Path, setting: str, *, has_output_head: bool) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    kind = AutoModelForCausalLM if has_output_head else AutoModel
    try:
        module, report = kind.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"{setting}: cannot load the model in {str(folder)!r}: {error}"
        ) from error
    wrong = {k: sorted(map(str, v)) for k, v in report.items() if v}
    if wrong:
        # transformers would go on with random numbers in place of what is missing.
        raise ConfigError(
            f"{setting}: the weights in {str(folder)!r} do not fit the model: {wrong}"
        )
    return module


def _backbone(module: Any) -> Any:
    """All but the output head."""
    if module.base_model is module:
        raise ConfigError(
            f"{type(module).__name__} cannot have a value head: transformers gives it no backbone "
            "apart from its output head"
        )
    return module.base_model


def _new_value_head(module: Any) -> nn.Linear:
    """A head that is 0, over the states that the language model's own head sees."""
    output_head = module.get_output_embeddings()
    config = module.config.get_text_config()
    width = config.hidden_size if output_head is None else output_head.weight.shape[1]
    head = nn.Linear(int(width), 1, bias=False, device=module.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    return head


def _read_value_head(folder: Path, setting: str) -> nn.Linear:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weight = load_file(folder / HEAD_FILE)[HEAD_TENSOR]
    except (OSError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"{setting}: cannot read {HEAD_TENSOR} from {HEAD_FILE} in {str(folder)!r}: {error}"
        ) from error
    head = nn.Linear(weight.shape[-1], 1, bias=False)
    head.weight = nn.Parameter(weight.float().reshape(1, -1).clone())
    return head


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
    slots, arguments = _arguments(module, batch)
    head = module.get_output_embeddings()
    if head is None:
        all_logits: Tensor = module(**arguments).logits
        return all_logits.flatten(0, 1).index_select(0, slots)

    def choose(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The head's input [B, L, H] becomes [1, M, H]. Right padding needs no attention mask, since
        causal attention never looks to the right."""
        return (inputs[0].flatten(0, 1).index_select(0, slots).unsqueeze(0), *inputs[1:])

    with head.register_forward_pre_hook(choose):
        logits: Tensor = module(**arguments).logits
    if logits.shape[:2] != (1, len(slots)):
        raise InvariantError(
            f"{type(module).__name__} gave logits of shape {tuple(logits.shape)} for "
            f"{len(slots)} positions; its output head is used in an unknown way"
        )
    return logits[0]


def values_at(model: LoadedModel, batch: MicroBatch) -> Tensor:
    """[M] float32 values at the batch's predicting positions: of the state before each target."""
    assert model.value_head is not None
    states = _states_at(model, batch)
    # The head is one dot product: float32 costs nothing, and bfloat16 would round every value.
    with torch.autocast(states.device.type, enabled=False):
        values: Tensor = model.value_head(states.float())
    return values[:, 0]


def _states_at(model: LoadedModel, batch: MicroBatch) -> Tensor:
    """[M, H] last hidden states of a backbone at the batch's predicting positions."""
    slots, arguments = _arguments(model.module, batch)
    states: Tensor = model.module(**arguments).last_hidden_state
    return states.flatten(0, 1).index_select(0, slots)


def _arguments(module: Any, batch: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
    """The batch's slots, and what the module is called with."""
    arguments: dict[str, Any] = {
        "input_ids": torch.from_numpy(batch.token_ids).to(module.device),
        "use_cache": False,
    }
    if batch.position_ids is not None:
        # transformers makes attention block-diagonal where positions restart, if there is no mask.
        arguments["position_ids"] = torch.from_numpy(batch.position_ids).to(module.device)
    return torch.from_numpy(batch.slots).to(module.device), arguments


def check_packing(model: LoadedModel) -> None:
    """Refuse packing where a model ignores restarting positions (recurrent layers, for example)."""
    ids = np.arange(14, dtype=np.int64) * 7919 % model.vocab_size
    chunk = RowChunk.from_rows(np.split(ids, [7, 11]))
    # A fresh value head is 0 everywhere, so states are compared, not values.
    probe = logits_at if model.head == "lm" else _states_at
    found = []
    for packing in (False, True):
        [batch] = micro_batches(
            chunk, range(3), np.ones(14, np.bool_), max_tokens=64, packing=packing
        )
        with torch.no_grad():
            rows = probe(model, batch).float().cpu()
        found.append(rows[np.argsort(batch.targets)])
    scale = float(found[0].abs().max()) or 1.0
    difference = float((found[0] - found[1]).abs().max()) / scale
    if difference > _PACKING_TOLERANCE:
        raise ConfigError(
            f"train_service.packing: {type(model.module).__name__} gives other logits packed than "
            f"padded (relative difference {difference:.3g}); accepted for it: packing=false"
        )


def export_tensors(model: LoadedModel, dtype: torch.dtype) -> list[NamedTensor]:
    """Every tensor under its Hugging Face checkpoint name; tied tensors once. A value head stays in
    float32, in a file of its own.

    The bytes may be those of the live weights: use them before the next optimizer step.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    module = model.module
    state = remove_tied_weights_from_state_dict(dict(module.state_dict()), module)
    state = revert_weight_conversion(module, state)
    tensors = [
        to_named_tensor(name, t.to(dtype) if t.is_floating_point() else t)
        for name, t in state.items()
    ]
    if model.value_head is not None:
        head = to_named_tensor(HEAD_TENSOR, model.value_head.weight)
        tensors.append(replace(head, file=HEAD_FILE))
    return tensors


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
    """The side files, with the dtype of the exported tensors, and a value head, in config.json."""
    config = json.loads(model.side_files["config.json"])
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if model.head == "value":
        config |= {HEAD_KEY: "value", "architectures": [type(model.module).__name__]}
    return {**model.side_files, "config.json": json.dumps(config, indent=2).encode()}
