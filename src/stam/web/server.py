"""Running the service with uvicorn."""

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn

from stam.errors import StamError, require
from stam.web.app import OWN_NAMES, SceneService
from stam.web.limits import AnswerWhenStopped
from stam.web.memory import keep_large_blocks_apart, return_freed_memory

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TICKS_BETWEEN_RETURNS = 100  # of uvicorn's clock: ten seconds


def serve(
    service: SceneService,
    host: str = "127.0.0.1",
    port: int = 8000,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serves until interrupted.

    Args:
        service: What to serve.
        host: Address to listen on. Any but this machine's own lets others in, and there is no password.
        port: Port to listen on; 0 takes a free one.
        on_ready: Called with the address once it is open.
    """
    keep_large_blocks_apart()
    listener = listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}"
    server = build_server(service, hosts=OWN_NAMES if host in LOOPBACK else ("*",))
    if on_ready is not None:
        on_ready(url)
    try:
        with listener:
            server.run(sockets=[listener])
    finally:
        service.close()  # also where the server failed before it began


def build_server(service: SceneService, hosts: Sequence[str] = OWN_NAMES, **settings: Any) -> "Server":
    """Puts the service behind uvicorn, which is told the limits it can keep itself.

    Args:
        service: What to serve.
        hosts: Names the service may be called by.
        settings: Others of uvicorn's.
    """
    defaults: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": 2}
    config = uvicorn.Config(
        AnswerWhenStopped(service.app(hosts)),
        limit_concurrency=service.limits.max_connections,
        ws="none",  # there are no web sockets here
        **(defaults | settings),
    )
    return Server(config, service.limits.client_seconds)


class Server(uvicorn.Server):
    """Uvicorn, which by itself waits for ever for a client that sends half a request, or takes no answer.

    It also gives freed memory back every few seconds.
    """

    def __init__(self, config: uvicorn.Config, client_seconds: float) -> None:
        super().__init__(config)
        self.client_seconds = client_seconds
        self._waiting: dict[Any, tuple[object, float]] = {}  # connection: what it waits for, since when
        self._requests_at_return = 0

    async def on_tick(self, counter: int) -> bool:
        """Is called by uvicorn ten times a second."""
        self._close_slow_clients(time.monotonic())
        num_requests = self.server_state.total_requests
        if counter % _TICKS_BETWEEN_RETURNS == 0 and num_requests != self._requests_at_return:
            self._requests_at_return = num_requests
            return_freed_memory()
        return await super().on_tick(counter)

    def _close_slow_clients(self, now: float) -> None:
        waiting: dict[Any, tuple[object, float]] = {}
        for connection in list(self.server_state.connections):
            wanted = _waits_for(connection)
            if wanted is None:
                continue
            known, since = self._waiting.get(connection, (wanted, now))
            if known != wanted:
                since = now
            if now - since > self.client_seconds:
                connection.transport.abort()
            else:
                waiting[connection] = wanted, since
        self._waiting = waiting


def _waits_for(connection: Any) -> object:
    """Returns what a connection waits for its client to do; `None` if it is the service's turn."""
    if not hasattr(connection, "cycle"):
        return None
    cycle = connection.cycle
    if cycle is None or cycle.response_complete:
        return "a request", cycle
    if cycle.more_body:
        return "the rest of the body", cycle
    if connection.flow.write_paused:
        return "taking the answer", cycle
    return None


def listen(host: str, port: int) -> socket.socket:
    """Opens the socket to serve on, or says why it cannot be had."""
    require(0 <= port <= 65535, f"cannot listen on port {port}: give --port 0 to 65535 (0 takes a free one)")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio turns off Nagle's algorithm only where the protocol is named: it costs 40 ms a request
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(512)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        reason = error.strerror or str(error)
        raise StamError(
            f"cannot listen on {host} port {port}: {reason}; give another with --port (0 takes a free one)"
        ) from error
