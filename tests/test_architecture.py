"""Imports go down the layers only, as docs/architecture.md draws them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "stam"


def layers() -> dict[str, int]:
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    return {name: int(layer) for layer, cell in rows for name in re.findall(r"`([\w/]+?)/?`", cell)}


def module_name(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= (
                {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module == "stam"
                else {node.module}
            )
    return {name.split(".")[1] for name in names if name.startswith("stam.")}


def test_every_module_is_in_the_table():
    modules = {module_name(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"}
    assert modules == set(layers())


def test_imports_go_down_only():
    table = layers()
    for path in PACKAGE.rglob("*.py"):
        here = module_name(path)
        if here in ("__init__", "__main__"):
            continue
        for name in imported(path) & set(table):
            below = table[name] < table[here] or name == here
            assert below, f"{here} (layer {table[here]}) imports {name} (layer {table[name]})"
