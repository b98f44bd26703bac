"""The wire of the train service: which verbs there are, and what their arguments are.

One request is POST /v1/policies/{policy}/{verb} with a msgpack body
`{"client", "seq", "acknowledged", "arguments"}`; the answer is `{"result"}` as msgpack, or our JSON
error. Client and server share this table, so neither can know a verb that the other does not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nexrl.errors import InvariantError
from nexrl.services.train.protocol import TrainService
from nexrl.types import (
    BackwardOutput,
    ForwardOutput,
    LossSpec,
    ModelSpec,
    OptimParams,
    OptimResult,
    PolicyVersion,
    RowChunk,
    TrainInfo,
    WeightManifest,
)
from nexrl.wire import from_plain, to_plain

CONTENT_TYPE = "application/msgpack"
Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What stands around the arguments of a call."""

    client: str
    """Id of the client object; calls are ordered for each client and policy."""
    seq: int
    """Position in that client's calls on that policy, from 0."""
    acknowledged: int = 0
    """Calls below this number are over for the client: the server forgets their answers."""
    arguments: dict[str, Any]
    """By the verb's parameter names."""

    @classmethod
    def from_message(cls, message: Any) -> Envelope:
        """InvariantError when the body is not such a message."""
        envelope = from_plain(cls, message)
        numbers = (envelope.seq, envelope.acknowledged)
        if not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise InvariantError(f"seq and acknowledged must be whole numbers, got {numbers}")
        if not isinstance(envelope.arguments, dict):
            raise InvariantError(f"arguments must be a mapping, got {envelope.arguments!r:.80}")
        return envelope


Verb = Callable[[TrainService, str, Arguments], Awaitable[Any]]


async def _create(service: TrainService, policy: str, arguments: Arguments) -> TrainInfo:
    spec = from_plain(ModelSpec, arguments["spec"])
    if spec.policy != policy:
        raise InvariantError(f"create: the path names policy {policy!r}, the body {spec.policy!r}")
    return await service.create(spec)


async def _forward(service: TrainService, policy: str, arguments: Arguments) -> ForwardOutput:
    chunk = from_plain(RowChunk, arguments["chunk"])
    return await service.forward(policy, chunk, outputs=tuple(arguments["outputs"]))


async def _forward_backward(
    service: TrainService, policy: str, arguments: Arguments
) -> BackwardOutput:
    chunk = from_plain(RowChunk, arguments["chunk"])
    loss = from_plain(LossSpec, arguments["loss"])
    return await service.forward_backward(policy, chunk, loss, outputs=tuple(arguments["outputs"]))


async def _backward(service: TrainService, policy: str, arguments: Arguments) -> BackwardOutput:
    chunk = from_plain(RowChunk, arguments["chunk"])
    return await service.backward(policy, chunk, arguments["gradients"])


async def _optim_step(service: TrainService, policy: str, arguments: Arguments) -> OptimResult:
    return await service.optim_step(policy, from_plain(OptimParams, arguments["params"]))


async def _save_state(service: TrainService, policy: str, arguments: Arguments) -> None:
    await service.save_state(policy, arguments["path"])


async def _load_state(service: TrainService, policy: str, arguments: Arguments) -> TrainInfo:
    return await service.load_state(
        policy, arguments["path"], with_optimizer=arguments["with_optimizer"]
    )


async def _publish_weights(
    service: TrainService, policy: str, arguments: Arguments
) -> WeightManifest:
    version = from_plain(PolicyVersion, arguments["version"])
    return await service.publish_weights(
        policy, version, arguments["path"], unchanged=arguments["unchanged"]
    )


async def _reset_optimizer(service: TrainService, policy: str, arguments: Arguments) -> None:
    await service.reset_optimizer(policy)


async def _info(service: TrainService, policy: str, arguments: Arguments) -> TrainInfo:
    return await service.info(policy)


VERBS: Mapping[str, Verb] = {
    "create": _create,
    "forward": _forward,
    "forward_backward": _forward_backward,
    "backward": _backward,
    "optim_step": _optim_step,
    "save_state": _save_state,
    "load_state": _load_state,
    "publish_weights": _publish_weights,
    "reset_optimizer": _reset_optimizer,
    "info": _info,
}


async def perform(
    service: TrainService, policy: str, verb: str, arguments: Arguments
) -> dict[str, Any]:
    """Run a verb and put its result in a message."""
    try:
        result = await VERBS[verb](service, policy, arguments)
    except KeyError as error:
        raise InvariantError(f"{verb}: the argument {error} is missing") from error
    return {"result": to_plain(result)}
