"""Running the service with uvicorn."""

import socket
from collections.abc import Callable

from stam.errors import StamError, require, require_package
from stam.web.app import OWN_NAMES, Service, create_app

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    service: Service,
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
    uvicorn = require_package("uvicorn", extra="web")
    listener = listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}"
    app = create_app(service, hosts=OWN_NAMES if host in LOOPBACK else ("*",))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    if on_ready is not None:
        on_ready(url)
    try:
        with listener:
            server.run(sockets=[listener])
    finally:
        service.pool.close()  # also where the server failed before it began


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
