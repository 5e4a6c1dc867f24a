"""Every file of ours is written here: beside its place first, then moved there, so it is never half written.

Files are read here too, those of text and JSON: a damaged one is named, and never a traceback.

An interrupted write, a full disk or a missing permission leaves what was there before. A temporary name is
`.NAME.writing`; where a process was killed in the middle, the next write to the same place reuses it.
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stam.errors import FileError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

WRITING = ".stam-writing"  # in a folder that is being saved to: what is not whole yet
COMMITTED = ".stam-new"  # likewise: what is whole, and valid instead of the files beside it

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def from_user(path: str | os.PathLike[str]) -> Path:
    """Returns a path as somebody wrote it, with the home folder in place of `~`."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise FileError(f"'{path}': there is no such home folder; write the path out") from error


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> None:
    """Writes a file whole or not at all.

    Args:
        path: Where to; a file there is replaced once the new one is whole. Its folder must exist.
        write: Writes the content to the path it is given, which is a temporary one in the same folder.
    """
    path = Path(path)
    temporary = _beside(path)
    try:
        with _explained(path):
            write(temporary)
            sync(temporary)
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def save_content(path: str | Path, content: str | bytes) -> None:
    """Writes text (as UTF-8, names of files as `shown` does) or bytes to a file, whole or not at all."""
    encoded = shown(content).encode() if isinstance(content, str) else content
    write_atomically(path, lambda place: place.write_bytes(encoded))


def save_folder(folder: str | Path, contents: Mapping[str, str | bytes]) -> None:
    """Writes several files as one: whoever opens the folder finds all of the old ones or all of the new.

    A new folder appears with all its files at once. In one that exists, they are written to a folder inside
    it, and one rename of that makes them valid: from then on `recover`, which every opening of ours calls,
    moves those into place that a process left there when it was killed. Other files stay.

    Args:
        folder: Where to; it is made where it does not exist.
        contents: Text or bytes by file name.
    """
    place = Path(folder).resolve()
    exists = place.exists()
    temporary = place / WRITING if exists else _beside(place)
    recover(place)
    try:
        with _explained(folder):
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir(parents=True)
            for name, content in contents.items():
                (temporary / name).write_bytes(content.encode() if isinstance(content, str) else content)
                sync(temporary / name)
            _sync_folder(temporary)
            temporary.rename(place / COMMITTED if exists else place)
            _sync_folder(place if exists else place.parent)
            _move_in(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def recover(folder: str | Path) -> None:
    """Completes what a process left undone that was killed in `save_folder`; mostly that is nothing."""
    with suppress(OSError):  # somebody else does so in this moment, or nothing can be written here
        _move_in(Path(folder))


def _move_in(folder: Path) -> None:
    """Moves files that are valid to their places."""
    committed = folder / COMMITTED
    if committed.is_dir():
        for file in committed.iterdir():
            with suppress(FileNotFoundError):  # somebody who came to read has moved it
                file.replace(folder / file.name)
        with suppress(FileNotFoundError):
            committed.rmdir()


def read_json(path: str | Path, what: str = "", most_bytes: int = 256 * 2**20) -> Any:
    """Reads a JSON file.

    Args:
        path: The file; nothing but a regular file is opened.
        what: What to call it in an error, before its path.
        most_bytes: A larger file is refused.

    Raises:
        FileError: It cannot be read, or is not JSON.
    """
    called = f"{what} '{path}'".strip()
    return parse_json(read_content(path, called, most_bytes), called)


def read_content(path: str | Path, called: str = "", most_bytes: int = 256 * 2**20) -> bytes:
    """Reads a whole file.

    Args:
        path: The file; nothing but a regular file is opened, since others may never end.
        called: What to call it in an error, by default its path.
        most_bytes: A larger file is refused before it is read.

    Raises:
        FileError: It cannot be read.
    """
    path, called = Path(path), called or f"'{path}'"
    try:
        if not path.is_file():
            raise FileError(f"cannot read {called}: it is not a file")
        with path.open("rb") as file:
            is_small = os.fstat(file.fileno()).st_size <= most_bytes
            content = file.read(most_bytes + 1) if is_small else b""
    except OSError as error:
        raise FileError(f"cannot read {called}: {error.strerror or error}") from error
    if not is_small or len(content) > most_bytes:
        raise FileError(f"cannot read {called}: it has more than {most_bytes >> 20} MB")
    return content


def parse_json(content: str | bytes, called: str) -> Any:
    """Parses JSON; a number that is not finite is an error too.

    Args:
        content: The text.
        called: What to call it in an error.

    Raises:
        FileError: It is not JSON.
    """
    try:
        text = content.decode() if isinstance(content, bytes) else content
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise FileError(f"{called} is damaged: it is nested too deeply") from error
    except ValueError as error:  # of JSON, of UTF-8, or a number of too many digits
        raise FileError(f"{called} is damaged: {_first_line(error)}") from error


def _finite(digits: str) -> float:
    return float(digits) if math.isfinite(float(digits)) else _refuse(digits)


def _refuse(number: str) -> float:
    raise ValueError(f"{number} is not a finite number")


def is_text(name: str | Path) -> bool:
    """Tells whether a file name is text: it may be any bytes."""
    return shown(name) == str(name)


def shown(name: str | Path) -> str:
    r"""Returns a file name, or what names one, as text that can be written anywhere.

    Bytes that are no text come as `\udce9`, as on the terminal.
    """
    return str(name).encode("utf-8", "backslashreplace").decode()


def make_folder(folder: str | Path) -> None:
    """Makes a folder and those it lies in; one that exists is left as it is."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"could not make the folder '{folder}': {error.strerror or error}") from error


@contextmanager
def take_turns(lock: Path) -> Iterator[None]:
    """Lets one process at a time do what is inside; where a lock file cannot be made, all do it at once."""
    try:
        make_folder(lock.parent)
        file = lock.open("a")
    except (OSError, FileError):
        yield
        return
    with file:
        if fcntl is not None:
            with suppress(OSError):  # some network drives have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cache_folder() -> Path:
    """Returns the folder for what can be found out again: `stam` in `$XDG_CACHE_HOME`, or in `~/.cache`.

    Raises:
        RuntimeError: The user has no home.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "stam"


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.writing")


def sync(path: Path) -> None:
    """Waits until a file's content is on the disk: a rename must not get there before it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk, where the system can do that."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _explained(path: str | Path) -> Iterator[None]:
    """Turns whatever goes wrong while writing into one line."""
    try:
        yield
    except OSError as error:
        hint = "; make room and run the same again" if error.errno in _NO_ROOM else ""
        why = f"{error.strerror or _first_line(error)}{hint}"
        raise FileError(f"could not write '{path}': {why} (what was there is kept)") from error
    except RuntimeError as error:  # what torch raises on a full disk, in words of its own
        why = f"{_first_line(error)}; is the disk full?"
        raise FileError(f"could not write '{path}': {why} (what was there is kept)") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
