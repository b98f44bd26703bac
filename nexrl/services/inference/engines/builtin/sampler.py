"""Logits of a whole batch to one drawn token per row.

A draw depends on its row's logits, seed and position alone: the uniform number comes from a
counter-based generator (a hash of seed and position), so neighbours in the batch, the order of
arrival and what was drawn before make no difference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nexrl.types import BoolArray, FloatArray

U64 = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class DrawSettings(NamedTuple):
    """How each of B rows is drawn; arrays are aligned with the rows of the logits."""

    seeds: U64
    """[B] seed of the choice."""
    positions: npt.NDArray[np.int64]
    """[B] index of the token within its completion, from 0."""
    temperature: FloatArray
    """[B] 0 is greedy."""
    top_p: FloatArray
    """[B] 1 is off."""
    top_k: npt.NDArray[np.int64]
    """[B] 0 is off."""

    @classmethod
    def same(cls, size: int, *, seed: int) -> DrawSettings:
        """Every row alike: position 0, temperature 1, nothing cut off."""
        return cls(
            seeds=np.full(size, seed, np.uint64),
            positions=np.zeros(size, np.int64),
            temperature=np.ones(size, np.float32),
            top_p=np.ones(size, np.float32),
            top_k=np.zeros(size, np.int64),
        )

    @property
    def is_cut(self) -> BoolArray:
        """[B] rows whose distribution top_p or top_k cut."""
        cut: BoolArray = (self.temperature > 0) & ((self.top_p < 1.0) | (self.top_k > 0))
        return cut

    def without_cuts(self) -> DrawSettings:
        """The same draws from the whole distribution."""
        return self._replace(top_p=np.ones_like(self.top_p), top_k=np.zeros_like(self.top_k))

    def rows(self, index: npt.NDArray[np.int64] | slice) -> DrawSettings:
        """Some of the rows; a slice gives views."""
        return DrawSettings._make(array[index] for array in self)


def _mix(x: U64) -> U64:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection of 64-bit numbers."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    mixed: U64 = x ^ (x >> np.uint64(31))
    return mixed


def uniforms(seeds: U64, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """[B] numbers in [0, 1) with 53 random bits, one for each (seed, position)."""
    counter = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    bits = _mix(_mix(seeds) + counter)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(
    logits_BV: torch.Tensor, settings: DrawSettings
) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Draw one token per row; returns token ids [B] and their logprobs [B].

    The logprob is that of the distribution drawn from: after temperature, and after truncation
    where top_p or top_k cut it. A greedy row reports the model's own distribution.
    """
    device = logits_BV.device
    greedy = settings.temperature == 0.0
    scaled_BV = logits_BV.float()
    divisor = np.where(greedy, np.float32(1.0), settings.temperature)
    if np.any(divisor != 1.0):
        scaled_BV = scaled_BV / torch.from_numpy(divisor).to(device)[:, None]
    cut = np.flatnonzero(settings.is_cut)
    if len(cut):
        scaled_BV = _truncate_rows(scaled_BV, cut, settings)
    logprobs_BV = torch.log_softmax(scaled_BV, dim=-1)
    if greedy.all():
        tokens_B = logprobs_BV.argmax(dim=-1)
    else:
        tokens_B = _inverse_cdf(logprobs_BV, uniforms(settings.seeds, settings.positions))
        if greedy.any():
            greedy_B = torch.from_numpy(greedy).to(device)
            tokens_B = torch.where(greedy_B, logprobs_BV.argmax(dim=-1), tokens_B)
    drawn_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    return tokens_B.cpu().numpy(), drawn_B.cpu().numpy()


def _inverse_cdf(logprobs_BV: torch.Tensor, uniform: npt.NDArray[np.float64]) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the uniform number."""
    # float64: in float32 the rounding of 50,000 sums would move probability between tokens.
    cdf_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    target_B1 = torch.from_numpy(uniform).to(cdf_BV.device)[:, None] * cdf_BV[:, -1:]
    tokens_B: torch.Tensor = torch.searchsorted(cdf_BV, target_B1, right=True)[:, 0]
    return tokens_B.clamp_max(cdf_BV.shape[1] - 1)


def _truncate_rows(
    scaled_BV: torch.Tensor, rows: npt.NDArray[Any], settings: DrawSettings
) -> torch.Tensor:
    """Minus infinity outside the k likeliest tokens and outside the nucleus, in the given rows.

    The nucleus is the smallest set whose mass reaches top_p (Holtzman et al. 2020).
    """
    device = scaled_BV.device
    index = torch.from_numpy(rows).to(device)
    sorted_RV, order_RV = scaled_BV[index].sort(dim=-1, descending=True, stable=True)
    probs_RV = torch.softmax(sorted_RV, dim=-1)
    mass_before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    top_p = torch.from_numpy(settings.top_p[rows]).to(device)[:, None]
    top_k = torch.from_numpy(settings.top_k[rows]).to(device)[:, None]
    rank_V = torch.arange(scaled_BV.shape[1], device=device)
    keep_RV = ((top_p >= 1.0) | (mass_before_RV < top_p)) & ((top_k == 0) | (rank_V < top_k))
    keep_RV[:, 0] = True
    kept_RV = sorted_RV.masked_fill(~keep_RV, -torch.inf)
    truncated_BV = scaled_BV.clone()
    truncated_BV[index] = torch.empty_like(kept_RV).scatter_(1, order_RV, kept_RV)
    return truncated_BV
