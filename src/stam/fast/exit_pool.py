"""Early exit on a GPU: scenes leave when the agent is sure, and the others are computed in full batches.

All scenes of a pool take a glimpse before any takes the next, in batches of what is left of the pool. So a
batch is full as long as enough scenes are left. A step of a batch is a CUDA graph, since a GPU computes it
faster than a host launches it: one for each number of glimpses and each of a few batch sizes.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from stam.fast import kernels
from stam.fast.bf16_weights import Bf16Weights
from stam.fast.cuda import FusedLooker
from stam.fast.cuda_causal import FusedCausalCore
from stam.fast.cuda_graph import GraphedFunction
from stam.model.agent import Looker
from stam.model.belief import Belief, is_confident
from stam.model.policy import Policy
from stam.shapes import Float, Int


@dataclass(frozen=True)
class PoolExits:
    """Where looking ended for each scene of a pool.

    Attributes:
        num_glimpses: Glimpses sensed.
        probabilities: What the agent believed then.
        locations: Where it looked; -1 after it stopped.
    """

    num_glimpses: Int[Tensor, " scenes"]
    probabilities: Float[Tensor, "scenes classes"]
    locations: Int[Tensor, "scenes glimpses"]


def can_pool(agent: object, policy: Policy, images: Tensor) -> bool:
    """Tells whether a pool can look: kernels compute the agent, and scenes in one state go one way."""
    is_same_for_all = policy.select(torch.zeros(1, dtype=torch.long)) is policy and not policy.draws
    return isinstance(agent, FusedLooker) and kernels.usable(images) and is_same_for_all


class ExitPool:
    """Looks at pools of scenes until the agent is sure of each."""

    def __init__(
        self,
        agent: Looker,
        policy: Policy,
        num_glimpses: int,
        most_scenes: int,
        batch_size: int,
        temperature: float = 1.0,
        is_graphed: bool = True,
    ) -> None:
        """Takes room for a pool.

        Args:
            agent: Who looks, in evaluation mode.
            policy: Picks the locations; see `can_pool`.
            num_glimpses: The most glimpses to sense in a scene.
            most_scenes: Scenes of a pool.
            batch_size: Scenes computed at once.
            temperature: Divides the logits.
            is_graphed: Whether steps are replayed as CUDA graphs.
        """
        self.agent, self.policy, self.temperature = agent, policy, temperature
        self.num_glimpses, self.batch_size, self.is_graphed = num_glimpses, batch_size, is_graphed
        device, config = agent.device, agent.config
        half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        self._images = torch.empty(
            most_scenes, config.channels, *agent.grid.image_size, dtype=half, device=device
        )
        self._locations = torch.zeros(most_scenes, num_glimpses, dtype=torch.long, device=device)
        self._probabilities = torch.zeros(most_scenes, config.num_classes, device=device)
        self._rows: Tensor | None = None
        if isinstance(agent.core, FusedCausalCore):
            room = num_glimpses * agent.positions.shape[1]
            self._rows = agent.core.no_rows(most_scenes, room, device).values
        self._weights = None
        if isinstance(agent, FusedLooker) and half is not None:
            self._weights = Bf16Weights(agent.agent, half)
        self._graphs: dict[tuple[int, int], GraphedFunction] = {}
        self._memory = torch.cuda.graph_pool_handle() if is_graphed else None

    def __call__(
        self,
        images: Float[Tensor, "scenes channels height width"],
        first_location: Int[Tensor, " scenes"],
        threshold: float,
    ) -> PoolExits:
        """Looks at each scene until the agent is sure of it, with max p above the threshold."""
        rounded = nullcontext() if self._weights is None else self._weights.in_use()
        with torch.no_grad(), rounded:
            return self._look(images, first_location, threshold)

    def _look(self, images: Tensor, first_location: Tensor, threshold: float) -> PoolExits:
        size = len(images)
        self._images[:size] = images
        self._locations[:size, 0] = first_location
        left = torch.arange(size, device=images.device)
        counts = torch.zeros_like(left)
        for count in range(1, self.num_glimpses + 1):
            for batch in left.split(self.batch_size):
                self._take(count, batch)
            counts[left] = count
            if count < self.num_glimpses:
                left = left[~is_confident(self._probabilities[left], threshold)]
            if len(left) == 0:
                break
        is_seen = torch.arange(self.num_glimpses, device=images.device) < counts[:, None]
        locations = self._locations[:size].masked_fill(~is_seen, -1)
        return PoolExits(counts, self._probabilities[:size].clone(), locations)

    def _take(self, count: int, samples: Int[Tensor, " batch"]) -> None:
        """Lets some scenes take a step, as a batch of the next of a few sizes."""
        size = min(next_size(len(samples)), self.batch_size)
        padding = samples[-1:].expand(size - len(samples))  # computed once more: the same is written twice
        samples = torch.cat((samples, padding))
        if not self.is_graphed:
            return self._step(count, samples)
        key = (count, size)
        if key not in self._graphs:
            self._graphs[key] = GraphedFunction(lambda chosen: self._step(count, chosen), pool=self._memory)
        self._graphs[key](samples)
        return None

    def _step(self, count: int, samples: Int[Tensor, " batch"]) -> None:
        """Encodes the latest glimpse of some scenes, and picks the next location."""
        agent, seen_at = self.agent, self._locations[samples, :count]
        belief = self._believe(count, samples, seen_at)
        self._probabilities[samples] = belief.probabilities(self.temperature)
        if count == self.num_glimpses:
            return
        seen = torch.zeros(len(samples), agent.grid.num_locations, dtype=torch.bool, device=samples.device)
        seen = seen.scatter(1, seen_at, True)
        decision = self.policy.at(count).decide(belief.state, seen, None, num_seen=count)
        self._locations[samples, count] = decision.location

    def _believe(self, count: int, samples: Tensor, seen_at: Int[Tensor, "batch glimpses"]) -> Belief:
        agent, core = self.agent, self.agent.core
        if self._rows is None:  # a core that keeps patches takes in all at once
            patches = agent.grid.patches(agent.grid.cut(self._images, seen_at, samples))
            return agent.believe(core.remember(None, patches, agent.positions[seen_at].flatten(1)))
        assert isinstance(core, FusedCausalCore)
        latest = seen_at[:, -1:]
        patches, positions = (
            agent.grid.patches(agent.grid.cut(self._images, latest, samples)),
            agent.positions[latest].flatten(1),
        )
        owners = samples.int()
        before = torch.full_like(owners, (count - 1) * positions.shape[1])
        features = core.step(patches, positions, self._rows, owners, before)
        return Belief(features.flatten(1), *core.classify(features))


def next_size(count: int) -> int:
    """Returns the next size that is a power of two, or one and a half of it."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
