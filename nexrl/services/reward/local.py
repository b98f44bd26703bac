"""LocalRewardService: a user's reward function, called here or in worker processes of its own.

Between a completion and its trajectory. The function is called with the completion text and the
row's columns as keywords. `async` functions run on the event loop, blocking ones in a thread, or in
a process that can be killed. Nothing that goes wrong is ever turned into the number 0.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, Protocol

from nexrl.blocking_pool import BlockingPool
from nexrl.config.user_code import load_user_object
from nexrl.errors import ConfigError
from nexrl.services.reward.process_pool import ProcessPool
from nexrl.services.reward.protocol import RewardResult, RewardService
from nexrl.services.reward.result import to_result
from nexrl.services.reward.service_class import is_service_class, make_service
from nexrl.services.reward.signature import FACTS, RewardCall
from nexrl.services.reward.user_call import raised, user_call
from nexrl.types import Completion

Isolation = Literal["thread", "process"]

_KEY = "rollout_worker.reward"


def load_reward_service(
    reference: str,
    *,
    recipe_dir: Path,
    arguments: Mapping[str, Any],
    isolation: Isolation = "thread",
    deadline_s: float = 30.0,
    num_workers: int = 2,
) -> RewardService:
    """The service for `path.py:name` or `package.module:name`, a function or a class that is a
    service itself; ConfigError when it is neither. Blocking."""
    function = load_user_object(reference, recipe_dir=recipe_dir, key=_KEY)
    if is_service_class(function):
        return make_service(
            function,
            reference=reference,
            recipe_dir=recipe_dir,
            arguments=arguments,
            isolation=isolation,
            deadline_s=deadline_s,
        )
    return make_reward_service(
        function,
        contract=contract_of(reference, function),
        arguments=arguments,
        isolation=isolation,
        deadline_s=deadline_s,
        num_workers=num_workers,
        reference=reference,
        recipe_dir=recipe_dir,
    )


def contract_of(reference: str, function: Callable[..., Any]) -> str:
    """Identity of a reward function: its reference and the hash of its source file."""
    try:
        source = Path(inspect.getfile(inspect.unwrap(function))).read_bytes()
    except (TypeError, OSError):  # a callable object, or one defined in a shell
        return reference
    return f"{reference}#{blake2b(source, digest_size=8).hexdigest()}"


def make_reward_service(
    function: Callable[..., Any],
    *,
    contract: str,
    arguments: Mapping[str, Any],
    isolation: Isolation = "thread",
    deadline_s: float = 30.0,
    num_workers: int = 2,
    reference: str = "",
    recipe_dir: Path | None = None,
) -> LocalRewardService:
    """A reward service for a function. `isolation: process` needs the `reference` by which a worker
    process can load it."""
    name = str(getattr(function, "__name__", type(function).__name__))
    call = RewardCall(function, name=name, arguments=arguments)
    caller: _Caller
    if isolation == "process":
        if not reference:
            raise ConfigError(
                "rollout_worker.reward_isolation: process needs the reward as `path.py:name` or "
                f"`package.module:name`, got the function object {name}"
            )
        caller = ProcessPool(
            reference,
            name=name,
            recipe_dir=recipe_dir or Path.cwd(),
            num_workers=num_workers,
            deadline_s=deadline_s,
        )
    else:
        caller = _FunctionCaller(function, name, deadline_s, num_workers)
    return LocalRewardService(caller, call, contract)


class _Caller(Protocol):
    """Calls the function somewhere and answers with its checked result."""

    async def call(self, text: str, keywords: dict[str, Any]) -> RewardResult: ...

    async def aclose(self) -> None: ...


class LocalRewardService:
    """RewardService over one function.

    Invariant: a call answers with what the function said, or raises; the completion text and the
    row are passed on unchanged.
    """

    def __init__(self, caller: _Caller, call: RewardCall, contract: str) -> None:
        self._caller = caller
        self._call = call
        self._contract = contract

    @property
    def contract(self) -> str:
        """See `RewardService.contract`."""
        return self._contract

    def check_row(self, row: Mapping[str, Any]) -> None:
        """ConfigError when a row lacks a column that the function needs; calls nothing."""
        self._call.keywords(row, dict.fromkeys(FACTS))

    async def score(
        self, completion_text: str, row: Mapping[str, Any], completion: Completion | None = None
    ) -> RewardResult:
        """See `RewardService.score`."""
        facts = {} if completion is None else {"finish_reason": completion.finish_reason}
        return await self._caller.call(completion_text, self._call.keywords(row, facts))

    async def aclose(self) -> None:
        """See `RewardService.aclose`."""
        await self._caller.aclose()


class _FunctionCaller:
    """Calls the function in this process: on the event loop when it is `async` or `instant`, else
    in owned threads, where one that hangs keeps its thread for ever."""

    def __init__(
        self, function: Callable[..., Any], name: str, deadline_s: float, num_threads: int
    ) -> None:
        self._function = function
        self._name = name
        self._deadline_s = deadline_s
        self._on_loop = _is_async(function) or getattr(function, "runs_at_once", False)
        self._threads = BlockingPool(num_threads, name=f"reward function {name}")
        self._turns = asyncio.Semaphore(num_threads)

    async def call(self, text: str, keywords: dict[str, Any]) -> RewardResult:
        what = f"reward function {self._name}"
        if not self._on_loop:
            async with self._turns:  # waiting for a turn is not the function's time
                async with user_call(what, self._deadline_s):
                    returned = await self._threads.run(lambda: self._function(text, **keywords))
                    if inspect.isawaitable(returned):
                        returned = await returned
            return to_result(returned, self._name)
        try:
            returned = self._function(text, **keywords)
        except (Exception, SystemExit) as error:
            raise raised(what, error) from error
        if type(returned) is not float and inspect.isawaitable(returned):
            async with user_call(what, self._deadline_s):
                returned = await returned
        return to_result(returned, self._name)

    async def aclose(self) -> None:
        await self._threads.aclose()


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    )
