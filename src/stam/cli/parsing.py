"""Reads a command's arguments into a dataclass."""

import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import re
import sys
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from stam.cli import COMMANDS
from stam.config import require_sensible_numbers
from stam.errors import ConfigError
from stam.files import from_user

T = TypeVar("T")


def split_positionals(
    arguments: list[str], most: int, cls: type | None = None
) -> tuple[list[str], list[str]]:
    """Returns the words that belong to no option, and the rest.

    Args:
        arguments: What the user wrote.
        most: How many such words there may be.
        cls: The dataclass of options. With it words are found behind options too, as in `--out RUN DATA`;
            several values of one option must then be numbers.
    """
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    options = arguments[len(words) :]
    if cls is not None:
        behind, options = _words_behind_options(options, flags_of(cls))
        words += behind
    if len(words) > most:
        raise ConfigError(f"one word too many: '{words[most]}'; see --help")
    return words, options


def _words_behind_options(arguments: list[str], flags: set[str]) -> tuple[list[str], list[str]]:
    words, options = [], []
    is_value = False  # whether the next word is the value of the option before it
    for word in arguments:
        if word.startswith("-") and not _is_number(word):
            is_value = "=" not in word and word not in flags
        elif not is_value and not _is_number(word):
            words.append(word)
            continue
        else:
            is_value = False
        options.append(word)
    return words, options


def flags_of(cls: type, prefix: str = "") -> set[str]:
    """Returns the options of a dataclass that take no value, those of the dataclasses in it included.

    Args:
        cls: The dataclass.
        prefix: What its options begin with, such as `augment.`.
    """
    flags = {"-h", "--help", "--help-all"}
    for name, given in get_type_hints(cls, include_extras=True).items():
        kind, *more = get_args(given) if get_origin(given) is Annotated else (given,)
        word = name.replace("_", "-")
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            is_flat = any(getattr(each, "name", None) == "" for each in more)
            flags |= flags_of(kind, prefix if is_flat else f"{prefix}{word}.")
        elif kind is bool:
            flags |= {f"--{prefix}{word}", f"--{prefix}no-{word}"}
    return flags


def _is_number(word: str) -> bool:
    return re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", word) is not None


def parse(
    cls: type[T],
    command: str,
    arguments: list[str],
    default: T | None = None,
    more_help: str = "",
    shown: tuple[str, ...] = (),
    words: str = "",
    chosen: tuple[str, ...] = (),
) -> T:
    """Returns the arguments of a command; `--help` and mistakes end the program here.

    A misspelt option names the nearest one, and the exit code is 2.

    Args:
        cls: A dataclass of options.
        command: The command's name.
        arguments: What the user wrote.
        default: Values for what the user leaves out.
        more_help: What help says beside the options.
        shown: The few options that `--help` lists, if not all; `--help-all` then does.
        words: What comes before the options, for help.
        chosen: Of the options in `shown`, those whose default is chosen for the images.
    """
    purpose, example = COMMANDS[command]
    in_full = not shown or "--help-all" in arguments
    about = [f"{purpose[0].upper()}{purpose[1:]}.", f"For example: {example}"]
    about += [more_help] if more_help else []
    about += [] if in_full else [f"stam {command} --help-all lists every setting, as docs/settings.md does."]
    if wants_help(arguments):
        cls, default = (cls, default) if in_full else shortened(default, shown, chosen)
        arguments = ["--help"]
    _require_once(cls, arguments)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = tyro.cli(
                cls,
                prog=f"stam {command} {words}".strip(),
                description="\n\n".join(about),
                args=arguments,
                default=default,
                use_underscores=False,
            )
    except SystemExit as stopped:
        if stopped.code and complaint.getvalue():
            how = f"stam {command} {'--help-all' if shown else '--help'}"
            raise ConfigError(in_one_line(complaint.getvalue(), how)) from None
        raise
    assert parsed is not None
    require_sensible_numbers(parsed)
    return _with_home(parsed)


def _require_once(cls: type, arguments: list[str]) -> None:
    """Raises where an option of several values is given twice: the first values would be lost."""
    several = {
        f"--{name.replace('_', '-')}"
        for name, kind in get_type_hints(cls).items()
        if get_origin(kind) is tuple
    }
    given = names_of(arguments)
    for name in several:
        if given.count(name) > 1:
            raise ConfigError(f"{name} is given twice: write its values behind one another, {name} A B")


def _with_home(parsed: T) -> T:
    """Returns options with the home folder in place of `~`: a shell leaves it in `--out=~/runs`."""

    def expanded(value: Any) -> Any:
        if isinstance(value, Path):
            return from_user(value)
        return tuple(map(expanded, value)) if isinstance(value, tuple) else value

    changes = {
        field.name: value
        for field in dataclasses.fields(parsed)  # type: ignore[arg-type]
        if (value := expanded(getattr(parsed, field.name))) != getattr(parsed, field.name)
    }
    return dataclasses.replace(parsed, **changes) if changes else parsed  # type: ignore[type-var]


def shortened(default: Any, shown: tuple[str, ...], chosen: tuple[str, ...] = ()) -> tuple[type, Any]:
    """Returns a dataclass of a few options and its values, both taken from a larger one.

    Args:
        default: An instance of the larger dataclass; options may also lie in the dataclasses it holds.
        shown: The names of the options; of several with one name the first is taken.
        chosen: Those whose default is chosen by the images.
    """
    found: dict[str, tuple[str, Any, Any]] = {}
    parts = [default, *(value for value in vars(default).values() if dataclasses.is_dataclass(value))]
    for part in parts:
        words, types = described(type(part)), get_type_hints(type(part))
        for name, value in vars(part).items():
            if name in shown and name not in found:
                hint = "(default: chosen for your images)" if name in chosen else None
                if value is None and hint is None:
                    hint = ""  # the words say what happens without it
                look = tyro.conf.arg(help=words[name], help_behavior_hint=hint, metavar=_metavar(types[name]))
                option = Annotated[types[name], look]  # type: ignore[valid-type]
                found[name] = (name, option, dataclasses.field(default=value))
    few = dataclasses.make_dataclass("Arguments", [found[name] for name in shown])
    return few, few()


def _metavar(kind: Any) -> str | None:
    """Returns what stands for the value of an option that may be left out: `PATH`, not `{None}|PATH`."""
    inner = [each for each in get_args(kind) if each is not NoneType]
    if len(inner) != 1 or NoneType not in get_args(kind):
        return None
    return str(inner[0].__name__).upper()


def described(cls: type) -> dict[str, str]:
    """Returns what a dataclass's docstring says of each of its fields."""
    attributes = (inspect.getdoc(cls) or "").split("Attributes:\n", 1)[1]
    entries = re.split(r"\n(?= {4}\w+: )", "\n" + attributes)
    pairs = (re.sub(r"\s+", " ", entry.strip()).split(": ", 1) for entry in entries if entry.strip())
    return {entry[0]: entry[1] for entry in pairs}


def in_one_line(complaint: str, how_to_see_all: str) -> str:
    """Returns what a box says of a mistake in the options, and the option nearest to a misspelt one."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", complaint).strip()
    lines = [line.strip("│ ") for line in plain.splitlines() if not line.startswith(("╭", "╰"))]
    if not plain.startswith("╭"):  # drawn for a terminal without lines: a title, underlined
        lines = lines[2:]
    said = list(itertools.takewhile(lambda line: line.strip("─-"), lines))
    if not said:  # it looks otherwise than known: better all of it than nothing
        return plain
    message, wrong = " ".join(said), re.search(r"--[\w.-]+", " ".join(said))
    listed = [line for line in lines[len(said) :] if line.startswith("--")]
    known = [word for line in listed for word in re.findall(r"--[\w.-]+", line)]
    close = difflib.get_close_matches(wrong[0], known, n=1, cutoff=0) if wrong else []
    meant = f"; did you mean {close[0]}?" if close and close[0] != (wrong and wrong[0]) else ""
    return f"{message.removesuffix('.')}{meant or ';'} see {how_to_see_all}"


def value_of(options: list[str], name: str) -> str | None:
    """Returns the value of an option before all of them are parsed: the last one, or none."""
    value = None
    for option, following in zip(options, [*options, None][1:], strict=True):
        if option.startswith(f"{name}="):
            value = option.partition("=")[2]
        elif option == name:
            value = following
    return value


def was_given(options: list[str], name: str) -> bool:
    """Tells whether an option was given."""
    return name in names_of(options)


def names_of(options: list[str]) -> list[str]:
    """Returns the names of options as they are documented: `_` may stand for `-`."""
    return [option.split("=")[0].replace("_", "-") for option in options]


def wants_help(options: list[str]) -> bool:
    """Tells whether help is asked for, so that nothing else need be right."""
    return any(option in ("-h", "--help", "--help-all") for option in options)


def require_out(out: Path | None, example: str) -> Path:
    """Returns the folder to write to, or says how to name one."""
    if out is None:
        raise ConfigError(f"name the folder to write to: {example}")
    return out


def next_command(command: str) -> None:
    """Ends a command by naming the next one; on stderr, so that stdout stays the result alone."""
    print(f"\nnext: {command}", file=sys.stderr)
