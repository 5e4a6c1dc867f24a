"""Reads a command's arguments into a dataclass."""

import contextlib
import difflib
import io
import itertools
import re
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
    about = f"{purpose[0].upper()}{purpose[1:]}.\n\nFor example: {example}"
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = tyro.cli(
                cls,
                prog=f"stam {command}",
                description=f"{about}\n\n{more_help}".strip(),
                args=arguments,
                default=default,
                use_underscores=False,
            )
    except SystemExit as stopped:
        if stopped.code and complaint.getvalue():
            raise ConfigError(in_one_line(complaint.getvalue(), command)) from None
        raise
    assert parsed is not None
    require_sensible_numbers(parsed)
    return parsed


def in_one_line(complaint: str, command: str) -> str:
    """Returns what a box says of a mistake in the options, and the option nearest to a misspelt one."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", complaint).strip()
    lines = [line.strip("│ ") for line in plain.splitlines() if not line.startswith(("╭", "╰"))]
    if not plain.startswith("╭"):  # drawn for a terminal without lines: a title, underlined
        lines = lines[2:]
    said = list(itertools.takewhile(lambda line: line.strip("─-"), lines))
    if not said:  # it looks otherwise than known: better all of it than nothing
        return plain
    message, wrong = " ".join(said), re.search(r"--[\w.-]+", " ".join(said))
    known = [line.split()[0] for line in lines[len(said) :] if line.startswith("--")]
    close = difflib.get_close_matches(wrong[0], known, n=1, cutoff=0) if wrong else []
    meant = f"; did you mean {close[0]}?" if close and close[0] != (wrong and wrong[0]) else ""
    return f"{message.removesuffix('.')}{meant or ';'} see stam {command} --help"


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
