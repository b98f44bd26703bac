"""`quick`: a frozen dataclass that is cheap to make.

For the records of which every trajectory needs a new one. `dataclass(frozen=True)` sets each field
by a call of `object.__setattr__`, which for the hundred fields of one trajectory was a tenth of the
controller's whole time.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def quick(cls: type[T]) -> type[T]:
    """Replace the constructor of a `dataclass(frozen=True, slots=True, kw_only=True)`.

    The new one fills the object while it belongs to a twin class with the same slots, where plain
    assignment works, and then returns it to its own class. Everything else stays as it was.
    """
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    twin = type(cls.__name__, (), {"__slots__": tuple(f.name for f in fields)})
    names: dict[str, Any] = {"set_class": object.__setattr__, "twin": twin, "absent": object()}
    parameters, body = [], ["own = self.__class__", "set_class(self, '__class__', twin)"]
    for field in fields:
        value = field.name
        if field.default_factory is not dataclasses.MISSING:
            names[f"make_{field.name}"] = field.default_factory
            value = f"make_{field.name}() if {field.name} is absent else {field.name}"
            parameters.append(f"{field.name}=absent")
        elif field.default is not dataclasses.MISSING:
            names[f"default_{field.name}"] = field.default
            parameters.append(f"{field.name}=default_{field.name}")
        else:
            parameters.append(field.name)
        body.append(f"self.{field.name} = {value}")
    body.append("self.__class__ = own")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    lines = [f"def __init__(self, *, {', '.join(parameters)}):", *body]
    exec("\n    ".join(lines), names)  # noqa: S102 - as dataclasses itself makes constructors
    constructor = names["__init__"]
    constructor.__qualname__ = f"{cls.__qualname__}.__init__"
    constructor.__annotations__ = cls.__init__.__annotations__
    cls.__init__ = constructor  # type: ignore[method-assign]
    return cls
