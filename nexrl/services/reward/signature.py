"""Which keywords a reward function is called with: those of the row, of the configuration and of the
draw that it accepts, no others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

from nexrl.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

FACTS: Final = frozenset({"finish_reason"})
"""What a reward function may ask of the draw, beside the row's columns: why it ended, one of
`nexrl.types.FinishReason` (`length` where a limit cut it)."""
_NO_FACTS: Final[Mapping[str, Any]] = MappingProxyType({})
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_TAKES_TEXT = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def instant(function: F) -> F:
    """Mark a blocking function as so quick that it is called on the event loop, without a thread.

    For pure functions of well under a millisecond; no deadline can interrupt one.
    """
    function.runs_at_once = True  # type: ignore[attr-defined]
    return function


class RewardCall:
    """The arguments of one reward function, decided once from its signature.

    Invariant: the completion text goes to the first positional parameter; each other parameter gets
    the configured argument of its name, else the row's column of its name, else the fact of the
    draw of its name (`finish_reason`), else its default.
    """

    def __init__(
        self, function: Callable[..., Any], *, name: str, arguments: Mapping[str, Any]
    ) -> None:
        self._name = name
        self._arguments = dict(arguments)
        parameters = list(_signature(function, name).parameters.values())
        if not parameters or parameters[0].kind not in _TAKES_TEXT:
            raise ConfigError(
                f"rollout_worker.reward: {name} must take the completion text as its first "
                "positional parameter, for example `def reward(completion, answer)`"
            )
        text, *others = parameters
        self._text_name = text.name if text.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else ""
        self._takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        accepted = [p for p in others if p.kind not in _VARIABLE]
        given = [p for p in accepted if p.name not in self._arguments]
        self._names = tuple(p.name for p in given)
        self._required = tuple(p.name for p in given if p.default is inspect.Parameter.empty)
        self._facts = FACTS.intersection(self._names)
        names = [p.name for p in accepted]
        for key in self._arguments:
            if key == self._text_name or (key not in names and not self._takes_any):
                raise ConfigError(
                    f"rollout_worker.reward_arguments.{key}: {name} has no such keyword; "
                    f"accepted: {', '.join(names) or 'none'}"
                )

    def keywords(
        self, row: Mapping[str, Any], facts: Mapping[str, Any] = _NO_FACTS
    ) -> dict[str, Any]:
        """Keywords for one row; ConfigError lists the row's columns when one is missing. `facts`:
        what is known of the draw, by the names in `FACTS`."""
        known = {key: facts[key] for key in self._facts if key in facts} | dict(row)
        for required in self._required:
            if required not in known:
                columns = ", ".join(sorted(map(str, row))) or "none"
                raise ConfigError(
                    f"rollout_worker.reward: {self._name} needs `{required}`, which is neither a "
                    f"column of the row nor in rollout_worker.reward_arguments; the row has: "
                    f"{columns}"
                )
        if self._takes_any:
            known.pop(self._text_name, None)
            found = {str(key): value for key, value in known.items()}
        else:
            found = {key: known[key] for key in self._names if key in known}
        return found | self._arguments


def _signature(function: Callable[..., Any], name: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"rollout_worker.reward: the parameters of {name} cannot be read ({error}); wrap it in "
            "a `def`"
        ) from error
