"""A session: one scene looked at live, fed one glimpse at a time and never given the scene."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stam.errors import SensorError, StamError, require
from stam.model.agent import Looker
from stam.model.belief import is_confident
from stam.model.policy import Policy, random_locations
from stam.scene.grid import Location
from stam.scene.pixels import require_normalised
from stam.scene.sensor import Sensor, as_pixels
from stam.shapes import Bool, Float

ALL_SEEN = "every location has been seen: open a new session for the next scene"


class AllSeenError(SensorError):
    """A glimpse came without its location, and no location is asked for any more."""


class OutOfStepError(StamError):
    """Whoever sends the glimpses and the session disagree on how many have been seen.

    Attributes:
        num_glimpses: Glimpses the session has seen.
        location: Where it wants to look next as (row, column).
    """

    def __init__(self, expected: int, num_glimpses: int, location: tuple[int, int] | None) -> None:
        place = "nowhere: everything has been seen" if location is None else f"at {list(location)}"
        super().__init__(
            f"the glimpse was sent to a session of {expected} glimpses, and {num_glimpses} have been seen: "
            f"ask how the session stands and go on from there (the next look is {place})"
        )
        self.num_glimpses, self.location = num_glimpses, location


@dataclass(frozen=True)
class LiveStep:
    """What the agent says after a glimpse.

    Attributes:
        probabilities: Probability of each class, calibrated if the agent is.
        label: Name of the most probable class.
        confidence: Its probability.
        location: Where to look next as (row, column); `None` when everything has been seen.
        stop: Whether the agent is sure enough, or has seen everything.
        num_glimpses: Glimpses seen so far.
    """

    probabilities: Float[Tensor, " classes"]
    label: str
    confidence: float
    location: tuple[int, int] | None
    stop: bool
    num_glimpses: int


@dataclass(frozen=True)
class Snapshot:
    """All that changes in a session. It is replaced whole, so that other threads never read half of it.

    Attributes:
        glimpses: The pixels sensed at each location, in the order they were first sensed.
        missed: Locations whose glimpse failed to arrive, not to be asked for again for now.
        location: Where to look next.
        memory: What the agent remembers of the glimpses.
        state: The agent's state after the latest glimpse.
        step: What it said then.
    """

    glimpses: dict[int, Tensor]
    missed: frozenset[int] = frozenset()
    location: int | None = None
    memory: Any = None
    state: Float[Tensor, "1 features"] | None = None
    step: LiveStep | None = None


@dataclass(frozen=True)
class Update:
    """A change to a session that has been checked, and waits for the agent to think about it.

    Attributes:
        session: The session.
        snapshot: What it will be, but for what the agent says; the memory lacks the last of the glimpses.
    """

    session: "Session"
    snapshot: Snapshot

    @property
    def num_glimpses(self) -> int:
        """Glimpses the session will have seen."""
        return len(self.snapshot.glimpses)


class Session:
    """One scene being looked at live.

    `location` says where to look; sense a glimpse there and pass it to `observe`, which returns a
    `LiveStep`. Observing goes on past `stop` for whoever wants to be surer. A call that raises leaves the
    session as it was. One thread at a time may change a session; `SessionPool` is for many.
    """

    def __init__(
        self,
        agent: Looker,
        first_location: Location | None = None,
        policy: Policy | str | None = None,
        generator: torch.Generator | None = None,
        threshold: float | None = None,
    ) -> None:
        """Opens a session; nothing has been seen yet.

        Args:
            agent: Who looks, with the weights it has now: later changes do not reach an open session, unless
                a module of the agent was replaced or hooked.
            first_location: Where the first glimpse is asked for. By default the agent's own, so a scene gets
                the same answer each time; a generator, where one is given, draws the location.
            policy: A policy or its name; by default the agent's own.
            generator: Source of randomness, of the first location too. By default the session has its own,
                seeded by torch's.
            threshold: Confidence above which to stop; by default the agent's.
        """
        require_evaluation(agent)
        agent = agent.prepared()
        threshold = agent.config.threshold if threshold is None else threshold
        require(0 <= threshold <= 1, f"threshold must be in [0, 1], got {threshold}")
        self.agent, self.threshold = agent, threshold
        self.policy = agent.policy(policy)
        named = policy if isinstance(policy, str) else agent.config.policy
        self.policy_name = None if isinstance(policy, Policy) else named
        self.generator = generator or torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        if first_location is None:
            first_location = agent.first_location if generator is None else _drawn(agent, generator)
        self.first_location = agent.grid.index(first_location)
        self._now = Snapshot({}, location=self.first_location)

    @property
    def location(self) -> tuple[int, int] | None:
        """Where to look next as (row, column); `None` when everything has been seen."""
        location = self._now.location
        return None if location is None else self.agent.grid.row_column(location)

    @property
    def step(self) -> LiveStep | None:
        """What the agent said after the latest glimpse; `None` before the first."""
        return self._now.step

    @property
    def num_glimpses(self) -> int:
        """Glimpses seen so far."""
        return len(self._now.glimpses)

    @property
    def seen(self) -> tuple[tuple[int, int], ...]:
        """The locations seen so far as (row, column), in the order they were first sensed."""
        return tuple(map(self.agent.grid.row_column, self._now.glimpses))

    @property
    def missed_locations(self) -> tuple[tuple[int, int], ...]:
        """The locations whose glimpse failed to arrive, as (row, column)."""
        return tuple(map(self.agent.grid.row_column, sorted(self._now.missed)))

    @property
    def snapshot(self) -> Snapshot:
        """All that changes in the session, as it is now."""
        return self._now

    def observe(self, glimpse: Any, location: Location | None = None) -> LiveStep:
        """Takes a glimpse and says what the agent makes of it.

        Args:
            glimpse: A PIL image, uint8 pixels, or floats normalised as the agent expects.
            location: Where it was really sensed, if not at `self.location`: a sensor may be off target.
                At a location seen before, the new glimpse takes the place of the old one.
        """
        (step,) = observe_all([self], [glimpse], [location])
        return step

    def missed(self, location: Location | None = None) -> tuple[int, int] | None:
        """Notes that a glimpse failed to arrive and returns where to look instead.

        The location is not asked for again while others are left; then all that were missed come up again.

        Args:
            location: Which one failed; by default the one asked for.
        """
        now, grid = self._now, self.agent.grid
        here = self._place(location)
        if here in now.glimpses:
            raise SensorError(f"location {grid.row_column(here)} has been seen: it cannot be missed")
        missed = now.missed | {here}
        num_unseen = grid.num_locations - len(now.glimpses)
        if len(missed) == num_unseen:
            missed = frozenset({here} if num_unseen > 1 else ())
        now = replace(now, missed=missed)
        self._now = replace(now, location=self._choose_again(now)) if here == now.location else now
        return self.location

    def _choose_again(self, now: Snapshot) -> int:
        """Picks a location from the latest state; before the first glimpse any will do."""
        if now.state is None:
            state, policy = torch.zeros(1, 1), self.agent.policy("random")
        else:
            state, policy = now.state, self.policy.at(len(now.glimpses))
        blocked = blocked_locations([now], self.agent).to(state.device)
        with torch.no_grad():
            return int(policy.choose(state, blocked, self.generator))

    def rewind(self, num_glimpses: int) -> LiveStep | None:
        """Forgets all but the first glimpses and returns what the agent makes of those; `None` of none."""
        if not 0 <= num_glimpses <= self.num_glimpses:
            raise StamError(f"cannot rewind to {num_glimpses} glimpses: {self.num_glimpses} have been seen")
        if num_glimpses == 0:
            self._now = Snapshot({}, location=self.first_location)
            return None
        kept = dict(list(self._now.glimpses.items())[:num_glimpses])
        (step,) = think([Update(self, Snapshot(kept, memory=self._memorise_all_but_last(kept)))])
        return step

    @torch.no_grad()
    def policy_map(self) -> Float[Tensor, "rows columns"]:
        """Returns how likely each location is to be looked at next, 0 where one was seen or missed.

        For the learned policy it is the distribution that training ends with; before the first glimpse every
        location is equally likely.
        """
        now, grid = self._now, self.agent.grid
        blocked = blocked_locations([now], self.agent)
        if now.state is None:
            likely = self.agent.policy("random").probabilities(torch.zeros(1, 1), blocked)
        else:
            policy = self.policy.at(len(now.glimpses))
            likely = policy.probabilities(now.state, blocked.to(now.state.device))
        return likely.view(grid.rows, grid.columns)

    def run(self, sensor: Sensor, max_glimpses: int | None = None, max_missed: int = 0) -> LiveStep:
        """Senses and observes until the agent is sure, or `max_glimpses` have been sensed.

        Args:
            sensor: What to look through.
            max_glimpses: When to stop though unsure; by default when everything has been seen.
            max_missed: How many glimpses may fail to arrive, or arrive spoilt: that often a `SensorError` or
                an `OSError` (`TimeoutError`, `ConnectionError`) makes the agent look elsewhere.
        """
        require_some(max_glimpses)
        if self.step is not None and has_reached(self.step, max_glimpses):
            return self.step
        num_missed = 0
        while True:
            location = self.location
            if location is None:
                raise SensorError(ALL_SEEN)
            try:
                step = self.observe(sensor.sense(location))
            except (SensorError, OSError):
                num_missed += 1
                if num_missed > max_missed:
                    raise
                self.missed()
                continue
            if step.stop or has_reached(step, max_glimpses):
                return step

    def prepare(self, glimpse: Any, location: Location | None = None) -> Update:
        """Checks a glimpse and returns the change it makes to the session, which is not made yet."""
        here = self._place(location)
        pixels = self._pixels(glimpse).to(self.agent.device)
        now = self._now
        glimpses = now.glimpses | {here: pixels}
        memory = self._memorise_all_but_last(glimpses) if here in now.glimpses else now.memory
        return Update(self, Snapshot(glimpses, now.missed - {here}, memory=memory))

    def answer_again(
        self, glimpse: Any, location: Location | None = None, num_glimpses: int | None = None
    ) -> LiveStep | None:
        """Returns what the agent says to a glimpse it has taken already; `None` if this one is new.

        A remote sensor that got no answer cannot know whether its glimpse arrived, and sends it again. What
        arrives a second time, the same pixels at the same location, must change nothing: not the next
        location either, which a random policy would draw again.

        Args:
            glimpse: What was sensed; see `observe`.
            location: Where; by default where the agent asked, for which `num_glimpses` must be given.
            num_glimpses: How many glimpses the sender believes the session has seen before this one.

        Raises:
            OutOfStepError: The session has seen another number of glimpses, and this is no repetition.
        """
        now, count = self._now, self.num_glimpses
        in_step = num_glimpses is None or num_glimpses == count
        latest = next(reversed(now.glimpses), None)
        if location is not None:
            here: int | None = self.agent.grid.index(location)
        else:
            here = None if in_step else latest
        may_repeat = in_step or (num_glimpses == count - 1 and here == latest)
        if may_repeat and here in now.glimpses and now.step is not None:
            known = now.glimpses[here]
            if torch.equal(self._pixels(glimpse).to(known.device), known):
                return replace(now.step, location=self.location)
        if not in_step:
            raise OutOfStepError(num_glimpses or 0, count, self.location)
        return None

    def commit(self, snapshot: Snapshot) -> None:
        """Makes a change that `think` has completed."""
        self._now = snapshot

    def say(
        self, probabilities: Float[Tensor, " classes"], location: int | None, num_glimpses: int
    ) -> LiveStep:
        """Puts into words what the agent believes."""
        if not bool(probabilities.isfinite().all()):
            raise StamError("the agent's probabilities are not numbers (NaN): its weights are damaged")
        best = int(probabilities.argmax())
        confidence = float(probabilities[best])
        return LiveStep(
            probabilities=probabilities,
            label=self.agent.labels[best],
            confidence=confidence,
            location=None if location is None else self.agent.grid.row_column(location),
            stop=location is None or bool(is_confident(probabilities, self.threshold)),
            num_glimpses=num_glimpses,
        )

    @torch.no_grad()
    def resume(self, glimpses: dict[int, Tensor], missed: frozenset[int], location: int | None) -> None:
        """Goes on from another session's glimpses and from where that one wanted to look next."""
        state = step = memory = None
        if glimpses:
            memory = self._memorise(glimpses)
            belief = self.agent.believe(memory)
            probabilities = belief.probabilities(self.agent.config.temperature)[0]
            state, step = belief.state, self.say(probabilities, location, len(glimpses))
        self._now = Snapshot(glimpses, missed, location, memory, state, step)

    def _place(self, location: Location | None) -> int:
        if location is not None:
            return self.agent.grid.index(location)
        if self._now.location is None:
            raise AllSeenError(ALL_SEEN)
        return self._now.location

    def _pixels(self, glimpse: Any) -> Float[Tensor, "channels height width"]:
        config, grid = self.agent.config, self.agent.grid
        pixels = as_pixels(glimpse, grid.glimpse_size, "glimpse", config.mean, config.std)
        advice = "pass pixels of 0..255 as uint8, or normalise them first"
        require_normalised(pixels, config.mean, config.std, "a glimpse", advice)
        return pixels.clone()  # a sensor may use its buffer again

    @torch.no_grad()
    def _memorise(self, glimpses: dict[int, Tensor]) -> Any:
        memory = None
        for location, pixels in glimpses.items():
            memory = self.agent.remember(memory, pixels[None], self._as_batch(location))
        return memory

    def _memorise_all_but_last(self, glimpses: dict[int, Tensor]) -> Any:
        return self._memorise(dict(list(glimpses.items())[:-1]))

    def _as_batch(self, location: int) -> Tensor:
        return torch.tensor([location], device=self.agent.device)


def require_evaluation(agent: Looker) -> None:
    """Raises where an agent is in training mode: looking would change its statistics."""
    if getattr(agent, "training", False):
        raise StamError("the agent is in training mode: call agent.eval() before opening a session")


def has_reached(step: LiveStep, max_glimpses: int | None) -> bool:
    """Tells whether as many glimpses have been seen as somebody wants at most."""
    return max_glimpses is not None and step.num_glimpses >= max_glimpses


def require_some(max_glimpses: int | None) -> None:
    """Raises where not one glimpse may be sensed."""
    require(
        max_glimpses is None or max_glimpses >= 1,
        f"max_glimpses must be at least 1, got {max_glimpses}",
    )


def observe_all(
    sessions: Sequence[Session], glimpses: Sequence[Any], locations: Sequence[Location | None] | None = None
) -> list[LiveStep]:
    """Feeds one glimpse to each of many sessions of one agent, thinking about them in batches.

    The sessions may be at different counts of glimpses; those at the same count share a pass. All glimpses
    are checked before any session changes.

    Args:
        sessions: The sessions, each at most once.
        glimpses: What each has sensed; see `Session.observe`.
        locations: Where, for those sensed elsewhere than asked for.
    """
    if len(set(map(id, sessions))) < len(sessions):
        raise StamError("a session can take only one glimpse at a time: it was given twice")
    places = [None] * len(sessions) if locations is None else locations
    updates = [
        session.prepare(glimpse, place)
        for session, glimpse, place in zip(sessions, glimpses, places, strict=True)
    ]
    steps: dict[int, LiveStep] = {}
    for group in by_count(updates):
        steps |= {id(update.session): step for update, step in zip(group, think(group), strict=True)}
    return [steps[id(session)] for session in sessions]


def by_count(updates: Sequence[Update]) -> list[list[Update]]:
    """Groups updates of one agent that can share a pass: their sessions have seen equally many glimpses.

    For a core that encodes each glimpse once it is enough that all have seen some, or that none has. One that
    encodes all of them again needs as many tokens for every sample; padding the shorter ones is slower.
    """
    groups: dict[tuple[int, int], list[Update]] = {}
    for update in updates:
        agent, count = update.session.agent, update.num_glimpses
        kind = min(count, 2) if agent.core.mixes_counts else count
        groups.setdefault((id(agent), kind), []).append(update)
    return list(groups.values())


@torch.no_grad()
def think(updates: Sequence[Update]) -> list[LiveStep]:
    """Thinks about a group of updates in one pass, commits them, and returns what the agent says to each."""
    agent, snapshots = updates[0].session.agent, [update.snapshot for update in updates]
    memory = _remember_last(snapshots, agent)
    belief = agent.believe(memory)
    places = _next_locations(updates, belief.state)
    probabilities = belief.probabilities(agent.config.temperature)
    steps = []
    for row, (update, snapshot, place) in enumerate(zip(updates, snapshots, places, strict=True)):
        step = update.session.say(probabilities[row], place, update.num_glimpses)
        state = belief.state[row : row + 1]
        own = memory if len(updates) == 1 else memory.select(torch.tensor([row], device=agent.device))
        update.session.commit(replace(snapshot, location=place, memory=own, state=state, step=step))
        steps.append(step)
    return steps


def _remember_last(snapshots: Sequence[Snapshot], agent: Looker) -> Any:
    """Returns the memory of some sessions in one batch, with the last glimpse of each."""
    last = [next(reversed(snapshot.glimpses.items())) for snapshot in snapshots]
    locations = torch.tensor([location for location, _ in last], device=agent.device)
    glimpses = torch.stack([pixels for _, pixels in last])
    memories = [snapshot.memory for snapshot in snapshots]
    joined = memories[0] if len(memories) == 1 or memories[0] is None else memories[0].join(memories)
    return agent.remember(joined, glimpses, locations)


def _next_locations(updates: Sequence[Update], state: Float[Tensor, "sessions features"]) -> list[int | None]:
    """Lets each session's policy choose; sessions that share one which never draws share a pass."""
    agent = updates[0].session.agent
    chosen: list[int | None] = [None] * len(updates)
    blocked = blocked_locations([update.snapshot for update in updates], agent).to(state.device)
    together: dict[object, tuple[Policy, list[int]]] = {}
    for row, update in enumerate(updates):
        if update.num_glimpses == agent.grid.num_locations:
            continue
        policy = update.session.policy.at(update.num_glimpses)  # what was missed has not been seen
        together.setdefault(update.session if policy.draws else policy, (policy, []))[1].append(row)
    for policy, rows in together.values():
        places = policy.choose(state[rows], blocked[rows], updates[rows[0]].session.generator)
        for row, place in zip(rows, places.tolist(), strict=True):
            chosen[row] = place
    return chosen


def blocked_locations(snapshots: Sequence[Snapshot], agent: Looker) -> Bool[Tensor, "sessions locations"]:
    """Marks the locations not to be asked for: those seen, and those missed while others are left."""
    blocked = torch.zeros(len(snapshots), agent.grid.num_locations, dtype=torch.bool)
    for row, snapshot in zip(blocked, snapshots, strict=True):
        row[list(snapshot.glimpses)] = True
        everywhere = len(snapshot.glimpses) + len(snapshot.missed) >= len(row)
        if snapshot.missed and not everywhere:
            row[list(snapshot.missed)] = True
    return blocked


def _drawn(agent: Looker, generator: torch.Generator) -> int:
    return int(random_locations(agent.grid, 1, torch.device("cpu"), generator))
