"""`stam prepare fmow SOURCE --out FOLDER`."""

import json
from dataclasses import dataclass
from pathlib import Path

from stam.cli.parsing import next_command, parse, require_out, split_positionals
from stam.config import to_plain
from stam.data import prepare_fmow
from stam.errors import ConfigError, require_choice


@dataclass(frozen=True)
class Arguments:
    """What `stam prepare` takes beside DATASET and SOURCE.

    Attributes:
        out: Where the class folders go. Needed.
        workers: Threads; one a core by default.
        max_shorter_side: Shrink crops whose shorter side is above this; none keeps them.
        json: Print the report as JSON.
    """

    out: Path | None = None
    workers: int | None = None
    max_shorter_side: int | None = None
    json: bool = False


def run(arguments: list[str]) -> None:
    """Turns a dataset's own layout into class folders."""
    positionals, options = split_positionals(arguments, most=2)
    parsed = parse(Arguments, "prepare", options, default=Arguments(), more_help="DATASET is fmow.")
    if len(positionals) < 2:
        raise ConfigError("name the dataset and where it lies: stam prepare fmow SOURCE --out FOLDER")
    out = require_out(parsed.out, "stam prepare fmow SOURCE --out FOLDER")
    require_choice("dataset", positionals[0], ("fmow",))
    report = prepare_fmow(
        Path(positionals[1]),
        out,
        num_workers=parsed.workers,
        max_shorter_side=parsed.max_shorter_side,
    )
    print(json.dumps(to_plain(report), indent=2) if parsed.json else report.summary())
    next_command(f"stam train fmow-small {out} --out RUN")
