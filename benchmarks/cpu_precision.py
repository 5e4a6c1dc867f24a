"""How much faster an agent trains on this CPU in half precision.

    python benchmarks/cpu_precision.py --size tiny --threads 2

Batches are learned from in turn, in float32 and in bfloat16, so that a busy machine slows both alike; medians
over the rounds. The agent is one of your own images: causal core, actor 512 wide, a teacher whose features
are followed. `stam train` chooses by the time of one matrix product, which is shown too.
"""

import argparse
import dataclasses
import statistics
from functools import partial

import torch

from stam.evaluation.speed import make_learner, random_batch
from stam.learning.loop import Place
from stam.learning.recipes import get_recipe
from stam.learning.timing import bf16_speedup, in_turn, median_ratio
from stam.learning.training import AgentLearner


def build(arguments: argparse.Namespace, precision: str) -> AgentLearner:
    base = get_recipe(arguments.size)
    settings = dataclasses.replace(
        base.training,
        precision=precision,
        batch_size=arguments.batch_size,
        num_glimpses=arguments.num_glimpses,
        short_episodes=0,
        device="cpu",
    )
    agent = dataclasses.replace(base.agent, core="causal", num_classes=30)
    torch.manual_seed(0)
    return make_learner(dataclasses.replace(base, agent=agent, training=settings))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="tiny", choices=("tiny", "small", "base"))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-glimpses", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    learners = {name: build(arguments, name) for name in ("float32", "bfloat16")}
    runs = {
        name: partial(learner.learn_from, *random_batch(learner), Place(0, 0, False))
        for name, learner in learners.items()
    }
    times = in_turn(runs, torch.device("cpu"), arguments.rounds)
    for name, seconds in times.items():
        print(f"{name:<9} {arguments.batch_size / statistics.median(seconds):6.1f} images/s")
    print(f"training {median_ratio(times['float32'], times['bfloat16']):.2f} times as fast in bfloat16")
    print(f"a matrix product {bf16_speedup():.2f} times")


if __name__ == "__main__":
    main()
