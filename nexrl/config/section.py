"""The base of every group of settings; the groups are in `schema_*.py`, the whole in `schema.py`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A strict, immutable group of settings: no unknown key, no infinity, no NaN.

    The docstring below a field is its sentence in the configuration reference.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
