"""Serving a system that looks at whole scenes: it is sent one, and says what each of its looks sensed.

An agent of ours is fed one glimpse after another (`app`). Other systems need the scene, so their API is one
route, and their page (`page/looks.html`) shows the looks one by one.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
import torch
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field

from stam.model.looker import SceneLooker, require_answers
from stam.scene.pixels import normalise
from stam.shapes import UInt8
from stam.web.app import OWN_NAMES, PAGE, SceneService, add_scene_routes, guarded_app
from stam.web.limits import Limits
from stam.web.scenes import SampleScene, encode_png, fitted, image_header, read_upload, sample_scenes
from stam.web.schemas import LimitsInfo, Problem

_BYTES_A_PIXEL = 8  # of a scene as an image, however badly it was compressed
_HEADER_BYTES = 100_000


class LookerInfo(BaseModel):
    """What looks, and what it needs."""

    name: str
    version: str
    labels: list[str]
    image_size: tuple[int, int] = Field(description="[height, width] of a scene in pixels")
    most_glimpses: int = Field(description="looks it takes")
    whole_to_attend: bool = Field(description="whether the complete image is used to choose where to look")
    whole_to_classify: bool = Field(description="whether the complete image is used to classify")
    policy: str
    policies: list[str]
    limits: LimitsInfo


class View(BaseModel):
    """A rectangle of the scene that a look sensed."""

    box: tuple[float, float, float, float] = Field(
        description="top, left, bottom and right as shares of the scene, which it may exceed"
    )
    size: tuple[int, int] = Field(description="[height, width] in pixels it was sensed at")


class Look(BaseModel):
    """What a look sensed, and the answer after it."""

    views: list[View]
    pixels: int = Field(description="pixels used to classify, up to this look")
    label: str
    confidence: float
    probabilities: list[float] = Field(description="of each label")


class LookService(SceneService):
    """A looker and the sample scenes."""

    def __init__(
        self,
        looker: SceneLooker,
        name: str = "looker",
        limits: Limits | None = None,
        scenes: Sequence[SampleScene] | None = None,
        resize_size: int | None = None,
    ) -> None:
        found = sample_scenes(looker.facts, None, resize_size) if scenes is None else scenes
        super().__init__(name, limits, found)
        self.looker, self.resize_size = looker, resize_size

    def app(self, hosts: Sequence[str] = OWN_NAMES) -> FastAPI:
        """Builds the application."""
        return create_looks_app(self, hosts)

    def read_scene(self, body: bytes) -> bytes:
        """Brings an uploaded image to the size that is looked at."""
        image = read_upload(body, self.limits.max_upload_pixels)
        return encode_png(fitted(image, self.looker.facts, self.resize_size))

    def describe(self) -> LookerInfo:
        """Says what looks."""
        from stam import __version__

        facts = self.looker.facts
        return LookerInfo(
            name=self.name,
            version=__version__,
            labels=list(facts.labels),
            image_size=facts.image_size,
            most_glimpses=facts.most_glimpses,
            whole_to_attend=facts.whole_to_attend,
            whole_to_classify=facts.whole_to_classify,
            policy=facts.policy,
            policies=list(facts.policies or (facts.policy,)),
            limits=LimitsInfo(**asdict(self.limits)),
        )

    def read_fitting(self, body: bytes) -> UInt8[np.ndarray, "height width 3"]:
        """Decodes a scene that has the size that is looked at; any other is refused."""
        height, width = self.looker.facts.image_size
        found = image_header(body)
        if found != (width, height):
            raise HTTPException(
                422, f"a scene is {height}x{width} pixels, got {found[1]}x{found[0]}: /api/view resizes it"
            )
        return read_upload(body, height * width)

    def look(self, body: bytes, policy: str | None, seed: int) -> list[Look]:
        """Looks at a scene, always in the same way with the same seed."""
        facts = self.looker.facts
        pixels = torch.from_numpy(self.read_fitting(body).copy()).permute(2, 0, 1)[None]
        images = normalise(pixels, facts.mean, facts.std).to(self.looker.device)
        generator = torch.Generator().manual_seed(seed)
        trace = self.looker.look(images, facts.most_glimpses, policy=policy, generator=generator)
        require_answers(trace)
        boxes, sizes = trace.boxes[0].tolist(), trace.sizes.tolist()
        looks = []
        for number, likely in enumerate(trace.probabilities[0].float().tolist()):
            parts = zip(boxes[number], sizes[number], strict=True)
            best = max(range(len(likely)), key=likely.__getitem__)
            looks.append(
                Look(
                    views=[View(box=box, size=size) for box, size in parts if box[2] > box[0]],
                    pixels=int(trace.pixels[0, number]),
                    label=facts.labels[best],
                    confidence=likely[best],
                    probabilities=[round(value, 6) for value in likely],
                )
            )
        return looks


def create_looks_app(service: LookService, hosts: Sequence[str] = OWN_NAMES) -> FastAPI:
    """Builds the application; see `stam.web.create_app`."""
    height, width = service.looker.facts.image_size
    app = guarded_app(
        service,
        hosts,
        min(service.limits.max_upload_bytes, _HEADER_BYTES + _BYTES_A_PIXEL * height * width),
        title="STAM zoo",
        summary="A hard-attention system that says where it looked.",
        description="Post a scene; `/api/view` brings any image to its size.",
        version=service.describe().version,
    )
    problems: dict[int | str, dict[str, Any]] = {code: {"model": Problem} for code in (413, 422, 503)}

    @app.get("/api/looker", tags=["looks"], summary="What looks")
    async def describe() -> LookerInfo:
        return service.describe()

    @app.post(
        "/api/looks",
        tags=["looks"],
        summary="Look at a scene",
        responses=problems,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}},
            }
        },
    )
    async def look(
        request: Request,
        policy: Annotated[str | None, Query(max_length=40)] = None,
        seed: Annotated[int, Query(ge=0, le=2**31)] = 0,
    ) -> list[Look]:
        """Returns what each look sensed and the answer after it. Nothing is kept."""
        with service.uploading():
            return await service.decoding(service.look, await request.body(), policy, seed)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "looks.html")

    add_scene_routes(app, service)
    app.mount("/", StaticFiles(directory=PAGE), name="page")
    return app
