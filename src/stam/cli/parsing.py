"""Reads a command's arguments into a dataclass."""

import itertools
import sys
from pathlib import Path
from typing import TypeVar

import tyro

from stam.cli import COMMANDS
from stam.config import require_sensible_numbers
from stam.errors import ConfigError

T = TypeVar("T")


def split_positionals(arguments: list[str], most: int) -> tuple[list[str], list[str]]:
    """Returns the words before the first option, and the rest."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if len(words) > most:
        raise ConfigError(f"one word too many: '{words[most]}'; see --help")
    return words, arguments[len(words) :]


def parse(
    cls: type[T], command: str, arguments: list[str], default: T | None = None, more_help: str = ""
) -> T:
    """Returns the arguments of a command; `--help` and mistakes end the program here.

    A misspelt option names the nearest one, and the exit code is 2.

    Args:
        cls: A dataclass of options.
        command: The command's name.
        arguments: What the user wrote.
        default: Values for what the user leaves out.
        more_help: What `--help` says beside the options.
    """
    purpose, example = COMMANDS[command]
    parsed = tyro.cli(
        cls,
        prog=f"stam {command}",
        description=f"{purpose[0].upper()}{purpose[1:]}.\n\nFor example: {example}\n\n{more_help}".strip(),
        args=arguments,
        default=default,
        use_underscores=False,
    )
    assert parsed is not None
    require_sensible_numbers(parsed)
    return parsed


def wants_help(options: list[str]) -> bool:
    """Tells whether help is asked for, so that nothing else need be right."""
    return "-h" in options or "--help" in options


def require_out(out: Path | None, example: str) -> Path:
    """Returns the folder to write to, or says how to name one."""
    if out is None:
        raise ConfigError(f"name the folder to write to: {example}")
    return out


def next_command(command: str) -> None:
    """Ends a command by naming the next one; on stderr, so that stdout stays the result alone."""
    print(f"\nnext: {command}", file=sys.stderr)
