"""Small scenes, agents, teachers and runs for the tests of evaluation."""

import functools
import json
from pathlib import Path

import numpy as np
import torch
from agents import randomise, tiny_config
from PIL import Image

import stam
from stam.evaluation import Evaluation, EvaluationPlan, Example, collect_examples, evaluate, reader_for
from stam.model.looker import Facts, SceneTrace
from stam.model.randomness import random_source
from stam.model.teacher import Teacher
from stam.model.vit import VisionTransformer
from stam.weights import save_agent, save_teacher

CLASSES = ("ash", "birch", "cedar", "elm", "fir")
FAST = dict(cost=False, most_timed=0, batch_size=8)


class NoiseScenes:
    """Labelled noise: enough for everything that does not need an agent to be good."""

    def __init__(self, num_scenes: int = 20, classes: tuple[str, ...] = CLASSES) -> None:
        self.classes = classes
        self.labels = np.arange(num_scenes, dtype=np.int64) % len(classes)

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, decode_size: int | None = None) -> np.ndarray:
        return np.random.default_rng(index).integers(0, 256, (24, 32, 3), dtype=np.uint8)


def make_agent(seed: int = 0, **settings) -> stam.Agent:
    torch.manual_seed(seed)
    agent = stam.Agent(tiny_config(**(dict(labels=CLASSES) | settings)))
    randomise(agent, seed)
    return agent.eval()


VIT = dict(width=24, depth=2, num_heads=3, distilled=True)


def make_teacher() -> Teacher:
    torch.manual_seed(3)
    model = VisionTransformer(num_classes=5, patch_size=(4, 4), image_patches=(6, 8), **VIT)
    randomise(model, seed=3)
    return Teacher(model, 5)


def fast_plan(**settings) -> EvaluationPlan:
    return EvaluationPlan(**(FAST | dict(num_seeds=2) | settings))


@functools.cache
def full_evaluation() -> Evaluation:
    """Everything that can be measured of an agent, once for all tests that only read it."""
    plan = EvaluationPlan(num_seeds=2, most_timed=4, batch_size=8)
    settings = {"seed": 3, "config": {"training": {"num_glimpses": 6, "list": [1]}}}
    return evaluate(make_agent(), NoiseScenes(12), plan, make_teacher(), name="my <run>", settings=settings)


@functools.cache
def some_examples() -> list[Example]:
    """Five scenes of five classes, of which one would break a page that does not escape it."""
    agent = make_agent(labels=("<b>ash</b>", *CLASSES[1:]))
    reader = reader_for(agent, NoiseScenes(10, agent.labels), fast_plan())
    return collect_examples(agent, reader, 5, 12, "learned")


def make_data(folder: Path, num_images: int = 4, classes: tuple[str, ...] = CLASSES) -> Path:
    """A folder of class folders with small noisy images."""
    scenes = NoiseScenes(num_images * len(classes), classes)
    for index, label in enumerate(scenes.labels):
        place = folder / "val" / classes[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(scenes.load(index)).save(place / f"{index}.png")
    return folder


def make_run(folder: Path, data: Path, with_teacher: bool = True, seed: int = 0, **settings) -> Path:
    """A run folder as training leaves it, with an untrained agent."""
    consistency = settings.pop("consistency", "soft")
    agent = make_agent(seed, **settings)
    save_agent(agent, folder / "best")
    config = {
        "agent": json.loads(agent.config.to_json()),
        "data": {"path": str(data), "resize_size": None},
        "training": {"num_glimpses": 6, "consistency": consistency},
    }
    record = {"recipe": "test", "seed": seed, "versions": {}, "config": config}
    (folder / "run.json").write_text(json.dumps(record))
    epochs = range(3)
    lines = [
        {"epoch": epoch, "loss/supervised": 1 / (epoch + 1), "val/accuracy@2": epoch / 9} for epoch in epochs
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if with_teacher:
        teacher = {"labels": list(CLASSES), "image_size": [24, 32], "vit": {**VIT, "patch_size": [4, 4]}}
        save_teacher(make_teacher().model, folder / "teacher", teacher)
    return folder


@functools.cache
def gridless_evaluation() -> Evaluation:
    """The result of a looker whose looks lie on no grid: a whole view, then two parts at a time."""
    return evaluate(WholeThenCrops(), NoiseScenes(10), EvaluationPlan(num_seeds=2), name="crops")


class WholeThenCrops:
    """A looker of another kind: a whole view at low resolution, then crops anywhere; always the first class.

    Every look after the first has a second part in some of the scenes, so that scenes differ in pixels.
    """

    facts = Facts(CLASSES, (24, 32), 3, whole_to_attend=True, whole_to_classify=True)
    device, episodic = torch.device("cpu"), None

    def __init__(self) -> None:
        self.drawn: list[torch.Tensor] = []

    def ready(self, fast=True):
        return self

    def look(self, images, num_glimpses, *, policy=None, generator=None):
        batch = len(images)
        places = random_source(generator).uniform((batch, 2), images.device) / 2
        self.drawn.append(places)
        whole = torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(batch, 1, 4)
        crop = torch.cat((places, places + 0.5), dim=1)[:, None]
        second = crop * (images.sum(dim=(1, 2, 3)) > 0)[:, None, None]
        boxes, sizes = [whole, *[torch.cat((crop, second), 1)] * 2], [[(4, 5)], *[[(6, 8), (3, 4)]] * 2]
        logits = torch.eye(5)[torch.zeros(batch, dtype=torch.long)]
        return SceneTrace.of(boxes[:num_glimpses], sizes[:num_glimpses], [logits] * num_glimpses)
