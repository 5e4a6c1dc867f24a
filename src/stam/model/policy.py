"""Who picks the next location: the learned policy, and the fixed or random orders it is compared with.

Every policy has one interface, `choose(state, seen) -> location`; `seen` marks the locations sensed so far
and none of them is ever chosen again. `decide` returns the location with what a learner needs beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from stam.config import require_choice
from stam.errors import StamError
from stam.learning.distributed import draw_rows
from stam.scene.grid import Grid
from stam.shapes import Bool, Float, Int

ORDERS = ("plus", "spiral", "centre-out")

Scorer = Callable[[Tensor, Tensor], Tensor]  # (state (B, 2D), candidates (B, K)) -> logits (B, K)


@dataclass(frozen=True)
class Decision:
    """A chosen location; with its log-probability where the policy is a distribution."""

    location: Int[Tensor, " batch"]
    log_probability: Float[Tensor, " batch"] | None = None


class Policy:
    """Base of all policies; a subclass implements `decide`."""

    def decide(
        self,
        state: Float[Tensor, "batch features"],
        seen: Bool[Tensor, "batch locations"],
        generator: torch.Generator | None = None,
        num_seen: int | None = None,
    ) -> Decision:
        """Picks one unseen location for each sample.

        Args:
            state: What the agent made of the glimpses so far.
            seen: The locations sensed so far.
            generator: Source of randomness, for the policies that draw.
            num_seen: How many locations each sample has seen, where all saw equally many; given, a GPU
                need not be asked.
        """
        raise NotImplementedError

    def choose(
        self,
        state: Float[Tensor, "batch features"],
        seen: Bool[Tensor, "batch locations"],
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, " batch"]:
        """Returns one unseen location for each sample."""
        return self.decide(state, seen, generator).location

    def at(self, num_glimpses: int) -> "Policy":
        """Returns the policy that decides after so many glimpses, which is mostly this one."""
        return self


class RandomPolicy(Policy):
    """Any unseen location, all equally likely."""

    def decide(
        self,
        state: Float[Tensor, "batch features"],
        seen: Bool[Tensor, "batch locations"],
        generator: torch.Generator | None = None,
        num_seen: int | None = None,
    ) -> Decision:
        """Picks uniformly among the unseen locations."""
        noise = random_like(seen, generator)
        return Decision(noise.masked_fill(seen, -1).argmax(dim=1))


class OrderPolicy(Policy):
    """A fixed order over the grid; locations already seen are skipped."""

    def __init__(self, order: list[int]) -> None:
        self._order = tuple(order)

    def decide(
        self,
        state: Float[Tensor, "batch features"],
        seen: Bool[Tensor, "batch locations"],
        generator: torch.Generator | None = None,
        num_seen: int | None = None,
    ) -> Decision:
        """Picks the first unseen location of the order."""
        # what an export traces is no real tensor: it must not be kept for later looks
        ranks = _ranks if torch.compiler.is_compiling() else _kept_ranks
        rank = ranks(self._order, seen.device)
        return Decision(rank.expand_as(seen).masked_fill(seen, seen.shape[1]).argmin(dim=1))


def _ranks(order: tuple[int, ...], device: torch.device) -> Int[Tensor, " locations"]:
    """Returns the rank of each location."""
    rank = torch.empty(len(order), dtype=torch.long)
    rank[torch.tensor(order)] = torch.arange(len(order))
    return rank.to(device)


_kept_ranks = cache(_ranks)  # on the device, so that no look has to bring them there


class GreedyPolicy(Policy):
    """The learned policy at inference: the unseen location the actor rates highest."""

    def __init__(self, actor: Scorer) -> None:
        self.actor = actor

    def decide(
        self,
        state: Float[Tensor, "batch features"],
        seen: Bool[Tensor, "batch locations"],
        generator: torch.Generator | None = None,
        num_seen: int | None = None,
    ) -> Decision:
        """Picks the best-rated unseen location."""
        candidates, closed = unseen_candidates(seen, num_seen)
        logits = self.actor(state, candidates)
        if closed is not None:
            logits = logits.masked_fill(closed, -torch.inf)
        best = logits.argmax(dim=1, keepdim=True)
        return Decision(candidates.gather(1, best).squeeze(1))


class HandoverPolicy(Policy):
    """The learned policy for the first glimpses, an order for the rest."""

    def __init__(self, learned: GreedyPolicy, rest: OrderPolicy, after: int) -> None:
        self.learned, self.rest, self.after = learned, rest, after

    def at(self, num_glimpses: int) -> Policy:
        """Returns the learned policy, or the order once it has taken over."""
        return self.learned if num_glimpses < self.after else self.rest

    def is_over(self, seen: Bool[Tensor, "batch locations"]) -> Bool[Tensor, " batch"]:
        """Tells which samples have seen so much that the order takes over."""
        return seen.sum(dim=1) >= self.after

    def decide(
        self,
        state: Float[Tensor, "batch features"],
        seen: Bool[Tensor, "batch locations"],
        generator: torch.Generator | None = None,
        num_seen: int | None = None,
    ) -> Decision:
        """Lets the actor decide, or the order, or each for some of the samples."""
        if num_seen is not None:
            return self.at(num_seen).decide(state, seen, generator, num_seen)
        over = self.is_over(seen)
        in_order = self.rest.decide(state, seen).location
        if over.all():
            return Decision(in_order)
        return Decision(torch.where(over, in_order, self.learned.decide(state, seen).location))


class SampledPolicy(Policy):
    """The learned policy in training: a location drawn from a softmax over the unseen ones.

    The actor's logits over the unseen locations are divided by their L2 norm and multiplied by `tau`.
    Every sample must have seen the same number of locations, as in a training batch. A `tau` that changes
    while a recorded batch is replayed is a tensor, changed in place. From `handover` glimpses on any unseen
    location is as likely as another, and there is nothing to learn about it: in use an order takes over, but
    classifiers learn more from many sets of locations than from one.
    """

    def __init__(self, actor: Scorer, tau: float | Tensor = 1.0, handover: int | None = None) -> None:
        self.actor, self.tau, self.handover = actor, tau, handover

    def log_probabilities(
        self,
        state: Float[Tensor, "batch features"],
        seen: Bool[Tensor, "batch locations"],
        num_seen: int | None = None,
    ) -> Float[Tensor, "batch locations"]:
        """Returns log pi over all locations; it is minus infinity where a location was seen."""
        candidates, closed = unseen_candidates(seen, num_seen)
        logits = self.actor(state, candidates).float()
        if closed is not None:
            logits = logits.masked_fill(closed, 0)
        scaled = F.normalize(logits, dim=1, eps=1e-6) * self.tau  # eps: all-zero logits stay zero
        if closed is not None:
            scaled = scaled.masked_fill(closed, -torch.inf)
        log_probabilities = scaled.log_softmax(dim=1)
        return torch.full(seen.shape, -torch.inf, device=seen.device).scatter(
            1, candidates, log_probabilities
        )

    def pick(
        self, log_probabilities: Float[Tensor, "batch locations"], generator: torch.Generator | None
    ) -> Int[Tensor, " batch"]:
        """Draws one location for each sample (by the Gumbel-max trick, so the host never waits)."""
        return perturbed(log_probabilities, generator).argmax(dim=1)

    def decide(
        self,
        state: Float[Tensor, "batch features"],
        seen: Bool[Tensor, "batch locations"],
        generator: torch.Generator | None = None,
        num_seen: int | None = None,
    ) -> Decision:
        """Draws a location and returns it with its log-probability."""
        if self.handover is not None and num_seen is not None and num_seen >= self.handover:
            return RandomPolicy().decide(state, seen, generator)
        log_probabilities = self.log_probabilities(state, seen, num_seen)
        location = self.pick(log_probabilities, generator)
        return Decision(location, log_probabilities.gather(1, location[:, None]).squeeze(1))


def perturbed(
    logits: Float[Tensor, "batch locations"], generator: torch.Generator | None
) -> Float[Tensor, "batch locations"]:
    """Returns logits with Gumbel noise: the largest is a draw, the k largest are draws of different ones."""
    noise = random_like(logits, generator).clamp_min(1e-20)
    return logits.detach() - (-noise.log()).log()


def random_like(tensor: Tensor, generator: torch.Generator | None) -> Float[Tensor, "..."]:
    """Returns uniform noise of the tensor's shape, drawn where the generator lives."""
    count, *rest = tensor.shape
    device = tensor.device if generator is None else generator.device
    noise = draw_rows(lambda rows: torch.rand(rows, *rest, generator=generator, device=device), count)
    return noise.to(tensor.device)


def random_locations(
    grid: Grid, batch_size: int, device: torch.device, generator: torch.Generator | None = None
) -> Int[Tensor, " batch"]:
    """Draws the first location of each sample, uniformly and independently."""
    where, highest = device if generator is None else generator.device, grid.num_locations
    drawn = draw_rows(
        lambda rows: torch.randint(highest, (rows,), generator=generator, device=where), batch_size
    )
    return drawn.to(device)


def unseen_candidates(
    seen: Bool[Tensor, "batch locations"], num_seen: int | None = None
) -> tuple[Int[Tensor, "batch candidates"], Bool[Tensor, "batch candidates"] | None]:
    """Returns the unseen locations in ascending order, and which of the entries are not.

    Samples that saw more than others have fewer candidates: their rows are filled up with seen ones. Where
    all saw equally many, `num_seen`, there are none of those.
    """
    count = int((~seen).sum(dim=1).max()) if num_seen is None else seen.shape[1] - num_seen
    if count == 0:
        raise StamError("every location has been seen: there is nowhere left to look")
    # by counting: a GPU takes ten times as long to sort
    seen_before = seen.cumsum(dim=1)
    locations = torch.arange(seen.shape[1], device=seen.device)
    place = torch.where(seen, seen.shape[1] - seen_before, locations - seen_before)  # seen ones to the end
    candidates = torch.empty_like(place).scatter_(1, place, locations.expand_as(place))[:, :count]
    return candidates, None if num_seen is not None else seen.gather(1, candidates)


def order(name: str, grid: Grid) -> list[int]:
    """Returns the locations of a grid in a named order: plus, spiral or centre-out."""
    require_choice("order", name, ORDERS)
    return {"plus": plus_order, "spiral": spiral_order, "centre-out": centre_out_order}[name](grid)


def spiral_order(grid: Grid) -> list[int]:
    """From the centre cell outward, ring by ring, clockwise; cells outside the grid are stepped over."""
    row, column = grid.rows // 2, grid.columns // 2
    visited = [grid.index((row, column))]
    turns = [(0, 1), (1, 0), (0, -1), (-1, 0)]  # right, down, left, up
    side = 0
    while len(visited) < grid.num_locations:
        row_step, column_step = turns[side % 4]
        for _ in range(side // 2 + 1):
            row, column = row + row_step, column + column_step
            if 0 <= row < grid.rows and 0 <= column < grid.columns:
                visited.append(grid.index((row, column)))
        side += 1
    return visited


def plus_order(grid: Grid) -> list[int]:
    """The centre, then the middle row and column outward, then the rest by distance from the centre."""
    centre = (grid.rows // 2, grid.columns // 2)

    def rank(location: int) -> tuple[bool, int, int]:
        row, column = grid.row_column(location)
        on_cross = row == centre[0] or column == centre[1]
        return not on_cross, _distance(grid, location), location

    return sorted(range(grid.num_locations), key=rank)


def centre_out_order(grid: Grid) -> list[int]:
    """All locations by distance from the centre, nearest first."""
    return sorted(range(grid.num_locations), key=lambda location: (_distance(grid, location), location))


def _distance(grid: Grid, location: int) -> int:
    row, column = grid.row_column(location)
    return (row - grid.rows // 2) ** 2 + (column - grid.columns // 2) ** 2


def make_policy(name: str, grid: Grid, actor: Scorer | None = None, handover: int | None = None) -> Policy:
    """Returns a policy by name: learned (greedy, with a handover if given), random, or one of the orders."""
    require_choice("policy", name, ("learned", "random", *ORDERS))
    if name == "random":
        return RandomPolicy()
    if name != "learned":
        return OrderPolicy(order(name, grid))
    if actor is None:
        raise StamError("this agent was trained without an actor: choose the policy random, plus or spiral")
    learned = GreedyPolicy(actor)
    if handover is None:
        return learned
    return HandoverPolicy(learned, OrderPolicy(order("centre-out", grid)), handover)
