"""How good an agent is while it trains: its accuracy after each glimpse, on some validation scenes."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stam.config import AgentConfig
from stam.data import BatchLoader, EvaluationView, Scenes, Subset, batches
from stam.data.randomness import random_order
from stam.fast import prepare
from stam.learning.loop import num_workers
from stam.learning.optimisation import autocast
from stam.model.agent import Agent, evaluating
from stam.model.policy import Policy
from stam.scene.pixels import normalise
from stam.settings import RunConfig, TrainingConfig

_LEAST_LOOKS = 400  # of each policy that is compared; the first location decides much of a single look
_MOST_ROUNDS = 8


def budgets(num_glimpses: int) -> list[int]:
    """Returns the few numbers of glimpses that metrics name."""
    wanted = (1, 2, 3, 5, 8, 12, 16, 21)
    return [count for count in wanted if count < num_glimpses] + [num_glimpses]


def validation_batch(training: TrainingConfig) -> int:
    """Returns how many scenes are looked at together."""
    return min(training.batch_size, 256)


def policies_to_try(agent: AgentConfig, training: TrainingConfig) -> list[str]:
    """Returns the policies that a validation compares: the agent's own, or several where it may choose."""
    if not training.choose_policy or agent.policy != "learned":
        return [agent.policy]
    handovers = [count for count in (8, 1) if count < training.num_glimpses - 1]
    return ["learned", *(f"learned:{count}" for count in handovers)]


def num_rounds(num_policies: int, num_scenes: int) -> int:
    """Returns how many first locations each scene gets: several where policies are compared on few scenes."""
    if num_policies == 1:
        return 1
    return min(_MOST_ROUNDS, math.ceil(_LEAST_LOOKS / max(1, num_scenes)))


def compare_policies(
    agent: Agent, config: RunConfig, scenes: Scenes, policies: Sequence[str]
) -> dict[str, list[float]]:
    """Returns the accuracy after each glimpse by each policy, all from the same first locations."""
    training = config.training
    rounds = num_rounds(len(policies), min(len(scenes), training.validation_images))
    found = {}
    for policy in policies:
        accuracies = [
            validate(agent, config, scenes, policy, training.seed + round_index)
            for round_index in range(rounds)
        ]
        found[policy] = [sum(after) / rounds for after in zip(*accuracies, strict=True)]
    return found


def validate(
    agent: Agent,
    config: RunConfig,
    scenes: Scenes,
    policy: Policy | str | None = None,
    seed: int | None = None,
) -> list[float]:
    """Returns the accuracy after each glimpse of an episode, on a fixed part of the validation scenes.

    Args:
        agent: The agent to validate.
        config: Its experiment.
        scenes: Validation scenes, of which at most `validation_images` are used.
        policy: Who picks the locations; by default the agent's own policy.
        seed: Seed of the first locations; by default that of the run.
    """
    training, device = config.training, agent.device
    count = min(len(scenes), training.validation_images)
    part = Subset(scenes, np.sort(random_order(len(scenes), "validation", training.seed)[:count]))
    view = EvaluationView(agent.config.image_size, config.data.resize_size)
    planned = batches(np.arange(count), validation_batch(training), drop_last=False)
    generator = torch.Generator().manual_seed(training.seed if seed is None else seed)
    correct: Tensor = torch.zeros(training.num_glimpses, dtype=torch.long, device=device)
    with evaluating(agent), autocast(device, training.precision):
        looker = prepare(agent, training.fast)
        for raw in BatchLoader(part, planned, view, num_workers(config.data)):
            images = normalise(raw.images.to(device), agent.config.mean, agent.config.std)
            trace = looker.look(images, training.num_glimpses, policy=policy, generator=generator)
            numbers = ~trace.probabilities.isnan().any(dim=-1)  # what is no number is not right
            correct += (numbers & (trace.predictions == raw.labels.to(device)[:, None])).sum(dim=0)
    return (correct / count).tolist()
