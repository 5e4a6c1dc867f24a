"""An episode: an agent looks at a batch of scenes, one glimpse at a time.

`rollout` is the one loop that training, evaluation, early exit and policy maps share. It knows an agent only
as something that remembers glimpses and, asked, says what it believes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from stam.errors import StamError
from stam.model.belief import Belief, ensemble_log_probabilities
from stam.model.policy import Decision, Policy
from stam.model.randomness import Randomness
from stam.scene.grid import Grid
from stam.shapes import Bool, Float, Int

Sense = Callable[[Tensor, Tensor], Tensor]  # (samples (B,), locations (B,)) -> glimpses (B, C, h, w)


@runtime_checkable
class EpisodeAgent(Protocol):
    """What an episode needs of an agent (`model.agent.Looker`, which imports this module)."""

    @property
    def grid(self) -> Grid:
        """The geometry of a scene."""
        ...

    def remember(self, memory: Any, glimpses: Tensor, locations: Tensor) -> Any:
        """Returns the memory with one more glimpse for each sample; `None` is the empty memory."""
        ...

    def sample_drop_path(self, batch_size: int, generator: Randomness = None) -> Tensor | None:
        """Draws drop-path masks, or `None` outside training."""
        ...

    def believe(self, memory: Any, drop_masks: Tensor | None = None) -> Belief:
        """Says what the glimpses in memory mean."""
        ...


@dataclass(frozen=True)
class Step:
    """An episode after `num_glimpses` glimpses, and where it goes from here.

    Attributes:
        num_glimpses: Glimpses sensed so far (the paper's t + 1).
        samples: Which samples of the batch these are: all, or those that have not left.
        location: Where the latest glimpse was sensed.
        seen: All locations sensed so far.
        belief: What the agent makes of them.
        drop_masks: The drop-path masks `belief` was computed with.
        memory: What the agent remembers of them.
        done: Which of the samples leave now; `None` where none can.
        decision: Where the samples that stay look next (all of them, if none can leave); `None` at the last
            glimpse.
        next_memory: Their memory with that next glimpse; `None` at the last glimpse.
    """

    num_glimpses: int
    samples: Int[Tensor, " batch"]
    location: Int[Tensor, " batch"]
    seen: Bool[Tensor, "batch locations"]
    belief: Belief
    drop_masks: Tensor | None
    memory: Any = None
    done: Bool[Tensor, " batch"] | None = None
    decision: Decision | None = None
    next_memory: Any = None


def rollout(
    agent: EpisodeAgent,
    sense: Sense,
    num_glimpses: int,
    first_location: Int[Tensor, " batch"],
    policy: Policy,
    generator: Randomness = None,
    leave_when: Callable[[Belief], Bool[Tensor, " batch"]] | None = None,
) -> Iterator[Step]:
    """Looks at a batch of scenes, yielding after every glimpse.

    The caller may update the agent between two steps. By then the next location has been chosen and sensed;
    everything else is computed anew from the agent's memory.

    Args:
        agent: Remembers glimpses and says what they mean.
        sense: Given samples and a location for each, returns the glimpses there.
        num_glimpses: Glimpses to sense, at most the locations of the grid.
        first_location: Where each sample's first glimpse is sensed.
        policy: Picks every later location.
        generator: Source of randomness for the policy and for drop-path.
        leave_when: Says of which samples enough has been seen. They leave the batch: from then on nothing
            is sensed, encoded or decided for them. By default all stay.
    """
    require_num_glimpses(num_glimpses, agent.grid)
    device = first_location.device
    samples, location = torch.arange(len(first_location), device=device), first_location
    seen = torch.zeros(len(samples), agent.grid.num_locations, dtype=torch.bool, device=device)
    memory = agent.remember(None, sense(samples, location), location)
    for count in range(1, num_glimpses + 1):
        seen = seen.scatter(1, location[:, None], True)
        drop_masks = agent.sample_drop_path(len(samples), generator)
        belief = agent.believe(memory, drop_masks)
        done = None if leave_when is None else leave_when(belief)
        step = Step(count, samples, location, seen, belief, drop_masks, memory, done)
        state = belief.state
        if done is not None and bool(done.any()):
            stay = (~done).nonzero().squeeze(1)
            memory, policy = memory.select(stay), policy.select(stay)
            samples, seen, state = samples[stay], seen[stay], state[stay]
        if count == num_glimpses or len(samples) == 0:
            yield step
            return
        decision = policy.decide(state, seen, generator, num_seen=count)
        location = decision.location
        memory = agent.remember(memory, sense(samples, location), location)
        yield replace(step, decision=decision, next_memory=memory)


def sense_images(images: Float[Tensor, "scenes channels height width"], grid: Grid) -> Sense:
    """Returns what cuts glimpses out of whole images, and touches no other pixel."""

    def sense(samples: Tensor, locations: Tensor) -> Tensor:
        return grid.cut(images, locations[:, None], samples)[:, 0]

    return sense


def require_num_glimpses(num_glimpses: int, grid: Grid) -> None:
    """Raises unless that many different glimpses can be sensed."""
    if not 1 <= num_glimpses <= grid.num_locations:
        raise StamError(
            f"num_glimpses must be 1 to {grid.num_locations} on a {grid.rows}x{grid.columns} grid, "
            f"got {num_glimpses}"
        )


@dataclass(frozen=True)
class Trace:
    """What an agent looked at in a batch of scenes, and what it made of it after each glimpse.

    Attributes:
        locations: Grid index of each glimpse.
        class_logits: Logits of classifier G.
        distill_logits: Logits of classifier D.
        probabilities: Ensemble probabilities, calibrated if the agent is.
        grid: Where glimpses lie.
    """

    locations: Int[Tensor, "batch glimpses"]
    class_logits: Float[Tensor, "batch glimpses classes"]
    distill_logits: Float[Tensor, "batch glimpses classes"]
    probabilities: Float[Tensor, "batch glimpses classes"]
    grid: Grid

    @property
    def predictions(self) -> Int[Tensor, "batch glimpses"]:
        """The most probable class after each glimpse."""
        return self.probabilities.argmax(dim=-1)

    @property
    def confidences(self) -> Float[Tensor, "batch glimpses"]:
        """The probability of that class."""
        return self.probabilities.amax(dim=-1)

    @property
    def readouts(self) -> tuple[Float[Tensor, "batch glimpses classes"], ...]:
        """Logits of both classifiers; the mean of their probabilities is the answer."""
        return self.class_logits, self.distill_logits

    @property
    def boxes(self) -> Float[Tensor, "batch glimpses 1 4"]:
        """Top, left, bottom and right of each glimpse, as shares of the scene."""
        rows = self.locations.div(self.grid.columns, rounding_mode="floor")
        columns = self.locations % self.grid.columns
        corners = torch.stack((rows, columns, rows + 1, columns + 1), dim=-1).float()
        counts = corners.new_tensor([self.grid.rows, self.grid.columns] * 2)
        return (corners / counts).unsqueeze(2)

    @property
    def sizes(self) -> Int[Tensor, "glimpses 1 2"]:
        """Height and width of each glimpse in pixels."""
        return torch.tensor(self.grid.glimpse_size).expand(self.locations.shape[1], 1, 2)

    @property
    def pixels(self) -> Int[Tensor, "batch glimpses"]:
        """Pixels sensed after each glimpse."""
        counts = torch.arange(1, self.locations.shape[1] + 1, device=self.locations.device)
        return (counts * self.grid.glimpse_area).expand_as(self.locations)

    @classmethod
    def of(cls, steps: list[tuple[Tensor, Belief]], grid: Grid, temperature: float = 1.0) -> "Trace":
        """Puts together where each glimpse was sensed and what was believed after it."""
        class_logits = torch.stack([belief.class_logits for _, belief in steps], dim=1)
        distill_logits = torch.stack([belief.distill_logits for _, belief in steps], dim=1)
        log_p = ensemble_log_probabilities(class_logits / temperature, distill_logits / temperature)
        return cls(
            locations=torch.stack([location for location, _ in steps], dim=1),
            class_logits=class_logits,
            distill_logits=distill_logits,
            probabilities=log_p.exp(),
            grid=grid,
        )
