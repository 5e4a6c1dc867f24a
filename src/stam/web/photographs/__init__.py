"""Images that ship for the page to show; `SOURCES.json` has what each shows, its source and licence."""

import json
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Photograph:
    """An image that ships.

    Attributes:
        file: Name of its file.
        collection: `objects` or `aerial`.
        label: Its class, in words; `None` where it is of no class of the agents that ship, or of several.
        title: What it shows.
        source: Who made it, where it was found and what was done to it.
        licence: Under which terms it may be passed on.
    """

    file: str
    collection: str
    label: str | None
    title: str
    source: str
    licence: str

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return _FOLDER / self.file

    @property
    def credit(self) -> str:
        """Who made it, and the licence, for a caption."""
        if self.is_drawn:
            return "drawn by a program"
        return f"{self.source.partition(', from the data inside')[0]}, {self.licence}"

    @property
    def is_drawn(self) -> bool:
        """Whether it was drawn by a program, for want of a photograph that may be shipped."""
        return self.source.startswith("drawn")


def photographs() -> list[Photograph]:
    """Returns all of them; the first of a collection is the one that its page opens with.

    Which one that is was measured by `experiments/first_scenes.py`.
    """
    entries = json.loads((_FOLDER / "SOURCES.json").read_text(encoding="utf-8"))
    return [Photograph(**entry) for entry in entries]
