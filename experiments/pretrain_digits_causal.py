"""Trains the causal core and the digits agent that ship with the package.

    python experiments/pretrain_digits_causal.py --out src/stam/assets --random-seconds 100 --seconds 60

The core starts from `digits-core`. First it learns from glimpses at random locations, then together with an
actor, the paper's way, so that its features tell where a digit may lie. The agent is saved as `digits`, and
its core alone as `digits-causal-core`, from which the demo learns another actor.
"""

import argparse
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pretrain_digits import as_images, load_scenes
from torch import Tensor

import stam
from stam.data import ClutteredDigits
from stam.learning.loop import Place
from stam.learning.recipes import get_recipe
from stam.learning.training import AgentLearner
from stam.settings import RunConfig
from stam.weights import open_teacher, save_agent, start_agent

RATES: dict[str, Any] = {"base_lr": 3e-4, "actor_lr": 2e-3, "critic_lr": 1e-3}
EPOCHS = 100  # steps of the schedules; they go by the time that has passed


def stage(
    init: str,
    device: str,
    policy: str,
    batch_size: int,
    agent: Mapping[str, Any] | None = None,
    **training: Any,
) -> tuple[AgentLearner, RunConfig]:
    """Returns what learns in one stage: with the recipe's agent but for some settings."""
    scenes = ClutteredDigits("train", num_scenes=2)
    base = get_recipe("digits-paper")
    agent_config = dataclasses.replace(
        base.agent, core="causal", policy=policy, labels=scenes.classes, **(agent or {})
    )
    usual: dict[str, Any] = {
        "device": device,
        "batch_size": batch_size,
        "epochs": EPOCHS,
        "tau_epochs": EPOCHS // 2,
        "min_lr": 1e-6,
        "feature_weight": 1.0,
        "ema_batches": 100,
    }
    settings = dataclasses.replace(base.training, **(usual | training))
    config = dataclasses.replace(base, agent=agent_config, training=settings)
    assert config.teacher is not None
    teacher = open_teacher(config.teacher, scenes.classes, agent_config.image_size)
    return AgentLearner(config, start_agent(init, agent_config), teacher, scenes), config


def learn(learner: AgentLearner, grey: Tensor, labels: Tensor, batch_size: int, seconds: float) -> stam.Agent:
    """Learns for some time from scenes drawn at random and returns the averaged agent."""
    began, count = time.monotonic(), 0
    while count == 0 or time.monotonic() - began < seconds:
        epoch = min(EPOCHS - 1, int(EPOCHS * (time.monotonic() - began) / max(seconds, 1e-9)))
        chosen = torch.randint(len(grey), (batch_size,), device=grey.device)
        learner.learn_from(as_images(grey[chosen]), labels[chosen], Place(epoch, count, False))
        count += 1
        if grey.device.type == "cuda" and count % 20 == 0:
            torch.cuda.synchronize()  # or the clock runs ahead of the work
    print(f"{count} batches of {batch_size}", flush=True)
    return learner.agent_to_use.eval()


@torch.no_grad()
def show(
    agent: stam.Agent, grey: Tensor, labels: Tensor, policies: tuple[str, ...], num_glimpses: int
) -> None:
    """Prints the accuracy after each glimpse."""
    for policy in policies:
        generator = torch.Generator().manual_seed(0)
        traces = [
            agent.look(as_images(part), num_glimpses, policy=policy, generator=generator)
            for part in grey.split(1000)
        ]
        right = torch.cat([trace.predictions for trace in traces]) == labels[:, None]
        print(
            f"{policy:>8} " + " ".join(f"{100 * value:5.1f}" for value in right.float().mean(dim=0).tolist())
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--random-seconds", type=float, default=100)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--num-sets", type=int, default=48, help="sets of training scenes")
    parser.add_argument("--num-scenes", type=int, default=5000, help="scenes of each")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    learner, _ = stage(
        "package:digits-core", given.device, "random", given.batch_size, num_glimpses=16, base_lr=6e-4
    )
    # other scenes than those of seed 0, which the agents of the results page are trained and tested on
    grey, labels = load_scenes("train", range(100, 100 + given.num_sets), given.num_scenes, learner.device)
    val_grey, val_labels = load_scenes("test", range(50, 52), min(1000, given.num_scenes), learner.device)
    core = learn(learner, grey, labels, given.batch_size, given.random_seconds)
    show(core, val_grey, val_labels, ("random", "plus", "spiral"), 14)
    save_agent(core, given.out / "digits-causal-core", half=True)
    start = str(given.out / "digits-causal-core")
    learner, config = stage(start, given.device, "learned", given.batch_size, num_glimpses=14, **RATES)
    agent = learn(learner, grey, labels, given.batch_size, given.seconds)
    show(agent, val_grey, val_labels, ("learned", "random", "plus", "spiral"), 14)
    save_agent(agent, given.out / "digits", half=True)
    without_actor = stam.Agent(dataclasses.replace(config.agent, policy="random"))
    without_actor.core.load_state_dict(agent.core.state_dict())
    save_agent(without_actor.eval(), given.out / "digits-causal-core", half=True)


if __name__ == "__main__":
    main()
