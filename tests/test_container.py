"""The container file, as far as it can be checked without building it."""

import json
import re
import shlex
from pathlib import Path

import pytest

from stam import cli

ROOT = Path(__file__).parent.parent
TEXT = re.sub(r"\\\n", " ", (ROOT / "Containerfile").read_text())


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", TEXT, re.MULTILINE)


def command_line() -> list[str]:
    """What a container runs that is started without arguments."""
    ((entry,), (arguments,)) = instructions("ENTRYPOINT"), instructions("CMD")
    return [*json.loads(entry), *json.loads(arguments)]


def test_what_it_copies_is_there_and_enough():
    copied = {source for line in instructions("COPY") for source in line.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    kept = (ROOT / ".containerignore").read_text().splitlines()
    assert {line[1:] for line in kept if line.startswith("!")} == copied and "*" in kept
    project = (ROOT / "pyproject.toml").read_text()
    for needed in ('readme = "README.md"', 'license-files = ["LICENSE"]', 'packages = ["src/stam"]'):
        assert needed in project
    (install,) = (line for line in instructions("RUN") if "useradd" not in line)
    (torch,) = re.findall(r'"(torch[^"]*)"', install)
    assert f'"{torch}"' in project  # otherwise another build would replace it
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', install)
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))


def test_it_does_not_run_as_root_and_its_python_fits():
    lines = [line.split()[0] for line in TEXT.splitlines() if re.match(r"[A-Z]+ ", line)]
    assert instructions("USER") == ["stam"] and lines.index("USER") < lines.index("ENTRYPOINT")
    (version,) = re.findall(r"python:3\.(\d+)-slim", TEXT)
    assert f"Python :: 3.{version}" in (ROOT / "pyproject.toml").read_text()


def test_its_command_serves_an_agent_where_it_is_looked_for(monkeypatch):
    from fastapi.testclient import TestClient

    from stam import web

    served = []
    monkeypatch.setattr(web, "serve", lambda *given: served.append(given))
    program, *arguments = command_line()
    assert program == "stam"
    cli.main(arguments)
    ((service, host, port, _),) = served
    assert host == "0.0.0.0" and [str(port)] == instructions("EXPOSE")
    (check,) = instructions("HEALTHCHECK")
    url = re.search(rf"http://127\.0\.0\.1:{port}(/[\w/]+)", check)[1]
    client = TestClient(web.create_app(service, ("*",)))
    assert client.get(url).json()["name"] == arguments[-1]
    compile(json.loads(check.removeprefix("CMD "))[2], "HEALTHCHECK", "exec")


@pytest.mark.parametrize("file", ["Containerfile", "docs/command-line.md"])
def test_the_documented_commands_name_what_is_there(file):
    text = (ROOT / file).read_text()
    runs = re.findall(r"podman run (.*?)(?:  |\n|#)", text)
    assert runs and "podman build --tag stam ." in text
    for line in runs:
        words = shlex.split(line)
        port = instructions("EXPOSE")[0]
        assert words[words.index("--publish") + 1] == f"127.0.0.1:{port}:{port}" and "stam" in words
