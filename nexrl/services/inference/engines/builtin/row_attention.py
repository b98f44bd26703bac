"""Attention of one query token per row, each row alone over its exact length.

The kernel then sees the same shapes whatever the batch: the deterministic decoder rests on it.
Other passes (no `row_lengths`) are the library's own scaled dot-product attention.
"""

from __future__ import annotations

from typing import Any

import torch

ROW_ATTENTION = "nexrl_row_attention"


def register_row_attention() -> str:
    """Make it known to transformers; returns its name there."""
    from transformers import AttentionInterface

    AttentionInterface.register(ROW_ATTENTION, _attend)
    return ROW_ATTENTION


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    row_lengths: list[int] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if row_lengths is None:
        whole, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return whole, None
    rows = [
        sdpa_attention_forward(
            module,
            query[i : i + 1],
            key[i : i + 1, :, :length],
            value[i : i + 1, :, :length],
            None,
            **kwargs,
        )[0]
        for i, length in enumerate(row_lengths)
    ]
    return torch.cat(rows), None
