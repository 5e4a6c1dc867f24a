"""Learning where to look from what every location would have told.

With a core that remembers, one glimpse more costs a few tokens. So after some step of a scene all locations
are tried. What a location is worth is how near the agent comes to teacher and label, on average over the
glimpses that are left: after the first of them that is computed, for later ones the critic predicts it. The
actor learns to choose the location that is worth most.

Departs from the paper, whose actor learns from the return of the one location that was drawn
(`Objective.actor_critic`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stam.learning.one_pass import Path, step_values
from stam.model.agent import Looker
from stam.model.belief import Belief
from stam.model.policy import Decision, Policy, Scorer, Seen, State
from stam.model.randomness import Randomness, random_source
from stam.shapes import Bool, Float, Int

FINAL_EXPLORATION = 0.3  # of the locations in training; in the beginning all are drawn at random
TEMPERATURE = 0.03  # nats: how much less a location may be worth than the best one and still be a goal


class ExploringPolicy(Policy):
    """Decides as another policy does, but looks at a random location now and then.

    So the actor learns after glimpses as it would choose them itself. An `exploration` that changes while a
    CUDA graph is replayed is a tensor, changed in place.
    """

    draws = True

    def __init__(self, policy: Policy, exploration: float | Tensor = FINAL_EXPLORATION) -> None:
        self.policy, self.exploration = policy, exploration

    def decide(
        self, state: State, seen: Seen, generator: Randomness = None, num_seen: int | None = None
    ) -> Decision:
        """Draws whether to explore, and where."""
        chosen = self.policy.decide(state, seen, generator, num_seen).location
        count, num_locations = seen.shape
        noise = random_source(generator).uniform((count, num_locations + 1), seen.device)
        anywhere = noise[:, 1:].masked_fill(seen, -1).argmax(dim=1)
        return Decision(torch.where(noise[:, 0] < self.exploration, anywhere, chosen))


def exploration(progress: float) -> float:
    """Returns the share of random locations, after a part of the time over which it falls."""
    return 1 - (1 - FINAL_EXPLORATION) * min(progress, 1.0)


@dataclass(frozen=True)
class Gains:
    """What each location is worth to some samples after one step of their episode.

    Attributes:
        samples: Which samples of the batch.
        num_glimpses: How many glimpses each had seen.
        seen: The locations they had seen.
        values: What each location is worth, in nats; of those that were seen it has no meaning.
        every: Locations were tried in one of so many samples.
    """

    samples: Int[Tensor, " tried"]
    num_glimpses: Int[Tensor, " tried"]
    seen: Bool[Tensor, "tried locations"]
    values: Float[Tensor, "tried locations"]
    every: int = 1

    def part(self, rows: slice) -> "Gains":
        """Returns the gains of the samples that lie in a part of the batch, counted from its beginning."""
        tried = slice(*(math.ceil(end / self.every) for end in (rows.start, rows.stop)))
        return Gains(
            self.samples[tried] - rows.start,
            self.num_glimpses[tried],
            self.seen[tried],
            self.values[tried],
            self.every,
        )


@torch.no_grad()
def try_locations(
    agent: Looker,
    images: Float[Tensor, "batch channels height width"],
    path: Path,
    labels: Int[Tensor, " batch"],
    log_q: Float[Tensor, "batch classes"],
    every: int,
    generator: Randomness,
) -> Gains:
    """Tries every location after some step of each episode, which is drawn at random.

    Args:
        agent: Who looks, in evaluation mode; its core must be a `OnePassCore`. Its critic predicts what
            comes after the location that is tried.
        images: The scenes.
        path: Where the agent looked.
        labels: The class of each scene.
        log_q: The teacher's distribution.
        every: Try locations of one in so many scenes.
        generator: Source of randomness.
    """
    grid, device = agent.grid, images.device
    count, num_steps = path.locations.shape
    # drawn for all: several processes draw the same
    num_glimpses = 1 + random_source(generator).integers(num_steps - 1, count, device)[::every]
    samples = torch.arange(0, count, every, device=device)
    every_location = torch.arange(grid.num_locations, device=device)
    is_before = torch.arange(num_steps, device=device) < num_glimpses[:, None]
    seen = ((path.locations[::every, :, None] == every_location) & is_before[..., None]).any(dim=1)
    locations = every_location.expand(seen.shape)
    memory = path.memory if every == 1 else path.memory.select(samples)
    glimpses = grid.cut(images, locations, samples)
    belief = agent.believe_each(memory, num_glimpses, glimpses, locations)
    rows = samples.repeat_interleave(grid.num_locations)
    values = _nearness(belief, labels[rows], log_q[rows]).view(seen.shape)
    if agent.critic is not None:
        later = agent.critic(belief.state).view(seen.shape)
        num_later = (num_steps - 1 - num_glimpses)[:, None]
        values = (values + num_later * later) / (1 + num_later)
    return Gains(samples, num_glimpses, seen, values, every)


def _nearness(belief: Belief, labels: Tensor, log_q: Tensor) -> Float[Tensor, " rows"]:
    """Returns how near a belief is to the teacher, -KL(p || q), and to the label, on average."""
    from_label = F.nll_loss(belief.log_probabilities(), labels, reduction="none")
    return -(belief.divergence_from(log_q) + from_label) / 2


def critic_loss(
    critic: Callable[[Tensor], Tensor],
    beliefs: Sequence[Belief],
    labels: Int[Tensor, " batch"],
    log_q: Float[Tensor, "batch classes"],
) -> Tensor:
    """Returns how wrong the critic predicts the mean nearness after the glimpses that follow each step.

    Args:
        critic: Predicts it from a state.
        beliefs: The belief after each step of whole episodes.
        labels: The class of each scene.
        log_q: The teacher's distribution.
    """
    with torch.no_grad():
        later = torch.stack([_nearness(belief, labels, log_q) for belief in beliefs[1:]]).flip(0)
        counts = torch.arange(1, len(beliefs), device=later.device)[:, None]
        goal = (later.cumsum(dim=0) / counts).flip(0)
    predicted = step_values(critic, torch.stack([belief.state for belief in beliefs[:-1]]))
    return F.mse_loss(predicted, goal)


def actor_loss(actor: Scorer, beliefs: Sequence[Belief], gains: Gains) -> Tensor:
    """Returns how far the actor's choice is from the best one: a cross-entropy over the unseen locations.

    The goal is the softmax of the values, divided by `TEMPERATURE`: locations that are worth about as much
    as the best one share its weight. How much less the others are worth does not matter.

    Args:
        actor: Rates locations.
        beliefs: The belief after each step, with gradient.
        gains: What was tried.
    """
    states = torch.stack([belief.state for belief in beliefs], dim=1)  # (B, T, 2 D)
    state = states[gains.samples, gains.num_glimpses - 1]
    locations = torch.arange(gains.seen.shape[1], device=gains.seen.device).expand(gains.seen.shape)
    goal = (gains.values / TEMPERATURE).masked_fill(gains.seen, -torch.inf).softmax(dim=1)
    logits = actor(state, locations).float().masked_fill(gains.seen, torch.finfo(torch.float32).min)
    return -(goal * logits.log_softmax(dim=1)).sum(dim=1).mean()
