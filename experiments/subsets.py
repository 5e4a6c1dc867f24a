"""Trains agents on small subsets of real images, to choose the settings that `stam train FOLDER` takes.

    python experiments/subsets.py --data aid=aid/train imagenette=imagenette/train \
        --init deit_tiny.safetensors --out results.json --trials trials.json --processes 4

A trial is {"name", "data", "images", "classes", "set": {"training": {..}, ..}}: a recipe with
changes, trained on that many images of that many classes. Accuracy is measured on up to 1,500 other images of
the same folder, so the images of the results page choose nothing.
"""

import argparse
import json
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from stam.config import from_plain, to_plain
from stam.data import Subset
from stam.data.folder import ImageFolder, list_folder
from stam.data.randomness import random_order
from stam.learning import experiment
from stam.learning.recipes import get_recipe
from stam.learning.runs import RunFolder
from stam.learning.validation import validate
from stam.settings import RunConfig

SHOWN = (1, 2, 3, 5, 8, 12, 21)
MOST_TESTED = 1500


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


def run_trial(trial: dict[str, Any], roots: dict[str, Path], init: str, work: Path) -> dict[str, Any]:
    place = work / f"{trial['name']}-{trial['data']}-{trial['images']}-{trial['classes']}"
    images, others = choose_images(
        roots[trial["data"]], trial["images"], trial["classes"], trial.get("seed", 0)
    )
    link(images, place / "images")
    base = get_recipe(trial.get("recipe", "tiny"))
    general = {"data": {"path": str(place / "images"), "check": False, "cache": True, "num_workers": 0}}
    config = changed(changed(base, {"init": init} | general), trial["set"])
    if "teacher_of" in trial:  # of an earlier trial on the same images
        earlier = place.with_name(place.name.replace(trial["name"], trial["teacher_of"], 1))
        config = changed(config, {"teacher": str(earlier / "run" / "teacher")})
    began = time.monotonic()
    agent = experiment.begin(config, place / "run")
    seconds = time.monotonic() - began
    timing = RunFolder(place / "run" / "teacher").path / "timing.jsonl"
    teacher = json.loads(timing.read_text().splitlines()[-1])["seconds"] if timing.exists() else 0.0
    measured = changed(config, {"training": {"validation_images": MOST_TESTED}})
    scenes = Subset(others, np.arange(len(others)))
    runs = [validate(agent, measured, scenes, seed=seed) for seed in (0, 1)]
    accuracy = [100 * float(np.mean(each)) for each in zip(*runs, strict=True)]
    return trial | {"seconds": seconds, "teacher_seconds": teacher, "accuracy": accuracy}


def row(result: dict[str, Any]) -> str:
    shown = " ".join(
        f"{result['accuracy'][count - 1]:5.1f}" for count in SHOWN if count <= len(result["accuracy"])
    )
    mean = sum(result["accuracy"]) / len(result["accuracy"])
    what = f"{result['data']} {result['images']} of {result['classes']}"
    return (
        f"{what:24} {result['name']:24} {shown}  mean {mean:5.1f}  "
        f"{result['seconds']:.0f} s ({result['teacher_seconds']:.0f})"
    )


def work_off(
    trials: list[dict[str, Any]], roots: dict[str, Path], init: str, work: Path, results: Any
) -> None:
    for trial in trials:
        try:
            results.put(run_trial(trial, roots, init, work))
        except Exception as error:
            results.put(trial | {"error": repr(error)})


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
    context = get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(
            target=work_off,
            args=(trials[index :: parsed.processes], roots, parsed.init, parsed.work / str(index), results),
        )
        for index in range(parsed.processes)
    ]
    for worker in workers:
        worker.start()
    done = []
    for _ in trials:
        result = results.get()
        done.append(result)
        print(row(result) if "accuracy" in result else f"{result['name']}: {result['error']}", flush=True)
        parsed.out.write_text(json.dumps(done))
    print()
    finished = [result for result in done if "accuracy" in result]
    for result in sorted(finished, key=lambda one: (one["data"], one["classes"], one["images"], one["name"])):
        print(row(result))


if __name__ == "__main__":
    main()
