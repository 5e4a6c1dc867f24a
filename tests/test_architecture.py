"""Rooms import only from the rooms that docs/architecture.md says they may."""

import ast
from pathlib import Path

import pytest

from stam.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "stam"

GROUND = {"errors", "shapes", "files"}
SETTINGS = GROUND | {"scene", "config", "settings"}
MAY_IMPORT = {
    "errors": set(),
    "shapes": set(),
    "files": {"errors"},
    "scene": GROUND,
    "config": GROUND | {"scene"},
    "settings": GROUND | {"scene", "config"},
    "model": SETTINGS,
    "fast": SETTINGS | {"model"},
    "weights": SETTINGS | {"model"},
    "data": SETTINGS,
    "learning": SETTINGS | {"model", "fast", "weights", "data"},
    "live": SETTINGS | {"model", "fast", "weights"},
    "evaluation": SETTINGS | {"model", "fast", "weights", "data", "learning"},
    "integrations": SETTINGS | {"model", "fast", "weights", "data", "live"},
    "show": SETTINGS | {"model", "data", "evaluation"},
    "web": SETTINGS | {"model", "weights", "data", "live"},
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    """Returns the rooms a module imports when it is loaded."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "stam":
            names |= {f"stam.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.split(".")[1] for name in names if name.startswith("stam.")}


NOT_YET = {"scene", "settings", "model", "data", "evaluation", "show"}


@pytest.mark.parametrize("room", sorted(set(MAY_IMPORT) - NOT_YET))
def test_a_room_imports_only_what_it_may(room):
    for path in PACKAGE.rglob("*.py"):
        if room_of(path) == room:
            assert imports(path) <= MAY_IMPORT[room] | {room}, path


def test_every_module_lies_in_a_room():
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__", "cli"}
    assert rooms <= set(MAY_IMPORT)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_another(command):
    """Not even inside a function: what two commands need lies in a room or a helper module."""
    names = set()
    for node in ast.walk(ast.parse((PACKAGE / "cli" / f"{command}.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
            names.add(f"{'.' * node.level}{node.module or ''}")
    assert not any(name.startswith(".") for name in names), "imports are absolute here"
    assert not names & {f"stam.cli.{other}" for other in COMMANDS}
