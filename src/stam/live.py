"""Live use: a session is fed one glimpse at a time and never sees the scene."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from stam.config import AgentConfig
from stam.episode import Looker
from stam.errors import SensorError
from stam.policy import Policy
from stam.sensor import Sensor, as_pixels
from stam.shapes import Float, Int


@runtime_checkable
class LiveLooker(Looker, Protocol):
    """An agent a session can be opened on."""

    @property
    def config(self) -> AgentConfig:
        """What the agent is: normalisation, threshold, temperature."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        ...


@dataclass(frozen=True)
class LiveStep:
    """What the agent says after a glimpse.

    Attributes:
        probabilities: Probability of each class.
        label: Name of the most probable class.
        confidence: Its probability.
        location: Where to look next as (row, column); `None` when everything has been seen.
        stop: Whether the agent is sure enough, or has seen everything.
        num_glimpses: Glimpses seen so far.
    """

    probabilities: Float[Tensor, " classes"]
    label: str
    confidence: float
    location: tuple[int, int] | None
    stop: bool
    num_glimpses: int


class Session:
    """One scene being looked at live.

    `location` says where to look; sense a glimpse there and pass it to `observe`, which returns a
    `LiveStep`. Observing goes on past `stop` for whoever wants to be surer.
    """

    def __init__(
        self,
        agent: LiveLooker,
        first_location: Int[Tensor, " one"],
        policy: Policy,
        generator: torch.Generator | None = None,
        threshold: float | None = None,
    ) -> None:
        self._agent, self._policy, self._generator = agent, policy, generator
        self._threshold = agent.config.threshold if threshold is None else threshold
        self._next: Tensor | None = first_location
        self._seen = torch.zeros(1, agent.grid.num_locations, dtype=torch.bool, device=agent.device)
        self._memory: Any = None

    @property
    def location(self) -> tuple[int, int] | None:
        """Where to look next as (row, column); `None` when everything has been seen."""
        return None if self._next is None else self._agent.grid.row_column(int(self._next))

    @torch.no_grad()
    def observe(self, glimpse: Any) -> LiveStep:
        """Takes the glimpse sensed at `location`: a PIL image, uint8 pixels, or normalised floats."""
        if self._next is None:
            raise SensorError("every location has been seen: open a new session for the next scene")
        config, grid = self._agent.config, self._agent.grid
        pixels = as_pixels(glimpse, grid.glimpse_size, "glimpse", config.mean, config.std)
        here = self._next
        self._memory = self._agent.remember(self._memory, pixels[None].to(self._agent.device), here)
        self._seen = self._seen.scatter(1, here[:, None], True)
        belief = self._agent.believe(self._memory)
        probabilities = belief.probabilities(config.temperature)[0]
        num_glimpses = int(self._seen.sum())
        finished = num_glimpses == grid.num_locations
        self._next = None if finished else self._policy.choose(belief.state, self._seen, self._generator)
        best = int(probabilities.argmax())
        confidence = float(probabilities[best])
        return LiveStep(
            probabilities=probabilities,
            label=self._agent.labels[best],
            confidence=confidence,
            location=self.location,
            stop=finished or confidence > self._threshold,
            num_glimpses=num_glimpses,
        )

    def run(self, sensor: Sensor, max_glimpses: int | None = None) -> LiveStep:
        """Senses and observes until the agent is sure, or `max_glimpses` have been sensed."""
        while True:
            location = self.location
            if location is None:
                raise SensorError("every location has been seen: open a new session for the next scene")
            step = self.observe(sensor.sense(location))
            if step.stop or step.num_glimpses == max_glimpses:
                return step
