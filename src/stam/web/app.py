"""The routes of the service. Thin: sessions live in a `SessionPool`, and the page is one more sensor."""

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import Body, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from PIL import Image
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from stam.errors import StamError
from stam.files import shown
from stam.live import (
    AllSeenError,
    OutOfStepError,
    PoolFullError,
    Session,
    SessionPool,
    UnknownSessionError,
)
from stam.model.agent import Looker
from stam.model.policy import POLICIES
from stam.web.limits import BodyLimit, Limits, SameOrigin, SecurityHeaders
from stam.web.scenes import (
    SampleScene,
    TooManyPixelsError,
    encode_png,
    fitted,
    image_header,
    read_upload,
    sample_scenes,
    thumbnail,
)
from stam.web.schemas import (
    AgentInfo,
    Conflict,
    GridInfo,
    LimitsInfo,
    MissedGlimpse,
    NewAnimation,
    NewSession,
    Problem,
    Rewind,
    SceneInfo,
    SessionInfo,
    Step,
)

PAGE = Path(__file__).parent / "page"
OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")
RAW_PIXELS = "application/octet-stream"
UPLOAD_PATH = "/api/view"
ANIMATION_PATH = "/api/animation"
BESIDE_PATH = "/beside"
_SMALL_BODY = 100_000  # bytes: a glimpse, however badly it was compressed, or some JSON

SessionId = Annotated[str, PathParameter(pattern="^[A-Za-z0-9_-]{1,64}$", description="from opening it")]
WithMap = Annotated[bool, Query(alias="map", description="whether to answer with the policy map too")]
Expected = Annotated[
    int | None,
    Query(ge=0, le=100_000, description="glimpses of the session before this one, as last answered"),
]
SceneId = Annotated[int, PathParameter(ge=0, le=100_000)]
OptionalIndex = Annotated[int | None, Query(ge=0, le=100_000)]

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_IMAGES = dict.fromkeys(("image/png", "image/jpeg", "image/webp"), _BINARY)


Result = TypeVar("Result")


def _problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    meanings = {
        400: "A body that cannot even be decoded",
        404: "There is no such thing, or it has expired",
        409: "The session is not in a state that allows it",
        413: "Too many bytes or pixels",
        415: "A body of another kind than those listed",
        422: "The request is not as it must be; the error says in what",
        429: "As many sessions are open as may be",
        503: "As many images are being uploaded as may be",
    }
    models = {409: Conflict}
    return {code: {"model": models.get(code, Problem), "description": meanings[code]} for code in codes}


def _refuse(code: int, message: str) -> HTTPException:
    return HTTPException(code, message)


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


class SceneService:
    """What services of any kind share: a name, limits, sample scenes, and care with what strangers send."""

    def __init__(self, name: str, limits: Limits | None, scenes: Sequence[SampleScene]) -> None:
        self.name, self.limits, self.scenes = shown(name), limits or Limits(), list(scenes)
        self._num_uploads = 0
        self._decoder = asyncio.Semaphore(1)

    def app(self, hosts: Sequence[str]) -> FastAPI:
        """Builds the application; see `create_app`."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what runs beside the application."""

    def read_scene(self, body: bytes) -> bytes:
        """Brings an uploaded image to the size that is looked at."""
        raise NotImplementedError

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Counts an image that is being uploaded, or refuses it where too many are."""
        if self._num_uploads >= self.limits.max_uploads:
            raise HTTPException(
                503,
                f"{self.limits.max_uploads} images are being uploaded, and no more may be: try again later",
                {"Retry-After": "1"},
            )
        self._num_uploads += 1
        try:
            yield
        finally:
            self._num_uploads -= 1

    async def decoding(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Runs what decodes an image beside the event loop, one at a time: pixels take much memory."""
        async with self._decoder:
            return await run_in_threadpool(function, *arguments)


class Service(SceneService):
    """An agent, its sessions and the sample scenes: what the routes share."""

    def __init__(
        self,
        agent: Looker,
        name: str = "agent",
        limits: Limits | None = None,
        scenes: Sequence[SampleScene] | None = None,
        resize_size: int | None = None,
        beside: "Service | None" = None,
    ) -> None:
        """Prepares to serve an agent.

        Args:
            agent: Who looks.
            name: What to call it.
            limits: What is allowed.
            scenes: For the page to offer; by default those that ship.
            resize_size: The shorter side of an image before its centre is cropped.
            beside: A second agent that the page shows next to this one.
        """
        super().__init__(name, limits, sample_scenes(agent.facts) if scenes is None else scenes)
        self.agent, self.resize_size, self.beside = agent, resize_size, beside
        self.pool = SessionPool(
            agent,
            max_sessions=self.limits.max_sessions,
            idle_seconds=self.limits.idle_seconds,
            lifetime_seconds=self.limits.lifetime_seconds,
        )

    def app(self, hosts: Sequence[str] = OWN_NAMES) -> FastAPI:
        """Builds the application; see `create_app`."""
        return create_app(self, hosts)

    def close(self) -> None:
        """Ends the sessions."""
        self.pool.close()
        if self.beside is not None:
            self.beside.close()

    @property
    def max_glimpse_bytes(self) -> int:
        """Bytes of any request but an upload: a glimpse encoded by whatever means."""
        height, width = self.agent.grid.glimpse_size
        raw = height * width * self.agent.config.channels
        return min(self.limits.max_upload_bytes, max(_SMALL_BODY, 4 * raw))

    def policies(self) -> list[str]:
        """Returns the policies that a session may name, the agent's own first."""
        own, has_actor = self.agent.config.policy, self.agent.actor is not None
        return list(dict.fromkeys((own, *(name for name in POLICIES if name != "learned" or has_actor))))

    def describe(self) -> AgentInfo:
        """Says what a sensor needs to know of the agent."""
        from stam import __version__

        config, grid = self.agent.config, self.agent.grid
        return AgentInfo(
            name=self.name,
            version=__version__,
            labels=list(self.agent.labels),
            grid=GridInfo(
                rows=grid.rows,
                columns=grid.columns,
                image_size=grid.image_size,
                glimpse_size=grid.glimpse_size,
            ),
            channels=config.channels,
            mean=list(config.mean),
            std=list(config.std),
            threshold=config.threshold,
            temperature=config.temperature,
            policy=config.policy,
            policies=self.policies(),
            limits=LimitsInfo(**asdict(self.limits)),
            beside=None if self.beside is None else self.beside.name,
        )

    def session(self, key: str) -> SessionInfo:
        """Says how a session stands."""
        session = self.pool.get(key)
        return SessionInfo(
            id=key,
            policy=session.policy_name or "",
            threshold=session.threshold,
            location=session.location,
            num_glimpses=session.num_glimpses,
            seen=list(session.seen),
            missed=list(session.missed_locations),
            expires_in=round(self.pool.expires_in(key), 1),
            step=None if session.step is None else Step.of(session.step),
        )

    def read_glimpse(self, content_type: str, body: bytes) -> Any:
        """Turns a request's body into a glimpse: raw pixels, or an encoded image of exactly its size."""
        height, width = self.agent.grid.glimpse_size
        channels = self.agent.config.channels
        if content_type == RAW_PIXELS:
            expected = height * width * channels
            if len(body) != expected:
                raise _refuse(
                    422,
                    f"a raw glimpse is {height}x{width} pixels of {channels} channels, {expected} bytes, "
                    f"row by row; got {len(body)}",
                )
            return np.frombuffer(body, dtype=np.uint8).reshape(height, width, channels).copy()
        size = image_header(body)
        if size != (width, height):
            raise _refuse(422, f"a glimpse is {height}x{width} pixels, got {size[1]}x{size[0]}: crop it")
        return Image.fromarray(read_upload(body, height * width))

    def read_scene(self, body: bytes) -> bytes:
        """Brings an uploaded image to the agent's size."""
        image = read_upload(body, self.limits.max_upload_pixels)
        return encode_png(fitted(image, self.agent.facts, self.resize_size))

    def animation(self, asked: NewAnimation) -> bytes:
        """Draws a look as a GIF."""
        from stam.show.animations import animation_bytes  # here, since few who serve ask for one
        from stam.show.pictures import Story

        grid = self.agent.grid
        height, width = grid.image_size
        if len(asked.steps) > grid.num_locations:
            raise _refuse(422, f"steps: {len(asked.steps)} given, a scene has {grid.num_locations} glimpses")
        try:
            body = base64.b64decode(asked.scene, validate=True)
        except (binascii.Error, ValueError) as error:
            raise _refuse(422, "scene: it is not base64 of an image") from error
        size = image_header(body)
        if size != (width, height):
            raise _refuse(422, f"scene: it is {height}x{width} pixels, got {size[1]}x{size[0]}")
        labels = [shown(step.label) for step in asked.steps]
        truth = None if asked.truth is None else shown(asked.truth)
        story = Story(
            name=shown(asked.name) if truth is None else truth,
            image=read_upload(body, height * width),
            grid=grid,
            locations=[grid.index(step.location) for step in asked.steps],
            labels=labels,
            confidences=[step.confidence for step in asked.steps],
            right=None if truth is None else [label == truth for label in labels],
            unsure=asked.unsure,
        )
        return animation_bytes([story], milliseconds=asked.milliseconds)


def create_app(service: Service, hosts: Sequence[str] = OWN_NAMES) -> FastAPI:
    """Builds the application.

    Args:
        service: What it serves.
        hosts: Names the service may be called by; any other is refused, lest a page of somebody else's reach
            it through a name that points here. `*` allows all.
    """
    app = guarded_app(
        service,
        hosts,
        max(each.max_glimpse_bytes for each in (service, service.beside) if each is not None),
        title="STAM",
        summary="An agent that classifies a scene it never sees whole, one glimpse at a time.",
        description="Open a session, sense a glimpse where it says, post it, and go on until `stop`.",
        version=service.describe().version,
    )
    _add_session_routes(app, service)
    add_scene_routes(app, service)
    _add_animation_route(app, service)
    if service.beside is not None:
        second = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        _add_error_handlers(second, service.beside)
        _add_session_routes(second, service.beside)
        app.mount(BESIDE_PATH, second)
    app.mount("/", StaticFiles(directory=PAGE, html=True), name="page")
    return app


def guarded_app(service: SceneService, hosts: Sequence[str], max_bytes: int, **about: str) -> FastAPI:
    """Builds an application without routes that keeps the limits and answers mistakes in words.

    Args:
        service: What it serves.
        hosts: See `create_app`.
        max_bytes: Most bytes of a request that is no upload.
        about: Title, summary and so on of the API.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    # without FastAPI's own pages, which load their scripts from elsewhere
    app = FastAPI(docs_url=None, redoc_url=None, lifespan=lifespan, **about)  # type: ignore[arg-type]
    app.add_middleware(
        BodyLimit,
        max_bytes=max_bytes,
        exceptions=dict.fromkeys((UPLOAD_PATH, ANIMATION_PATH), service.limits.max_upload_bytes),
    )
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    app.add_middleware(SameOrigin)
    app.add_middleware(SecurityHeaders)
    _add_error_handlers(app, service)
    return app


def _add_error_handlers(app: FastAPI, service: SceneService) -> None:
    def answer(code: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": shown(message)}, code, headers)

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> JSONResponse:
        headers = dict(error.headers) if error.headers else None
        return answer(error.status_code, str(error.detail), headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        found = [(".".join(map(str, problem["loc"])), problem["msg"]) for problem in error.errors()]
        return answer(422, "; ".join(f"{where}: {what}" for where, what in found))

    @app.exception_handler(UnknownSessionError)
    async def unknown(request: Request, error: UnknownSessionError) -> JSONResponse:
        return answer(404, str(error))

    @app.exception_handler(PoolFullError)
    async def full(request: Request, error: PoolFullError) -> JSONResponse:
        return answer(429, str(error), {"Retry-After": str(int(min(service.limits.idle_seconds, 60)))})

    @app.exception_handler(TooManyPixelsError)
    async def too_many_pixels(request: Request, error: TooManyPixelsError) -> JSONResponse:
        return answer(413, str(error))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it, and it is no fault of the service's

    @app.exception_handler(AllSeenError)
    async def all_seen(request: Request, error: AllSeenError) -> JSONResponse:
        return answer(409, str(error))

    @app.exception_handler(OutOfStepError)
    async def out_of_step(request: Request, error: OutOfStepError) -> JSONResponse:
        location = None if error.location is None else list(error.location)
        conflict = Conflict(error=str(error), num_glimpses=error.num_glimpses, location=location)
        return JSONResponse(conflict.model_dump(), 409)

    @app.exception_handler(StamError)
    async def mistake(request: Request, error: StamError) -> JSONResponse:
        return answer(422, str(error))


def _add_session_routes(app: FastAPI, service: Service) -> None:
    pool = service.pool

    @app.get("/api/agent", tags=["agent"], summary="What the agent is")
    async def describe() -> AgentInfo:
        return service.describe()

    @app.post(
        "/api/sessions",
        status_code=201,
        tags=["sessions"],
        summary="Open a session",
        responses=_problems(400, 413, 422, 429),
    )
    async def open_session(settings: Annotated[NewSession | None, Body()] = None) -> SessionInfo:
        asked = settings or NewSession.model_validate({})
        key = pool.open(asked.first_location, asked.policy, asked.seed, asked.threshold)
        return service.session(key)

    @app.get(
        "/api/sessions/{session_id}",
        tags=["sessions"],
        summary="How a session stands",
        responses=_problems(404, 422),
    )
    async def read_session(session_id: SessionId) -> SessionInfo:
        return service.session(session_id)

    @app.delete(
        "/api/sessions/{session_id}",
        status_code=204,
        tags=["sessions"],
        summary="Close a session",
        responses=_problems(404, 422),
    )
    async def close_session(session_id: SessionId) -> None:
        pool.discard(session_id)

    @app.post(
        "/api/sessions/{session_id}/glimpses",
        tags=["sessions"],
        summary="Post a glimpse",
        responses=_problems(404, 409, 413, 415, 422),
        openapi_extra={
            "requestBody": {
                "required": True,
                "description": "The glimpse: an image of exactly the glimpse size, or its raw pixels as "
                "bytes (height, width, channels), row by row.",
                "content": {**_IMAGES, RAW_PIXELS: _BINARY},
            }
        },
    )
    async def post_glimpse(
        request: Request,
        session_id: SessionId,
        row: OptionalIndex = None,
        column: OptionalIndex = None,
        num_glimpses: Expected = None,
        with_map: WithMap = False,
    ) -> Step:
        """Tells the agent what was sensed.

        Which glimpse it is must be said, so that one sent twice is not taken for two: by `row` and `column`,
        where it was sensed; by `num_glimpses` as last answered, if it was sensed where the agent asked; or by
        all three. A request that got no answer may be sent again. A location seen before is allowed: the
        new glimpse takes the place of the old one.
        """
        pool.get(session_id)  # before a body is read
        content_type = _content_type(request)
        if content_type not in (RAW_PIXELS, *_IMAGES):
            raise _refuse(415, f"a glimpse is {', '.join((*_IMAGES, RAW_PIXELS))}; got '{content_type}'")
        if (row is None) != (column is None):
            raise _refuse(422, "give both row and column, or neither")
        location = None if row is None or column is None else (row, column)
        if location is None and num_glimpses is None:
            raise _refuse(
                422,
                "say which glimpse it is, so that one sent twice is not taken for two: num_glimpses as last "
                "answered, or row and column",
            )
        glimpse = service.read_glimpse(content_type, await request.body())
        step = await asyncio.wrap_future(pool.submit(session_id, glimpse, location, num_glimpses))
        return Step.of(step, await policy_map(session_id) if with_map else None)

    @app.post(
        "/api/sessions/{session_id}/missed",
        tags=["sessions"],
        summary="Say that a glimpse failed to arrive",
        responses=_problems(400, 404, 409, 413, 422),
    )
    async def miss_glimpse(
        session_id: SessionId, missed: Annotated[MissedGlimpse | None, Body()] = None
    ) -> SessionInfo:
        """The agent asks for another place, and comes back to this one when no other is left."""
        location = missed.location if missed is not None else None
        session = pool.get(session_id)
        if location is None and session.location is None:
            raise _refuse(409, "every location has been seen: none is asked for")
        if location in session.seen:
            raise _refuse(409, f"location {list(location)} has been seen: it cannot be missed")
        await asyncio.wrap_future(pool.call(session_id, lambda session: session.missed(location)))
        return service.session(session_id)

    @app.post(
        "/api/sessions/{session_id}/rewind",
        tags=["sessions"],
        summary="Forget the latest glimpses",
        responses=_problems(400, 404, 409, 413, 422),
    )
    async def rewind(session_id: SessionId, rewind: Rewind) -> SessionInfo:
        """Keeps the first `num_glimpses` and has the agent think again from there."""
        seen = pool.get(session_id).num_glimpses
        if rewind.num_glimpses > seen:
            raise _refuse(409, f"cannot rewind to {rewind.num_glimpses} glimpses: {seen} have been seen")
        await asyncio.wrap_future(pool.call(session_id, lambda session: session.rewind(rewind.num_glimpses)))
        return service.session(session_id)

    @app.get(
        "/api/sessions/{session_id}/map",
        tags=["sessions"],
        summary="How likely each location comes next",
        responses=_problems(404, 422),
    )
    async def read_map(session_id: SessionId) -> list[list[float]]:
        """Returns rows of columns; 0 where a location was seen or missed."""
        return await policy_map(session_id)

    async def policy_map(session_id: str) -> list[list[float]]:
        likely = await asyncio.wrap_future(pool.call(session_id, Session.policy_map))
        return [[round(value, 6) for value in row] for row in likely.tolist()]


def _add_animation_route(app: FastAPI, service: Service) -> None:
    gif: dict[int | str, dict[str, Any]] = {
        200: {"content": {"image/gif": _BINARY}, "description": "A frame for each glimpse"}
    }

    @app.post(
        ANIMATION_PATH,
        tags=["scenes"],
        summary="Draw a look as a GIF",
        response_class=Response,
        responses=gif | _problems(400, 413, 422, 503),
    )
    async def animate(asked: NewAnimation) -> Response:
        """Draws the glimpses in the order they were sensed. Nothing is kept."""
        with service.uploading():
            return Response(await service.decoding(service.animation, asked), media_type="image/gif")


def add_scene_routes(app: FastAPI, service: SceneService) -> None:
    """Adds the sample scenes, and the one that brings an image to size."""

    def known(scene_id: int) -> SampleScene:
        if scene_id >= len(service.scenes):
            raise _refuse(404, f"no scene {scene_id}: there are {len(service.scenes)}, from 0")
        return service.scenes[scene_id]

    @app.get("/api/scenes", tags=["scenes"], summary="Sample scenes")
    async def list_scenes() -> list[SceneInfo]:
        return [
            SceneInfo(id=index, name=scene.name, label=scene.label)
            for index, scene in enumerate(service.scenes)
        ]

    png: dict[int | str, dict[str, Any]] = {
        200: {"content": {"image/png": _BINARY}, "description": "A scene of the agent's image size"}
    }

    @app.get(
        "/api/scenes/{scene_id}",
        tags=["scenes"],
        summary="A sample scene",
        response_class=Response,
        responses=png | _problems(404, 422),
    )
    async def read_scene(scene_id: SceneId) -> Response:
        pixels = await service.decoding(known(scene_id).load)
        return Response(encode_png(pixels), media_type="image/png")

    jpeg: dict[int | str, dict[str, Any]] = {
        200: {"content": {"image/jpeg": _BINARY}, "description": "A small picture of the scene"}
    }

    @app.get(
        "/api/scenes/{scene_id}/thumbnail",
        tags=["scenes"],
        summary="A sample scene, small",
        response_class=Response,
        responses=jpeg | _problems(404, 422),
    )
    async def read_thumbnail(scene_id: SceneId) -> Response:
        pixels = await service.decoding(known(scene_id).load)
        return Response(thumbnail(pixels), media_type="image/jpeg")

    @app.post(
        UPLOAD_PATH,
        tags=["scenes"],
        summary="Bring an image to the agent's size",
        response_class=Response,
        responses=png | _problems(413, 415, 422, 503),
        openapi_extra={"requestBody": {"required": True, "content": _IMAGES | {"image/*": _BINARY}}},
    )
    async def view(request: Request) -> Response:
        """Resizes and crops as evaluation does. Nothing is kept."""
        content_type = _content_type(request)
        if not content_type.startswith("image/"):
            raise _refuse(415, f"send an image, such as image/png; got '{content_type}'")
        with service.uploading():
            body = await request.body()
            return Response(await service.decoding(service.read_scene, body), media_type="image/png")
