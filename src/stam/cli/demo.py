"""`stam demo`: the main job on the embedded digits, from training to a picture."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import stam
from stam.cli.parsing import next_command, parse
from stam.cli.processes import processes
from stam.data import ClutteredDigits, Scenes, open_scenes
from stam.errors import MissingPackageError, require
from stam.files import save_content
from stam.learning import experiment
from stam.learning.recipes import get_recipe
from stam.learning.runs import RunFolder
from stam.learning.validation import validate
from stam.model.agent import Agent
from stam.scene.pixels import normalise
from stam.settings import RunConfig
from stam.show.animations import save_gif
from stam.show.pictures import Story, save_strip

RECIPE = "digits"
POLICIES = ("learned", "random", "plus", "spiral")
SHOWN_GLIMPSES = 14


@dataclass(frozen=True)
class Arguments:
    """What `stam demo` takes.

    Attributes:
        out: Where the run and the pictures go.
        epochs: Epochs of training; none takes the recipe's.
        seed: Seed of the training.
        num_scenes: Test scenes to measure the accuracy on.
        resume: Go on with an interrupted demo.
    """

    out: Path = Path("demo")
    epochs: int | None = None
    seed: int = 0
    num_scenes: int = 600
    resume: bool = False


def run(arguments: list[str]) -> None:
    """Trains an agent on cluttered digits, compares ways of looking, and draws it looking."""
    parsed = parse(Arguments, "demo", arguments)
    require(parsed.num_scenes >= 1, f"--num-scenes must be at least 1, got {parsed.num_scenes}")
    if parsed.resume:
        given = parsed.epochs is not None or parsed.seed != 0
        require(not given, "--resume goes on with the settings of the run: leave out --epochs and --seed")
        begun = RunFolder.open(parsed.out).record()["recipe"]
        require(begun == RECIPE, f"the run in '{parsed.out}' is no demo: it was begun with '{begun}'")
    train(parsed)
    agent, config = stam.load(parsed.out / "last"), RunFolder.open(parsed.out).config()
    scenes = open_scenes("digits", seed=config.data.split_seed).val
    count = min(parsed.num_scenes, len(scenes))
    print(f"\naccuracy in % on {count} test scenes: one agent, four ways of looking")
    accuracies = accuracy_by_policy(agent, config, scenes, parsed.num_scenes)
    print(table(accuracies))
    draw(agent, parsed.out)
    print(f"\nthe agent looking: {parsed.out / 'looking.png'} and {parsed.out / 'looking.gif'}")
    if draw_curves(accuracies, parsed.out / "policies.png"):
        print(f"the ways of looking compared: {parsed.out / 'policies.png'}")
    next_command(f"stam serve {parsed.out}    (watch it look, in a browser), or stam evaluate {parsed.out}")


def train(parsed: Arguments) -> None:
    """Trains the agent of the demo, or goes on with it."""
    config = get_recipe(RECIPE)
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, seed=parsed.seed))
    if parsed.epochs is not None:
        training = dataclasses.replace(
            config.training, epochs=parsed.epochs, tau_epochs=max(1, parsed.epochs // 2)
        )
        config = dataclasses.replace(config, training=training)
    with processes(config.training.device):
        if parsed.resume:
            experiment.resume(parsed.out)
        else:
            experiment.begin(config, parsed.out, RECIPE)


def accuracy_by_policy(agent: Agent, config: RunConfig, scenes: Scenes, count: int) -> dict[str, list[float]]:
    """Returns the accuracy after each glimpse with the learned policy and with fixed orders."""
    training = dataclasses.replace(config.training, validation_images=count, num_glimpses=SHOWN_GLIMPSES)
    config = dataclasses.replace(config, training=training)
    found = {}
    for policy in POLICIES:
        print(f"looking at test scenes: {policy}", file=sys.stderr)
        found[policy] = validate(agent, config, scenes, policy)
    return found


def table(accuracies: dict[str, list[float]]) -> str:
    """Lays accuracies out as text, one row a number of glimpses."""
    header = "glimpses" + "".join(f"{name:>10}" for name in accuracies)
    rows = [header]
    for index in range(len(next(iter(accuracies.values())))):
        rows.append(
            f"{index + 1:>8}" + "".join(f"{100 * values[index]:>10.1f}" for values in accuracies.values())
        )
    return "\n".join(rows)


def draw_curves(accuracies: dict[str, list[float]], path: Path) -> bool:
    """Draws the accuracy after each glimpse, where the package for figures is there; tells whether it is."""
    try:
        from stam.show.figures import curves, style
    except MissingPackageError:
        return False
    title = "Where to look is worth learning: cluttered digits, one agent"
    save_content(path, style.to_bytes(curves.policies(accuracies, title)))
    return True


def draw(agent: Agent, folder: Path, indices: Sequence[int] = (3, 11, 17, 29)) -> None:
    """Draws the agent looking at a few test scenes until it is sure, as a strip and an animation."""
    scenes = ClutteredDigits("test", seed=1)
    pictures = scenes.load_batch(np.array(indices))
    images = normalise(torch.from_numpy(pictures).permute(0, 3, 1, 2))
    generator = torch.Generator().manual_seed(4)
    trace = agent.look(images, 16, generator=generator)
    stories = []
    for row, index in enumerate(indices):
        sure = (trace.confidences[row] > agent.threshold).nonzero()
        count = int(sure[0]) + 1 if len(sure) else trace.locations.shape[1]
        said = trace.predictions[row, :count].tolist()
        stories.append(
            Story(
                name=f"a {scenes.classes[scenes.labels[index]]}",
                image=pictures[row],
                grid=agent.grid,
                locations=trace.locations[row, :count].tolist(),
                labels=[agent.labels[label] for label in said],
                confidences=trace.confidences[row, :count].tolist(),
            )
        )
    save_strip(stories, folder / "looking.png")
    save_gif(stories, folder / "looking.gif")
