"""What an episode and a teacher teach the agent: every loss, the reward, and both normalisations.

The paper's symbols: q the teacher's distribution, p_g and p_d the classifiers' distributions, p their mean.
After n glimpses, k = n - 1 numbers the step (the paper's t).

Which loss trains what: L_sup the core and classifier G; L_consist the core and classifier D; L_actor the
actor, its location embeddings and the core; L_critic the critic alone. Nothing flows through the look-ahead.
Without consistency, L_sup is taken of the ensemble and trains both classifiers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.errors import StamError, require, require_choice
from stam.learning.distributed import global_mean
from stam.model.agent import Looker
from stam.model.belief import Belief, kl_divergence
from stam.model.episode import Step
from stam.model.teacher import TeacherOutput
from stam.settings import CONSISTENCY
from stam.shapes import Float, Int

_SMALLEST_DEVIATION = 1e-6  # equal rewards give zero, not a division by zero


def feature_distances(
    state: Float[Tensor, "batch features"], goal: Float[Tensor, "batch readout width"]
) -> Float[Tensor, " batch"]:
    """Returns 1 - cosine between the agent's two features and the teacher's, which may have only one."""
    own = state.float().unflatten(1, (2, goal.shape[2]))  # (B, 2, D)
    return 1 - F.cosine_similarity(own, goal.float(), dim=2).mean(dim=1)


def normalise_rewards(rewards: Float[Tensor, "*steps batch"]) -> Float[Tensor, "*steps batch"]:
    """Gives the rewards of each step zero mean and unit biased variance over the global batch."""
    (mean,) = global_mean(rewards)
    centred = rewards - mean[..., None]
    (variance,) = global_mean(centred.square())
    return centred / variance[..., None].sqrt().clamp_min(_SMALLEST_DEVIATION)


class ValueNormaliser(nn.Module):
    """Moving averages that normalise the critic's targets, one pair for each step of an episode.

    They are the statistics of PopArt, without its rescaling of the critic's last layer. `mean` (mu) starts at
    0 and `second_moment` (nu) at the number of rewards still to come: each has unit variance, so that is the
    variance of their sum were they independent. They are in float64, since sigma^2 = nu - mu^2 is a
    difference. Both are buffers, so that they are saved with a checkpoint; they belong to training, not to
    the agent.
    """

    mean: Tensor
    second_moment: Tensor

    def __init__(self, num_glimpses: int, decay: float = 0.99) -> None:
        super().__init__()
        to_come = torch.arange(num_glimpses - 1, 0, -1, dtype=torch.float64)
        self.decay = decay
        self.register_buffer("mean", torch.zeros_like(to_come))
        self.register_buffer("second_moment", to_come)

    def _statistics(self, k: int | slice) -> tuple[Tensor, Tensor]:
        """Returns mean and deviation of some steps, (..., 1)."""
        mean = self.mean[k]
        variance = torch.addcmul(self.second_moment[k], mean, mean, value=-1)
        return mean[..., None], variance.clamp_min(_SMALLEST_DEVIATION**2).sqrt()[..., None]

    def denormalise(
        self, values: Float[Tensor, "*steps batch"], k: int | slice
    ) -> Float[Tensor, "*steps batch"]:
        """Turns the critic's output at step k, or at some steps, into returns."""
        mean, deviation = self._statistics(k)
        return torch.addcmul(mean, deviation, values.double()).float()

    def normalise(
        self, targets: Float[Tensor, "*steps batch"], k: int | slice
    ) -> Float[Tensor, "*steps batch"]:
        """Turns returns at step k, or at some steps, into what the critic should output."""
        mean, deviation = self._statistics(k)
        return ((targets.double() - mean) / deviation).float()

    @torch.no_grad()
    def update(self, targets: Float[Tensor, "*steps batch"], k: int | slice) -> None:
        """Moves the statistics of step k, or of some steps, towards those of the global batch of targets."""
        precise = targets.double()
        mean, second_moment = global_mean(precise, precise.square())
        self.mean[k].lerp_(mean, 1 - self.decay)
        self.second_moment[k].lerp_(second_moment, 1 - self.decay)


@dataclass(frozen=True)
class Losses:
    """The losses after one glimpse.

    Attributes:
        total: What is minimised.
        parts: For the log: each loss before it is weighted and, for a learned policy, the mean reward.
    """

    total: Tensor
    parts: dict[str, Tensor]


@dataclass(frozen=True)
class Objective:
    """What is minimised after each glimpse of an episode.

    Attributes:
        num_glimpses: Glimpses in an episode (the paper's T).
        consistency: `soft` follows the teacher's distribution, `hard` its most probable class; `none`
            trains the ensemble on the labels alone. The reward compares with the teacher in all three.
        feature_weight: Weight of the distance between the agent's and the teacher's features; 0 in the paper.
    """

    num_glimpses: int
    consistency: str = "soft"
    feature_weight: float = 0.0

    def __post_init__(self) -> None:
        """Checks the settings."""
        require(self.num_glimpses >= 1, f"num_glimpses must be at least 1, got {self.num_glimpses}")
        require_choice("consistency", self.consistency, CONSISTENCY)

    def losses(
        self,
        agent: Looker,
        step: Step,
        labels: Int[Tensor, " batch"],
        target: TeacherOutput,
        values: ValueNormaliser | None = None,
    ) -> Losses:
        """Returns the losses of one step (Algorithm 2 of the paper).

        Without a log-probability in the decision there is nothing to learn about where to look: only the
        classifiers are trained, and no look-ahead is computed (the Random, Plus and Spiral agents).

        Args:
            agent: Looks ahead, and predicts returns.
            step: The episode after n glimpses.
            labels: The class of each scene.
            target: What the teacher says of the whole scenes.
            values: Statistics of the critic's targets, for a learned policy; those of this step are updated.
        """
        each = self.classification(step.belief, labels, target)
        parts = {name: losses.mean() for name, losses in each.items()}
        if step.decision is not None and step.decision.log_probability is not None:
            if agent.critic is None or values is None:
                raise StamError("learning where to look needs a critic: call agent.add_critic() first")
            with torch.no_grad():  # the same drop-path masks: only the new glimpse makes a difference
                ahead = agent.believe(step.next_memory, step.drop_masks)
            parts |= self.actor_critic(step, ahead, agent.critic, values, target.log_q)
        return Losses(self.total(parts), parts)

    def classification(
        self, belief: Belief, labels: Int[Tensor, " batch"], target: TeacherOutput
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Returns L_sup (Eq. 2) and L_consist (Eq. 3) of each sample, and the distance of its features."""
        if self.consistency == "none":
            losses = {"supervised": F.nll_loss(belief.log_probabilities(), labels, reduction="none")}
        else:
            losses = {"supervised": F.cross_entropy(belief.class_logits.float(), labels, reduction="none")}
            said = belief.distill_logits.float()
            if self.consistency == "hard":
                losses["consistency"] = F.cross_entropy(said, target.log_q.argmax(dim=1), reduction="none")
            else:  # the student on the left
                losses["consistency"] = kl_divergence(said.log_softmax(dim=1), target.log_q)
        if self.feature_weight > 0:
            assert target.features is not None
            losses["features"] = feature_distances(belief.state, target.features)
        return losses

    def actor_critic(
        self,
        step: Step,
        ahead: Belief,
        critic: Callable[[Tensor], Tensor],
        values: ValueNormaliser,
        log_q: Float[Tensor, "batch classes"],
    ) -> dict[str, Tensor]:
        """Returns L_actor (Eq. 5) and L_critic (Eq. 4) of one step, and the mean reward.

        The target is that of a one-step actor-critic without discount, r + V(s'). It moves the statistics of
        its step first and is normalised by them then; V(s') is read with those of the next step.

        Args:
            step: The episode after n glimpses, with the decision where to look next.
            ahead: The belief after that next glimpse; no gradient flows to it.
            critic: The value function.
            values: Statistics of the critic's targets; those of this step are updated.
            log_q: The teacher's distribution.
        """
        assert step.decision is not None and step.decision.log_probability is not None
        n = step.num_glimpses
        k = n - 1
        with torch.no_grad():
            rewards = -ahead.divergence_from(log_q)
            targets = normalise_rewards(rewards)
            if n + 1 < self.num_glimpses:  # after the last glimpse no reward follows
                # in training mode: batch norm by the statistics of the next states
                targets = targets + values.denormalise(critic(ahead.state), k + 1)
            values.update(targets, k)
            normalised = values.normalise(targets, k)
        value = critic(step.belief.state)
        advantage = (normalised - value).detach()
        return {
            "actor": -(step.decision.log_probability * advantage).mean(),
            "critic": (normalised - value).abs().mean(),
            "reward": rewards.mean(),
        }

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        """Returns the loss to minimise (Eq. 7): (L_sup + L_consist)/2 + L_actor + L_critic, + features."""
        if self.consistency == "none":
            total = parts["supervised"]
        else:
            total = (parts["supervised"] + parts["consistency"]) / 2
        for name in ("actor", "critic"):
            if name in parts:
                total = total + parts[name]
        if "features" in parts:
            total = total + self.feature_weight * parts["features"]
        return total
