"""Early exit on a GPU: scenes leave when the agent is sure, and the others are computed in full batches.

All scenes of a pool take a glimpse before any takes the next, in batches of what is left of the pool. So a
batch is full as long as enough scenes are left. A step of a batch is a CUDA graph, since a GPU computes it
faster than a host launches it: one for each number of glimpses and each of a few batch sizes.

The GPU itself keeps the list of scenes that are left. The host must know how many they are, to choose a batch
size. Where several batches are left it waits for that number. Where one is left, the GPU would have nothing
to do meanwhile: there the host goes by the number before the latest step, which is never too small.
"""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from stam.fast import kernels
from stam.fast.bf16_weights import Bf16Weights
from stam.fast.cuda import FusedActor, FusedLooker
from stam.fast.cuda_causal import FusedCausalCore
from stam.fast.cuda_graph import GraphedFunction
from stam.fast.cuda_policy import fuse_policy
from stam.model.agent import Looker
from stam.model.belief import Belief, is_confident
from stam.model.policy import Policy, Seen
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
        is_late: bool = True,
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
            is_late: Whether the last batch is chosen by the number of scenes before the latest step.
        """
        self.agent, self.policy, self.temperature = agent, fuse_policy(policy), temperature
        self.num_glimpses, self.batch_size = num_glimpses, batch_size
        self.is_graphed, self.is_late = is_graphed, is_late
        device, config = agent.device, agent.config
        half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        self._spare = most_scenes  # a scene that is computed where none is left
        places = most_scenes + 1
        self._images = torch.zeros(places, config.channels, *agent.grid.image_size, dtype=half, device=device)
        self._locations = torch.zeros(places, num_glimpses, dtype=torch.long, device=device)
        self._probabilities = torch.zeros(places, config.num_classes, device=device)
        self._counts = torch.zeros(places, dtype=torch.long, device=device)
        self._is_done = torch.zeros(places, dtype=torch.bool, device=device)
        self._threshold = torch.zeros((), device=device)
        self._order = torch.zeros(most_scenes + batch_size, dtype=torch.long, device=device)
        self._left = torch.zeros(1, dtype=torch.long, device=device)
        # how many were left after each step, for the host to read
        self._told = torch.zeros(num_glimpses, 1, dtype=torch.long, pin_memory=device.type == "cuda")
        self._events = [torch.cuda.Event() for _ in range(num_glimpses)] if device.type == "cuda" else []
        self._rows: Tensor | None = None
        self._table: Tensor | None = None  # kept in place, since CUDA graphs read it
        if isinstance(agent.core, FusedCausalCore):
            room = num_glimpses * agent.positions.shape[1]
            self._rows = agent.core.no_rows(places, room, device).values.zero_()
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
        with torch.no_grad(), ExitStack() as stack:
            if self._weights is not None:
                stack.enter_context(self._weights.in_use())
            if isinstance(self.agent.actor, FusedActor) and kernels.usable(self._images):
                stack.enter_context(self.agent.actor.folded())
            if self._rows is not None:
                self._make_table()
            return self._look(images, first_location, threshold)

    def _make_table(self) -> None:
        """Makes what tokens start from, of the weights as they are now."""
        assert isinstance(self.agent.core, FusedCausalCore)
        fresh = self.agent.core.token_table()
        self._table = fresh if self._table is None else self._table.copy_(fresh)

    def _look(self, images: Tensor, first_location: Tensor, threshold: float) -> PoolExits:
        size, device = len(images), images.device
        self._images[:size] = images
        self._locations[:size, 0] = first_location
        self._locations[self._spare] = torch.arange(self.num_glimpses, device=device)  # no location twice
        self._threshold.fill_(threshold)
        self._order.fill_(size - 1)
        self._order[:size] = torch.arange(size, device=device)
        self._left.fill_(size)
        num_left = size  # or more
        for count in range(1, self.num_glimpses + 1):
            for start in range(0, num_left, self.batch_size):
                self._take(count, start, min(self.batch_size, num_left - start))
            if count == self.num_glimpses:
                break
            self._close_ranks(count)
            is_late = self.is_late and num_left <= self.batch_size
            num_left = min(num_left, self._num_left_after(count - 1 if is_late else count))
            if num_left == 0:
                break
        counts = self._counts[:size].clone()
        is_seen = torch.arange(self.num_glimpses, device=device) < counts[:, None]
        locations = self._locations[:size].masked_fill(~is_seen, -1)
        return PoolExits(counts, self._probabilities[:size].clone(), locations)

    def _take(self, count: int, start: int, num_scenes: int) -> None:
        """Lets some scenes take a step, as a batch of the next of a few sizes.

        The list of scenes goes on with one that is left: it is computed again, and the same is written twice.
        """
        size = min(next_size(num_scenes), self.batch_size)
        samples = self._order[start : start + size]
        if not self.is_graphed:
            return self._step(count, samples)
        key = (count, size)
        if key not in self._graphs:
            self._graphs[key] = GraphedFunction(lambda chosen: self._step(count, chosen), pool=self._memory)
        self._graphs[key](samples)
        return None

    def _close_ranks(self, count: int) -> None:
        """Takes those who are done off the list, and lets the host know how many are left."""
        if kernels.usable(self._images):
            from stam.fast.kernels.ranks import close_ranks

            close_ranks(self._order, self._is_done, self._left, self._spare)
        else:
            still = self._order[: int(self._left)]
            still = still[~self._is_done[still]]
            self._order.fill_(still[0] if len(still) > 0 else self._spare)
            self._order[: len(still)] = still
            self._left.fill_(len(still))
        self._told[count].copy_(self._left, non_blocking=True)
        if self._events:
            self._events[count].record()

    def _num_left_after(self, count: int) -> int:
        """Returns how many scenes were left after a step, waiting for it; at first it was any number."""
        if count == 0:
            return len(self._order)
        if self._events:
            self._events[count].synchronize()
        return int(self._told[count])

    def _step(self, count: int, samples: Int[Tensor, " batch"]) -> None:
        """Encodes the latest glimpse of some scenes, notes what is believed, and picks the next location."""
        belief = self._believe(count, samples)
        seen = self._note(count, samples, belief)
        if count < self.num_glimpses:
            decision = self.policy.at(count).decide(belief.state, seen, None, num_seen=count)
            self._locations[samples, count] = decision.location

    def _believe(self, count: int, samples: Int[Tensor, " batch"]) -> Belief:
        agent, core = self.agent, self.agent.core
        if self._rows is None:  # a core that keeps patches takes in all at once
            return agent.believe(core.remember(None, *self._patches(samples, slice(0, count))))
        assert isinstance(core, FusedCausalCore)
        patches, positions = self._patches(samples, slice(count - 1, count))
        owners = samples.int()
        before = torch.full_like(owners, (count - 1) * positions.shape[1])
        features = core.step(patches, positions, self._rows, owners, before, table=self._table)
        return Belief(features.flatten(1), *core.classify(features))

    def _patches(self, samples: Int[Tensor, " batch"], glimpses: slice) -> tuple[Tensor, Tensor]:
        """Returns the patches of some glimpses of some scenes, and where they lie."""
        grid, positions = self.agent.grid, self.agent.positions
        if kernels.usable(self._images):
            from stam.fast.kernels.exits import cut_patches

            return cut_patches(grid, self._images, samples, self._locations, positions, glimpses)
        locations = self._locations[samples, glimpses]
        return grid.patches(grid.cut(self._images, locations, samples)), positions[locations].flatten(1)

    def _note(self, count: int, samples: Int[Tensor, " batch"], belief: Belief) -> Seen:
        """Notes what is believed of some scenes, and who is done; returns the locations each has seen."""
        num_locations = self.agent.grid.num_locations
        if kernels.usable(self._images):
            from stam.fast.kernels.exits import note

            logits, notes = (
                (belief.class_logits, belief.distill_logits),
                (self._probabilities, self._counts, self._is_done),
            )
            return note(
                logits,
                samples,
                self._locations,
                self._threshold,
                self.temperature,
                count,
                num_locations,
                *notes,
            )
        probabilities = belief.probabilities(self.temperature)
        self._probabilities[samples] = probabilities
        self._counts.index_fill_(0, samples, count)
        self._is_done[samples] = is_confident(probabilities, self._threshold)
        seen = torch.zeros(len(samples), num_locations, dtype=torch.bool, device=samples.device)
        return seen.scatter_(1, self._locations[samples, :count], True)


def next_size(count: int) -> int:
    """Returns the next size that is a power of two, or that and a few eighths of it."""
    eighth = max(1, (1 << (count.bit_length() - 1)) // 8)
    return -(-count // eighth) * eighth
