"""The one rollout of n glimpses that training, evaluation and live use share.

An episode knows an agent only through the `Looker` protocol: something that remembers glimpses and, asked,
says what it believes. How it remembers (every patch, or a cache of encodings) is its own affair.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from stam.errors import StamError
from stam.model.policy import Decision, Policy
from stam.scene.grid import Grid
from stam.shapes import Bool, Float, Int


@dataclass(frozen=True)
class Belief:
    """What an agent makes of the glimpses it has seen.

    Attributes:
        state: The paper's Markov state s = [f_g ; f_d].
        class_logits: Classifier G, trained on the labels.
        distill_logits: Classifier D, trained to agree with the teacher.
    """

    state: Float[Tensor, "batch features"]
    class_logits: Float[Tensor, "batch classes"]
    distill_logits: Float[Tensor, "batch classes"]

    def log_probabilities(self, temperature: float = 1.0) -> Float[Tensor, "batch classes"]:
        """Returns the log of the ensemble: the mean of the two probability vectors (Eq. 1)."""
        return ensemble_log_probabilities(self.class_logits / temperature, self.distill_logits / temperature)

    def probabilities(self, temperature: float = 1.0) -> Float[Tensor, "batch classes"]:
        """Returns the ensemble probabilities."""
        return self.log_probabilities(temperature).exp()


def ensemble_log_probabilities(*logits: Float[Tensor, "*batch classes"]) -> Float[Tensor, "*batch classes"]:
    """Returns the log of the mean of softmaxes (of probabilities, not of logits), in float32."""
    each = torch.stack([part.float().log_softmax(dim=-1) for part in logits])
    return each.logsumexp(dim=0) - math.log(len(logits))


@runtime_checkable
class Looker(Protocol):
    """What an episode needs of an agent."""

    @property
    def grid(self) -> Grid:
        """The geometry of a scene."""
        ...

    def remember(self, memory: Any, glimpses: Tensor, locations: Tensor) -> Any:
        """Returns the memory with one more glimpse for each sample; `None` is the empty memory."""
        ...

    def sample_drop_path(self, batch_size: int, generator: torch.Generator | None = None) -> Tensor | None:
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
        memory: What the agent remembers of them.
        belief: What it makes of them.
        location: Where the latest one was sensed.
        seen: All locations sensed so far.
        decision: Where it looks next; `None` at the last glimpse.
        next_memory: The memory with that next glimpse; `None` at the last glimpse.
        drop_masks: The drop-path masks `belief` was computed with.
    """

    num_glimpses: int
    memory: Any
    belief: Belief
    location: Int[Tensor, " batch"]
    seen: Bool[Tensor, "batch locations"]
    decision: Decision | None
    next_memory: Any
    drop_masks: Tensor | None


def rollout(
    agent: Looker,
    sense: Callable[[Tensor], Tensor],
    num_glimpses: int,
    first_location: Int[Tensor, " batch"],
    policy: Policy,
    generator: torch.Generator | None = None,
) -> Iterator[Step]:
    """Looks at a batch of scenes, yielding after every glimpse.

    The caller may update the agent between two steps: nothing computed before is used again, except what
    the agent itself keeps in its memory.

    Args:
        agent: Remembers glimpses and says what they mean.
        sense: Given locations (B,), returns the glimpses there (B, C, h, w).
        num_glimpses: Glimpses to sense, at most the locations of the grid.
        first_location: Where each sample's first glimpse is sensed.
        policy: Picks every later location.
        generator: Source of randomness for the policy and for drop-path.
    """
    require_num_glimpses(num_glimpses, agent.grid)
    batch_size, location = first_location.shape[0], first_location
    seen = torch.zeros(batch_size, agent.grid.num_locations, dtype=torch.bool, device=location.device)
    memory = agent.remember(None, sense(location), location)
    for count in range(1, num_glimpses + 1):
        seen = seen.scatter(1, location[:, None], True)
        drop_masks = agent.sample_drop_path(batch_size, generator)
        belief = agent.believe(memory, drop_masks)
        decision = next_memory = None
        if count < num_glimpses:
            decision = policy.decide(belief.state, seen, generator, num_seen=count)
            next_memory = agent.remember(memory, sense(decision.location), decision.location)
        yield Step(count, memory, belief, location, seen, decision, next_memory, drop_masks)
        if decision is not None:
            memory, location = next_memory, decision.location


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
    """

    locations: Int[Tensor, "batch glimpses"]
    class_logits: Float[Tensor, "batch glimpses classes"]
    distill_logits: Float[Tensor, "batch glimpses classes"]
    probabilities: Float[Tensor, "batch glimpses classes"]

    @property
    def predictions(self) -> Int[Tensor, "batch glimpses"]:
        """The most probable class after each glimpse."""
        return self.probabilities.argmax(dim=-1)

    @property
    def confidences(self) -> Float[Tensor, "batch glimpses"]:
        """The probability of that class."""
        return self.probabilities.amax(dim=-1)


@torch.no_grad()
def look(
    agent: Looker,
    sense: Callable[[Tensor], Tensor],
    num_glimpses: int,
    first_location: Int[Tensor, " batch"],
    policy: Policy,
    generator: torch.Generator | None = None,
    temperature: float = 1.0,
) -> Trace:
    """Runs a whole episode without learning from it."""
    episode = rollout(agent, sense, num_glimpses, first_location, policy, generator)
    steps = [(step.location, step.belief) for step in episode]
    beliefs = [belief for _, belief in steps]
    return Trace(
        locations=torch.stack([location for location, _ in steps], dim=1),
        class_logits=torch.stack([belief.class_logits for belief in beliefs], dim=1),
        distill_logits=torch.stack([belief.distill_logits for belief in beliefs], dim=1),
        probabilities=torch.stack([belief.probabilities(temperature) for belief in beliefs], dim=1),
    )
