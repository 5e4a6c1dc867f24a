"""Opens the agent a command is to use."""

from pathlib import Path

from stam.errors import require
from stam.fast import prepare
from stam.learning.runs import recorded_resize_size
from stam.model.agent import Looker
from stam.weights import find_agent, load_agent


def open_agent(
    source: str | Path, resize_size: int | None = None, threshold: float | None = None, fast: bool = True
) -> tuple[Looker, int | None]:
    """Loads an agent, ready to look, and says how its images are resized: as asked, or as in its evaluation.

    Args:
        source: What `stam.load` takes.
        resize_size: The shorter side before the centre crop, if it is given.
        threshold: Confidence above which it stops, if it is given.
        fast: Whether to use `stam.fast`; otherwise its plain modules look.
    """
    found = find_agent(source)
    loaded = load_agent(found.folder)
    agent = prepare(loaded if threshold is None else loaded.configure(threshold=threshold), fast)
    if resize_size is None:
        return agent, recorded_resize_size(found, loaded.config)
    require(resize_size >= 1, f"--resize-size must be at least 1, got {resize_size}")
    return agent, resize_size
