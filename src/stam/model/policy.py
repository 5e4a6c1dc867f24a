"""Who picks the next location: the learned policy, and the fixed or random orders it is compared with.

Every policy has one interface, `decide(state, seen) -> Decision`: `seen` marks the locations sensed so far,
none of which is chosen again. `choose` returns the location alone. `POLICIES` lists the names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from stam.errors import ConfigError, StamError, require_choice
from stam.model.orders import ORDERS, centre_out_order
from stam.model.randomness import Randomness, random_source
from stam.scene.grid import Grid
from stam.shapes import Bool, Float, Int

FINAL_TAU = 4.0  # the paper's tau when training ends; maps are drawn with it

State = Float[Tensor, "batch features"]  # s = [f_g ; f_d], so 2 D features
Seen = Bool[Tensor, "batch locations"]
PerLocation = Float[Tensor, "batch locations"]
Scorer = Callable[[Tensor, Tensor], Tensor]  # (state (B, 2D), candidates (B, K)) -> logits (B, K)


@dataclass(frozen=True)
class Decision:
    """A chosen location; with its log-probability where the actor is being trained (`SampledPolicy`)."""

    location: Int[Tensor, " batch"]
    log_probability: Float[Tensor, " batch"] | None = None


class Policy:
    """Base of all policies; a subclass implements `decide`, and `weights` if it can say what it prefers.

    Attributes:
        draws: Whether it draws at random, so that two samples in the same state may go different ways.
    """

    draws = False

    def decide(
        self, state: State, seen: Seen, generator: Randomness = None, num_seen: int | None = None
    ) -> Decision:
        """Picks one unseen location for each sample.

        Args:
            state: What the agent made of the glimpses so far.
            seen: The locations sensed so far.
            generator: Source of randomness, for the policies that draw.
            num_seen: How many locations each sample has seen, where all saw equally many. It avoids a
                synchronisation with a GPU.
        """
        raise NotImplementedError

    def choose(self, state: State, seen: Seen, generator: Randomness = None) -> Int[Tensor, " batch"]:
        """Returns one unseen location for each sample."""
        return self.decide(state, seen, generator).location

    def weights(self, state: State, seen: Seen) -> PerLocation:
        """Returns how much each location is preferred; what it says of seen ones does not matter."""
        raise StamError(f"{type(self).__name__} does not say how likely a location is, so it has no map")

    def probabilities(self, state: State, seen: Seen) -> PerLocation:
        """Returns how likely each location is to come next, 0 where it was seen; all 0 when all were seen."""
        weights = self.weights(state, seen).masked_fill(seen, 0)
        return weights / weights.sum(dim=1, keepdim=True).clamp_min(1e-12)

    def at(self, num_glimpses: int) -> "Policy":
        """Returns the policy that decides after so many glimpses; one made of two overrides it."""
        return self

    def select(self, samples: Int[Tensor, " kept"]) -> "Policy":
        """Returns the policy for some samples of a batch; one with an order for each sample overrides it."""
        return self


class RandomPolicy(Policy):
    """Any unseen location, all equally likely."""

    draws = True

    def decide(
        self, state: State, seen: Seen, generator: Randomness = None, num_seen: int | None = None
    ) -> Decision:
        """Picks uniformly among the unseen locations."""
        noise = random_source(generator).uniform(tuple(seen.shape), seen.device)
        return Decision(noise.masked_fill(seen, -1).argmax(dim=1))

    def weights(self, state: State, seen: Seen) -> PerLocation:
        """All alike."""
        return torch.ones(seen.shape, device=seen.device)


class OrderPolicy(Policy):
    """A fixed order over the grid; locations already seen are skipped."""

    def __init__(self, order: list[int]) -> None:
        self._order = tuple(order)

    def decide(
        self, state: State, seen: Seen, generator: Randomness = None, num_seen: int | None = None
    ) -> Decision:
        """Picks the first unseen location of the order."""
        # what an export traces is no real tensor: it must not be kept for later looks
        ranks = _ranks if torch.compiler.is_compiling() else _kept_ranks
        rank = ranks(self._order, seen.device)
        return Decision(rank.expand_as(seen).masked_fill(seen, seen.shape[1]).argmin(dim=1))

    def weights(self, state: State, seen: Seen) -> PerLocation:
        """The one that comes next is certain."""
        return F.one_hot(self.choose(state, seen), seen.shape[1]).float()


def _ranks(order: tuple[int, ...], device: torch.device) -> Int[Tensor, " locations"]:
    """Returns the rank of each location."""
    rank = torch.empty(len(order), dtype=torch.long)
    rank[torch.tensor(order)] = torch.arange(len(order))
    return rank.to(device)


_kept_ranks = cache(_ranks)  # on the device, so that no look has to bring them there


class GreedyPolicy(Policy):
    """The learned policy at inference: the unseen location the actor rates highest.

    Args:
        actor: Rates locations.
        sharpness: What training multiplied the logits by; `None` where it divided them by their norm first.
            The choice does not depend on it, only how likely the other locations are said to be.
    """

    def __init__(self, actor: Scorer, sharpness: float | None = None) -> None:
        self.actor, self.sharpness = actor, sharpness

    def decide(
        self, state: State, seen: Seen, generator: Randomness = None, num_seen: int | None = None
    ) -> Decision:
        """Picks the best-rated unseen location."""
        candidates, filler = unseen_candidates(seen, num_seen)
        logits = self.actor(state, candidates)
        if filler is not None:
            logits = logits.masked_fill(filler, -torch.inf)
        best = logits.argmax(dim=1, keepdim=True)
        return Decision(candidates.gather(1, best).squeeze(1))

    def weights(self, state: State, seen: Seen) -> PerLocation:
        """A softmax of the logits scaled as in training; normalised ones with the paper's last tau."""
        every = torch.arange(seen.shape[1], device=seen.device).expand(seen.shape)
        logits = self.actor(state, every).float()
        if self.sharpness is None:
            return scale_logits(logits.masked_fill(seen, 0), FINAL_TAU).exp()  # exponents in -tau..tau
        return (self.sharpness * logits).masked_fill(seen, -torch.inf).softmax(dim=1)


class SampledPolicy(Policy):
    """The learned policy in training: a location drawn from a softmax over the unseen ones.

    The actor's logits over the unseen locations are divided by their L2 norm and multiplied by `tau`.
    A `tau` that changes while a CUDA graph is replayed is a tensor, changed in place.
    """

    draws = True

    def __init__(self, actor: Scorer, tau: float | Tensor = 1.0) -> None:
        self.actor, self.tau = actor, tau

    def log_probabilities(self, state: State, seen: Seen, num_seen: int | None = None) -> PerLocation:
        """Returns log pi over all locations; it is minus infinity where a location was seen."""
        candidates, filler = unseen_candidates(seen, num_seen)
        logits = self.actor(state, candidates).float()
        if filler is not None:
            logits = logits.masked_fill(filler, 0)
        logits = scale_logits(logits, self.tau)
        if filler is not None:
            logits = logits.masked_fill(filler, -torch.inf)
        log_probabilities = logits.log_softmax(dim=1)
        return torch.full(seen.shape, -torch.inf, device=seen.device).scatter(
            1, candidates, log_probabilities
        )

    def pick(self, log_probabilities: PerLocation, generator: Randomness = None) -> Int[Tensor, " batch"]:
        """Draws one location for each sample."""
        return draw(log_probabilities, generator)

    def decide(
        self, state: State, seen: Seen, generator: Randomness = None, num_seen: int | None = None
    ) -> Decision:
        """Draws a location and returns it with its log-probability."""
        log_probabilities = self.log_probabilities(state, seen, num_seen)
        location = self.pick(log_probabilities, generator)
        return Decision(location, log_probabilities.gather(1, location[:, None]).squeeze(1))

    def log_probabilities_of(
        self,
        locations: Int[Tensor, "steps batch"],
        states: Float[Tensor, "steps batch features"],
        seen: Bool[Tensor, "steps batch locations"],
    ) -> Float[Tensor, "steps batch"]:
        """Returns log pi of decisions made before, one after each of the first steps of an episode.

        Only the actor takes one step after the other, as its batch norm runs over the candidates of a step.
        """
        seen, location = seen.flatten(0, 1), locations.flatten()[:, None]
        candidates, _ = unseen_candidates(seen, num_seen=1)
        filler = seen.gather(1, candidates)  # after the first step there are fewer
        logits = rate_each_step(self.actor, states, candidates.unflatten(0, locations.shape)).flatten(0, 1)
        logits = scale_logits(logits.float().masked_fill(filler, 0), self.tau).masked_fill(filler, -torch.inf)
        place = (candidates == location).int().argmax(dim=1, keepdim=True)
        return logits.log_softmax(dim=1).gather(1, place).view(locations.shape)

    def weights(self, state: State, seen: Seen) -> PerLocation:
        """The distribution it draws from."""
        return self.log_probabilities(state, seen).exp()


class FirstThen(Policy):
    """One policy for the first glimpses, another for the rest."""

    def __init__(self, first: Policy, then: Policy, num_first: int) -> None:
        self.first, self.then, self.num_first = first, then, num_first
        self.draws = first.draws or then.draws

    def at(self, num_glimpses: int) -> Policy:
        """Returns the policy that decides after so many glimpses."""
        return self.first if num_glimpses < self.num_first else self.then

    def select(self, samples: Int[Tensor, " kept"]) -> Policy:
        """Returns the policy for some samples of a batch; it is this one where both are the same for all."""
        first, then = self.first.select(samples), self.then.select(samples)
        is_same = first is self.first and then is self.then
        return self if is_same else FirstThen(first, then, self.num_first)

    def decide(
        self, state: State, seen: Seen, generator: Randomness = None, num_seen: int | None = None
    ) -> Decision:
        """Lets one of the two decide, or each for some of the samples."""
        if num_seen is not None:
            return self.at(num_seen).decide(state, seen, generator, num_seen)
        is_over = seen.sum(dim=1) >= self.num_first
        later = self.then.choose(state, seen, generator)
        if is_over.all():
            return Decision(later)
        return Decision(torch.where(is_over, later, self.first.choose(state, seen, generator)))

    def weights(self, state: State, seen: Seen) -> PerLocation:
        """Those of the policy that decides next."""
        is_over = seen.sum(dim=1, keepdim=True) >= self.num_first
        return torch.where(is_over, self.then.weights(state, seen), self.first.weights(state, seen))


@runtime_checkable
class StepScorer(Protocol):
    """An actor that can rate the candidates of all steps of an episode at once."""

    def at_each_step(self, states: Tensor, candidates: Tensor) -> Tensor:
        """Returns what `rate_each_step` does."""
        ...


def rate_each_step(
    actor: Scorer,
    states: Float[Tensor, "steps batch features"],
    candidates: Int[Tensor, "steps batch candidates"],
) -> Float[Tensor, "steps batch candidates"]:
    """Returns an actor's logits after each step of an episode.

    After each step there is one candidate fewer. What lies behind a sample's candidates is not rated: its
    logits are 0.
    """
    rate = actor.at_each_step if isinstance(actor, StepScorer) else partial(rate_one_by_one, actor)
    return rate(states, candidates)


def rate_one_by_one(
    actor: Scorer,
    states: Float[Tensor, "steps batch features"],
    candidates: Int[Tensor, "steps batch candidates"],
) -> Float[Tensor, "steps batch candidates"]:
    """Returns what `rate_each_step` does, by asking the actor after each step."""
    widest = candidates.shape[2]
    each = [
        actor(state, chosen[:, : widest - step])
        for step, (state, chosen) in enumerate(zip(states, candidates, strict=True))
    ]
    return torch.stack([F.pad(logits, (0, step)) for step, logits in enumerate(each)])


def draw(log_probabilities: PerLocation, generator: Randomness = None) -> Int[Tensor, " batch"]:
    """Draws one location for each sample, by the Gumbel-max trick: no synchronisation with a GPU."""
    shape, device = tuple(log_probabilities.shape), log_probabilities.device
    noise = random_source(generator).uniform(shape, device).clamp_min(1e-20)
    return (log_probabilities.detach() - (-noise.log()).log()).argmax(dim=1)


def scale_logits(
    logits: Float[Tensor, "batch candidates"], tau: float | Tensor
) -> Float[Tensor, "batch candidates"]:
    """Divides the logits of each sample by their L2 norm, then multiplies them by tau."""
    return F.normalize(logits, dim=1, eps=1e-6) * tau  # eps: all-zero logits stay zero


def random_locations(
    grid: Grid, batch_size: int, device: torch.device, generator: Randomness = None
) -> Int[Tensor, " batch"]:
    """Draws the first location of each sample, uniformly and independently."""
    return random_source(generator).integers(grid.num_locations, batch_size, device)


def unseen_candidates(
    seen: Bool[Tensor, "batch locations"], num_seen: int | None = None
) -> tuple[Int[Tensor, "batch candidates"], Bool[Tensor, "batch candidates"] | None]:
    """Returns the unseen locations in ascending order, and which of the entries are filler.

    Candidates are gathered, not masked, since the actor's batch norm must see unseen locations only (in
    training all samples saw equally many). Samples that saw more than others have fewer candidates: their
    rows are filled up with seen ones. Where all saw equally many, `num_seen`, there is no filler.
    """
    count = int((~seen).sum(dim=1).max()) if num_seen is None else seen.shape[1] - num_seen
    if count == 0:
        raise StamError("every location has been seen: there is nowhere left to look")
    # by counting: a GPU takes ten times as long to sort
    seen_up_to_here = seen.cumsum(dim=1)  # the location itself included
    locations = torch.arange(seen.shape[1], device=seen.device)
    place = torch.where(seen, seen.shape[1] - seen_up_to_here, locations - seen_up_to_here)  # seen to the end
    candidates = torch.empty_like(place).scatter_(1, place, locations.expand_as(place))[:, :count]
    return candidates, None if num_seen is not None else seen.gather(1, candidates)


POLICIES = ("learned", "random", *ORDERS)


def require_policy(name: str) -> None:
    """Raises unless a policy can be made by that name: one of `POLICIES`, or `learned:NUMBER`."""
    base, colon, number = name.partition(":")
    if not colon:
        require_choice("policy", name, POLICIES)
    elif base != "learned" or not number.isdecimal() or int(number) < 1:
        raise ConfigError(
            f"policy '{name}' is unknown: learned:8 lets the actor choose until 8 glimpses have been seen, "
            "then the order centre-out; no other policy takes a number"
        )


def make_policy(name: str, grid: Grid, actor: Scorer | None = None, sharpness: float | None = None) -> Policy:
    """Returns a policy by name; `sharpness` is that of `GreedyPolicy`.

    `learned` is greedy; `learned:8` lets the actor choose until 8 glimpses have been seen, then the order
    `centre-out`; the others are `random` and the orders `plus`, `spiral` and `centre-out`.
    """
    require_policy(name)
    base, _, num_first = name.partition(":")
    if base == "random":
        return RandomPolicy()
    if base in ORDERS:
        return OrderPolicy(ORDERS[base](grid))
    if actor is None:
        known = ", ".join(name for name in POLICIES if name != "learned")
        raise StamError(f"this agent was trained without an actor: choose one of {known}")
    learned = GreedyPolicy(actor, sharpness)
    if not num_first:
        return learned
    return FirstThen(learned, OrderPolicy(centre_out_order(grid)), int(num_first))
