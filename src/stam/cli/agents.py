"""Opens the agent a command is to use."""

from pathlib import Path

from stam.errors import WeightsError, require
from stam.fast import prepare
from stam.learning.runs import recorded_resize_size
from stam.model.agent import Looker
from stam.model.looker import SceneLooker
from stam.weights import FoundAgent, find_agent, load_agent
from stam.zoo import load_looker


def open_agent(
    source: str | Path,
    resize_size: int | None = None,
    threshold: float | None = None,
    fast: bool = True,
    compiled: bool = False,
) -> tuple[Looker, int | None]:
    """Loads an agent, ready to look, and says how its images are resized: as asked, or as in its evaluation.

    Args:
        source: What `stam.load` takes.
        resize_size: The shorter side before the centre crop, if it is given.
        threshold: Confidence above which it stops, if it is given.
        fast: Whether to use `stam.fast`; otherwise its plain modules look.
        compiled: Whether to compile it.
    """
    require(fast or not compiled, "--compile and --no-fast exclude each other: give one of them")
    found = find_agent(source)
    loaded = load_agent(found.folder)
    if threshold is not None:
        loaded.configure(threshold=threshold)
    agent = loaded.compiled() if compiled else prepare(loaded, fast)
    return agent, _resize_size(found, loaded, resize_size)


def names_agent(source: str | Path) -> bool:
    """Tells whether a word of the command line means an agent."""
    try:
        find_agent(source)
    except WeightsError:
        return False
    return True


def open_looker(
    source: str | Path, resize_size: int | None = None, fast: bool = True
) -> tuple[SceneLooker, int | None]:
    """Loads an agent or a system of the zoo, ready to look; see `open_agent`."""
    found = find_agent(source)
    looker = load_looker(found.folder)
    return looker.ready(fast), _resize_size(found, looker, resize_size)


def _resize_size(found: FoundAgent, looker: SceneLooker, given: int | None) -> int | None:
    if given is None:
        return recorded_resize_size(found, looker.facts.resize_size)
    require(given >= 1, f"--resize-size must be at least 1, got {given}")
    return given
