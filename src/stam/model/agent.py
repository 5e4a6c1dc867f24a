"""The agent: a core that encodes glimpses, two classifiers, an actor, and a critic while it is trained.

The paper's symbols: core T, classifiers G and D (the core's `head` and `head_dist`), actor A, critic C,
glimpse-location embeddings e (`actor.location_embedding`), state s.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.config import AgentConfig
from stam.errors import StamError
from stam.fast import kernels
from stam.fast.cpu import Linear, PackedWeights, multiply_and_rectify, scale_and_shift
from stam.fast.lookup import look_up
from stam.learning import distributed
from stam.live import Session
from stam.model import episode
from stam.model.episode import Belief, Trace, ensemble_log_probabilities
from stam.model.policy import Policy, make_policy, random_locations
from stam.model.vit import Started, VisionTransformer
from stam.scene.grid import Grid
from stam.shapes import Float, Int


@dataclass(frozen=True)
class Memory:
    """The glimpses an agent has seen.

    Attributes:
        locations: Where.
        patches: Their pixels as flat patches in token order.
        started: What the core makes of each patch alone, where it was computed as the glimpse came.
    """

    locations: Int[Tensor, "batch glimpses"]
    patches: Float[Tensor, "batch tokens pixels"]
    started: Started | None = None

    def select(self, samples: Int[Tensor, " kept"]) -> "Memory":
        """Returns the memory of some samples, as when the others are done and leave the batch."""
        started = None if self.started is None else self.started.select(samples)
        return Memory(self.locations[samples], self.patches[samples], started)


class RowNorm(nn.BatchNorm1d):
    """Batch normalisation that also takes a batch of one.

    Departs from the paper: a single row has no variance, so it is normalised by the running statistics.
    """

    def forward(self, rows: Float[Tensor, "rows features"]) -> Float[Tensor, "rows features"]:
        """Normalises over the rows, those of all processes if there are several."""
        if self.training and distributed.is_distributed():
            return self._over_processes(rows)
        if self.training and rows.shape[0] == 1:
            mean, variance = self.running_mean, self.running_var
            return F.batch_norm(rows, mean, variance, self.weight, self.bias, training=False, eps=self.eps)
        return super().forward(rows)

    def _over_processes(self, rows: Float[Tensor, "rows features"]) -> Float[Tensor, "rows features"]:
        count, single = rows.shape[0] * distributed.world_size(), rows.float()
        centred = single - distributed.global_row_sum(single) / count
        variance = distributed.global_row_sum(centred.square()) / count
        assert self.momentum is not None and self.running_mean is not None and self.running_var is not None
        with torch.no_grad():
            mean = (single - centred)[0]
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / max(count - 1, 1), self.momentum)
            self.get_buffer("num_batches_tracked").add_(1)
        normalised = centred * (variance + self.eps).rsqrt()
        return torch.addcmul(self.bias, normalised, self.weight).to(rows.dtype)

    def _has_kernels(self, rows: Tensor, count: int) -> bool:
        """Tells whether kernels of ours can train it: they know the rows of one process alone."""
        return self.training and count > 1 and kernels.usable(rows) and not distributed.is_distributed()

    def then_relu(
        self, rows: Float[Tensor, "rows inputs"], layer: nn.Linear | None = None
    ) -> Float[Tensor, "rows features"]:
        """Normalises rows, or what a layer makes of them, then rectifies."""
        if self._has_kernels(rows, rows.shape[0]):
            from stam.fast.kernels.rows import linear_norm_relu, norm_relu

            if layer is None:
                return norm_relu(rows, self)
            return linear_norm_relu(rows, layer.weight, layer.bias, self)
        packed = layer.packed_with_norm if isinstance(layer, Linear) else None
        if packed is not None:
            return multiply_and_rectify(rows, packed)
        return F.relu(self(rows if layer is None else layer(rows)))

    def then_relu_then(
        self, rows: Float[Tensor, "rows inputs"], layer: nn.Linear, final: nn.Linear
    ) -> Float[Tensor, " rows"]:
        """Normalises what a layer makes of rows, rectifies, and ends with a layer of one output."""
        if self._has_kernels(rows, rows.shape[0]):
            from stam.fast.kernels.rows import linear_norm_relu_dot

            return linear_norm_relu_dot(rows, (layer.weight, layer.bias), self, (final.weight, final.bias))
        return final(self.then_relu(rows, layer)).squeeze(1)

    def of_sums_then_relu(
        self,
        of_sample: Float[Tensor, "batch features"],
        of_location: Float[Tensor, "locations features"],
        chosen: Int[Tensor, "batch candidates"],
    ) -> Float[Tensor, "rows features"]:
        """Normalises of_sample[b] + of_location[chosen[b, k]], a row for each b and k, then rectifies."""
        if self._has_kernels(of_sample, chosen.numel()):
            from stam.fast.kernels.location_sums import sum_norm_relu

            return sum_norm_relu(of_sample, of_location, chosen, self)
        sums = of_sample[:, None] + look_up(of_location, chosen)  # (B, K, features)
        return self.then_relu(sums.flatten(0, 1))


class RowMlp(nn.Module):
    """Three times FC-BN-ReLU, then FC to one number: the shape of both actor and critic."""

    def __init__(self, in_features: int, hidden: int) -> None:
        super().__init__()
        self.fc0, self.bn0 = nn.Linear(in_features, hidden), RowNorm(hidden)
        self.fc1, self.bn1 = Linear(hidden, hidden), RowNorm(hidden)
        self.fc2, self.bn2 = Linear(hidden, hidden), RowNorm(hidden)
        self.fc_final = nn.Linear(hidden, 1)
        self.fc1.comes_before(self.bn1)
        self.fc2.comes_before(self.bn2)

    def finish(self, first: Float[Tensor, "rows hidden"]) -> Float[Tensor, " rows"]:
        """Computes everything after the first linear layer."""
        return self.finish_rectified(self.bn0.then_relu(first))

    def finish_rectified(self, rows: Float[Tensor, "rows hidden"]) -> Float[Tensor, " rows"]:
        """Computes everything after the first FC-BN-ReLU."""
        rows = self.bn1.then_relu(rows, self.fc1)
        return self.bn2.then_relu_then(rows, self.fc2, self.fc_final)


class Actor(RowMlp):
    """Rates candidate locations, each from the state and the location's own embedding."""

    def __init__(self, num_locations: int, width: int, hidden: int) -> None:
        super().__init__(3 * width, hidden)
        self.location_embedding = nn.Parameter(torch.zeros(num_locations, width))
        self._is_thinking = False
        self._kept: tuple[Tensor, ...] | None = None

    @contextmanager
    def thinking(self) -> Iterator[None]:
        """Within it nothing is learned, so W_e e(l), normed, is computed once, when first asked for."""
        self._is_thinking, self._kept = True, None
        try:
            yield
        finally:
            self._is_thinking, self._kept = False, None

    def forward(
        self, state: Float[Tensor, "batch features"], candidates: Int[Tensor, "batch candidates"]
    ) -> Float[Tensor, "batch candidates"]:
        """Returns a logit for each candidate.

        The first layer acts on [s ; e(l)], so it is W_s s + W_e e(l): one product for each sample and one
        for each location, instead of one for every pair.
        """
        for_state, for_location = self.fc0.weight.split((state.shape[1], self.location_embedding.shape[1]), 1)
        if self._is_thinking and not self.training:
            of_location, scale, shift = self._normed_locations(for_location)
            of_state = torch.addcmul(shift, F.linear(state, for_state), scale)  # (B, hidden)
            rows = (of_state[:, None] + look_up(of_location, candidates)).relu_().flatten(0, 1)
        else:
            of_state = F.linear(state, for_state, self.fc0.bias)
            of_location = F.linear(self.location_embedding, for_location)  # (L, hidden)
            rows = self.bn0.of_sums_then_relu(of_state, of_location, candidates)  # (B K, hidden)
        return self.finish_rectified(rows).view(candidates.shape)

    def _normed_locations(self, weight: Float[Tensor, "hidden width"]) -> tuple[Tensor, ...]:
        """Returns W_e e(l) with the first norm in it, and what the norm does to W_s s."""
        kept = self._kept
        if kept is None:
            scale, shift = scale_and_shift(self.bn0)
            of_location = F.linear(self.location_embedding, weight) * scale  # (L, hidden)
            kept = self._kept = of_location, scale, self.fc0.bias * scale + shift
        return kept


class Critic(RowMlp):
    """Predicts the (normalised) return that follows a state; its gradient stops at the state."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(2 * width, hidden)
        for layer in (self.fc0, self.fc1, self.fc2, self.fc_final):
            nn.init.xavier_uniform_(layer.weight, gain=1.2)
            nn.init.zeros_(layer.bias)
        nn.init.constant_(self.fc_final.bias, 0.58)

    def forward(self, state: Float[Tensor, "batch features"]) -> Float[Tensor, " batch"]:
        """Returns V(s)."""
        return self.finish(self.fc0(state.detach())).float()


class Agent(nn.Module):
    """Classifies a scene from a sequence of glimpses and decides where to look next.

    An agent starts without a critic; `add_critic` makes one for training, and it is never saved.
    """

    positions: Tensor

    def __init__(self, config: AgentConfig) -> None:
        super().__init__()
        self.config = config
        grid = config.grid
        self.core = VisionTransformer(
            num_classes=config.num_classes,
            patch_size=grid.patch_size,
            image_patches=grid.image_patches,
            channels=config.channels,
            width=config.width,
            depth=config.depth,
            num_heads=config.num_heads,
            mlp_ratio=config.mlp_ratio,
            drop_path=config.drop_path,
        )
        learned = config.policy == "learned"
        self.actor = Actor(grid.num_locations, config.width, config.actor_width) if learned else None
        self.critic: Critic | None = None
        self.register_buffer("positions", grid.patch_positions(), persistent=False)
        self.reset_location_embedding()
        self.packed_weights = PackedWeights(self)

    def train(self, mode: bool = True) -> "Agent":
        """Goes to training mode, or to evaluation mode."""
        if mode:
            self.packed_weights.forget()
        return super().train(mode)

    @property
    def grid(self) -> Grid:
        """The geometry of a scene."""
        return self.config.grid

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names; the class numbers where none were given."""
        return self.config.labels or tuple(str(index) for index in range(self.config.num_classes))

    @property
    def threshold(self) -> float:
        """Confidence above which a live agent stops looking."""
        return self.config.threshold

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.core.pos_embed.device

    def configure(self, **settings: object) -> "Agent":
        """Changes settings that no parameter depends on, such as labels or threshold."""
        allowed = {"labels", "threshold", "temperature", "handover", "mirrored"}
        if not settings.keys() <= allowed:
            raise StamError(f"only {', '.join(sorted(allowed))} can be changed on a built agent")
        self.config = dataclasses.replace(self.config, **settings)  # type: ignore[arg-type]
        return self

    def add_critic(self) -> Critic:
        """Makes a fresh critic for training and returns it."""
        self.critic = Critic(self.config.width, self.config.critic_width).to(self.device)
        return self.critic

    @torch.no_grad()
    def reset_location_embedding(self) -> None:
        """Starts e(l) from the core's position embeddings, interpolated to the grid of glimpses."""
        if self.actor is None:
            return
        patch_embedding = self.core.pos_embed[:, self.core.num_readout :]
        goal = (self.grid.rows, self.grid.columns)
        self.actor.location_embedding.copy_(
            interpolate_positions(patch_embedding, self.grid.image_patches, goal)[0]
        )

    def remember(
        self,
        memory: Memory | None,
        glimpses: Float[Tensor, "batch channels height width"],
        locations: Int[Tensor, " batch"],
    ) -> Memory:
        """Returns the memory with one more glimpse for each sample."""
        patches, started = self.grid.patches(glimpses[:, None]), None
        if memory is None:
            if self.core.can_start():
                started = self.core.start(patches, self.positions[locations])
            return Memory(locations[:, None], patches, started)
        if self.core.can_go_on(memory.started):
            started = self.core.start_more(memory.started, patches, self.positions[locations])
        return Memory(
            torch.cat((memory.locations, locations[:, None]), dim=1),
            torch.cat((memory.patches, patches), dim=1),
            started,
        )

    def join(self, memories: Sequence[Memory]) -> Memory:
        """Joins memories of equally many glimpses into one batch."""
        return Memory(
            torch.cat([memory.locations for memory in memories]),
            torch.cat([memory.patches for memory in memories]),
        )

    def sample_drop_path(self, batch_size: int, generator: torch.Generator | None = None) -> Tensor | None:
        """Draws drop-path masks, or `None` outside training."""
        return self.core.sample_drop_path(batch_size, generator)

    def believe(self, memory: Memory, drop_masks: Tensor | None = None) -> Belief:
        """Encodes the remembered glimpses and classifies the scene."""
        if drop_masks is None and self.core.can_go_on(memory.started):
            features = self.core.go_on(memory.started)  # (B, 2, D)
        else:
            features = self.core(memory.patches, self._positions(memory), drop_masks)
        logits = self.core.classify(features)
        if self.config.mirrored and not self.training:
            mirror_image = self.grid.mirror(memory.patches, self._positions(memory))
            other = self.core.classify(self.core(*mirror_image))
            logits = tuple(ensemble_log_probabilities(*pair) for pair in zip(logits, other, strict=True))
        class_logits, distill_logits = logits
        return Belief(features.flatten(1), class_logits, distill_logits)

    def _positions(self, memory: Memory) -> Int[Tensor, "batch tokens"]:
        return self.positions[memory.locations].flatten(1)

    def forward(self, memory: Memory, drop_masks: Tensor | None = None) -> Belief:
        """The same as `believe`, for wrappers that call modules."""
        return self.believe(memory, drop_masks)

    def policy(self, policy: Policy | str | None = None) -> Policy:
        """Returns the policy meant: one given, one named, or by default the agent's own."""
        if isinstance(policy, Policy):
            return policy
        return make_policy(policy or self.config.policy, self.grid, self.actor, self.config.handover)

    def look(
        self,
        images: Float[Tensor, "batch channels height width"],
        num_glimpses: int,
        first_location: int | Int[Tensor, " batch"] | None = None,
        policy: Policy | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Trace:
        """Looks at scenes glimpse by glimpse and returns what it saw and thought.

        Args:
            images: Normalised scenes. Only the pixels of the glimpses asked for are read.
            num_glimpses: Glimpses to sense in each scene.
            first_location: Grid index of the first glimpse, one for all or one each; random by default.
            policy: A policy or its name; by default the agent's own (the learned one is greedy).
            generator: Source of randomness for the first location and for random policies.
        """
        self.grid.require_images(images, self.config.channels)
        images = images.to(self.device)
        first = self._first_locations(first_location, images.shape[0], generator)

        with torch.no_grad(), evaluating(self), self.thinking():
            return self.look_from(images, num_glimpses, first, self.policy(policy), generator)

    def look_from(
        self,
        images: Float[Tensor, "batch channels height width"],
        num_glimpses: int,
        first_location: Int[Tensor, " batch"],
        policy: Policy,
        generator: torch.Generator | None = None,
    ) -> Trace:
        """The same as `look`, for arguments that were checked and an agent in evaluation mode."""

        def sense(locations: Tensor) -> Tensor:
            return self.grid.cut(images, locations[:, None])[:, 0]

        temperature = self.config.temperature
        return episode.look(self, sense, num_glimpses, first_location, policy, generator, temperature)

    def _first_locations(
        self, given: int | Tensor | None, batch_size: int, generator: torch.Generator | None
    ) -> Int[Tensor, " batch"]:
        if given is None:
            return random_locations(self.grid, batch_size, self.device, generator)
        locations = torch.as_tensor(given, device=self.device).long().expand(batch_size)
        if batch_size:
            lowest, highest = locations.aminmax()
            self.grid.index(int(lowest))
            self.grid.index(int(highest))
        return locations

    @contextmanager
    def thinking(self) -> Iterator[None]:
        """Within it nothing is learned: weights are kept in the form that computes fastest."""
        with self.packed_weights.in_use():
            if self.actor is None or torch.is_grad_enabled() or torch.is_autocast_enabled(self.device.type):
                yield
            else:
                with self.actor.thinking():
                    yield

    def session(
        self,
        first_location: int | tuple[int, int] | None = None,
        policy: Policy | str | None = None,
        generator: torch.Generator | None = None,
        threshold: float | None = None,
    ) -> Session:
        """Opens a live session: nothing seen yet, to be fed one glimpse at a time (see `stam.live`)."""
        return Session(self, first_location, policy, generator, threshold)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Within it a module is in evaluation mode."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def interpolate_positions(
    embedding: Float[Tensor, "1 source width"], source: tuple[int, int], goal: tuple[int, int]
) -> Float[Tensor, "1 goal width"]:
    """Resizes position embeddings from one grid to another (bicubic, corners not aligned)."""
    if source == goal:
        return embedding
    planes = embedding.reshape(1, *source, -1).permute(0, 3, 1, 2).float()  # (1, D, rows, columns)
    planes = F.interpolate(planes, size=goal, mode="bicubic", align_corners=False)
    return planes.flatten(2).transpose(1, 2).to(embedding.dtype)
