"""Episodes for a core that reads all steps in one pass.

An episode is looked through twice: first glimpse by glimpse and without gradient, to find out where the
policy looks; then in one pass with gradient, which gives every step's belief at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stam.model.agent import Looker
from stam.model.belief import Belief
from stam.model.episode import Step, rollout, sense_images
from stam.model.policy import Policy, SampledPolicy
from stam.model.randomness import Randomness
from stam.shapes import Float, Int


@dataclass(frozen=True)
class Path:
    """Where an episode looked.

    Attributes:
        steps: Its steps, without gradient and without memory.
        locations: Where it looked, and where it would have looked next if it went on.
        memory: What the agent remembered after the last step.
    """

    steps: list[Step]
    locations: Int[Tensor, "batch glimpses"]
    memory: Any


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
    steps, memory = [], None
    for step in islice(rollout(agent, sense, num_glimpses, first_location, policy, generator), num_steps):
        memory = step.memory
        steps.append(replace(step, memory=None, next_memory=None))
    locations = [step.location for step in steps]
    if steps[-1].decision is not None:
        locations.append(steps[-1].decision.location)
    return Path(steps, torch.stack(locations, dim=1), memory)


def retrace(
    agent: Looker,
    images: Float[Tensor, "batch channels height width"],
    path: Path,
    policy: Policy,
    drop_masks: Tensor | None,
) -> list[tuple[Step, Belief | None]]:
    """Takes the steps of a path again in one pass with gradient.

    Returns:
        Each step as it is with the agent's present weights, and the belief after the next glimpse, if there
        was one: the look-ahead of one step is the next step.
    """
    glimpses = agent.grid.cut(images, path.locations)
    beliefs: Sequence[Belief] = agent.believe_all(glimpses, path.locations, drop_masks)
    retraced: list[tuple[Step, Belief | None]] = []
    for index, taken in enumerate(path.steps):
        belief, decision = beliefs[index], taken.decision
        if decision is not None and decision.log_probability is not None:
            assert isinstance(policy, SampledPolicy)
            decision = policy.decided(decision.location, belief.state, taken.seen, taken.num_glimpses)
        step = replace(taken, belief=belief, drop_masks=drop_masks, decision=decision)
        retraced.append((step, beliefs[index + 1] if index + 1 < len(beliefs) else None))
    return retraced
