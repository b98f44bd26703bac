"""What a reward function returned, checked: the one place where it becomes a `RewardResult`.

Used in process by `local.py` and inside worker processes by `worker_process.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from nexrl.errors import RewardError
from nexrl.services.reward.protocol import RewardResult

_ABSTAINED = RewardResult(value=None)
_ACCEPTED = "a finite number, None (abstain), a mapping of named parts to numbers or None, or a RewardResult"


def to_result(returned: Any, name: str) -> RewardResult:
    """The judgement in what function `name` returned; RewardError for anything else.

    None abstains and is not 0. The value of named parts is their sum without those that abstain;
    when all do, the whole abstains (FR-071). A list must hold exactly one value, because one
    completion is scored per call (FR-061).
    """
    if type(returned) is float and math.isfinite(returned):
        return RewardResult(value=returned)
    if returned is None:
        return _ABSTAINED
    if isinstance(returned, RewardResult):
        parts = {key: _number(part, name, key) for key, part in returned.parts.items()}
        value = None if returned.value is None else _number(returned.value, name)
        return RewardResult(value=value, parts=parts)
    if isinstance(returned, Mapping):
        return _of_parts(returned, name)
    if isinstance(returned, list | tuple) or (
        isinstance(returned, np.ndarray) and returned.ndim > 0
    ):
        if len(returned) != 1:
            raise RewardError(
                f"reward function {name} returned {len(returned)} values, expected 1: it is called "
                f"with one completion at a time; accepted: {_ACCEPTED}"
            )
        return to_result(returned[0], name)
    return RewardResult(value=_number(returned, name))


def _of_parts(parts: Mapping[Any, Any], name: str) -> RewardResult:
    if not parts:
        raise RewardError(
            f"reward function {name} returned an empty mapping; accepted: {_ACCEPTED}"
        )
    for key in parts:
        if not isinstance(key, str):
            raise RewardError(f"reward function {name} returned a part named {key!r}, not a string")
    scored = {key: _number(part, name, key) for key, part in parts.items() if part is not None}
    if not scored:
        return _ABSTAINED
    return RewardResult(value=math.fsum(scored.values()), parts=scored)


def _number(value: Any, name: str, part: str | None = None) -> float:
    where = "" if part is None else f" in part {part!r}"
    # Scalars of array libraries (numpy, torch) have no shape and know how to become a float.
    is_scalar = isinstance(value, Real | np.bool_) or (
        getattr(value, "shape", None) == () and hasattr(value, "__float__")
    )
    if not is_scalar or isinstance(value, complex | np.complexfloating):
        raise RewardError(
            f"reward function {name} returned {value!r:.80} of type {type(value).__name__}{where}; "
            f"accepted: {_ACCEPTED}"
        )
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"reward function {name} returned {number}{where}; accepted: {_ACCEPTED}")
    return number
