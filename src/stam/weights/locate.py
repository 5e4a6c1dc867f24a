"""What a path or a name means: the one place that decides it.

A source is one of these:

PATH           a weights file; a weights folder; a run folder, whose agent is in `best` or else in `last`;
               a teacher's folder or run; the run of an agent that has its own teacher
NAME           a model that ships with the package, such as `digits`, where no such path exists
package:NAME   the same, whatever paths exist
hub:NAME       a model on the Hugging Face hub
none           nothing: weights are drawn at random
"""

import difflib
import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from stam.errors import WeightsError, did_you_mean
from stam.files import from_user
from stam.weights.folder import CONFIG_FILE, MODEL_FILE, is_agent_folder, is_teacher_folder
from stam.weights.hub import HubError, fetch

NOTHING = "none"
RUN_FILE = "run.json"  # what a run is; its folder is a run folder
CARD_FILE = "README.md"  # what an agent that ships was trained on, and what it is not good for
HASHES_FILE = "hashes.json"  # of the models that ship with the package: name, SHA-256 of its weights

_ASSETS = Path(str(files("stam"))) / "assets"
_CHECKPOINTS = ("best", "last")  # of a run, in the order in which they are looked for


@dataclass(frozen=True)
class FoundAgent:
    """An agent that a source means.

    Attributes:
        name: What to call it.
        folder: The folder of its weights and configuration.
        home: Where what is made from it goes: the folder that was named. An agent that ships with the package
            or comes from the hub has `NAME-results` in the current folder, which may not exist yet.
        run: The run folder that its folder is, or lies in; none for an agent without a run.
        is_borrowed: Whether it ships with the package or comes from the hub, so that it is not to be changed.
    """

    name: str
    folder: Path
    home: Path
    run: Path | None
    is_borrowed: bool


def locate(source: str | Path) -> Path:
    """Returns the file or folder that a source names; from the hub the weights file is fetched."""
    path, package, hub = _meaning(source)
    if package is not None:
        return package_folder(package)
    if hub is not None:
        file = fetch(hub, MODEL_FILE)
        with suppress(HubError):  # what is not ours may have none; ours says which grid of patches it has
            fetch(hub, CONFIG_FILE)
        return file
    if not path.exists():
        raise WeightsError(
            f"no weights at '{source}': give a file, a run folder, package:NAME, hub:NAME, or none"
        )
    return path


def find_agent(source: str | Path) -> FoundAgent:
    """Returns the agent that a source means, or raises and says what would be one."""
    path, package, hub = _meaning(source)
    home = find_home(source)
    if package is not None:
        return FoundAgent(package, package_folder(package), home, None, is_borrowed=True)
    if hub is not None:
        fetch(hub, CONFIG_FILE)
        folder = fetch(hub, MODEL_FILE).parent
        return FoundAgent(hub.rpartition("/")[2], folder, home, None, is_borrowed=True)
    if not path.exists():
        shipped = agent_names()
        close = difflib.get_close_matches(str(source), shipped, n=1)
        meant = f"did you mean '{close[0]}'? or " if close else ""
        raise WeightsError(
            f"no agent at '{source}': {meant}give a run folder, a weights folder, hub:NAME, or one of "
            f"{', '.join(shipped)}"
        )
    if path.is_file() and not (path.name == MODEL_FILE and is_agent_folder(path.parent)):
        raise WeightsError(
            f"'{source}' is a file, not an agent: give a run folder or a weights folder "
            "(stam train --init FILE makes an agent of a DeiT)"
        )
    found = _find_model(home)
    if found is None:
        raise WeightsError(
            f"'{source}' holds no agent: expected {MODEL_FILE} and {CONFIG_FILE} in it, in best/ or in "
            "last/; stam train makes one"
        )
    return FoundAgent(home.resolve().name, found, home, _find_run(found), is_borrowed=False)


def find_home(source: str | Path) -> Path:
    """Returns where what is made from an agent goes; see `FoundAgent.home`."""
    path, package, hub = _meaning(source)
    name = package or hub
    if name is not None:
        return Path(f"{name.rpartition('/')[2]}-results")
    return path.parent if path.is_file() else path


def find_core(source: str | Path) -> Path | None:
    """Returns what a model starts from: the folder of an agent, or a weights file; nothing for `none`."""
    if str(source) == NOTHING:
        return None
    path = locate(source)
    if path.is_file():
        return path
    found = _find_model(path)
    if found is None:
        raise WeightsError(
            f"'{source}' holds no agent and no teacher: expected {MODEL_FILE} and {CONFIG_FILE} in it, "
            "in best/ or in last/"
        )
    return found / MODEL_FILE if is_teacher_folder(found) else found


def find_teacher(source: str | Path) -> Path | None:
    """Returns the folder of the teacher that a source means: a teacher, its run, or the run of an agent.

    Nothing where there is none, as at a weights file.
    """
    path = locate(source)
    own = path / "teacher"
    places = (path, *(path / name for name in _CHECKPOINTS), own, *(own / name for name in _CHECKPOINTS))
    return next((folder for folder in places if is_teacher_folder(folder)), None)


def package_names() -> list[str]:
    """Returns the names of the models that ship with the package."""
    return sorted(path.name for path in _ASSETS.iterdir() if is_agent_folder(path))


def agent_names() -> list[str]:
    """Returns the names of the agents that ship; what trainings start from has no card."""
    folders = (_ASSETS / name for name in package_names())
    return [each.name for each in folders if not is_teacher_folder(each) and (each / CARD_FILE).is_file()]


def package_folder(name: str) -> Path:
    """Returns the folder of a model that ships with the package, and checks that it is as it was shipped."""
    if name not in package_names():
        raise WeightsError(f"the package has no model '{name}': {did_you_mean(name, package_names())}")
    folder = _ASSETS / name
    recorded = json.loads((_ASSETS / HASHES_FILE).read_text()).get(name)
    if hashlib.sha256((folder / MODEL_FILE).read_bytes()).hexdigest() != recorded:
        raise WeightsError(f"the model '{name}' is not as it was shipped: install stam-vision again")
    return folder


def _meaning(source: str | Path) -> tuple[Path, str | None, str | None]:
    """Returns a source as a path, and its name in the package or on the hub where it means one."""
    path = from_user(source)
    kind, _, name = str(source).partition(":")
    if kind == "package":
        return path, name, None
    if kind == "hub":
        return path, None, name
    shipped = not path.exists() and str(source) in package_names()
    return path, str(source) if shipped else None, None


def _find_model(path: Path) -> Path | None:
    """Returns the folder of the model in a weights folder or a run folder."""
    folders = (path, *(path / name for name in _CHECKPOINTS))
    return next((folder for folder in folders if is_agent_folder(folder)), None)


def _find_run(folder: Path) -> Path | None:
    """Returns the run folder that an agent's folder is, or lies in."""
    return next((place for place in (folder, folder.parent) if (place / RUN_FILE).is_file()), None)
