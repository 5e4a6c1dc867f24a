"""Writes docs/settings.md from the settings' own docstrings: `python docs/make_settings.py`."""

import dataclasses
from pathlib import Path

from stam.cli.parsing import described
from stam.config import AgentConfig
from stam.data.augment import AugmentConfig
from stam.settings import DataConfig, TeacherConfig, TrainingConfig

PAGE = Path(__file__).parent / "settings.md"
SECTIONS = [
    (AgentConfig, "The agent", "--NAME; the classes come from the data"),
    (DataConfig, "Data", "--NAME"),
    (AugmentConfig, "Augmentation", "--augment.NAME"),
    (TrainingConfig, "Training", "--NAME"),
    (
        TeacherConfig,
        "Fine-tuning a teacher",
        "--NAME for stam teacher, --teacher-training.NAME for stam train",
    ),
]


def default_of(field: dataclasses.Field) -> str:
    """Returns a field's default as a reader would write it."""
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        return "see below"
    else:
        return "needed"
    if isinstance(value, tuple):
        return " ".join(f"{item:.4g}" if isinstance(item, float) else str(item) for item in value) or "none"
    return "none" if value is None else f"{value}"


def page() -> str:
    """Returns the whole page."""
    lines = [
        "# Settings",
        "",
        "Every field of a run, with the default of the library; a recipe may set another, and",
        "`stam train RECIPE --help-all` shows what is in force. This page is written by",
        "`python docs/make_settings.py` from the docstrings, and a test holds that it is current.",
    ]
    for cls, title, option in SECTIONS:
        words = described(cls)
        lines += ["", f"## {title}", "", f"`{cls.__name__}`; on the command line {option}.", ""]
        lines += ["| field | default | what it is |", "|---|---|---|"]
        for field in dataclasses.fields(cls):
            lines.append(f"| `{field.name}` | {default_of(field)} | {words[field.name]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
