"""Rooms import only from the rooms that docs/architecture.md says they may."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stam.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "stam"


def rooms() -> dict[str, set[str]]:
    """Returns what each room may import, from the table in the documentation."""
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \|([^|]*)\|$", text, re.MULTILINE)
    return {room: set(re.findall(r"\w+", cell)) for room, cell in rows}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    """Returns the modules of ours that a module imports when it is loaded."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("stam.")}


def test_every_module_lies_in_a_room():
    found = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__", "cli"}
    assert found == set(rooms())


@pytest.mark.parametrize("room", rooms())
def test_a_room_imports_only_what_it_may(room):
    allowed = rooms()[room] | {room}
    for path in PACKAGE.rglob("*.py"):
        if room_of(path) == room:
            assert {name.split(".")[1] for name in imports(path)} <= allowed, path


def test_no_room_imports_in_a_circle():
    table = rooms()
    for room, allowed in table.items():
        assert all(room not in table[other] for other in allowed), room


def test_a_look_and_a_session_load_no_training_or_data_code():
    script = """
import sys
import torch
loaded_by_torch = set(sys.modules)
import stam
agent = stam.load("digits")
agent.look(torch.zeros(1, 3, 56, 56), 3)
agent.session().observe(torch.zeros(3, 8, 8))
print(*sorted(set(sys.modules) - loaded_by_torch))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    ours = {name.split(".")[1] for name in loaded if name.startswith("stam.")}
    assert ours <= {"errors", "shapes", "files", "scene", "config", "model", "fast", "weights", "live"}
    assert not loaded & {"tarfile", "tyro", "sklearn", "matplotlib", "fastapi", "stam.fast.cuda"}


def test_the_heart_is_free_of_speed():
    words = re.compile(r"kernels|packed|triton|cuda_graph|mkldnn|is_cuda|autocast|stam\.learning")
    for path in (PACKAGE / "model").glob("*.py"):
        found = words.findall(path.read_text())
        assert not found, (path.name, found)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_another(command):
    """Not even inside a function: what two commands need lies in a room or a helper module."""
    names = set()
    for node in ast.walk(ast.parse((PACKAGE / "cli" / f"{command}.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    assert not names & {f"stam.cli.{other}" for other in COMMANDS}
