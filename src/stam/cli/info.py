"""`stam info AGENT`: what an agent, a teacher or a run is, and how it was trained."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from torch import nn

from stam.cli.parsing import next_command, parse
from stam.config import to_plain
from stam.errors import WeightsError
from stam.learning.distributed import how_to_resume
from stam.learning.overview import RunOverview, overview
from stam.learning.progress import duration
from stam.learning.recipes import RECIPES, get_recipe
from stam.weights import MODEL_FILE, FoundAgent, find_agent, load_teacher_folder
from stam.weights.folder import is_teacher_folder
from stam.weights.locate import RUN_FILE
from stam.zoo import load_looker

_OF_THE_DATA = ("agent.num_classes", "agent.labels", "agent.preprocess_size", "data.path")
_MOST_LABELS = 12


@dataclass(frozen=True)
class Arguments:
    """What to describe.

    Attributes:
        agent: A run folder, a weights folder, an agent that ships (such as digits), or hub:NAME; a teacher or
            a run of a system of the zoo too.
        json: Print everything as JSON, with all settings and class names.
    """

    agent: tyro.conf.Positional[str]
    json: bool = False


def run(arguments: list[str]) -> None:
    """Runs the command."""
    given = parse(Arguments, "info", arguments)
    try:
        found = find_agent(given.agent)
    except WeightsError:
        if not (Path(given.agent) / RUN_FILE).is_file():
            raise
        found = None  # a run that has saved nothing yet
    model = None if found is None else describe_model(found)
    folder = Path(given.agent) if found is None else found.run
    training = None if folder is None else overview(folder)
    if given.json:
        print(json.dumps({"model": model, "run": training and asdict(training)}, indent=1))
        return
    lines = {} if found is None or model is None else model_lines(found, model)
    if training is not None:
        lines |= run_lines(training)
    elif found is not None:
        lines |= card_lines(found.folder)
    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {said}" for name, said in lines.items()))
    next_command(_what_next(given.agent, model, training))


def describe_model(found: FoundAgent) -> dict[str, Any]:
    """Returns what a saved model is, as JSON has it."""
    weights = found.folder / MODEL_FILE
    told: dict[str, Any] = {"folder": str(found.folder), "megabytes": round(weights.stat().st_size / 1e6, 1)}
    if is_teacher_folder(found.folder):
        teacher, labels = load_teacher_folder(found.folder)
        told |= {"kind": "teacher", "parameters": _count(teacher.model), "labels": list(labels)}
        return told
    looker = load_looker(found.folder)
    facts = looker.facts
    agent = looker.episodic
    told |= {
        "kind": "agent" if agent is not None else getattr(looker, "name", "system"),
        "parameters": _count(looker) if isinstance(looker, nn.Module) else None,
        "labels": list(facts.labels),
        "image_size": list(facts.image_size),
        "most_glimpses": facts.most_glimpses,
        "policy": facts.policy,
        "resize_size": facts.resize_size,
    }
    if agent is not None:
        told["config"] = {key: value for key, value in to_plain(agent.config).items() if key != "labels"}
        told["grid"] = [agent.grid.rows, agent.grid.columns]
    return told


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def model_lines(found: FoundAgent, model: dict[str, Any]) -> dict[str, str]:
    """Returns what a person reads of a model."""
    kinds = {"agent": "an agent", "teacher": "a whole-image teacher"}
    labels, kind = model["labels"], kinds.get(model["kind"], f"the system {model['kind']}")
    more = f", ... ({len(labels) - _MOST_LABELS} more)" if len(labels) > _MOST_LABELS else ""
    lines = {
        "model": f"{found.name}, {kind}, in {model['folder']}",
        "size": f"{model['parameters']:,} parameters, {model['megabytes']} MB",
        "classes": f"{len(labels)}: {', '.join(labels[:_MOST_LABELS])}{more}",
    }
    if model["kind"] == "teacher":
        return lines
    height, width = model["image_size"]
    resized = model["resize_size"]
    how = f"the shorter side becomes {resized}, then the centre" if resized else "resized straight to that"
    lines["images"] = f"{height}x{width} pixels ({how})"
    config = model.get("config")
    if config is None:
        lines["looks"] = f"at most {model['most_glimpses']}"
        return lines
    rows, columns = model["grid"]
    lines |= {
        "glimpses": f"{_size(config['glimpse_size'])} pixels on a {rows}x{columns} grid",
        "core": f"{config['core']}, {config['width']} wide, {config['depth']} blocks, "
        f"{config['num_heads']} heads, patches of {_size(config['patch_size'])}",
        "policy": config["policy"],
        "stops at": f"confidence {config['threshold']:.3f}, temperature {config['temperature']:.3f}",
    }
    return lines


def _size(size: int | list[int]) -> str:
    return f"{size}x{size}" if isinstance(size, int) else "x".join(map(str, size))


def run_lines(run: RunOverview) -> dict[str, str]:
    """Returns what a person reads of a run."""
    done = f"{run.epochs_done} of {run.epochs} epochs in {duration(run.seconds)}, seed {run.seed}"
    made = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    lines = {
        "run": f"{run.path}, recipe {run.recipe}",
        "trained on": ", ".join([run.data, *(f"{count:,} {part}" for part, count in run.images.items())]),
        "trained": f"{done} ({made})",
    }
    if run.best is not None:
        what = {"agent": "mean accuracy over the glimpses", "teacher": "accuracy on whole images"}
        measured = what.get(run.kind, "accuracy after the last look")
        lines["best"] = f"{100 * run.best:.1f}% {measured}, on validation images after epoch {run.best_epoch}"
    if run.kind == "agent" and run.recipe in RECIPES:
        other = differences(run.config, to_plain(get_recipe(run.recipe)))
        lines["settings"] = f"other than the recipe's: {', '.join(other) or 'none'}"
    return lines


def differences(config: dict[str, Any], recipe: dict[str, Any], where: str = "") -> list[str]:
    """Returns the settings of a run that its recipe has otherwise, but for what follows from the data."""
    found: list[str] = []
    for name, value in config.items():
        place = f"{where}{name}"
        if isinstance(value, dict) and isinstance(recipe.get(name), dict):
            found += differences(value, recipe[name], f"{place}.")
        elif place not in _OF_THE_DATA and name in recipe and _plain(value) != _plain(recipe[name]):
            found.append(f"{place} {value}")
    return found


def _plain(value: Any) -> Any:
    """Returns a size of two equal sides as one number: both mean the same."""
    return value[0] if isinstance(value, list) and len(value) == 2 and value[0] == value[1] else value


def card_lines(folder: Path) -> dict[str, str]:
    """Returns what the model card of an agent that ships says of its training."""
    card = folder / "README.md"
    if not card.is_file():
        return {}
    text = card.read_text(errors="replace")
    entries = re.findall(r"^- \*\*(Data|Limits)\*\*: (.*(?:\n  .*)*)", text, re.MULTILINE)
    names = {"Data": "trained on", "Limits": "limits"}
    return {names[name]: " ".join(text.split()) for name, text in entries} | {"card": str(card)}


def _what_next(agent: str, model: dict[str, Any] | None, training: RunOverview | None) -> str:
    if training is not None and training.epochs_done < training.epochs:
        command = "teacher" if training.kind == "teacher" else "train"
        return how_to_resume(command, Path(training.path))
    if model is not None and model["kind"] == "teacher":
        return f"stam train path/to/images --teacher {agent} --out RUN"
    return f"stam evaluate {agent}" if training is not None else f"stam predict {agent} IMAGE"
