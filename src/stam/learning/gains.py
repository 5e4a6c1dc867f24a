"""Learning where to look from what every location would have told.

With a core that remembers, one glimpse more costs a few tokens. So after some step of a scene all locations
are tried. What a location is worth is how near a glimpse there brings the agent to teacher and label. The
actor learns to choose locations that are worth much: its loss is the mean worth under its own softmax, which
is known exactly. What was tried in the last batches is kept, and after each batch the actor makes some
updates from it.

Departs from the paper, whose actor learns from the returns of the locations that were drawn
(`Objective.actor_critic`), and whose actor's gradient reaches the core. Here it does not: an actor that
begins at random spoils the features of a core that begins well. There is no critic. Adding what one predicts
of the glimpses that follow made the choice worse on photographs, and no better on digits.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stam.learning import distributed
from stam.learning.one_pass import Path
from stam.model.agent import Looker
from stam.model.belief import Belief
from stam.model.policy import Decision, Policy, Scorer, Seen, State, draw
from stam.model.randomness import Randomness, random_source
from stam.shapes import Bool, Float, Int

SHARPNESS = 4.0  # of the softmax over an actor's logits
_EARLY = 1.5  # above 1, so that early steps are drawn more often than late ones
_KEPT_BATCHES = 32  # from fewer the actor learns single scenes by heart
ROWS_OF_UPDATE = 256  # scenes


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
    """What each location is worth to some scenes, each after one step of its episode.

    Attributes:
        state: The agent's state after that step.
        seen: The locations it had seen.
        values: What each location is worth, in nats; of those that were seen it has no meaning.
    """

    state: Float[Tensor, "tried features"]
    seen: Bool[Tensor, "tried locations"]
    values: Float[Tensor, "tried locations"]


@torch.no_grad()
def try_locations(
    agent: Looker,
    images: Float[Tensor, "batch channels height width"],
    path: Path,
    labels: Int[Tensor, " batch"],
    log_q: Float[Tensor, "batch classes"],
    generator: Randomness,
) -> Gains:
    """Tries every location after some step of each episode, which is drawn at random: early ones more often.

    After few glimpses the most depends on the next one, and all later steps follow from it.

    Args:
        agent: Who looks, in evaluation mode; its core must be a `OnePassCore`.
        images: The scenes.
        path: Where the agent looked.
        labels: The class of each scene.
        log_q: The teacher's distribution.
        generator: Source of randomness.
    """
    grid, device = agent.grid, images.device
    count, num_steps = path.locations.shape
    drawn = random_source(generator).uniform((count,), device) ** _EARLY
    num_glimpses = 1 + (drawn * (num_steps - 1)).long().clamp(max=num_steps - 2)
    samples, every_location = (torch.arange(size, device=device) for size in (count, grid.num_locations))
    is_before = torch.arange(num_steps, device=device) < num_glimpses[:, None]
    seen = ((path.locations[:, :, None] == every_location) & is_before[..., None]).any(dim=1)
    locations = every_location.expand(seen.shape)
    glimpses = grid.cut(images, locations)
    belief = agent.believe_each(path.memory, num_glimpses, glimpses, locations)
    rows = samples.repeat_interleave(grid.num_locations)
    values = _nearness(belief, labels[rows], log_q[rows]).view(seen.shape)
    assert path.states is not None
    return Gains(path.states[samples, num_glimpses - 1], seen, values)


def _nearness(belief: Belief, labels: Tensor, log_q: Tensor) -> Float[Tensor, " rows"]:
    """Returns how near a belief is to the teacher, -KL(p || q), and to the label, on average."""
    from_label = F.nll_loss(belief.log_probabilities(), labels, reduction="none")
    return -(belief.divergence_from(log_q) + from_label) / 2


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

    def add(self, gains: Gains) -> int:
        """Takes what a batch told in place of the oldest; returns how many rows it has."""
        given = gains.state.float(), gains.seen, gains.values.float()
        new = tuple(map(distributed.rows_of_all, given))
        rows = len(new[0])
        if rows not in self.kept:
            self.kept[rows] = tuple(part.expand(_KEPT_BATCHES, *part.shape).clone() for part in new)
        for kept, part in zip(self.kept[rows], new, strict=True):
            kept.copy_(torch.cat((part[None], kept[:-1])))
        return rows

    def draw(self, rows: int, generator: Randomness) -> Gains:
        """Returns what an update learns from, of batches of a size; each process gets its share."""
        kept = [part.flatten(0, 1) for part in self.kept[rows]]
        share = max(1, ROWS_OF_UPDATE // distributed.world_size())
        chosen = random_source(generator).integers(len(kept[0]), share, kept[0].device)
        return Gains(*(part[chosen] for part in kept))


def actor_loss(actor: Scorer, gains: Gains) -> Tensor:
    """Returns how little the locations are worth that the actor would draw, on average.

    It is minus the expected advantage under the actor's softmax, in standard deviations of all advantages.
    The advantage of a location is what it is worth beyond the mean of the unseen ones. The gradient is that
    of a policy gradient method, without the noise of a draw.
    """
    unseen = (~gains.seen).float()
    values, num_unseen = gains.values.float() * unseen, unseen.sum(dim=1)
    advantages = (values - (values.sum(dim=1) / num_unseen)[:, None]) * unseen
    (variance,) = distributed.global_mean(advantages.square().sum(dim=1) / num_unseen)
    spread = variance.sqrt().clamp_min(1e-6)
    likely = SoftmaxPolicy(actor).weights(gains.state, gains.seen)
    return -(likely * advantages).sum(dim=1).mean() / spread
