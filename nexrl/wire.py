"""Dataclasses and numpy arrays as msgpack: the body of HTTP messages and of stored columns.

Consumes and produces frozen dataclasses of `types.py`. Only plain data crosses: no pickle.
An array is {"__nd__": [dtype, shape], "data": bytes}, little-endian and C-ordered.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import msgpack
import numpy as np

from nexrl.errors import InvariantError

T = TypeVar("T")
_ALLOWED_KINDS = "biuf"


def pack(value: Any) -> bytes:
    """Any mix of dataclasses, arrays, mappings, sequences and scalars as msgpack bytes."""
    packed: bytes = msgpack.packb(to_plain(value), use_bin_type=True)
    return packed


def unpack(data: bytes) -> Any:
    """Inverse of `pack` down to plain values and arrays; raises InvariantError on damage."""
    try:
        return msgpack.unpackb(data, raw=False, object_hook=_revive, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise InvariantError(f"not a readable message of {len(data)} bytes: {error}") from error


def to_plain(value: Any) -> Any:
    """Dataclasses become mappings by field name, arrays become tagged bytes, tuples lists."""
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _ALLOWED_KINDS:
            raise InvariantError(f"an array of dtype {value.dtype} cannot be sent")
        array = np.ascontiguousarray(value)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        return {"__nd__": [array.dtype.str, list(array.shape)], "data": array.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(v) for v in value]
    raise InvariantError(f"a {type(value).__name__} cannot be sent: {value!r}")


def _revive(mapping: dict[Any, Any]) -> Any:
    tag = mapping.get("__nd__")
    if tag is None:
        return mapping
    dtype = np.dtype(tag[0])
    if dtype.kind not in _ALLOWED_KINDS:
        raise ValueError(f"array dtype {tag[0]} is not accepted")
    return np.frombuffer(mapping["data"], dtype=dtype).reshape(tag[1])


def from_plain(cls: type[T], value: Any) -> T:
    """Rebuild a dataclass (and those inside it) from the mapping that `to_plain` made.

    A field that is absent takes its default. An unknown field goes into the class's `extra`
    mapping when it has one, so that newer schema versions survive; else InvariantError.
    """
    built: T = _build(cls, value)
    return built


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(hint: Any, value: Any) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any or value is None:
        return value
    if origin in (typing.Union, types.UnionType):
        options = [a for a in typing.get_args(hint) if a is not type(None)]
        return _build(options[0], value) if len(options) == 1 else value
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _build_dataclass(hint, value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if origin is tuple and isinstance(value, list):
        args = typing.get_args(hint)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_build(args[0], v) for v in value)
        return tuple(_build(a, v) for a, v in zip(args, value, strict=True))
    if origin in (dict, Mapping) and isinstance(value, dict):
        args = typing.get_args(hint)
        return {k: _build(args[1], v) for k, v in value.items()} if args else value
    return value


def _build_dataclass(cls: type, value: Any) -> Any:
    if not isinstance(value, dict):
        raise InvariantError(f"{cls.__name__} expected a mapping, got {type(value).__name__}")
    hints = _hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    fields = {k: _build(hints[k], v) for k, v in value.items() if k in known}
    unknown = {k: v for k, v in value.items() if k not in known}
    if unknown:
        if "extra" not in known:
            raise InvariantError(f"{cls.__name__} has no field {sorted(unknown)}")
        fields["extra"] = {**fields.get("extra", {}), **unknown}
    try:
        return cls(**fields)
    except TypeError as error:
        raise InvariantError(f"{cls.__name__}: {error}") from error
