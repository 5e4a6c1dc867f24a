"""What goes over the wire, as JSON; the OpenAPI schema is made of these."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from stam.errors import ConfigError
from stam.files import shown
from stam.live import LiveStep
from stam.model.policy import require_policy


def known_policy(name: str) -> str:
    """Returns a policy's name, if it is one."""
    try:
        require_policy(name)
    except ConfigError as error:
        raise ValueError(shown(str(error))) from error
    return name


PolicyName = Annotated[str, AfterValidator(known_policy), Field(max_length=40)]
Index = Annotated[int, Field(strict=True, ge=0, le=100_000)]
Place = Annotated[tuple[Index, Index], Field(description="[row, column] on the grid, from 0")]
Probability = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]


class Problem(BaseModel):
    """Why a request was refused, and what to do about it."""

    error: str


class Conflict(Problem):
    """The same of a glimpse for another state of the session than it is in, and what that state is."""

    num_glimpses: int | None = Field(None, description="glimpses the session has seen")
    location: list[int] | None = Field(None, description="where it wants to look next, [row, column]")


class GridInfo(BaseModel):
    """Where glimpses lie in a scene."""

    rows: int
    columns: int
    image_size: tuple[int, int] = Field(description="[height, width] of a scene in pixels")
    glimpse_size: tuple[int, int] = Field(description="[height, width] of a glimpse in pixels")


class LimitsInfo(BaseModel):
    """What the service allows."""

    max_sessions: int
    idle_seconds: float
    lifetime_seconds: float
    max_upload_bytes: int
    max_upload_pixels: int
    max_uploads: int
    max_connections: int
    client_seconds: float


class AgentInfo(BaseModel):
    """All that a sensor needs to know of the agent."""

    name: str
    version: str = Field(description="version of stam-vision")
    labels: list[str]
    grid: GridInfo
    channels: int
    mean: list[float] = Field(description="channel means that the service normalises pixels with")
    std: list[float]
    threshold: float = Field(description="confidence above which to stop, unless a session says other")
    temperature: float
    policy: str = Field(description="the agent's own policy")
    policies: list[str] = Field(description="policies a session may name")
    limits: LimitsInfo
    beside: str | None = Field(
        None, description="name of a second agent, whose sessions are under /beside/api"
    )


class NewSession(BaseModel):
    """How a session is to look; everything may be left out."""

    model_config = ConfigDict(extra="forbid")

    policy: PolicyName | None = Field(None, description="who picks locations; by default the agent's own")
    first_location: Place | None = Field(
        None, description="where to look first; by default the agent's own, or drawn from the seed"
    )
    threshold: Probability | None = Field(None, description="confidence above which to stop")
    seed: Annotated[int, Field(strict=True, ge=0, le=2**53 - 1)] | None = Field(
        None, description="makes the first location and a random policy repeatable"
    )


class MissedGlimpse(BaseModel):
    """Which glimpse failed to arrive."""

    model_config = ConfigDict(extra="forbid")

    location: Place | None = Field(None, description="by default the one asked for")


class Rewind(BaseModel):
    """How many glimpses to keep."""

    model_config = ConfigDict(extra="forbid")

    num_glimpses: Index


class Step(BaseModel):
    """What the agent says after a glimpse."""

    label: str
    confidence: float
    probabilities: list[float] = Field(description="one for each label, in their order")
    location: Place | None = Field(description="where to look next; null when everything has been seen")
    stop: bool = Field(description="whether the agent is sure enough, or has seen everything")
    num_glimpses: int
    policy_map: list[list[float]] | None = Field(
        None, description="rows of columns: how likely each location comes next; only where asked for"
    )

    @classmethod
    def of(cls, step: LiveStep, policy_map: list[list[float]] | None = None) -> "Step":
        """Puts a step of a session on the wire."""
        return cls(
            label=step.label,
            confidence=step.confidence,
            probabilities=[round(value, 7) for value in step.probabilities.tolist()],
            location=step.location,
            stop=step.stop,
            num_glimpses=step.num_glimpses,
            policy_map=policy_map,
        )


class SessionInfo(BaseModel):
    """A session as it stands."""

    id: str
    policy: str
    threshold: float
    location: Place | None = Field(description="where to look next; null when everything has been seen")
    num_glimpses: int
    seen: list[Place] = Field(description="in the order they were first sensed")
    missed: list[Place]
    expires_in: float = Field(description="seconds until the session is closed if it is not used")
    step: Step | None = Field(description="what the agent said last; null before the first glimpse")


class AnimationStep(BaseModel):
    """A glimpse of an animation, and what was said after it."""

    model_config = ConfigDict(extra="forbid")

    location: Place
    label: Annotated[str, Field(max_length=200)]
    confidence: Probability


class NewAnimation(BaseModel):
    """What an animation shows; of the scene only the glimpses are drawn."""

    model_config = ConfigDict(extra="forbid")

    scene: Annotated[str, Field(description="an image of the agent's image size, as base64")]
    steps: Annotated[list[AnimationStep], Field(min_length=1, max_length=4096)]
    name: Annotated[str, Field(max_length=200)] = "scene"
    truth: Annotated[str, Field(max_length=200)] | None = Field(None, description="the true class, if known")
    unsure: Annotated[bool, Field(strict=True)] = Field(
        False, description="whether the agent ended without being as confident as it has to be"
    )
    milliseconds: Annotated[int, Field(strict=True, ge=50, le=5000)] = 450


class SceneInfo(BaseModel):
    """A sample scene for the page."""

    id: int
    name: str
    label: str | None = Field(description="what it really shows, where that is known")
