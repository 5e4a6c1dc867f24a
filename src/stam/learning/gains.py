"""Learning where to look from what every location would have told.

With a core that remembers, one glimpse more costs a few tokens. So after some step of a scene all locations
are tried. What a location is worth is how near the agent comes to teacher and label, on average over the
glimpses that are left: after the first of them that is computed, for later ones the critic predicts it. The
actor learns to choose locations that are worth much: its loss is the mean worth under its own softmax, which
is known exactly. What was tried in the last batches is kept, and the actor takes some steps from it after
each batch.

Departs from the paper, whose actor learns from the return of the one location that was drawn
(`Objective.actor_critic`), and whose actor's gradient reaches the core. Here it does not: an actor that
begins at random spoils the features of a core that begins well.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stam.learning import distributed
from stam.learning.one_pass import Path, step_values
from stam.model.agent import Looker
from stam.model.belief import Belief
from stam.model.policy import Decision, Policy, Scorer, Seen, State, draw
from stam.model.randomness import Randomness, random_source
from stam.shapes import Bool, Float, Int

SHARPNESS = 4.0  # of the softmax over an actor's logits
_KEPT_BATCHES = 32  # from fewer the actor learns single scenes by heart


class SoftmaxPolicy(Policy):
    """Draws a location from the softmax of an actor's logits, so that it looks where it learns to look.

    Unlike the paper's `SampledPolicy` it leaves the logits as long as they are: an actor that is sure
    explores less.
    """

    draws = True

    def __init__(self, actor: Scorer) -> None:
        self.actor = actor

    def log_probabilities(self, state: State, seen: Seen) -> Float[Tensor, "batch locations"]:
        """Returns log pi over all locations; next to nothing where a location was seen."""
        every = torch.arange(seen.shape[1], device=seen.device).expand(seen.shape)
        logits = SHARPNESS * self.actor(state, every).float()
        return logits.masked_fill(seen, torch.finfo(torch.float32).min).log_softmax(dim=1)

    def decide(
        self, state: State, seen: Seen, generator: Randomness = None, num_seen: int | None = None
    ) -> Decision:
        """Draws a location; nothing is learned from the draw itself."""
        return Decision(draw(self.log_probabilities(state, seen), generator))

    def weights(self, state: State, seen: Seen) -> Float[Tensor, "batch locations"]:
        """The distribution it draws from."""
        return self.log_probabilities(state, seen).exp()


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


class Replay:
    """What was tried in the last batches, for the actor to learn from again.

    Batches of each size are kept apart, in tensors that keep their place in memory, as CUDA graphs want it.
    They are full from the start, with copies of the first batch. Several processes keep the same.

    Attributes:
        kept: For each number of rows of a batch: states, what had been seen, and what every location was
            worth, (batches, rows, ...).
    """

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, ...]] = {}

    def add(self, state: Float[Tensor, "tried features"], gains: Gains) -> int:
        """Takes the states of a batch and its gains in place of the oldest; returns how many rows it has."""
        given = state.detach().float(), gains.seen, gains.values.float()
        new = tuple(map(distributed.rows_of_all, given))
        rows = len(new[0])
        if rows not in self.kept:
            self.kept[rows] = tuple(part.expand(_KEPT_BATCHES, *part.shape).clone() for part in new)
        for kept, part in zip(self.kept[rows], new, strict=True):
            kept.copy_(torch.cat((part[None], kept[:-1])))
        return rows

    def draw(self, rows: int, count: int, generator: Randomness) -> tuple[Tensor, Tensor, Tensor]:
        """Returns so many of the rows of batches of a size, for all processes together, at random."""
        kept = [part.flatten(0, 1) for part in self.kept[rows]]
        share = max(1, count // distributed.world_size())
        chosen = random_source(generator).integers(len(kept[0]), share, kept[0].device)
        state, seen, values = (part[chosen] for part in kept)
        return state, seen, values


def states_before(gains: Gains, beliefs: Sequence[Belief]) -> Float[Tensor, "tried features"]:
    """Returns the states after which locations were tried.

    Args:
        gains: What was tried.
        beliefs: The belief after each step.
    """
    states = torch.stack([belief.state for belief in beliefs], dim=1)  # (B, T, 2 D)
    return states[gains.samples, gains.num_glimpses - 1]


def actor_loss(
    actor: Scorer,
    state: Float[Tensor, "tried features"],
    seen: Bool[Tensor, "tried locations"],
    values: Float[Tensor, "tried locations"],
) -> Tensor:
    """Returns how little the locations are worth that the actor would draw, on average.

    It is minus the expected advantage under the actor's softmax, in standard deviations of all advantages.
    The advantage of a location is what it is worth beyond the mean of the unseen ones. The gradient is that
    of a policy gradient method, without the noise of a draw.

    Args:
        actor: Rates locations.
        state: The states after which locations were tried.
        seen: The locations that had been seen.
        values: What each location was worth.
    """
    unseen = (~seen).float()
    values, num_unseen = values.float() * unseen, unseen.sum(dim=1)
    advantages = (values - (values.sum(dim=1) / num_unseen)[:, None]) * unseen
    (variance,) = distributed.global_mean(advantages.square().sum(dim=1) / num_unseen)
    spread = variance.sqrt().clamp_min(1e-6)
    likely = SoftmaxPolicy(actor).weights(state, seen)
    return -(likely * advantages).sum(dim=1).mean() / spread
