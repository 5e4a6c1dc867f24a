"""How much a client may ask of the service, and what holds it to that."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from stam.errors import require

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """What the service allows.

    Attributes:
        max_sessions: Sessions open at once.
        idle_seconds: How long a session is kept after its latest use.
        lifetime_seconds: How long a session is kept at all.
        max_upload_bytes: Bytes of a request.
        max_upload_pixels: Pixels of an uploaded image, counted before it is decoded.
        max_uploads: Images that are being uploaded at once; of these one at a time is decoded.
        max_connections: Connections open at once; a request on one more is answered 503.
        client_seconds: How long a client may take to send a request, and to take the answer.
    """

    max_sessions: int = 256
    idle_seconds: float = 600.0
    lifetime_seconds: float = 3600.0
    max_upload_bytes: int = 16_000_000
    max_upload_pixels: int = 40_000_000
    max_uploads: int = 4
    max_connections: int = 512
    client_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Checks the limits."""
        for name in self.__dataclass_fields__:
            require(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}")


class _BodyTooLargeError(Exception):
    pass


class BodyLimit:
    """Refuses a request that is too long, by its header or, if that lies, as it arrives."""

    def __init__(self, app: App, max_bytes: int, exceptions: Mapping[str, int]) -> None:
        """Wraps the application.

        Args:
            app: What to pass requests on to.
            max_bytes: What a body may have.
            exceptions: The same for paths that take more.
        """
        self.app, self.max_bytes, self.exceptions = app, max_bytes, exceptions

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes the request on, and counts its bytes."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        max_bytes = self.exceptions.get(scope["path"], self.max_bytes)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        too_long = announced.isdigit() and int(announced) > max_bytes
        arrived = 0

        async def counted() -> Message:
            nonlocal arrived, too_long
            message = await receive()
            arrived += len(message.get("body", b""))
            too_long = arrived > max_bytes
            if too_long:
                raise _BodyTooLargeError
            return message

        async def unless_refused(message: Message) -> None:
            if not too_long:  # what the application makes of a body cut off is of no interest
                await send(message)

        if not too_long:
            with suppress(_BodyTooLargeError):
                await self.app(scope, counted, unless_refused)
        if too_long:
            await refuse(send, 413, f"a request may have {max_bytes} bytes: send less")


class SameOrigin:
    """Refuses what a page of another site would have a visitor's browser do here."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes on what comes from our page, or from no page at all."""
        headers = dict(scope.get("headers", []))
        origin = headers.get(b"origin")
        if origin is not None and origin.split(b"//")[-1] != headers.get(b"host"):
            await refuse(send, 403, "requests from pages of other sites are not answered")
        else:
            await self.app(scope, receive, send)


class AnswerWhenStopped:
    """Answers requests that are cut off when the service stops: uvicorn prints a traceback for each."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes the request on; whoever is still waiting at the end is told."""
        answered = False

        async def noting(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except asyncio.CancelledError:
            if scope["type"] == "http" and not answered:
                await refuse(send, 503, "the service is stopping: ask again later")


async def refuse(send: Send, code: int, message: str) -> None:
    """Answers with an error before the application is asked."""
    body = json.dumps({"error": message}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class SecurityHeaders:
    """Tells browsers to load nothing from elsewhere and to let nobody frame the page."""

    HEADERS = (
        (
            b"content-security-policy",
            b"default-src 'self'; img-src 'self' blob: data:; "
            b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-cache"),
    )

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Adds the headers to every answer."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self.HEADERS]
            await send(message)

        await self.app(scope, receive, with_headers)
