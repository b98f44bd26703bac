"""The train service over HTTP: verbs as POST, health and Prometheus metrics as GET.

`python -m nexrl.services.train.server --config JSON` is what a launcher starts; it prints one ready
line with its port. The service behind it may be any `TrainService`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence

from aiohttp import web
from pydantic import ValidationError

from nexrl.config.schema import TrainServiceConfig
from nexrl.errors import ConfigError
from nexrl.services.http import bind, end_process, make_app, serve
from nexrl.services.train.call_order import CallOrder
from nexrl.services.train.local import make_local_train_service
from nexrl.services.train.messages import CONTENT_TYPE, VERBS, Envelope, perform
from nexrl.services.train.protocol import TrainService
from nexrl.types import ModelSpec
from nexrl.wire import pack, unpack

TOKEN_VARIABLE = "NEXRL_SERVICE_TOKEN"  # noqa: S105 - the name of a variable, not a secret
ORDER_DEADLINE_S = 60.0
MAX_CLIENTS = 256


class _Calls:
    """The handlers' state: an order of calls for each (policy, client), and counters.

    Invariant: an order is dropped only when none of its calls is in progress.
    """

    def __init__(self, service: TrainService) -> None:
        self._service = service
        self._orders: OrderedDict[tuple[str, str], CallOrder] = OrderedDict()
        self._calls: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._in_progress = 0

    async def handle_verb(self, request: web.Request) -> web.Response:
        policy, verb = request.match_info["policy"], request.match_info["verb"]
        if verb not in VERBS:
            raise ConfigError(f"no verb is named {verb!r} (accepted: {sorted(VERBS)})")
        envelope = Envelope.from_message(unpack(await request.read()))
        order = self._order(policy, envelope.client)
        await order.acknowledge(envelope.acknowledged)

        async def work() -> bytes:
            return await self._counted(policy, verb, envelope)

        answer = await order.run(envelope.seq, work)
        return web.Response(body=answer, content_type=CONTENT_TYPE)

    def _order(self, policy: str, client: str) -> CallOrder:
        key = (policy, client)
        if key not in self._orders:
            self._orders[key] = CallOrder(deadline_s=ORDER_DEADLINE_S)
            idle = [k for k, order in self._orders.items() if not order.busy and k != key]
            for old in idle[: max(0, len(self._orders) - MAX_CLIENTS)]:
                del self._orders[old]
        self._orders.move_to_end(key)
        return self._orders[key]

    async def _counted(self, policy: str, verb: str, envelope: Envelope) -> bytes:
        loop = asyncio.get_running_loop()
        start = loop.time()
        self._calls[verb] += 1
        self._in_progress += 1
        try:
            return pack(await perform(self._service, policy, verb, envelope.arguments))
        except BaseException:
            self._failures[verb] += 1
            raise
        finally:
            self._in_progress -= 1
            self._seconds[verb] += loop.time() - start

    async def handle_health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "service": "train"})

    async def handle_metrics(self, request: web.Request) -> web.Response:
        counters: dict[str, Mapping[str, float]] = {
            "calls": self._calls,
            "failures": self._failures,
            "seconds": self._seconds,
        }
        lines = []
        for name, by_verb in counters.items():
            lines.append(f"# TYPE nexrl_train_{name}_total counter")
            lines += [
                f'nexrl_train_{name}_total{{verb="{v}"}} {by_verb.get(v, 0):.15g}' for v in VERBS
            ]
        lines.append("# TYPE nexrl_train_calls_in_progress gauge")
        lines += [f"nexrl_train_calls_in_progress {self._in_progress}", ""]
        return web.Response(text="\n".join(lines), content_type="text/plain")

    async def aclose(self, app: web.Application) -> None:
        """The service ends running calls at their next micro-batch; then nothing is left to wait
        for."""
        await self._service.aclose()
        for order in self._orders.values():
            await order.aclose()


def make_train_app(service: TrainService, *, token: str | None = None) -> web.Application:
    """The HTTP application over a service; closing it closes the service.

    A call that arrives before one that its client made earlier waits for it, ORDER_DEADLINE_S at
    most.
    """
    calls = _Calls(service)
    app = make_app(token=token)
    app.router.add_post("/v1/policies/{policy}/{verb}", calls.handle_verb)
    app.router.add_get("/health", calls.handle_health)
    app.router.add_get("/metrics", calls.handle_metrics)
    # Before connections are drained, so that running calls end at their next micro-batch.
    app.on_shutdown.append(calls.aclose)
    return app


async def run_server(
    config: TrainServiceConfig,
    *,
    deterministic: bool = False,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    models: Sequence[ModelSpec] = (),
) -> None:
    """Serve until SIGTERM or SIGINT; `models` are created before the ready line."""
    sock = bind(host, port, token=token, setting="service.train_service port")
    service = make_local_train_service(config, deterministic=deterministic)
    try:
        for spec in models:
            await service.create(spec)
        await serve(make_train_app(service, token=token), sock, name="train")
    finally:
        sock.close()
        await service.aclose()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop; a configuration error is one line and exit code 2.

    The token comes from NEXRL_SERVICE_TOKEN.
    """
    parser = argparse.ArgumentParser(prog="python -m nexrl.services.train.server")
    parser.add_argument("--config", default="{}", help="service.train_service as JSON")
    parser.add_argument("--model", help="model folder to host as policy `actor` from the start")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: the system chooses")
    parser.add_argument("--deterministic", action="store_true", help="same bits for same input")
    given = parser.parse_args(arguments)
    try:
        asyncio.run(
            run_server(
                TrainServiceConfig.model_validate_json(given.config),
                deterministic=given.deterministic,
                host=given.host,
                port=given.port,
                token=os.environ.get(TOKEN_VARIABLE) or None,
                models=[ModelSpec(path=given.model)] if given.model else [],
            )
        )
    except (ConfigError, ValidationError) as error:
        print(f"train server: {error}", file=sys.stderr)  # noqa: T201 - the process's own stderr
        return 2
    return 0


if __name__ == "__main__":
    end_process(main())
