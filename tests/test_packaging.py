"""What `pip install -e .` brings is what the first commands need, and a missing extra names its command."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from stam import errors

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORTED_AS = {"pillow": "PIL", "scikit-learn": "sklearn"}
OPTIONAL = {  # modules that are imported only where their extra is asked for
    "show/figures/": {"matplotlib"},
    "show/report/": {"matplotlib"},
    "fast/kernels/": {"triton"},
}


def package_names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", each)[0] for each in requirements}


def test_a_plain_install_brings_every_package_that_is_imported():
    installed = {IMPORTED_AS.get(name, name) for name in package_names(PROJECT["dependencies"])}
    installed |= {"stam", *sys.stdlib_module_names, "pydantic", "anyio"}  # the last two come with fastapi
    for path in (ROOT / "src/stam").rglob("*.py"):
        place = path.relative_to(ROOT / "src/stam").as_posix()
        allowed = installed.union(*(names for part, names in OPTIONAL.items() if place.startswith(part)))
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert {name.split(".")[0] for name in names} <= allowed, (place, names)


def test_every_extra_that_is_named_exists():
    extras = set(PROJECT["optional-dependencies"])
    for path in (ROOT / "src/stam").rglob("*.py"):
        for extra in re.findall(r'extra="(\w+)"', path.read_text()):
            assert extra in extras or path.name == "schemas.py", (path, extra)
    wanted = re.findall(r"--editable '\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text())
    assert wanted and {extra for each in wanted for extra in each.split(",")} <= extras


def test_a_missing_extra_is_installed_from_the_clone(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert errors.how_to_install("hub") == "pip install -e '.[hub]'"
    monkeypatch.chdir(tmp_path)
    assert errors.how_to_install("hub") == f"pip install -e '{ROOT}[hub]'"
    with pytest.raises(errors.MissingPackageError, match=r"'no_such': pip install -e '.*\[hub\]'"):
        errors.require_package("no_such", extra="hub")
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "lib/site-packages/stam/errors.py"))
    assert errors.how_to_install("hub") == "pip install 'stam-vision[hub]'"
