"""The wire of the train service: which verbs there are, and what their arguments are.

One request is POST /v1/policies/{policy}/{verb} with a msgpack body
`{"client", "seq", "acknowledged", "arguments"}`; the answer is `{"result"}` as msgpack, or our JSON
error. Client and server share this table, so neither can know a verb that the other does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nexrl.errors import InvariantError
from nexrl.services.train.protocol import TrainService
from nexrl.types import LossSpec, ModelSpec, OptimParams, PolicyVersion, RowChunk
from nexrl.wire import from_plain, to_plain

CONTENT_TYPE = "application/msgpack"


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


VERBS: Mapping[str, Mapping[str, Any]] = {
    "create": {"spec": ModelSpec},
    "forward": {"chunk": RowChunk, "outputs": tuple[str, ...]},
    "forward_backward": {"chunk": RowChunk, "loss": LossSpec, "outputs": tuple[str, ...]},
    "backward": {"chunk": RowChunk, "gradients": Mapping[str, Any]},
    "optim_step": {"params": OptimParams},
    "save_state": {"path": str},
    "load_state": {"path": str, "with_optimizer": bool},
    "publish_weights": {"version": PolicyVersion, "path": str, "unchanged": bool},
    "reset_optimizer": {},
    "drop": {},
    "info": {},
}
"""By name of the `TrainService` method: its arguments beside the policy, and their types."""


async def perform(
    service: TrainService, policy: str, verb: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Run a verb and put its result in a message."""
    try:
        given = {name: from_plain(hint, arguments[name]) for name, hint in VERBS[verb].items()}
    except KeyError as error:
        raise InvariantError(f"{verb}: the argument {error} is missing") from error
    method = getattr(service, verb)
    if verb != "create":
        result = await method(policy, **given)
    elif given["spec"].policy == policy:
        result = await method(**given)
    else:
        named = given["spec"].policy
        raise InvariantError(f"create: the path names policy {policy!r}, the body {named!r}")
    return {"result": to_plain(result)}
