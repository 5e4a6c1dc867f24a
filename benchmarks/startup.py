"""What a training takes before it trains.

    python benchmarks/startup.py plan --images 1281167
    python benchmarks/startup.py kernels --size small --batch 256

`plan`: time and memory to the first batch, with as many images as ImageNet has. They are made up (one grey
pixel each), so that what is measured is the plan of the run, not the disk.

`kernels`: the first batches of a training on a GPU in new processes, one after another. They share a folder
of compiled kernels that is empty at first (`TRITON_CACHE_DIR`; otherwise it is `~/.triton/cache`): the first
process compiles, the others find what it compiled.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from stam.config import AgentConfig
from stam.data import RawBatch
from stam.evaluation.speed import make_learner, random_batch
from stam.learning.loop import Place, load_batches
from stam.learning.recipes import get_recipe
from stam.learning.timing import synchronise
from stam.learning.training import plan
from stam.settings import DataConfig, RunConfig, TrainingConfig


class MadeUpScenes:
    """As many scenes as asked for, all alike."""

    def __init__(self, count: int) -> None:
        self.classes = ("one", "two")
        self.labels = np.zeros(count, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, decode_size: int | None = None) -> np.ndarray:
        """Returns a grey pixel."""
        return np.zeros((1, 1, 3), dtype=np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("plan", "kernels", "first-batches"), default="plan")
    parser.add_argument("--images", type=int, default=1_281_167, help="training images (default: ImageNet's)")
    parser.add_argument("--recipe", default="imagenet-small", help="whose plan to follow")
    parser.add_argument("--batches", type=int, default=30, help="batches to load after it (default: 30)")
    parser.add_argument("--size", default="small", help="kernels: of the agent")
    parser.add_argument("--batch", type=int, default=256, help="kernels: images of a batch")
    parser.add_argument("--glimpses", type=int, default=21, help="kernels: of an episode")
    parser.add_argument("--device", default="cuda", help="kernels: where to train")
    parser.add_argument("--processes", type=int, default=3, help="kernels: one after another")
    arguments = parser.parse_args()
    {"plan": plan_run, "kernels": kernels, "first-batches": first_batches}[arguments.what](arguments)


def kernels(arguments: argparse.Namespace) -> None:
    """Starts a training in one new process after another."""
    command = [sys.executable, __file__, "first-batches", "--device", arguments.device]
    for option in ("size", "batch", "glimpses"):
        command += [f"--{option}", str(getattr(arguments, option))]
    with tempfile.TemporaryDirectory() as cache:
        for number in range(arguments.processes):
            began = time.perf_counter()
            said = subprocess.run(
                command, env=os.environ | {"TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, check=True
            )
            whole = time.perf_counter() - began
            compiled = sum(1 for _ in Path(cache).rglob("*.cubin"))
            row = {"process": number + 1} | json.loads(said.stdout) | {"compiled kernels": compiled}
            print(json.dumps(row | {"whole process s": round(whole, 1)}), flush=True)


def first_batches(arguments: argparse.Namespace) -> None:
    """Learns from three batches: the first compiles kernels, the second is captured, the third replayed."""
    training = TrainingConfig(
        num_glimpses=arguments.glimpses, batch_size=arguments.batch, device=arguments.device
    )
    agent = AgentConfig.of_size(arguments.size, 1000)
    learner = make_learner(RunConfig(agent=agent, training=training))
    images, labels = random_batch(learner)
    seconds = []
    for index in range(3):
        synchronise(learner.device)
        began = time.perf_counter()
        learner.learn_from(images, labels, Place(0, index, False))
        synchronise(learner.device)
        seconds.append(round(time.perf_counter() - began, 2))
    print(json.dumps({"first three batches s": seconds, "torch": torch.__version__}))


def plan_run(arguments: argparse.Namespace) -> None:
    """Plans a run and loads its first batches."""
    scenes, config = MadeUpScenes(arguments.images), get_recipe(arguments.recipe)
    before, began = peak_megabytes(), time.perf_counter()
    made = plan(len(scenes), config)
    loaded = load_batches(scenes, made.batches_from((0, 0)), DataConfig(num_workers=0))
    print(f"{made.num_batches()} batches of {made.batch_size} in {made.epochs} epochs")
    report("the first batch", next(loaded), began, before)
    rest = list(itertools.islice(loaded, arguments.batches))
    report(f"{arguments.batches} more", rest[-1], began, before)


def report(name: str, batch: tuple[object, RawBatch], began: float, before: float) -> None:
    """Prints what was taken since the beginning."""
    taken = f"{time.perf_counter() - began:.2f} s, {peak_megabytes() - before:.0f} MB"
    print(f"{name}, at {batch[0]}: {taken} more than before")


def peak_megabytes() -> float:
    """Returns the most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
