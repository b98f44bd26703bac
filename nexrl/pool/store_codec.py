"""Trajectories as compact bytes: the `facts` column of the trajectory store.

Written by `TrajectoryStore`'s writer thread, read by `StoreReader`. A dataclass is a msgpack array
[mark, value, value, ...]; which field each place holds is the layout, kept in the store beside the
data. So a field added later reads as its default in older stores, and fields that a reader does not
know end up in `Trajectory.extra`. Places instead of names because encoding is most of the cost of
storing a rollout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final

import msgpack
import numpy as np

from nexrl.errors import InvariantError
from nexrl.types import (
    Array,
    Column,
    Failure,
    MediaSpan,
    PolicyVersion,
    Provenance,
    Sampling,
    Segment,
    TokenRow,
    Trajectory,
    Turn,
    VersionSpan,
)
from nexrl.wire import from_plain

Layout = Mapping[str, list[str]]
"""Field names by class name, in the order they are stored; a mark is a class's position."""

_INT32: Final = 1
_FLOAT32: Final = 2
_BOOL: Final = 3
_ARRAY: Final = 4
_CLASS: Final = 5
_OPAQUE: Final = "__repr__"
_SAME: Final = "loss_mask"
"""Stands for a `sampled` array equal to the loss mask."""

_CLASSES: Final[tuple[type, ...]] = (
    Trajectory,
    TokenRow,
    VersionSpan,
    PolicyVersion,
    Turn,
    MediaSpan,
    Column,
    Provenance,
    Sampling,
    Segment,
    Failure,
)
_DERIVED: Final[Mapping[type, frozenset[str]]] = {Trajectory: frozenset({"tokens", "loss_mask"})}
"""Fields that the constructor fills in from `rows`."""


def _stored_fields(cls: type) -> list[str]:
    skipped = _DERIVED.get(cls, frozenset())
    return [f.name for f in dataclasses.fields(cls) if f.name not in skipped]


LAYOUT: Final[Layout] = {cls.__name__: _stored_fields(cls) for cls in _CLASSES}
"""What this version writes."""
_MARKS: Final = {cls: msgpack.ExtType(_CLASS, bytes([i])) for i, cls in enumerate(_CLASSES)}
_VALUES: Final[dict[type, Callable[[Any], tuple[Any, ...]]]] = {
    cls: attrgetter(*LAYOUT[cls.__name__]) for cls in _CLASSES
}
_SAMPLED_PLACE: Final = LAYOUT["TokenRow"].index("sampled")


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """What the rollout left, as bytes. A value in `extra` that is no plain data is kept as its
    `repr`: facts for people are better than none."""
    return _encode(trajectory)


def decode_trajectory(data: bytes, layout: Layout = LAYOUT) -> Trajectory:
    """Inverse of `encode_trajectory`; InvariantError when the bytes are damaged."""
    plain = _decode(data, layout)
    for row in plain["rows"]:
        if isinstance(row["sampled"], str):
            row["sampled"] = row["loss_mask"]
    return from_plain(Trajectory, plain)


def encode_failure(failure: Failure) -> bytes:
    """A failure as bytes."""
    return _encode(failure)


def decode_failure(data: bytes, layout: Layout = LAYOUT) -> Failure:
    """Inverse of `encode_failure`."""
    return from_plain(Failure, _decode(data, layout))


def _encode(value: Any) -> bytes:
    # Text of a model may hold half a surrogate pair; that must not cost the record.
    packed: bytes = msgpack.packb(
        value, default=_to_packable, use_bin_type=True, unicode_errors="surrogatepass"
    )
    return packed


def _to_packable(value: Any) -> Any:
    """What msgpack cannot pack itself: arrays, the classes above, odd mappings and scalars."""
    kind = type(value)
    if kind is np.ndarray:
        return _encode_array(value)
    if kind is TokenRow:
        return _encode_row(value)
    mark = _MARKS.get(kind)
    if mark is not None:
        return (mark, *_VALUES[kind](value))
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return {_OPAQUE: repr(value)}


def _encode_row(row: TokenRow) -> list[Any]:
    values = [_MARKS[TokenRow], *_VALUES[TokenRow](row)]
    sampled = row.sampled
    if sampled is not None and (sampled is row.loss_mask or np.array_equal(sampled, row.loss_mask)):
        values[1 + _SAMPLED_PLACE] = _SAME
    return values


def _encode_array(array: Array) -> msgpack.ExtType:
    if array.ndim == 1:
        dtype = array.dtype
        if dtype == np.int32:
            return msgpack.ExtType(_INT32, array.tobytes())
        if dtype == np.float32:
            return msgpack.ExtType(_FLOAT32, array.tobytes())
        if dtype == np.bool_:
            bits = np.packbits(array).tobytes()
            return msgpack.ExtType(_BOOL, len(array).to_bytes(4, "little") + bits)
    if array.dtype.kind not in "biuf":
        return msgpack.ExtType(_ARRAY, msgpack.packb(["", [], repr(array).encode()]))
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    parts = [little.dtype.str, list(array.shape), little.tobytes()]
    return msgpack.ExtType(_ARRAY, msgpack.packb(parts, use_bin_type=True))


def _decode(data: bytes, layout: Layout) -> Any:
    fields = list(layout.values())

    def name_fields(values: list[Any]) -> Any:
        if values and type(values[0]) is _Mark:
            return dict(zip(fields[values[0]], values[1:], strict=True))
        return values

    try:
        return msgpack.unpackb(
            data,
            raw=False,
            ext_hook=_decode_ext,
            list_hook=name_fields,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
    except (ValueError, TypeError, IndexError, msgpack.exceptions.UnpackException) as error:
        raise InvariantError(f"a stored record of {len(data)} bytes is damaged: {error}") from error


class _Mark(int):
    """First entry of an array that stands for a dataclass."""

    __slots__ = ()


def _decode_ext(code: int, data: bytes) -> Any:
    if code == _CLASS:
        return _Mark(data[0])
    if code == _INT32:
        return np.frombuffer(data, "<i4")
    if code == _FLOAT32:
        return np.frombuffer(data, "<f4")
    if code == _BOOL:
        length = int.from_bytes(data[:4], "little")
        bits = np.frombuffer(data, np.uint8, offset=4)
        return np.unpackbits(bits, count=length).astype(np.bool_)
    if code == _ARRAY:
        dtype, shape, raw = msgpack.unpackb(data, raw=False)
        return np.frombuffer(raw, np.dtype(dtype)).reshape(shape) if dtype else raw.decode()
    raise ValueError(f"unknown code {code}")
