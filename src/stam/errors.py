"""One small exception tree: whatever a user can put right is a `StamError` with a one-line message."""

import difflib
import importlib
import signal
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


class StamError(Exception):
    """A mistake its user can put right; the command line prints it without a traceback and exits with 2."""


class ConfigError(StamError):
    """A setting that is unknown, out of range, or does not fit another one."""


class DataError(StamError):
    """Images or labels that are missing, unreadable, or not laid out as they must be."""


class WeightsError(StamError):
    """A weights file that cannot be read or does not fit the model."""


class FileError(StamError):
    """A file or folder that could not be read or written; what was there before is kept."""


class SensorError(StamError):
    """A sensor that breaks its contract, or a glimpse that cannot be used."""


class Interrupted(StamError):  # noqa: N818 - what happened is no error
    """Somebody asked to stop, and what was done is saved; the message says how to go on.

    Attributes:
        number: The number of the signal that asked for it; by default that of Ctrl-C.
    """

    def __init__(self, message: str = "", number: int | None = None) -> None:
        super().__init__(message)
        self.number = number or signal.SIGINT


class MissingPackageError(StamError, ImportError):
    """An optional package is needed and not installed."""


def require_package(name: str, extra: str) -> ModuleType:
    """Imports an optional package, or says which extra of ours brings it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = f"this needs the package '{name}': {how_to_install(extra)}"
        raise MissingPackageError(message) from error


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra: from the clone that this package runs from, or by name."""
    clone = Path(__file__).resolve().parents[2]
    if not (clone / "pyproject.toml").is_file():
        return f"pip install 'stam-vision[{extra}]'"
    return f"pip install -e '{'.' if clone == Path.cwd() else clone}[{extra}]'"


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Returns the hint to append to an error about an unknown name: the nearest one, or the whole list."""
    names = sorted(allowed)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"allowed: {', '.join(names)}"


def require(condition: bool, message: str) -> None:
    """Raises `ConfigError` with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_choice(name: str, given: str, allowed: tuple[str, ...]) -> None:
    """Raises unless `given` is one of the allowed names, and names the nearest."""
    if given not in allowed:
        raise ConfigError(f"{name} '{given}' is unknown: {did_you_mean(given, allowed)}")
