r"""Trains an actor by gains for the core of a run, which stays as it is, and compares it with fixed orders.

    python experiments/own_images.py aid --init package:aid-tiny --core causal --minutes 26 --device cpu \
        --workers 0 --set '{"training": {"core_fraction": 0.6}}' --out runs/aid-core
    python experiments/actor_alone.py runs/aid-core --out aid.json

The scenes are training images of the run, shown once. Accuracy is measured on its validation images, from one
first location each.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import torch

import stam
from stam.data import BatchLoader, TrainingView
from stam.data.randomness import random_order
from stam.learning.experiment import open_data
from stam.learning.loop import Place
from stam.learning.runs import RunFolder
from stam.learning.training import AgentLearner
from stam.learning.validation import validate
from stam.model.agent import Agent
from stam.weights import open_teacher

POLICIES = ("learned", "plus", "spiral", "centre-out")
SHOWN = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 21)
BATCH, BATCHES_OF_EPOCH = 32, 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scenes", type=int, default=5760)
    parser.add_argument("--actor-steps", type=int, default=1, help="updates after each batch of 32 scenes")
    parser.add_argument("--val-images", type=int, default=2000)
    given = parser.parse_args()
    config, start = RunFolder.open(given.run).config(), stam.load(given.run / "last")
    num_batches = given.scenes // BATCH
    epochs = 1 + max(1, num_batches // BATCHES_OF_EPOCH)  # the first is the core's, which is over
    training = dataclasses.replace(
        config.training,
        batch_size=BATCH,
        epochs=epochs,
        core_fraction=1 / epochs,
        num_cores=1,
        actor_objective="gains",
        actor_steps=given.actor_steps,
        actor_lr=1e-3,
        ema_batches=max(2, round(0.18 * num_batches)),
        validation_images=given.val_images,
    )
    config = dataclasses.replace(config, training=training)
    torch.manual_seed(training.seed)
    agent = Agent(config.agent)
    agent.core.load_state_dict(start.core.state_dict())
    splits = open_data(config.data)
    teacher = open_teacher(str(given.run / "teacher"), start.labels, start.grid.image_size, agent.config)
    learner = AgentLearner(config, agent, teacher, splits.val)
    learner.stage_number = 1
    order, began = random_order(len(splits.train), "actor alone"), time.monotonic()
    for number in range(num_batches):
        chosen = np.sort(np.resize(order, (num_batches, BATCH))[number])
        (raw,) = BatchLoader(splits.train, [chosen], TrainingView(config.data.decode_size), 0)
        epoch = 1 + min(number // BATCHES_OF_EPOCH, epochs - 2)
        learner.train_batch(Place(epoch, number % BATCHES_OF_EPOCH, False), raw)
    print(f"{given.scenes} scenes in {time.monotonic() - began:.0f} s")
    used, found = learner.agent_to_use.eval(), {}
    for policy in POLICIES:
        found[policy] = [100 * value for value in validate(used, config, splits.val, policy)]
        shown = " | ".join(f"{found[policy][n - 1]:.1f}" for n in SHOWN if n <= len(found[policy]))
        print(f"| {policy} | {shown} | {sum(found[policy]) / len(found[policy]):.1f} |", flush=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
