"""Agents trained alike on real photographs, and what they reach after each glimpse.

    python experiments/real_images.py imagenette --data imagenette-train.tar --init deit_tiny.safetensors \
        --agents learned random plus spiral hard no-consistency --out runs/imagenette

Every agent starts from the same weights, sees the same images in the same order and takes the same number of
updates. Results come from the checkpoint after the last update: the validation images choose nothing. With
`--hold-out`, a tenth of the training images takes their place, which is how settings were chosen;
`--hold-out 0.5` takes half of them.
`--agents` are the ends of recipes' names: random for imagenette-random, long for imagenette-long.
`--set` changes settings of the recipe, `--trials` compares several changes, each trained in turn; {"core":
{"frozen": "mlp"}} among them keeps the MLPs of the core's blocks as they start. `--members` trains several
agents of other seeds, each for its part of the epochs, and averages their cores into one. `--views`
measures each agent again with other settings of its own: {"handover-8": {"handover": 8}}; an order, which has
nothing to hand over, has no such view.
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
from stam.data import CachedScenes, Scenes, Splits, Subset, open_scenes
from stam.data.randomness import random_order
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


def hold_out(scenes: Scenes, share: float) -> tuple[Scenes, Scenes]:
    """Returns the scenes to learn from, and a share of them all to choose settings by."""
    order = random_order(len(scenes), "held out", 0)
    cut = int(len(scenes) * share)
    return Subset(scenes, np.sort(order[cut:])), Subset(scenes, np.sort(order[:cut]))


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
    """Opens the teacher, or fine-tunes one; its last checkpoint counts, whatever the validation says."""
    if given != "fine-tune":
        return open_teacher(given, tuple(train.classes), config.agent, config.class_indices)
    model, record = build_student(
        config.teacher_training, config.agent, init, tuple(train.classes), config.class_indices
    )
    folder = RunFolder.create(out / "teacher")
    began = time.monotonic()
    finetune(folder, config.teacher_training, config.data, config.agent, model, record, train, val)
    teacher = open_teacher(str(folder.path / "last"), tuple(train.classes), config.agent)
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


def train_one(name: str, config: RunConfig, setup: Setup, frozen: str = "") -> tuple[Agent, dict[str, Any]]:
    """Trains one agent, but for a part of its core, if one is to stay; returns it with how long it took."""
    torch.manual_seed(config.training.seed)
    agent = start_agent(setup.init, config.agent, config.class_indices)
    for place, parameter in agent.core.named_parameters():
        parameter.requires_grad_(not (frozen and f".{frozen}." in place))
    folder, data = RunFolder.create(setup.out / name), setup.data
    # what was really used, so that `stam evaluate` finds it
    images = dataclasses.replace(config.data, path=setup.path)
    folder.write_record(name, dataclasses.replace(config, init=setup.init, data=images), data.record)
    began = time.monotonic()
    agent = train(folder, config, agent, setup.teacher, data.train, data.val)
    seconds = time.monotonic() - began
    shown = plan(len(data.train), config.training).num_batches() * config.training.batch_size
    save_agent(agent, folder.path / "half", half=True)
    return agent, {"name": name, "seconds": seconds, "images": shown, "settings": dataclasses.asdict(config)}


def train_members(
    name: str, config: RunConfig, setup: Setup, members: int, frozen: str = ""
) -> tuple[Agent, dict[str, Any]]:
    """Trains several agents, each for its part of the epochs; returns the first with the mean of all cores.

    Cores that started from the same weights can be averaged; actors, which started afresh, cannot.
    """
    if members == 1:
        return train_one(name, config, setup, frozen)
    agents, results = [], []
    for member in range(members):
        training = dataclasses.replace(
            config.training,
            seed=config.training.seed + member,
            epochs=config.training.epochs // members,
            tau_epochs=max(1, config.training.tau_epochs // members),
        )
        own = dataclasses.replace(config, training=training)
        agent, result = train_one(f"{name}-{member}", own, setup, frozen)
        agents.append(agent)
        results.append(result)
    first, cores = agents[0], [agent.core.state_dict() for agent in agents]
    first.core.load_state_dict({key: sum(core[key] for core in cores) / members for key in cores[0]})
    save_agent(first, setup.out / name / "half", half=True)
    totals = {key: sum(result[key] for result in results) for key in ("seconds", "images")}
    return first, {"name": name, **totals, "members": members, "settings": dataclasses.asdict(config)}


def measure(
    agent: Agent,
    data: DataConfig,
    scenes: Scenes,
    seeds: int,
    glimpses: int,
    name: str,
    policy: str | None = None,
) -> Any:
    """Evaluates an agent, with its own or another policy, over seeds of the first location."""
    settings = EvaluationPlan(
        num_seeds=seeds,
        num_glimpses=min(glimpses, agent.grid.num_locations),
        policy=policy,
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
        "--teacher", help="a teacher's folder or weights, or fine-tune; by default as the recipe says"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, help="where numbers go after each agent; by default --out")
    parser.add_argument("--agents", nargs="*", default=["learned"])
    parser.add_argument("--set", default="{}", help='JSON: {"training": {...}, "agent": {...}}')
    parser.add_argument("--trials", default='{"": {}}', help="JSON: a name and changes, for each trial")
    parser.add_argument("--members", type=int, default=1, help="agents to average into one")
    parser.add_argument("--views", default="{}", help="JSON: a name and settings of the agent, for each view")
    parser.add_argument("--hold-out", type=float, nargs="?", const=0.1, metavar="SHARE")
    parser.add_argument("--seeds", type=int, default=10, help="of the first location, in evaluation")
    parser.add_argument("--glimpses", type=int, default=21, help="to evaluate")
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    numbers = arguments.results or arguments.out
    for folder in (arguments.out, numbers):
        folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    splits = open_scenes(arguments.data)
    classes = tuple(splits.train.classes)
    common, trials = json.loads(arguments.set), json.loads(arguments.trials)
    views = {"": {}} | json.loads(arguments.views)
    base = configure(arguments.dataset, classes, common, arguments.workers)
    train_scenes: Scenes = in_memory(splits.train, base.data.decode_size, arguments.workers)
    val_scenes: Scenes
    if arguments.hold_out:
        train_scenes, val_scenes = hold_out(train_scenes, arguments.hold_out)
    else:
        val_scenes = in_memory(splits.val, None, arguments.workers)
    data = Splits(train_scenes, val_scenes, splits.record)
    print(f"{len(train_scenes)} + {len(val_scenes)} images, {time.monotonic() - began:.0f} s", flush=True)
    given = arguments.teacher or (arguments.init if base.teacher is not None else "fine-tune")
    teacher = get_teacher(base, given, arguments.init, arguments.out, train_scenes, val_scenes)
    results = []
    setup = Setup(arguments.data, arguments.init, teacher, data, arguments.out)
    for trial, changes in trials.items():
        for agent_name in arguments.agents:
            recipe = arguments.dataset if agent_name == "learned" else f"{arguments.dataset}-{agent_name}"
            parts = {*common, *changes}
            merged = {part: common.get(part, {}) | changes.get(part, {}) for part in parts}
            config = configure(recipe, classes, merged, arguments.workers)
            name = "-".join(part for part in (agent_name, trial) if part)
            frozen = merged.get("core", {}).get("frozen", "")
            agent, result = train_members(name, config, setup, arguments.members, frozen)
            own = {"handover": agent.config.handover, "mirrored": agent.config.mirrored}
            for view, settings in views.items():
                if "handover" in settings and agent.config.policy != "learned":
                    continue
                agent.configure(**own | settings)
                called = "-".join(part for part in (name, view) if part)
                found = measure(agent, config.data, val_scenes, arguments.seeds, arguments.glimpses, called)
                (numbers / f"{called}.json").write_text(found.to_json())
                curve = found.accuracy.ensemble.top1
                results.append(result | {"name": called, "mean": curve.mean, "std": curve.std})
                (numbers / "results.json").write_text(json.dumps(results, indent=1))
                shown = " ".join(f"{n}:{100 * curve.mean[n - 1]:.1f}" for n in SHOWN if n <= len(curve.mean))
                print(
                    f"{called:<28} {result['seconds']:>4.0f} s {result['images']:>8} images  "
                    f"mean {100 * float(np.mean(curve.mean[:21])):.2f}  {shown}  "
                    f"[{time.monotonic() - began:.0f} s]",
                    flush=True,
                )


if __name__ == "__main__":
    main()
