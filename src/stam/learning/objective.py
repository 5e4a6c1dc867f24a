"""What an episode and a teacher teach the agent: every loss, the reward, and both normalisations.

Legend: y label, q teacher's distribution, p_g and p_d the classifiers' distributions, p their mean,
R reward, V value, z normalised target, A advantage, pi policy; k = n - 1 numbers the steps with a reward.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.config import require, require_choice
from stam.errors import StamError
from stam.fast import kernels
from stam.learning.distributed import global_mean
from stam.model.agent import Agent
from stam.model.episode import Belief, Step, rollout
from stam.model.policy import Policy, SampledPolicy
from stam.shapes import Float, Int

Labels = Int[Tensor, " batch"] | Float[Tensor, "batch classes"]  # classes, or how likely each is

CONSISTENCY = ("soft", "hard", "none")
REWARDS = ("agreement", "gain")

_SMALLEST_LOG_PROBABILITY = math.log(torch.finfo(torch.float32).tiny)  # a certain teacher stays finite
_SMALLEST_DEVIATION = 1e-6  # equal rewards give zero, not a division by zero


def kl_divergence(
    log_p: Float[Tensor, "batch classes"], log_q: Float[Tensor, "batch classes"]
) -> Float[Tensor, " batch"]:
    """Returns KL(p || q) = sum p (log p - log q); the first argument is the weighting one."""
    return (log_p.exp() * (log_p - log_q.clamp_min(_SMALLEST_LOG_PROBABILITY))).sum(dim=1)


@torch.no_grad()
def distance_from(log_q: Float[Tensor, "batch classes"], belief: Belief) -> Float[Tensor, " batch"]:
    """Returns KL(p || q) of what an agent believes, as a number to compare with, not to learn from."""
    if kernels.usable(log_q):
        from stam.fast.kernels.losses import ensemble_divergence

        logits = belief.class_logits, belief.distill_logits
        return ensemble_divergence(*logits, log_q, _SMALLEST_LOG_PROBABILITY)
    return kl_divergence(belief.log_probabilities(), log_q)


def feature_distance(
    state: Float[Tensor, "batch features"], goal: Float[Tensor, "batch readout width"]
) -> Tensor:
    """Returns 1 - cosine between the agent's two features and the teacher's, which may have only one."""
    own = state.float().unflatten(1, (2, goal.shape[2]))  # (B, 2, D)
    return 1 - F.cosine_similarity(own, goal.float(), dim=2).mean()


def normalise_rewards(rewards: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Gives the rewards of one step zero mean and unit biased variance over the global batch."""
    (mean,) = global_mean(rewards)
    centred = rewards - mean
    (variance,) = global_mean(centred.square())
    return centred / variance.sqrt().clamp_min(_SMALLEST_DEVIATION)


class ValueNormaliser(nn.Module):
    """PopArt-style statistics of the critic's targets, kept apart for each step of an episode.

    `mean` (mu) starts at 0 and `second_moment` (nu) at the variance of what is still to come, were rewards
    independent: without a discount their number. Both are buffers, so that they are saved with a checkpoint
    and move with the module; they belong to training, not to the agent.
    """

    mean: Tensor
    second_moment: Tensor

    def __init__(self, num_glimpses: int, decay: float = 0.99, discount: float = 1.0) -> None:
        super().__init__()
        rewards = num_glimpses - 1
        self.decay = decay
        to_come = (discount ** (2 * torch.arange(rewards, dtype=torch.float64))).cumsum(0).flip(0)
        self.register_buffer("mean", torch.zeros(rewards, dtype=torch.float64))
        self.register_buffer("second_moment", to_come)

    def _deviation(self, k: int) -> Tensor:
        variance = torch.addcmul(self.second_moment[k], self.mean[k], self.mean[k], value=-1)
        return variance.clamp_min(_SMALLEST_DEVIATION**2).sqrt()

    def denormalise(self, values: Float[Tensor, " batch"], k: int) -> Float[Tensor, " batch"]:
        """Turns the critic's output at step k into a return."""
        return torch.addcmul(self.mean[k], self._deviation(k), values.double()).float()

    def normalise(self, targets: Float[Tensor, " batch"], k: int) -> Float[Tensor, " batch"]:
        """Turns returns at step k into what the critic should output."""
        return ((targets.double() - self.mean[k]) / self._deviation(k)).float()

    @torch.no_grad()
    def update(self, targets: Float[Tensor, " batch"], k: int) -> None:
        """Moves the statistics of step k towards those of the global batch of targets."""
        precise = targets.double()
        mean, second_moment = global_mean(precise, precise.square())
        self.mean[k].lerp_(mean, 1 - self.decay)
        self.second_moment[k].lerp_(second_moment, 1 - self.decay)


@dataclass(frozen=True)
class Objective:
    """The losses of one step of an episode.

    Attributes:
        num_glimpses: Glimpses in an episode (the paper's T).
        consistency: `soft` follows the teacher's distribution, `hard` its most probable class; `none`
            trains the ensemble on the labels alone.
        reward: `agreement` with the teacher after the next glimpse, as in the paper, or the `gain` in it by
            that glimpse. What was known before does not depend on where to look: without it, the reward
            varies less from scene to scene.
        discount: How much the return after the next glimpse counts; 1 in the paper.
        handover: Glimpses after which locations are not the actor's choice any more; none in the paper.
        feature_weight: Weight of the distance between the agent's and the teacher's features; 0 in the paper.
    """

    num_glimpses: int
    consistency: str = "soft"
    reward: str = "agreement"
    discount: float = 1.0
    handover: int | None = None
    feature_weight: float = 0.0

    @property
    def num_chosen(self) -> int:
        """Glimpses until which the actor chooses: with them its returns end."""
        return self.num_glimpses if self.handover is None else min(self.handover, self.num_glimpses)

    def __post_init__(self) -> None:
        """Checks the settings."""
        require(self.num_glimpses >= 1, f"num_glimpses must be at least 1, got {self.num_glimpses}")
        require_choice("consistency", self.consistency, CONSISTENCY)
        require_choice("reward", self.reward, REWARDS)
        require(0 <= self.discount <= 1, f"discount must be from 0 to 1, got {self.discount}")

    def classification(
        self,
        belief: Belief,
        labels: Labels,
        teacher_log_probabilities: Float[Tensor, "batch classes"],
    ) -> dict[str, Tensor]:
        """Returns L_sup (Eq. 2) and L_consist (Eq. 3) with the weights they have in the sum."""
        if self.consistency == "none":
            # a softmax of log probabilities changes nothing
            return {"supervised": F.cross_entropy(belief.log_probabilities(), labels)}
        supervised = F.cross_entropy(belief.class_logits.float(), labels)
        if self.consistency == "hard":
            pseudo_labels = teacher_log_probabilities.argmax(dim=1)
            consistency = F.cross_entropy(belief.distill_logits.float(), pseudo_labels)
        else:
            log_p = belief.distill_logits.float().log_softmax(dim=1)
            consistency = kl_divergence(log_p, teacher_log_probabilities).mean()
        return {"supervised": supervised, "consistency": consistency}

    def attention(
        self,
        step: Step,
        ahead: Belief,
        critic: Callable[[Tensor], Tensor],
        values: ValueNormaliser,
        teacher_log_probabilities: Float[Tensor, "batch classes"],
    ) -> dict[str, Tensor]:
        """Returns L_actor (Eq. 5) and L_critic (Eq. 4) of one step, and the mean reward.

        Args:
            step: The episode after n glimpses, with the decision where to look next.
            ahead: The belief after that next glimpse, computed without gradient.
            critic: The value function.
            values: Statistics of the critic's targets; those of this step are updated.
            teacher_log_probabilities: log q.
        """
        assert step.decision is not None and step.decision.log_probability is not None
        k = step.num_glimpses - 1
        with torch.no_grad():
            rewards = -distance_from(teacher_log_probabilities, ahead)
            gains = rewards
            if self.reward == "gain":
                gains = rewards + distance_from(teacher_log_probabilities, step.belief)
            targets = normalise_rewards(gains)
            if self.discount > 0 and step.num_glimpses + 1 < self.num_chosen:  # a last state has no return
                targets = targets + self.discount * values.denormalise(critic(ahead.state), k + 1)
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


@dataclass(frozen=True)
class StepLosses:
    """The losses after one glimpse of a training batch: `total` is to be minimised, `parts` are named."""

    num_glimpses: int
    total: Tensor
    parts: dict[str, Tensor]
    location: Int[Tensor, " batch"]


def training_episode(
    agent: Agent,
    objective: Objective,
    values: ValueNormaliser | None,
    images: Float[Tensor, "batch channels height width"],
    labels: Labels,
    teacher_log_probabilities: Float[Tensor, "batch classes"],
    first_location: Int[Tensor, " batch"],
    policy: Policy,
    generator: torch.Generator | None = None,
    teacher_features: Float[Tensor, "batch readout features"] | None = None,
) -> Iterator[StepLosses]:
    """Runs one training batch: yields the losses after each of T glimpses (Algorithm 2 of the paper).

    The caller takes `total.backward()` and an optimiser step between two glimpses. With a policy that is
    not a `SampledPolicy` there is nothing to learn about where to look, so only the classifiers are trained
    and no look-ahead is computed (the Random, Plus and Spiral agents).
    """
    learns_to_look = isinstance(policy, SampledPolicy)
    if learns_to_look and (agent.critic is None or values is None):
        raise StamError("learning where to look needs a critic: call agent.add_critic() first")

    def sense(locations: Tensor) -> Tensor:
        return agent.grid.cut(images, locations[:, None])[:, 0]

    for step in rollout(agent, sense, objective.num_glimpses, first_location, policy, generator):
        parts = objective.classification(step.belief, labels, teacher_log_probabilities)
        if teacher_features is not None:
            parts["features"] = feature_distance(step.belief.state, teacher_features)
        if learns_to_look and step.num_glimpses < objective.num_chosen:
            assert agent.critic is not None and values is not None
            with torch.no_grad():  # the same drop-path masks: only the new glimpse makes a difference
                ahead = agent.believe(step.next_memory, step.drop_masks)
            parts |= objective.attention(step, ahead, agent.critic, values, teacher_log_probabilities)
        yield StepLosses(step.num_glimpses, objective.total(parts), parts, step.location)
