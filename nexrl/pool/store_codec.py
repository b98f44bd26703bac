"""Trajectories as compact bytes: the `facts` column of the trajectory store.

Written by `TrajectoryStore`'s writer thread, read by `StoreReader`. A dataclass is a msgpack array
[mark, value, value, ...]; which field each place holds is the layout, kept in the store beside the
data. So a field added later reads as its default in older stores, and fields that a reader does not
know end up in `Trajectory.extra`. Places instead of names because encoding is most of the cost of
storing a rollout.
"""

from __future__ import annotations

import dataclasses
import threading
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

_CLASSES: Final[Mapping[type, tuple[str, ...]]] = {
    Trajectory: ("rows", "failure", "provenance"),
    TokenRow: ("token_ids", "loss_mask", "behavior_logprobs", "versions", "turns", "media"),
    VersionSpan: ("version",),
    PolicyVersion: (),
    Turn: (),
    MediaSpan: (),
    Column: ("values",),
    Provenance: ("sampling", "segments"),
    Sampling: (),
    Segment: (),
    Failure: (),
}
"""What may be stored, each with its fields that hold arrays or other classes; all other fields are
packed as they are."""
_DERIVED: Final[Mapping[type, frozenset[str]]] = {Trajectory: frozenset({"tokens", "loss_mask"})}
"""Fields that the constructor fills in from `rows`."""


def _stored_fields(cls: type) -> list[str]:
    skipped = _DERIVED.get(cls, frozenset())
    return [f.name for f in dataclasses.fields(cls) if f.name not in skipped]


LAYOUT: Final[Layout] = {cls.__name__: _stored_fields(cls) for cls in _CLASSES}
"""What this version writes."""
_Written = tuple[msgpack.ExtType, Callable[[Any], tuple[Any, ...]], tuple[int, ...]]
_WRITTEN: Final[dict[type, _Written]] = {
    cls: (
        msgpack.ExtType(_CLASS, bytes([i])),
        attrgetter(*LAYOUT[cls.__name__]),
        tuple(1 + LAYOUT[cls.__name__].index(name) for name in nested),
    )
    for i, (cls, nested) in enumerate(_CLASSES.items())
}
"""By class: its mark, its values in order, and the places of the nested ones."""
_SAMPLED_PLACE: Final = 1 + LAYOUT["TokenRow"].index("sampled")
_FREQUENT: Final = {np.dtype("<i4"): _INT32, np.dtype("<f4"): _FLOAT32, np.dtype(np.bool_): _BOOL}
_extension: Final = msgpack.ExtType._make
"""Without the constructor's checks, which cost more than the bytes of a short array."""


def encode(value: Trajectory | Failure) -> bytes:
    """What a rollout left, or why it failed, as bytes. A value in `extra` that is no plain data is
    kept as its `repr`: facts for people are better than none."""
    packed: bytes = _packers.packer.pack(_plain(value))
    return packed


def decode_trajectory(data: bytes, layout: Layout = LAYOUT) -> Trajectory:
    """Inverse of `encode`; InvariantError when the bytes are damaged."""
    plain = _decode(data, layout)
    for row in plain["rows"]:
        if isinstance(row["sampled"], str):
            row["sampled"] = row["loss_mask"]
    return from_plain(Trajectory, plain)


def decode_failure(data: bytes, layout: Layout = LAYOUT) -> Failure:
    """Inverse of `encode`; InvariantError when the bytes are damaged."""
    return from_plain(Failure, _decode(data, layout))


def _plain(value: Any) -> Any:
    """The classes above as lists and arrays as bytes, before packing: a callback out of msgpack for
    each costs three times as much. What is left to `_to_packable` are values of `extra`."""
    kind = type(value)
    known = _WRITTEN.get(kind)
    if known is None:
        return _encode_array(value) if kind is np.ndarray else value
    mark, values_of, nested = known
    values = [mark, *values_of(value)]
    for place in nested:
        entry = values[place]
        if type(entry) is tuple:
            if entry:
                values[place] = [_plain(one) for one in entry]
        elif entry is not None:
            values[place] = _plain(entry)
    if kind is TokenRow:
        values[_SAMPLED_PLACE] = _plain_sampled(value)
    return values


def _plain_sampled(row: TokenRow) -> Any:
    if row.sampled is None:
        return None
    is_same = row.sampled is row.loss_mask or np.array_equal(row.sampled, row.loss_mask)
    return _SAME if is_same else _encode_array(row.sampled)


def _to_packable(value: Any) -> Any:
    """What msgpack cannot pack itself: odd mappings and scalars, and classes within `extra`."""
    plain = _plain(value)
    if plain is not value:
        return plain
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return {_OPAQUE: repr(value)}


def _encode_array(array: Array) -> msgpack.ExtType:
    code = _FREQUENT.get(array.dtype) if array.ndim == 1 else None
    if code == _BOOL:
        bits = np.packbits(array).tobytes()
        return _extension((_BOOL, len(array).to_bytes(4, "little") + bits))
    if code is not None:
        return _extension((code, array.tobytes()))
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


class _Packers(threading.local):
    """One packer for each thread that writes: making one costs as much as a trajectory."""

    def __init__(self) -> None:
        # Text of a model may hold half a surrogate pair; that must not cost the record.
        self.packer = msgpack.Packer(
            default=_to_packable, use_bin_type=True, unicode_errors="surrogatepass"
        )


_packers = _Packers()
