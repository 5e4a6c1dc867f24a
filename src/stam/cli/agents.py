"""Opens the agent a command is to use."""

from pathlib import Path

from stam.errors import require
from stam.learning.runs import recorded_resize_size
from stam.model.agent import Agent
from stam.weights import find_agent, load_agent


def open_agent(source: str | Path, resize_size: int | None = None) -> tuple[Agent, int | None]:
    """Loads an agent and says how its images are resized: as asked, or as in its evaluation."""
    found = find_agent(source)
    agent = load_agent(found.folder)
    if resize_size is None:
        return agent, recorded_resize_size(found)
    require(resize_size >= 1, f"--resize-size must be at least 1, got {resize_size}")
    return agent, resize_size
