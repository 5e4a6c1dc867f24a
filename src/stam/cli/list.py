"""`stam list [FOLDER]`: the agents that ship, recipes, other systems, extras, and the runs in a folder."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from stam.cli.extras import EXTRAS, is_installed
from stam.cli.parsing import next_command, parse
from stam.cli.recipes import main_recipes
from stam.errors import DataError, StamError, how_to_install
from stam.learning.overview import RunOverview, find_runs, overview
from stam.learning.progress import duration
from stam.learning.recipes import RECIPES, get_recipe
from stam.weights import package_folder
from stam.weights.folder import read_agent_config
from stam.weights.locate import agent_names
from stam.zoo import SYSTEMS, require_system


@dataclass(frozen=True)
class Arguments:
    """What to list.

    Attributes:
        folder: List the runs in this folder instead, and in those inside it.
        json: Print JSON.
    """

    folder: tyro.conf.Positional[Path | None] = None
    json: bool = False


def run(arguments: list[str]) -> None:
    """Runs the command."""
    given = parse(Arguments, "list", arguments)
    if given.folder is not None:
        _list_runs(given.folder, given.json)
        return
    agents, recipes, systems, extras = list_agents(), list_recipes(), list_systems(), list_extras()
    if given.json:
        found = {"agents": agents, "recipes": list(RECIPES), "systems": systems, "extras": extras}
        print(json.dumps(found, indent=1))
        return
    _, varied, endings = main_recipes()
    missing = [each["name"] for each in extras if not each["installed"]]
    parts = [
        section("agents that ship (stam predict NAME IMAGE, stam serve NAME)", rows(agents)),
        section("recipes (stam train RECIPE DATA --out RUN)", rows(recipes)),
        f"  {', '.join(varied[:-1])} and {varied[-1]} may end in {', '.join(endings)}",
        section("other hard-attention systems (stam train SYSTEM DATA --out RUN)", rows(systems)),
        section("extras", rows([each | {"installed": _yes(each["installed"])} for each in extras])),
    ]
    parts += [f"  to install one: {how_to_install(missing[0])}"] if missing else []
    print("\n".join(parts))
    next_command("stam info imagenette-tiny")


def _list_runs(folder: Path, as_json: bool) -> None:
    if not folder.is_dir():
        raise DataError(f"no such folder: '{folder}'")
    runs: list[RunOverview] = []
    damaged = []
    for path in find_runs(folder):
        try:
            runs.append(overview(path))
        except StamError as error:  # one that is damaged hides no other
            damaged.append(str(error))
    if as_json:
        print(json.dumps([asdict(run) for run in runs], indent=1))
    elif runs:
        print(
            table(("run", "recipe", "data", "epochs", "best %", "trained"), [_run_row(run) for run in runs])
        )
    else:
        print(f"no runs in '{folder}'")
    if damaged:
        raise DataError("; ".join(damaged))
    next_command(f"stam info {runs[0].path}" if runs else "stam train path/to/images --out runs/mine")


def _run_row(run: RunOverview) -> tuple[str, ...]:
    recipe = f"teacher {run.recipe}" if run.kind == "teacher" else run.recipe
    best = "" if run.best is None else f"{100 * run.best:.1f}"
    return run.path, recipe, run.data, f"{run.epochs_done}/{run.epochs}", best, duration(run.seconds)


def list_agents() -> list[dict[str, str]]:
    """Returns the agents that ship and can be used; cores to start from are not among them."""
    found = []
    for name in agent_names():
        config = read_agent_config(package_folder(name))
        size = "x".join(map(str, config.grid.image_size))
        looks = f"{size} pixels, {config.grid.rows}x{config.grid.columns} locations"
        found.append({"name": name, "classes": f"{config.num_classes} classes", "scenes": looks})
    return found


def list_recipes() -> list[dict[str, str]]:
    """Returns the recipes without their variants."""
    found = []
    for name in main_recipes()[0]:
        config = get_recipe(name)
        size = "x".join(map(str, config.agent.grid.image_size))
        how = f"{config.training.num_glimpses} glimpses, {config.training.epochs} epochs"
        found.append({"name": name, "scenes": f"{size} pixels", "training": how, "start": config.init})
    return found


def list_systems() -> list[dict[str, str]]:
    """Returns the systems of the zoo with their papers."""
    return [{"name": name, "paper": require_system(name).paper} for name in SYSTEMS]


def list_extras() -> list[dict[str, Any]]:
    """Returns the extras, what for, and whether they are installed."""
    return [{"name": name, "for": EXTRAS[name][1], "installed": is_installed(name)} for name in EXTRAS]


def _yes(installed: bool) -> str:
    return "installed" if installed else "not installed"


def section(title: str, lines: str) -> str:
    """Returns a part of the list."""
    return f"\n{title}\n{lines}"


def rows(entries: Sequence[dict[str, Any]]) -> str:
    """Returns entries as indented lines, their values below each other."""
    lines = table((), [tuple(map(str, entry.values())) for entry in entries]).splitlines()
    return "\n".join(f"  {line}" for line in lines)


def table(header: tuple[str, ...], cells: Sequence[tuple[str, ...]]) -> str:
    """Lays cells out below each other."""
    every = [header, *cells] if header else list(cells)
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    )
