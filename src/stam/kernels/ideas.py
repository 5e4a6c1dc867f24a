"""Which of the ideas that are still to be measured are on; goes once they are measured."""

import os

_WANTED = os.environ.get("STAM_IDEAS", "all").split(",")


def on(name: str) -> bool:
    """Tells whether an idea is on: STAM_IDEAS names those that are, separated by commas, or `all`."""
    return "all" in _WANTED or name in _WANTED
