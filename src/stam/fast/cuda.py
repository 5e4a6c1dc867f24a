"""A GPU in half precision: the modules of `stam.model` computed by fused kernels.

Parameters are read from the modules themselves, wherever they are at the moment, so training updates them as
usual. Without autocast to half precision, or without Triton, the modules compute for themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from stam.fast import kernels
from stam.fast.bf16_weights import Bf16Weights
from stam.fast.cpu_layers import scale_and_shift
from stam.fast.cuda_causal import FusedCausalCore
from stam.fast.cuda_transformer import encode
from stam.fast.known import unknown_part
from stam.model.actor_critic import Actor, Critic, RowMlp, RowNorm
from stam.model.agent import Agent, Looker
from stam.model.belief import SMALLEST_LOG_PROBABILITY, Belief, ensemble_log_probabilities
from stam.model.causal import CausalCore
from stam.model.core import Core, PatchMemory, ReencodingCore
from stam.model.policy import rate_one_by_one
from stam.model.randomness import Randomness
from stam.model.teacher import Teacher, TeacherOutput
from stam.model.vit import VisionTransformer
from stam.shapes import Float, Int

if TYPE_CHECKING:
    from stam.fast.kernels.rows import Groups


def fuse(agent: Agent) -> Looker:
    """Returns the agent computed by fused kernels, with the same parameters; for training and for looking.

    An agent with a part that was replaced or hooked computes by its own modules.
    """
    return FusedLooker(agent) if unknown_part(agent) is None else agent


def fuse_teacher(teacher: Teacher) -> "Teacher | FusedTeacher":
    """Returns the teacher computed by fused kernels, where it is a DeiT as it was built."""
    model = teacher.model
    known = isinstance(model, VisionTransformer) and unknown_part(model) is None
    return FusedTeacher(cast(VisionTransformer, model)) if known else teacher


@contextmanager
def rounded_weights(agent: Looker) -> Iterator[None]:
    """Within it a fused agent computes with weights that are rounded and folded once, as they are now.

    Outside it every use of a weight rounds it, which takes a small step longer than the step itself.
    """
    if not isinstance(agent, FusedLooker):
        yield
        return
    with Bf16Weights(agent.agent, torch.get_autocast_dtype("cuda")).in_use():
        actor, is_trained = agent.actor, agent.agent.training
        with actor.folded() if isinstance(actor, FusedActor) and not is_trained else nullcontext():
            yield


class FusedTeacher:
    """A whole-image teacher; its weights are rounded together, once a batch."""

    def __init__(self, model: VisionTransformer) -> None:
        self.model = model
        self._weights: Bf16Weights | None = None

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "batch channels height width"]) -> TeacherOutput:
        """Returns what it says of normalised whole images, with its features."""
        if kernels.usable(images) and self._weights is None:
            self._weights = Bf16Weights(self.model, torch.get_autocast_dtype("cuda"))
        with self._weights.in_use() if self._weights and kernels.usable(images) else nullcontext():
            features = encode(self.model, *self.model.all_patches(images))
            return TeacherOutput(ensemble_log_probabilities(*self.model.classify(features)), features)


class FusedLooker(Looker):
    """An agent computed by fused kernels."""

    core: Core

    def __init__(self, agent: Agent) -> None:
        self.agent, self.config, self.positions = agent, agent.config, agent.positions
        core = agent.core
        self.core = FusedCausalCore(core) if isinstance(core, CausalCore) else FusedCore(core)
        # a joint actor has few rows: there is nothing to fuse
        self.actor = FusedActor(agent.actor) if isinstance(agent.actor, Actor) else agent.actor
        self.critic = None if agent.critic is None else FusedCritic(agent.critic)

    def believe(self, memory: Any, drop_masks: Tensor | None = None) -> Belief:
        """Encodes the remembered glimpses and classifies the scene."""
        belief = super().believe(memory, drop_masks)
        if not kernels.usable(belief.state):
            return belief
        return FusedBelief(belief.state, belief.class_logits, belief.distill_logits)

    def believe_all(
        self,
        glimpses: Float[Tensor, "batch steps channels height width"],
        locations: Int[Tensor, "batch steps"],
        drop_masks: Tensor | None = None,
    ) -> list[Belief]:
        """Returns the belief after each glimpse, from one pass."""
        beliefs = super().believe_all(glimpses, locations, drop_masks)
        if not kernels.usable(beliefs[0].state):
            return beliefs
        return [FusedBelief(each.state, each.class_logits, each.distill_logits) for each in beliefs]


@dataclass(frozen=True)
class FusedBelief(Belief):
    """What an agent makes of the glimpses it has seen."""

    @torch.no_grad()
    def divergence_from(self, log_q: Float[Tensor, "batch classes"]) -> Float[Tensor, " batch"]:
        """Returns KL(p || q) of the ensemble, as a number to compare with, not to learn from."""
        from stam.fast.kernels.losses import ensemble_divergence

        return ensemble_divergence(self.class_logits, self.distill_logits, log_q, SMALLEST_LOG_PROBABILITY)


class FusedCore:
    """The core computed by fused kernels."""

    mixes_counts = False

    def __init__(self, core: ReencodingCore) -> None:
        self._core = core

    def remember(
        self,
        memory: PatchMemory | None,
        patches: Float[Tensor, "batch patches pixels"],
        positions: Int[Tensor, "batch patches"],
    ) -> PatchMemory:
        """Adds the patches of one more glimpse."""
        return self._core.remember(memory, patches, positions)

    def read(
        self, memory: PatchMemory, drop_masks: Float[Tensor, "depth 2 batch 1 1"] | None = None
    ) -> Float[Tensor, "batch 2 width"]:
        """Encodes all patches together."""
        return encode(self._core, memory.patches, memory.positions, drop_masks)

    def classify(self, features: Float[Tensor, "batch 2 width"]) -> tuple[Tensor, ...]:
        """Returns the logits of the two classifiers."""
        return self._core.classify(features)

    def sample_drop_path(self, batch_size: int, generator: Randomness = None) -> Tensor | None:
        """Draws drop-path masks, or `None` outside training."""
        return self._core.sample_drop_path(batch_size, generator)


class FusedActor:
    """The actor computed by fused kernels; once trained, its batch norms are a part of its weights."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._folded: tuple[Tensor, ...] | None = None  # kept in place, since CUDA graphs read it
        self._is_folded = False

    @contextmanager
    def folded(self) -> Iterator[None]:
        """Within it an actor that is not trained computes with weights that are prepared once.

        They are those of now. Outside it every call prepares them.
        """
        fresh = _fold(self._actor)
        if self._folded is None:
            self._folded = fresh
        else:
            torch._foreach_copy_(self._folded, fresh)
        self._is_folded = True
        try:
            yield
        finally:
            self._is_folded = False

    def __call__(
        self, state: Float[Tensor, "batch features"], candidates: Int[Tensor, "batch candidates"]
    ) -> Float[Tensor, "batch candidates"]:
        """Returns a logit for each candidate."""
        actor = self._actor
        if not actor.training and not torch.is_grad_enabled() and kernels.usable(state):
            ready = self._folded if self._is_folded and self._folded is not None else _fold(actor)
            return _rate(ready, state, candidates)
        if not _has_kernels(actor, state, candidates.numel()):
            return actor(state, candidates)
        from stam.fast.kernels.location_sums import sum_norm_relu

        of_state, of_location = actor.fc0(state, actor.location_embedding)
        rows = sum_norm_relu(of_state, of_location, candidates, actor.bn0)
        return _finish(actor, rows).view(candidates.shape)

    def at_each_step(
        self,
        states: Float[Tensor, "steps batch features"],
        candidates: Int[Tensor, "steps batch candidates"],
    ) -> Float[Tensor, "steps batch candidates"]:
        """Returns what `rate_each_step` does, by one launch of each kernel for all steps."""
        actor, (steps, batch, widest) = self._actor, candidates.shape
        if not _has_kernels(actor, states, batch * (widest - steps + 1)):
            return rate_one_by_one(actor, states, candidates)
        from stam.fast.kernels.location_sums import sum_norm_relu
        from stam.fast.kernels.rows import Groups

        groups = Groups(batch, widest, fewer=1, count=steps)
        of_state, of_location = actor.fc0(states.flatten(0, 1), actor.location_embedding)
        rows = sum_norm_relu(of_state, of_location, candidates.flatten(0, 1), actor.bn0, groups)
        return _finish(actor, rows, groups).view(candidates.shape)


@torch.no_grad()
def _fold(actor: Actor) -> tuple[Tensor, ...]:
    """Returns the weights of an actor that is not trained: a batch norm is a factor and an offset then.

    Weight and bias for a state, what is added for each location, then weight and bias of every other layer.
    """
    half = torch.get_autocast_dtype("cuda")
    factor, offset = scale_and_shift(actor.bn0)
    width = actor.location_embedding.shape[1]
    for_state, for_embedding = actor.fc0.weight.split((actor.fc0.in_features - width, width), dim=1)
    of_location = F.linear(actor.location_embedding, for_embedding) * factor
    folded = [for_state * factor[:, None], actor.fc0.bias * factor + offset, of_location]
    for layer, norm in ((actor.fc1, actor.bn1), (actor.fc2, actor.bn2)):
        factor, offset = scale_and_shift(norm)
        folded += [layer.weight * factor[:, None], layer.bias * factor + offset]
    return tuple(part.to(half) for part in (*folded, actor.fc_final.weight, actor.fc_final.bias))


def _rate(folded: tuple[Tensor, ...], state: Tensor, candidates: Tensor) -> Float[Tensor, "batch candidates"]:
    """Returns the logits of an actor that is not trained."""
    from stam.fast.kernels.location_sums import sum_relu

    weight, bias, of_location, *hidden, final, final_bias = folded
    rows = sum_relu(F.linear(state.to(weight.dtype), weight, bias), of_location, candidates)
    for weight, bias in zip(hidden[::2], hidden[1::2], strict=True):
        rows = torch._addmm_activation(bias, rows, weight.t())  # with ReLU
    return F.linear(rows, final, final_bias).view(candidates.shape)


class FusedCritic:
    """The critic computed by fused kernels, while it is trained."""

    def __init__(self, critic: Critic) -> None:
        self._critic = critic

    def __call__(self, state: Float[Tensor, "batch features"]) -> Float[Tensor, " batch"]:
        """Returns V(s)."""
        critic = self._critic
        if not _has_kernels(critic, state, len(state)):
            return critic(state)
        from stam.fast.kernels.rows import norm_relu

        return _finish(critic, norm_relu(critic.fc0(state.detach()), critic.bn0)).float()

    def at_each_step(self, states: Float[Tensor, "steps batch features"]) -> Float[Tensor, "steps batch"]:
        """Returns V(s) after each step of an episode, by one launch of each kernel for all steps."""
        critic, (steps, batch) = self._critic, states.shape[:2]
        if not _has_kernels(critic, states, batch):
            return torch.stack([critic(state) for state in states])
        from stam.fast.kernels.rows import Groups, norm_relu

        groups = Groups(batch, count=steps)
        rows = norm_relu(critic.fc0(states.detach().flatten(0, 1)), critic.bn0, groups)
        return _finish(critic, rows, groups).float().view(steps, batch)


def _has_kernels(mlp: RowMlp, state: Tensor, num_rows: int) -> bool:
    """Tells whether kernels can take over: they train batch norms over the rows of one process."""
    return mlp.training and num_rows > 1 and type(mlp.bn0) is RowNorm and kernels.usable(state)


def _finish(
    mlp: RowMlp, rows: Float[Tensor, "rows hidden"], groups: "Groups | None" = None
) -> Float[Tensor, " rows"]:
    """Computes everything after the first FC-BN-ReLU; each group of rows has batch norms of its own."""
    from stam.fast.kernels.rows import linear_norm_relu, linear_norm_relu_dot

    rows = linear_norm_relu(rows, mlp.fc1.weight, mlp.fc1.bias, mlp.bn1, groups)
    last = (mlp.fc_final.weight, mlp.fc_final.bias)
    return linear_norm_relu_dot(rows, (mlp.fc2.weight, mlp.fc2.bias), mlp.bn2, last, groups)
