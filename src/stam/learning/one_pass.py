"""Episodes for a core that reads all steps in one pass.

An episode is looked through twice: first glimpse by glimpse and without gradient, to find out where the
policy looks; then in one pass with gradient, which gives every step's belief at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from stam.errors import StamError
from stam.learning.objective import Objective, ValueNormaliser, normalise_rewards
from stam.model.agent import Looker
from stam.model.belief import Belief
from stam.model.episode import rollout, sense_images
from stam.model.policy import Policy, SampledPolicy
from stam.model.randomness import Randomness
from stam.model.teacher import TeacherOutput
from stam.scene.grid import Grid
from stam.shapes import Bool, Float, Int


@dataclass(frozen=True)
class Path:
    """Where episodes looked.

    Attributes:
        locations: Where they looked, and where they would have looked next if they went on.
        num_steps: Steps to learn from: as many as locations, or one fewer where the path goes on.
        seen: What had been seen at each decision that is learned from, which are the first ones; `None` where
            none is.
        memory: What the agent remembers of all glimpses but the last, which nothing was decided from.
        states: The agent's state before each decision; `None` where there is none.
    """

    locations: Int[Tensor, "batch glimpses"]
    num_steps: int
    seen: Bool[Tensor, "decisions batch locations"] | None
    memory: Any = None
    states: Float[Tensor, "batch decisions features"] | None = None


@torch.no_grad()
def explore(
    agent: Looker,
    images: Float[Tensor, "batch channels height width"],
    first_location: Int[Tensor, " batch"],
    policy: Policy,
    generator: Randomness,
    num_steps: int,
    num_glimpses: int,
) -> Path:
    """Looks at scenes glimpse by glimpse, without gradient.

    Args:
        agent: Who looks. Its core drops nothing: drop-path is for the pass with gradient.
        images: The scenes.
        first_location: Where each scene's first glimpse is sensed.
        policy: Picks every later location.
        generator: Source of randomness for the policy.
        num_steps: Steps to take.
        num_glimpses: Glimpses of a whole episode; where the steps are fewer, this is its beginning.
    """
    sense = sense_images(images, agent.grid)
    explorer = _Explorer(agent, max(1, min(num_steps, num_glimpses - 1)))
    locations, seen, states, decision, memory = [], [], [], None, None
    for step in islice(rollout(explorer, sense, num_glimpses, first_location, policy, generator), num_steps):
        locations.append(step.location)
        decision, memory = step.decision, step.memory  # of the earlier memories nothing is kept
        if decision is None:
            break
        states.append(step.belief.state)
        if decision.log_probability is not None:
            seen.append(step.seen)
    if decision is not None:
        locations.append(decision.location)
    return Path(
        torch.stack(locations, dim=1),
        num_steps,
        torch.stack(seen) if seen else None,
        memory,
        torch.stack(states, dim=1) if states else None,
    )


class _Explorer:
    """An agent in an episode of which only the locations matter.

    It classifies nothing, and encodes no glimpse that no decision follows: the state after that one is the
    state before it.
    """

    def __init__(self, agent: Looker, num_encoded: int) -> None:
        self._agent, self._left = agent, num_encoded

    @property
    def grid(self) -> Grid:
        return self._agent.grid

    def remember(self, memory: Any, glimpses: Tensor, locations: Tensor) -> Any:
        if self._left == 0:
            return memory
        self._left -= 1
        return self._agent.remember(memory, glimpses, locations)

    def sample_drop_path(self, batch_size: int, generator: Randomness = None) -> Tensor | None:
        return self._agent.sample_drop_path(batch_size, generator)

    def believe(self, memory: Any, drop_masks: Tensor | None = None) -> Belief:
        state = self._agent.core.read(memory, drop_masks).flatten(1)
        none = state.new_empty(len(state), 0)
        return Belief(state, none, none)


@dataclass(frozen=True)
class Retraced:
    """The steps of a path, taken again with gradient.

    Attributes:
        num_steps: Steps to learn from.
        beliefs: The belief after each glimpse; where the path goes on, one more than steps.
        log_probabilities: Of each decision that is learned from, by the agent's present weights; `None` where
            none is.
    """

    num_steps: int
    beliefs: list[Belief]
    log_probabilities: Float[Tensor, "decisions batch"] | None


def retrace(
    agent: Looker,
    images: Float[Tensor, "batch channels height width"],
    path: Path,
    policy: Policy,
    drop_masks: Tensor | None,
) -> Retraced:
    """Takes the steps of a path again in one pass with gradient."""
    glimpses = agent.grid.cut(images, path.locations)
    beliefs = agent.believe_all(glimpses, path.locations, drop_masks)
    if path.seen is None:
        return Retraced(path.num_steps, beliefs, None)
    assert isinstance(policy, SampledPolicy)
    count = len(path.seen)
    log_probabilities = policy.log_probabilities_of(
        path.locations[:, 1 : count + 1].t(),
        torch.stack([belief.state for belief in beliefs[:count]]),
        path.seen,
    )
    return Retraced(path.num_steps, beliefs, log_probabilities)


def path_losses(
    objective: Objective,
    agent: Looker,
    path: Retraced,
    labels: Int[Tensor, " batch"],
    target: TeacherOutput,
    values: ValueNormaliser | None,
) -> dict[str, Float[Tensor, " steps"]]:
    """Returns what `Objective.losses` gives after each step, but for the total, for all steps at once.

    The look-ahead of a step is the next step. The last has no decision to learn from, unless the path goes
    on.
    """
    times = path.num_steps
    features = None if target.features is None else target.features.repeat(times, 1, 1)
    each = objective.classification(
        _joined(path.beliefs[:times]),
        labels.repeat(times),
        TeacherOutput(target.log_q.repeat(times, 1), features),
    )
    losses = {name: rows.view(times, -1).mean(dim=1) for name, rows in each.items()}
    if path.log_probabilities is None:
        return losses
    if agent.critic is None or values is None:
        raise StamError("learning where to look needs a critic: call agent.add_critic() first")
    return losses | _actor_critic(
        objective.num_glimpses,
        path.log_probabilities,
        path.beliefs[: len(path.log_probabilities) + 1],
        agent.critic,
        values,
        target.log_q,
    )


def _actor_critic(
    num_glimpses: int,
    log_probabilities: Float[Tensor, "steps batch"],
    beliefs: Sequence[Belief],
    critic: Callable[[Tensor], Tensor],
    values: ValueNormaliser,
    log_q: Float[Tensor, "batch classes"],
) -> dict[str, Float[Tensor, " steps"]]:
    """Returns what `Objective.actor_critic` does for the first steps of an episode at once.

    Args:
        num_glimpses: Glimpses of a whole episode (T).
        log_probabilities: Of the decision after each step.
        beliefs: After each step, and after the glimpse that the last decision led to.
        critic: The value function.
        values: Statistics of the critic's targets; those of these steps are updated.
        log_q: The teacher's distribution.
    """
    count = len(log_probabilities)
    steps, valued = slice(0, count), min(count, num_glimpses - 2)  # no reward follows the last glimpse
    value = step_values(critic, torch.stack([belief.state for belief in beliefs[:count]]))
    with torch.no_grad():
        rewards = -_joined(beliefs[1:]).divergence_from(log_q.repeat(count, 1)).view(count, -1)
        targets = normalise_rewards(rewards)
        next_values = value[1 : valued + 1]
        if valued == count:  # the path goes on
            next_values = torch.cat((next_values, critic(beliefs[count].state)[None]))
        targets[:valued] += values.denormalise(next_values, slice(1, valued + 1))
        values.update(targets, steps)
        normalised = values.normalise(targets, steps)
    error = normalised - value
    return {
        "actor": -(log_probabilities * error.detach()).mean(dim=1),
        "critic": error.abs().mean(dim=1),
        "reward": rewards.mean(dim=1),
    }


@runtime_checkable
class StepCritic(Protocol):
    """A critic that can predict the returns after all steps of an episode at once."""

    def at_each_step(self, states: Tensor) -> Tensor:
        """Returns what it predicts after each step, by the batch statistics of that step."""
        ...


def step_values(
    critic: Callable[[Tensor], Tensor], states: Float[Tensor, "steps batch features"]
) -> Float[Tensor, "steps batch"]:
    """Returns the critic's output after each step; its batch norm takes each step by itself."""
    if isinstance(critic, StepCritic):
        return critic.at_each_step(states)
    return torch.stack([critic(state) for state in states])


def _joined(beliefs: Sequence[Belief]) -> Belief:
    """Returns the beliefs of several steps as one of many samples."""
    parts = zip(*((each.state, each.class_logits, each.distill_logits) for each in beliefs), strict=True)
    return type(beliefs[0])(*(torch.cat(part) for part in parts))
