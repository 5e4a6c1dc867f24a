"""Trains agents on small subsets of real images: what `stam train FOLDER` chooses, and what else was tried.

    python experiments/subsets.py --data aid=aid/train imagenette=imagenette/train \
        --init deit_tiny.safetensors --work runs/subsets --out results.json --trials trials.json --processes 4

A trial is {"name", "data", "images", "classes"}: the settings that `stam train` chooses, for that many images
of that many classes. "core" names another core, "recipe" a recipe instead of that choice, "set" changes
settings ({"training": {..}, ..}; "before" does so before the choice, "teach" for the teacher), "effort" says
how long to train (1 is a whole training), "policies" are those to evaluate with.

All trials on the same images follow one teacher, which is fine-tuned first. Accuracy is measured on up to
3,000 other images of the same folder: the images of the results page choose nothing. Trials that have a
result in `--out` are left out.
"""

import argparse
import json
import time
from collections.abc import Iterator
from multiprocessing import get_context, set_start_method
from pathlib import Path
from typing import Any

import numpy as np

from stam.config import from_plain, to_plain
from stam.data.folder import ImageFolder, list_folder
from stam.data.randomness import random_order
from stam.evaluation import EvaluationPlan, evaluate
from stam.learning import experiment
from stam.learning.choosing import choose
from stam.learning.experiment import open_data, with_classes
from stam.learning.fitting import with_core
from stam.learning.optimisation import choose_device
from stam.learning.recipes import get_recipe
from stam.learning.survey import Survey, look_at
from stam.settings import RunConfig
from stam.weights import start_agent

SHOWN = (1, 2, 3, 5, 8, 12, 21)
MOST_TESTED = 3000
Trial = dict[str, Any]


def choose_images(root: Path, num_images: int, num_classes: int, seed: int) -> tuple[list[Path], ImageFolder]:
    """Draws images of some classes, as many of each; returns them and others of these classes to test on."""
    entries = list_folder(root)
    names = sorted({entry.class_name for entry in entries})
    classes = tuple(sorted(names[index] for index in random_order(len(names), "classes", seed)[:num_classes]))
    kept, others = [], []
    for name in classes:
        of_class = [entry for entry in entries if entry.class_name == name]
        order = random_order(len(of_class), f"images of {name}", seed)
        share = num_images // num_classes
        kept += [root / of_class[index].name for index in order[:share]]
        others += [of_class[index] for index in order[share:]]
    order = np.sort(random_order(len(others), "others", seed)[:MOST_TESTED])
    return kept, ImageFolder(root, [others[index] for index in order], classes)


def link(images: list[Path], folder: Path) -> None:
    for image in images:
        place = folder / image.parent.name
        place.mkdir(parents=True, exist_ok=True)
        (place / image.name).symlink_to(image.resolve())


def changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    plain = to_plain(config)
    for part, values in changes.items():
        if part == "augment":
            plain["data"]["augment"] |= values
        elif isinstance(values, dict):
            plain[part] |= values
        else:
            plain[part] = values
    return from_plain(RunConfig, plain)


def place_of(trial: Trial, work: Path) -> Path:
    return work / f"{trial['data']}-{trial['images']}-{trial['classes']}-{trial.get('seed', 0)}"


def chosen_config(trial: Trial, init: str, folder: Path) -> RunConfig:
    """Returns the settings that `stam train` would choose, for a whole training."""
    given = {"init": init, "data": {"path": str(folder), "check": False}} | trial.get("before", {})
    base = changed(get_recipe("tiny"), given)
    base = with_core(base, trial.get("core", "reencoding"))
    scenes = open_data(base.data).train
    base = with_classes(base, tuple(scenes.classes))
    survey = Survey(len(scenes), len(scenes.classes))
    if init != "none":
        device = choose_device(base.training.device)
        survey = look_at(scenes, start_agent(init, base.agent, None), base.data, device)
    return choose(base, survey, trial.get("effort", 1.0)).config


def teach(trial: Trial, roots: dict[str, Path], init: str, work: Path) -> float:
    """Makes the images of a trial and a teacher for them; returns the seconds the teacher took."""
    place = place_of(trial, work)
    images, _ = choose_images(roots[trial["data"]], trial["images"], trial["classes"], trial.get("seed", 0))
    link(images, place / "images")
    config = changed(
        chosen_config(trial, init, place / "images"), {"teacher_training": trial.get("teach", {})}
    )
    began = time.monotonic()
    experiment.begin_teacher(config, place / "teacher")
    return time.monotonic() - began


def run_trial(trial: Trial, roots: dict[str, Path], init: str, work: Path) -> Trial:
    place = place_of(trial, work)
    _, others = choose_images(roots[trial["data"]], trial["images"], trial["classes"], trial.get("seed", 0))
    if "recipe" in trial:  # its settings, but for the data and the start
        data = {"path": str(place / "images"), "check": False}
        config = changed(get_recipe(trial["recipe"]), {"init": init, "class_indices": None, "data": data})
    else:
        config = chosen_config(trial, init, place / "images")
    config = changed(config, {"teacher": str(place / "teacher")} | trial.get("set", {}))
    began = time.monotonic()
    agent = experiment.begin(config, place / trial["name"])
    seconds = time.monotonic() - began
    accuracy = {}
    for policy in trial.get("policies", ["learned"]):
        plan = EvaluationPlan(
            num_seeds=2,
            num_glimpses=config.training.num_glimpses,
            policy=policy,
            batch_size=256,
            num_workers=trial.get("workers", 3),
            cost=False,
            most_timed=0,
            precision="auto",
            resize_size=config.data.resize_size,
        )
        found = evaluate(agent, others, plan, source=trial["data"], name=policy, progress=False)
        accuracy[policy] = [100 * value for value in found.accuracy.ensemble.top1.mean]
    return trial | {"seconds": seconds, "accuracy": accuracy}


def rows(result: Trial) -> list[str]:
    what = f"{result['data']} {result['images']} of {result['classes']}"
    found = []
    for policy, accuracy in result["accuracy"].items():
        shown = " ".join(f"{accuracy[count - 1]:5.1f}" for count in SHOWN if count <= len(accuracy))
        mean = sum(accuracy) / len(accuracy)
        found.append(
            f"{what:24} {result['name']:24} {policy:10} {shown}  mean {mean:5.2f}  {result['seconds']:.0f} s"
        )
    return found


def same(one: Trial, other: Trial) -> bool:
    """Tells whether two trials, or their results, have one name and the same images."""
    return all(one.get(key, 0) == other.get(key, 0) for key in ("name", "data", "images", "classes", "seed"))


def work_off(todo: Any, results: Any) -> None:
    # of the processes that load images: others import torch first
    set_start_method("fork", force=True)
    while (job := todo.get()) is not None:
        task, trial, *given = job
        try:
            results.put((trial, task(trial, *given)))
        except Exception as error:
            results.put((trial, error))


def in_processes(jobs: list[tuple], num_processes: int) -> Iterator[tuple[Trial, Any]]:
    """Works off jobs, (function, trial, more arguments..); yields each trial with its result or error."""
    context = get_context("spawn")
    todo, results = context.Queue(), context.Queue()
    for job in [*jobs, *[None] * num_processes]:
        todo.put(job)
    for _ in range(num_processes):
        context.Process(target=work_off, args=(todo, results)).start()
    for _ in jobs:
        yield results.get()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", required=True, help="NAME=FOLDER")
    parser.add_argument("--init", required=True)
    parser.add_argument("--trials", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parsed = parser.parse_args()
    roots = {name: Path(folder) for name, _, folder in (given.partition("=") for given in parsed.data)}
    trials = json.loads(parsed.trials.read_text())
    done = json.loads(parsed.out.read_text()) if parsed.out.exists() else []
    trials = [trial for trial in trials if not any(same(trial, result) for result in done)]
    given = roots, parsed.init, parsed.work
    untaught = {place_of(trial, parsed.work): trial for trial in trials}
    jobs = [(teach, trial, *given) for place, trial in untaught.items() if not place.exists()]
    for trial, seconds in in_processes(jobs, min(len(jobs), parsed.processes)):
        taken = repr(seconds) if isinstance(seconds, Exception) else f"in {seconds:.0f} s"
        print(f"{place_of(trial, parsed.work).name}: teacher {taken}", flush=True)
    for trial, result in in_processes([(run_trial, trial, *given) for trial in trials], parsed.processes):
        if isinstance(result, Exception):
            print(f"{trial['name']}: {result!r}", flush=True)
            continue
        done.append(result)
        print("\n".join(rows(result)), flush=True)
        parsed.out.write_text(json.dumps(done))
    print()
    for result in sorted(done, key=lambda one: (one["data"], one["classes"], one["images"], one["name"])):
        print("\n".join(rows(result)))


if __name__ == "__main__":
    main()
