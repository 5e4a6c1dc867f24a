"""Trains systems of the zoo for some seconds each on one GPU; prints a table of all trained so far.

    python experiments/zoo.py mnist.npz --out runs/clutter --systems ram:150 dram:150
    python experiments/zoo.py 'imagenette-*.tar' --init deit_tiny.safetensors --out runs/imagenette
    python experiments/zoo.py aid.tar --init deit_tiny.safetensors --out runs/aid --agents runs/stam

A short probe of every stage says how many epochs fit into the seconds. Weights after the last update are
evaluated, so the test scenes select nothing. Photographs to train on lie on the GPU, digits are painted
there. Every system is evaluated with its own policy and, where it has one, with the random policy;
`stn-even` is STN's classifier without its sampler, with as many updates as STN had, where that was trained
before. Agents of ours are evaluated on the same scenes.

OUT/NAME is a run that `stam evaluate`, `stam figures` and `stam serve` take, OUT/NAME.json a result that
`stam compare` takes, OUT/NAME.png shows it looking at two scenes, or at the pictures of `--pictures`. A
system that has a result is left out, so a command that was cut short can be given again; `--pack` keeps a
tar of all results up to date. The table has all results in OUT, those of earlier calls too.
`experiments/zoo_tables.py` writes the tables and pictures of docs/zoo.md from them.
"""

import argparse
import dataclasses
import io
import json
import tarfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from stam.data import (
    BatchLoader,
    CachedScenes,
    ClutteredScenes,
    PaintedScenes,
    RawBatch,
    Scenes,
    Splits,
    Subset,
    open_scenes,
)
from stam.data.on_device import keep_on_device
from stam.evaluation import Evaluation, EvaluationPlan, evaluate, load_evaluation, save_evaluation
from stam.evaluation.examples import collect_examples
from stam.evaluation.scenes import SceneReader
from stam.files import save_content
from stam.learning.loop import Place
from stam.learning.optimisation import choose_device
from stam.learning.runs import RunFolder
from stam.learning.timing import synchronise
from stam.model.agent import Looker
from stam.prediction import Looking, predict
from stam.scene.pixels import normalise
from stam.show.figures.scenes import story_of
from stam.show.pictures import GAP, PAPER, image_bytes, save_strip
from stam.weights import load_agent
from stam.weights.locate import NOTHING, find_agent
from stam.zoo import SYSTEMS, System
from stam.zoo.stn import Stn
from stam.zoo.training import SystemLearner, ZooConfig, default_config, start, train_system, with_classes

EVEN = "stn-even"
WARM_UP, TIMED = 3, 5  # batches of a probe: the first compile, the second is captured
BATCH_SIZE = {"digits": 1024, "photographs": 256}
SMALLER = {"saccader": 4}  # it encodes every window of a scene, so it takes a part of the batch


class PaintedOnce:
    """Scenes to evaluate on that are painted once, all together."""

    def __init__(self, scenes: ClutteredScenes) -> None:
        self.classes, self.labels = scenes.classes, scenes.labels
        self._images = scenes.paint(np.arange(len(scenes))).images

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, decode_size: int | None = None) -> np.ndarray:
        """Returns one image."""
        return self._images[index].permute(1, 2, 0).numpy()


def on_device(splits: Splits, device: torch.device, workers: int) -> Splits:
    """Decodes all photographs once; those to train on go to a GPU's memory.

    Digits to train on are painted on the device in every batch, those to evaluate once.
    """
    if isinstance(splits.train, ClutteredScenes):
        assert isinstance(splits.val, ClutteredScenes)
        return Splits(splits.train, PaintedOnce(splits.val), splits.record)
    val = CachedScenes(splits.val)
    val.fill(None, workers, progress=False)
    train = keep_on_device(splits.train, device, None, workers, progress=False)
    return Splits(train, val, splits.record)


def first_batches(scenes: Scenes, config: ZooConfig, device: torch.device) -> Iterator[RawBatch]:
    """Yields the first batch over and over, made each time as in training."""
    indices = np.arange(config.training.batch_size)
    if isinstance(scenes, ClutteredScenes):
        scenes = scenes.to(device)
    while True:
        if isinstance(scenes, PaintedScenes):
            yield scenes.paint(indices)
        else:
            yield from BatchLoader(scenes, [indices])


def configure(name: str, given: argparse.Namespace, classes: tuple[str, ...]) -> ZooConfig:
    config = default_config("stn" if name == EVEN else name, given.data)
    system = dataclasses.replace(config.system, **given.set)
    if name == EVEN:
        system = dataclasses.replace(system, sampler=False)  # type: ignore[call-arg]
    grey = isinstance(given.opened.train, ClutteredScenes)
    batch_size = BATCH_SIZE["digits" if grey else "photographs"] // SMALLER.get(name, 1)
    rates = {"lr": given.lr, "backbone_lr": given.backbone_lr}
    training = dataclasses.replace(
        config.training,
        **{key: rate for key, rate in rates.items() if rate is not None},
        batch_size=given.batch_size or batch_size,
        seed=given.seed,
        device=given.device,
        validate_every=1_000_000,
        validation_images=256,
        save_minutes=1_000.0,
    )
    data = dataclasses.replace(config.data, check=False, resize_size=None, num_workers=given.workers)
    takes = hasattr(system, "backbone") and system.backbone != "conv"
    init = given.init if takes else NOTHING
    return with_classes(ZooConfig(config.name, system, data, training, init), classes)


def seconds_a_batch(config: ZooConfig, splits: Splits) -> float:
    """Trains a throw-away copy for a few batches of each stage."""
    learner = SystemLearner(config, start(config), len(splits.train), splits.val)
    made = first_batches(splits.train, config, learner.device)
    stages = learner.system.stages
    taken = 0.0
    for number, stage in enumerate(stages):
        learner.ends = [0] * number + [10**9] * (len(stages) - number)
        for batch in range(WARM_UP + TIMED):
            if batch == WARM_UP:
                synchronise(learner.device)
                began = time.monotonic()
            learner.train_batch(Place(0, batch, False), next(made))
        synchronise(learner.device)
        taken += (time.monotonic() - began) / TIMED * stage.share / sum(each.share for each in stages)
    return taken


def train(name: str, seconds: float, given: argparse.Namespace) -> None:
    splits = given.opened
    config = configure(name, given, tuple(splits.train.classes))
    began = time.monotonic()
    each = seconds_a_batch(config, splits)
    an_epoch = max(len(splits.train) // config.training.batch_size, 1)
    epochs = given.epochs or epochs_of_twin(name, given.out) or max(1, int(seconds / each / an_epoch))
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, epochs=epochs))
    print(
        f"{name}: {1000 * each:.2f} ms a batch of {config.training.batch_size}, {epochs} epochs; "
        f"probed in {time.monotonic() - began:.0f} s",
        flush=True,
    )
    folder = RunFolder.create(given.out / name)
    folder.write_record(name, config, splits.record)
    began = time.monotonic()
    system = train_system(folder, config, start(config), splits)
    measured = {"seconds": time.monotonic() - began, "epochs": epochs}
    measure(name, system, config, given, measured | {"updates": epochs * an_epoch})


def epochs_of_twin(name: str, out: Path) -> int | None:
    """Returns how long STN was trained, for the classifier without its sampler: both get equal updates."""
    twin = out / "stn.json"
    if name != EVEN or not twin.is_file():
        return None
    return int(load_evaluation(twin).settings["measured"]["epochs"])


def measure(name: str, system: System, config: ZooConfig, given: argparse.Namespace, more: dict) -> None:
    settings = {"recipe": name, "seed": config.training.seed, "measured": more}
    settings["config"] = json.loads(json.dumps(dataclasses.asdict(config)))
    grey = config.system.grey or not system.backbones()
    for policy in reversed(system.policies):  # its own last: a result without the other is not done
        plan = plan_of(given, policy=policy, precision="float32" if grey else "auto")
        title, suffix = (name, "") if policy == "learned" else (f"{name}, {policy}", f"-{policy}")
        save_evaluation(evaluated(system, title, plan, settings, given), given.out / f"{name}{suffix}.json")
    draw(name, system, given)
    print(f"{name}: trained {more['seconds']:.0f} s; {line_of(given.out, name)}", flush=True)


def draw(name: str, system: System, given: argparse.Namespace) -> None:
    """Draws a system looking: at pictures that were given, or at scenes of the data."""
    path, facts = given.out / f"{name}.png", system.facts
    if given.pictures:
        found = predict(system, list(given.pictures), Looking())
        assert isinstance(found, list)
        save_strip([each.story for each in found], path)
        if isinstance(system, Stn):
            draw_bent(system, found[0].story.image, path)
        return
    reader = SceneReader(
        given.opened.val,
        facts.image_size,
        device=system.device,
        mean=facts.mean,
        std=facts.std,
        progress=False,
    )
    examples = collect_examples(system, reader, 2, facts.most_glimpses, facts.policy)
    save_strip([story_of(each) for each in examples], path)


def measure_agent(path: Path, given: argparse.Namespace) -> None:
    """Evaluates an agent of ours on the same scenes."""
    agent = load_agent(find_agent(path).folder).to(given.device_used)
    config = {"training": {}, "agent": json.loads(json.dumps(dataclasses.asdict(agent.config)))}
    plan = plan_of(
        given, precision="auto", most_timed=0, low_resolution=False, num_glimpses=given.agent_glimpses
    )
    found = evaluated(agent.eval(), path.name, plan, {"recipe": "stam", "config": config}, given)
    save_evaluation(found, given.out / f"{path.name}.json")


def plan_of(given: argparse.Namespace, **settings: Any) -> EvaluationPlan:
    shared = {"num_seeds": given.seeds, "batch_size": 256, "num_workers": given.workers, "cost": False}
    return EvaluationPlan(**(shared | settings))


def evaluated(
    looker: System | Looker, name: str, plan: EvaluationPlan, settings: dict, given: argparse.Namespace
) -> Evaluation:
    source = Path(given.data).name
    return evaluate(
        looker, given.opened.val, plan, source=source, name=name, settings=settings, progress=False
    )


def draw_bent(system: Stn, image: np.ndarray, path: Path) -> None:
    """Draws a scene, and what the classifier sees of it: the boxes of a look do not show how it is bent."""
    pixels, facts = torch.from_numpy(image.copy()).permute(2, 0, 1)[None], system.facts
    with torch.inference_mode():
        seen = system.bent(normalise(pixels, facts.mean, facts.std).to(system.device)).cpu()[0]
    mean, std = (torch.tensor(each)[:, None, None] for each in (facts.mean, facts.std))
    bent = (255 * (seen * std + mean)).clamp(0, 255).byte().permute(1, 2, 0).numpy()
    both = Image.new("RGB", (2 * image.shape[1] + GAP, image.shape[0]), PAPER)
    both.paste(Image.fromarray(image), (0, 0))
    both.paste(
        Image.fromarray(bent).resize(image.shape[1::-1], Image.Resampling.NEAREST),
        (both.width // 2 + GAP // 2, 0),
    )
    save_content(path, image_bytes(both, path))


def pack(out: Path, file: Path) -> None:
    """Puts all results and pictures into one tar, without the weights."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for path in sorted((*out.glob("*.json"), *out.glob("*.png"))):
            archive.add(path, f"{out.name}/{path.name}")
    save_content(file, content.getvalue())


def line_of(out: Path, name: str) -> str:
    """Returns a row of the table: what the paper's Table 1 has, and the random policy beside it."""
    found = load_evaluation(out / f"{name}.json")
    other = out / f"{name}-random.json"
    random = f"{100 * load_evaluation(other).accuracy.ensemble.top1.mean[-1]:.2f}" if other.is_file() else ""
    top1 = found.accuracy.ensemble.top1
    answers = ["yes" if each else "no" for each in (found.whole_to_attend, found.whole_to_classify)]
    curve = " ".join(f"{100 * value:.1f}" for value in top1.mean)
    right, pixels = f"{100 * top1.mean[-1]:.2f}", f"{found.pixels[-1]:,}"
    seconds = f"{found.settings.get('measured', {}).get('seconds', 0):.0f}"
    return f"| {' | '.join((name, *answers, pixels, right, random, seconds, curve))} |"


HEAD = (
    "system",
    "whole to attend",
    "to classify",
    "pixels",
    "accuracy %",
    "random %",
    "s",
    "after each look",
)


def packed(given: argparse.Namespace) -> None:
    if given.pack is not None:
        pack(given.out, given.pack)


def parted(asked: str) -> tuple[str, str, str]:
    """Splits NAME:SECONDS."""
    return asked.partition(":")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="digits in an .npz file, a folder of class folders, or tar shards")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--systems",
        nargs="*",
        default=[*SYSTEMS, EVEN],
        help=f"of {', '.join(SYSTEMS)}, {EVEN}; NAME:SECONDS gives one its own time",
    )
    parser.add_argument("--agents", nargs="*", type=Path, default=[], help="runs of STAM to evaluate too")
    parser.add_argument("--agent-glimpses", type=int, default=21, help="of each run of STAM")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, for each system")
    parser.add_argument("--epochs", type=int, help="epochs instead of seconds")
    parser.add_argument("--init", default=NOTHING, help="a DeiT-Tiny's weights, for systems on photographs")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--lr", type=float, help="of all but a DeiT, instead of the default")
    parser.add_argument("--backbone-lr", type=float, help="of a DeiT, instead of the default")
    parser.add_argument(
        "--seeds", type=int, default=1, help="of the evaluation, for systems that begin at random"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--limit", type=int, help="of the scenes to evaluate, for a try")
    parser.add_argument("--pictures", nargs="*", type=Path, default=[], help="images to draw systems with")
    parser.add_argument("--pack", type=Path, help="a .tar.gz file for all results, written after each system")
    parser.add_argument("--set", type=json.loads, default={}, help='settings, such as {"location_std": 0.2}')
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    asked = [(name, float(seconds or given.seconds)) for name, _, seconds in map(parted, given.systems)]
    unknown = [name for name, _ in asked if name not in (*SYSTEMS, EVEN)]
    if unknown:
        parser.error(f"unknown system '{unknown[0]}': allowed are {', '.join((*SYSTEMS, EVEN))}")
    given.device_used = choose_device(given.device)
    given.opened = on_device(open_scenes(given.data), given.device_used, given.workers)
    if given.limit is not None:
        chosen = np.linspace(0, len(given.opened.val) - 1, given.limit).astype(np.int64)
        given.opened = dataclasses.replace(given.opened, val=Subset(given.opened.val, chosen))
    failed: list[str] = []
    for name, seconds in asked:
        if (given.out / f"{name}.json").is_file():
            continue
        try:
            train(name, seconds, given)
        except Exception:  # the time of the others is not lost
            traceback.print_exc()
            failed.append(name)
        packed(given)
    for path in given.agents:
        measure_agent(path, given)
        packed(given)
    print(f"\n| {' | '.join(HEAD)} |")
    print("|---|---|---|--:|--:|--:|--:|---|")
    for name in sorted(file.stem for file in given.out.glob("*.json")):
        if not name.endswith("-random"):
            print(line_of(given.out, name))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
