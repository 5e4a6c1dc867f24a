"""Trains agents from the same start on real photographs and measures their accuracy after each glimpse.

    python experiments/real_images.py imagenette --data imagenette-train.tar --init deit_tiny.safetensors \
        --agents learned random plus spiral hard no-consistency --out runs/imagenette

All agents start from the same weights, see the same images in the same order and take the same number of
updates. Results come from the checkpoint after the last update, so the validation images select nothing.

`--agents` are suffixes of recipe names: `random` is the recipe `imagenette-random`. `--set` overrides
settings of the recipe. `--actor-glimpses 5 8` evaluates each learned agent two more times: its actor chooses
the first 5 or 8 glimpses, then the fixed order centre-out takes over. These rows are named `learned:5` and
`learned:8`.
"""

import argparse
import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stam.config import from_plain, to_plain
from stam.data import CachedScenes, Scenes, Splits, open_scenes
from stam.evaluation import EvaluationPlan, evaluate
from stam.learning.finetuning import build_student, finetune, whole_image_accuracy
from stam.learning.recipes import get_recipe
from stam.learning.runs import RunFolder
from stam.learning.training import plan, train
from stam.model.agent import Agent
from stam.model.teacher import Teacher
from stam.settings import DataConfig, RunConfig
from stam.weights import open_teacher, save_agent, start_agent

SHOWN = (1, 2, 3, 5, 8, 12, 16, 21)


def in_memory(scenes: Scenes, decode_size: int | None, num_workers: int) -> CachedScenes:
    cached = CachedScenes(scenes)
    cached.fill(decode_size, num_workers, progress=False)
    return cached


def configure(recipe: str, classes: tuple[str, ...], changes: dict[str, Any], workers: int) -> RunConfig:
    """Returns a recipe with changes such as {"training": {"base_lr": 1e-4}}, for the classes of the data."""
    plain = to_plain(get_recipe(recipe))
    plain["agent"] |= {"num_classes": len(classes), "labels": classes} | changes.get("agent", {})
    plain["data"] |= {"num_workers": workers, "check": False}
    plain["data"]["augment"] |= changes.get("augment", {})
    plain["training"] |= {"validate_every": 100_000, "validation_images": 200} | changes.get("training", {})
    plain["teacher_training"] |= changes.get("teacher", {})
    return from_plain(RunConfig, plain)


def get_teacher(config: RunConfig, given: str, init: str, out: Path, train: Scenes, val: Scenes) -> Teacher:
    """Opens the teacher or fine-tunes one. The last checkpoint is used, not the best."""
    if given != "fine-tune":
        return open_teacher(
            given, tuple(train.classes), config.agent.image_size, config.agent, config.class_indices
        )
    model, record = build_student(
        config.teacher_training, config.agent, init, tuple(train.classes), config.class_indices
    )
    folder = RunFolder.create(out / "teacher")
    began = time.monotonic()
    finetune(folder, config.teacher_training, config.data, config.agent, model, record, train, val)
    teacher = open_teacher(str(folder.path / "last"), tuple(train.classes), config.agent.image_size)
    device = next(model.parameters()).device
    accuracy = whole_image_accuracy(teacher.to(device), config.agent, config.data, val)
    print(f"teacher: {time.monotonic() - began:.0f} s, {100 * accuracy:.2f}%", flush=True)
    return teacher


@dataclass(frozen=True)
class Setup:
    """What all agents of an experiment share.

    Attributes:
        path: Where the images are.
        init: Where the starting weights are.
        teacher: The teacher of all.
        data: The images.
        out: Where runs go.
    """

    path: str
    init: str
    teacher: Teacher
    data: Splits
    out: Path


def train_one(name: str, config: RunConfig, setup: Setup) -> tuple[Agent, dict[str, Any]]:
    """Trains one agent and returns it with the time it took."""
    torch.manual_seed(config.training.seed)
    agent = start_agent(setup.init, config.agent, config.class_indices)
    folder, data = RunFolder.create(setup.out / name), setup.data
    # record the paths that were used, so that `stam evaluate` finds the data
    images = dataclasses.replace(config.data, path=setup.path)
    folder.write_record(name, dataclasses.replace(config, init=setup.init, data=images), data.record)
    began = time.monotonic()
    agent = train(folder, config, agent, setup.teacher, data.train, data.val)
    seconds = time.monotonic() - began
    shown = plan(len(data.train), config).num_batches() * config.training.batch_size
    save_agent(agent, folder.path / "half", half=True)
    return agent, {"name": name, "seconds": seconds, "images": shown, "settings": dataclasses.asdict(config)}


def measure(
    agent: Agent,
    data: DataConfig,
    scenes: Scenes,
    seeds: int,
    glimpses: int,
    name: str,
) -> Any:
    """Evaluates an agent over several seeds of the first location."""
    settings = EvaluationPlan(
        num_seeds=seeds,
        num_glimpses=min(glimpses, agent.grid.num_locations),
        resize_size=data.resize_size,
        batch_size=512,
        num_workers=data.num_workers or 0,
        low_resolution=False,
        cost=False,
        most_timed=0,
        precision="auto",
    )
    return evaluate(agent, scenes, settings, name=name, source=data.path, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", choices=("imagenette", "aid"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--init", required=True)
    parser.add_argument(
        "--teacher", help="a folder, a weights file or fine-tune; by default that of the recipe"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, help="where results are written; by default --out")
    parser.add_argument("--agents", nargs="*", default=["learned"])
    parser.add_argument("--set", default="{}", help='JSON: {"training": {...}, "agent": {...}}')
    parser.add_argument(
        "--actor-glimpses", type=int, nargs="*", default=[], help="evaluate learned:N too, for each N"
    )
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds of the first location")
    parser.add_argument("--glimpses", type=int, default=21, help="number of glimpses to evaluate")
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    numbers = arguments.results or arguments.out
    for folder in (arguments.out, numbers):
        folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    splits = open_scenes(arguments.data)
    classes = tuple(splits.train.classes)
    changes = json.loads(arguments.set)
    base = configure(arguments.dataset, classes, changes, arguments.workers)
    train_scenes = in_memory(splits.train, base.data.decode_size, arguments.workers)
    val_scenes = in_memory(splits.val, None, arguments.workers)
    data = Splits(train_scenes, val_scenes, splits.record)
    print(f"{len(train_scenes)} + {len(val_scenes)} images, {time.monotonic() - began:.0f} s", flush=True)
    given = arguments.teacher or (arguments.init if base.teacher is not None else "fine-tune")
    teacher = get_teacher(base, given, arguments.init, arguments.out, train_scenes, val_scenes)
    results = []
    setup = Setup(arguments.data, arguments.init, teacher, data, arguments.out)
    for name in arguments.agents:
        recipe = arguments.dataset if name == "learned" else f"{arguments.dataset}-{name}"
        config = configure(recipe, classes, changes, arguments.workers)
        agent, result = train_one(name, config, setup)
        with_actor = arguments.actor_glimpses if agent.config.has_actor else []
        for count in (None, *with_actor):
            if agent.config.has_actor:
                agent.configure(policy="learned" if count is None else f"learned:{count}")
            row, file = (name, name) if count is None else (f"{name}:{count}", f"{name}-{count}")
            found = measure(agent, config.data, val_scenes, arguments.seeds, arguments.glimpses, row)
            (numbers / f"{file}.json").write_text(found.to_json())
            curve = found.accuracy.ensemble.top1
            results.append(result | {"name": row, "mean": curve.mean, "std": curve.std})
            (numbers / "results.json").write_text(json.dumps(results, indent=1))
            shown = " ".join(f"{n}:{100 * curve.mean[n - 1]:.1f}" for n in SHOWN if n <= len(curve.mean))
            print(
                f"{row:<20} {result['seconds']:>4.0f} s {result['images']:>8} images  "
                f"mean {100 * float(np.mean(curve.mean[:21])):.2f}  {shown}  "
                f"[{time.monotonic() - began:.0f} s]",
                flush=True,
            )


if __name__ == "__main__":
    main()
