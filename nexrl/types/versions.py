"""Policy versions, the spans they drew, and the seeds of every draw."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nexrl.errors import InvariantError

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

DEFAULT_POLICY = "actor"
SCHEMA_VERSION = 2
"""Of stored trajectories: 2 added `Turn.reward` and `Turn.anchor`. Older ones are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """One published state of one policy; `number` counts batches consumed."""

    policy: str = DEFAULT_POLICY
    """Name of the model being trained."""
    incarnation: int = 0
    """Counts starts of the run: a resume begins a new one, so old engines cannot be mistaken."""
    number: int = 0
    """Batches consumed before this version was published."""

    def next(self) -> PolicyVersion:
        """The version that the next batch ends in."""
        return replace(self, number=self.number + 1)

    def __str__(self) -> str:
        return f"{self.policy}@{self.incarnation}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Inverse of `str()`; raises InvariantError on anything else."""
        policy, sep, rest = text.rpartition("@")
        incarnation, dot, number = rest.partition(".")
        if not (sep and dot and policy and incarnation.isdigit() and number.isdigit()):
            raise InvariantError(
                f"not a policy version: {text!r} (expected policy@incarnation.number)"
            )
        return cls(policy=policy, incarnation=int(incarnation), number=int(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """The policy version that drew tokens [start, end) of a row or completion."""

    start: int
    """First token position, inclusive."""
    end: int
    """Last token position, exclusive; greater than start."""
    version: PolicyVersion
    """Version of these tokens; for `bounded` sources the oldest it can have been."""


VersionSource = Literal["engine", "pinned", "bounded"]
LogprobKind = Literal["tempered", "raw", "truncated"]
FinishReason = Literal["eos", "stop_string", "stop_token", "length", "abort", "error"]


def check_spans(spans: tuple[VersionSpan, ...], length: int, what: str) -> None:
    """Spans ascend, do not overlap and stay inside [0, length)."""
    position = 0
    for span in spans:
        if span.start < position or span.end <= span.start or span.end > length:
            raise InvariantError(
                f"{what}: version span [{span.start}, {span.end}) is out of order or outside "
                f"[0, {length})"
            )
        position = span.end


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts; the same on every machine and Python.

    seed of a call = derive_seed(run seed, policy, item_id, draw, member, call index).
    """
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
