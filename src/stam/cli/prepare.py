"""`stam prepare fmow SOURCE --out FOLDER` and `stam prepare shards SOURCE --out FOLDER`."""

import json
from dataclasses import dataclass
from pathlib import Path

from stam.cli.parsing import next_command, parse, require_out, split_positionals
from stam.config import to_plain
from stam.data import FmowReport, ShardReport, open_scenes, prepare_fmow, prepare_shards
from stam.errors import ConfigError, require, require_choice

USAGE = "stam prepare fmow SOURCE --out FOLDER, or stam prepare shards SOURCE --out FOLDER"


@dataclass(frozen=True)
class Arguments:
    """What `stam prepare` takes beside DATASET and SOURCE.

    Attributes:
        out: Where the class folders or shards go. Needed.
        workers: fmow: threads; one a core by default.
        max_shorter_side: fmow: shrink crops whose shorter side is above this; none keeps them.
        shard_mb: shards: megabytes of each.
        val_fraction: shards: the share to validate on, where the source has no split of its own.
        test_fraction: shards: the share to test on, where the source has no test part of its own.
        seed: shards: seed of that split and of the order of images.
        skip_unreadable: shards: leave out images that cannot be read.
        json: Print the report as JSON.
    """

    out: Path | None = None
    workers: int | None = None
    max_shorter_side: int | None = None
    shard_mb: float = 256.0
    val_fraction: float = 0.1
    test_fraction: float = 0.0
    seed: int = 0
    skip_unreadable: bool = False
    json: bool = False


def run(arguments: list[str]) -> None:
    """Turns a dataset's own layout into class folders, or images into shards."""
    positionals, options = split_positionals(arguments, most=2, cls=Arguments)
    about = "DATASET is fmow, or shards: any source of images, packed for fast and remote reading."
    parsed = parse(Arguments, "prepare", options, default=Arguments(), more_help=about)
    if len(positionals) < 2:
        raise ConfigError(f"name the dataset and where it lies: {USAGE}")
    dataset, source = positionals
    out = require_out(parsed.out, f"stam prepare {dataset} SOURCE --out FOLDER")
    require_choice("dataset", dataset, ("fmow", "shards"))
    report: FmowReport | ShardReport
    if dataset == "shards":
        require(parsed.shard_mb > 0, f"--shard-mb must be above 0, got {parsed.shard_mb}")
        splits = open_scenes(
            source,
            val_fraction=parsed.val_fraction,
            test_fraction=parsed.test_fraction,
            seed=parsed.seed,
        )
        shard_bytes = int(parsed.shard_mb * 1_000_000)
        report = prepare_shards(splits, out, shard_bytes, parsed.seed, parsed.skip_unreadable)
    else:
        report = prepare_fmow(
            Path(source), out, num_workers=parsed.workers, max_shorter_side=parsed.max_shorter_side
        )
    print(json.dumps(to_plain(report), indent=2) if parsed.json else report.summary())
    next_command(f"stam train {'fmow-small ' if dataset == 'fmow' else ''}{out} --out RUN")
