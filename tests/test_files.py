"""Files appear whole or not at all, whatever happens while they are written."""

import ast
import errno
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from agents import randomise, tiny_config

import stam
from stam import files
from stam.errors import FileError, StamError
from stam.files import is_text, make_folder, recover, save_content, save_folder, shown, write_atomically
from stam.weights import save_agent

PACKAGE = Path(__file__).parent.parent / "src" / "stam"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def half_written_then(error):
    """Writes some bytes and then fails, as a full disk or Ctrl-C makes a write fail."""

    def write(path: Path) -> None:
        path.write_bytes(b"ne")
        raise error

    return write


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def test_text_and_bytes_are_written_and_replaced(tmp_path):
    save_content(tmp_path / "a", "grüße")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "grüße"
    save_content(str(tmp_path / "a"), b"\x00\x01")
    assert (tmp_path / "a").read_bytes() == b"\x00\x01"
    assert names(tmp_path) == ["a"]


def test_others_may_read_a_file_as_any_other(tmp_path):
    (tmp_path / "plain").write_text("x")
    save_content(tmp_path / "a", "x")
    save_folder(tmp_path / "b", {"c": "x"})
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "plain", tmp_path / "a", tmp_path / "b/c")}
    assert len(modes) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), full_disk(), RuntimeError("stream failed\nat 3")])
@pytest.mark.parametrize("before", ["old", None])
def test_a_write_that_does_not_end_leaves_what_was_there(tmp_path, error, before):
    path = tmp_path / "a"
    if before is not None:
        path.write_text(before)
    with pytest.raises((KeyboardInterrupt, FileError)):
        write_atomically(path, half_written_then(error))
    assert names(tmp_path) == ([] if before is None else ["a"])
    assert before is None or path.read_text() == before


def test_a_full_disk_is_one_line_that_says_what_to_do(tmp_path):
    with pytest.raises(StamError) as raised:
        write_atomically(tmp_path / "a", half_written_then(full_disk()))
    assert str(raised.value) == (
        f"could not write '{tmp_path / 'a'}': No space left on device; make room and run the same again "
        "(what was there is kept)"
    )
    with pytest.raises(FileError, match=r"stream failed; is the disk full\? \(what was there is kept\)$"):
        write_atomically(tmp_path / "a", half_written_then(RuntimeError("stream failed\nat 3")))


def test_the_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    def sync(_):
        happened.append("sync")
        raise full_disk()

    happened: list[str] = []
    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(FileError, match="No space left"):
        save_content(tmp_path / "a", "new")
    assert happened == ["sync"] and (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


@pytest.mark.parametrize("place", ["no/folder", "file/inside", "taken", "x" * 300])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path, place):
    (tmp_path / "file").write_text("x")
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileError, match="could not write") as raised:
        save_content(tmp_path / place, "x")
    assert "\n" not in str(raised.value) and names(tmp_path) == ["file", "taken"]


def test_what_a_killed_process_left_behind_is_used_up(tmp_path):
    (tmp_path / ".a.writing").write_text("half")
    save_content(tmp_path / "a", "whole")
    (tmp_path / ".b.writing").mkdir()
    (tmp_path / ".b.writing" / "junk").write_text("half")
    save_folder(tmp_path / "b", {"c": "whole"})
    assert names(tmp_path) == ["a", "b"] and names(tmp_path / "b") == ["c"]


def test_a_folder_appears_with_all_its_files_and_keeps_others(tmp_path, monkeypatch):
    save_folder(tmp_path / "deep" / "a", {"x": "1", "y": b"2"})
    assert names(tmp_path / "deep") == ["a"] and names(tmp_path / "deep" / "a") == ["x", "y"]
    (tmp_path / "deep" / "a" / "notes").write_text("mine")
    save_folder(tmp_path / "deep" / "a", {"x": "3", "y": "4"})
    found = {path.name: path.read_text() for path in (tmp_path / "deep" / "a").iterdir()}
    assert found == {"x": "3", "y": "4", "notes": "mine"}
    monkeypatch.chdir(tmp_path / "deep" / "a")
    save_folder(".", {"x": "5"})
    assert (tmp_path / "deep" / "a" / "x").read_text() == "5" and names(tmp_path / "deep") == ["a"]


@pytest.mark.parametrize("existing", [True, False])
def test_a_folder_whose_second_file_fails_is_as_before(tmp_path, monkeypatch, existing):
    if existing:
        save_folder(tmp_path / "a", {"x": "old", "y": "old"})
    write = Path.write_bytes

    def fails_at_y(path, content):
        if path.name == "y":
            raise full_disk()
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", fails_at_y)
    with pytest.raises(FileError, match=r"could not write '.*a': No space left on device"):
        save_folder(tmp_path / "a", {"x": "new", "y": "new"})
    assert names(tmp_path) == (["a"] if existing else [])
    assert not existing or {path.read_text() for path in (tmp_path / "a").iterdir()} == {"old"}


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="could not make the folder"):
        make_folder(tmp_path / "file" / "inside")
    with pytest.raises(FileError, match="could not write"):
        save_folder(tmp_path / "file" / "inside", {"x": "1"})
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_torch_writes_through_it(tmp_path):
    write_atomically(tmp_path / "state.pt", lambda path: torch.save({"a": 1}, path))
    assert torch.load(tmp_path / "state.pt", weights_only=True) == {"a": 1}


def test_no_other_module_writes_files_by_itself():
    writers = {"write_text", "write_bytes", "fsync", "savefig", "save_file"}
    for path in PACKAGE.rglob("*.py"):
        called = {
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        allowed = {"savefig"} if path.parent.name == "figures" else set()  # into memory
        assert path == Path(files.__file__) or not called & writers - allowed, path


class KilledError(BaseException):
    """The process is no more."""


class Kill:
    """Ends everything at the nth change of the disk under a folder: nothing after it takes place.

    It listens to Python's audit events, which come before what they announce. There is no way to stop
    listening, so one listener serves all tests.
    """

    EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate")

    def __init__(self) -> None:
        self.folder, self.left = "", 0
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple) -> None:
        if not self.folder or event not in self.EVENTS or not self.is_change(event, arguments):
            return
        self.left -= 1
        if self.left < 0:
            raise KilledError

    def is_change(self, event: str, arguments: tuple) -> bool:
        writes = event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        inside = any(str(part).startswith(self.folder) for part in arguments if isinstance(part, (str, Path)))
        # what `rmtree` removes is named relative to an open folder
        return writes and (inside or event in ("os.remove", "os.rmdir"))

    @contextmanager
    def at(self, folder: Path, change: int):
        """Within it, everything up to the given change takes place."""
        self.folder, self.left = str(folder), change
        try:
            yield
        finally:
            self.folder = ""


KILL = Kill()
OLD, NEW = ({"x": word, "y": word * 2, "z": word * 3} for word in ("old", "new"))


def whole(folder: Path) -> dict[str, str]:
    recover(folder)
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("existing", [True, False, None])
def test_killed_at_any_change_of_the_disk_a_folder_is_old_or_new(tmp_path, existing):
    outcomes = []
    for change in range(100):
        folder = tmp_path / str(change) / "best"
        if existing:
            save_folder(folder, OLD | {"mine": "notes"})
            (folder / "figures").mkdir()
        elif existing is None:
            folder.mkdir(parents=True)
        try:
            with KILL.at(tmp_path / str(change), change):
                save_folder(folder, NEW)
        except KilledError:
            ended = False
        else:
            ended = True
        found = whole(folder) if folder.exists() else {}
        mine = {"mine": "notes"} if existing else {}
        assert found in (NEW | mine, (OLD if existing else {}) | mine), (change, found)
        outcomes.append(found == NEW | mine)
        assert existing is None or outcomes == sorted(outcomes)  # from one change on it is the new one
        save_folder(folder, NEW)  # whatever was left is no hindrance
        assert whole(folder) == NEW | mine and names(folder.parent) == ["best"]
        assert not existing or names(folder) == ["figures", "mine", *NEW]
        if ended:
            break
    assert ended and len(outcomes) >= 8 and not outcomes[0]
    assert existing is False or sum(outcomes) > 3  # killed between two moves, it was completed


def test_killed_while_an_agent_is_saved_it_is_the_old_or_the_new(tmp_path, agent):
    """From the command that saves to the one that loads: weights never go with another's configuration."""
    other = stam.Agent(tiny_config(threshold=0.123)).eval()
    randomise(other, seed=9)
    states = {}
    for change in range(100):
        folder = tmp_path / str(change) / "best"
        save_agent(agent, folder)
        ended = True
        try:
            with KILL.at(tmp_path / str(change), change):
                save_agent(other, folder)
        except KilledError:
            ended = False
        loaded = stam.load(folder.parent)
        expected = other if loaded.config == other.config else agent
        assert loaded.config == expected.config
        assert loaded.core.head.weight.equal(expected.core.head.weight)
        states[loaded.config.threshold] = change
        if ended:
            break
    assert ended and set(states) == {0.123, agent.config.threshold}


def test_names_that_are_not_text_are_written_as_on_a_terminal(tmp_path):
    odd = os.fsdecode(b"caf\xe9.png")
    assert shown(odd) == r"caf\udce9.png" and shown("grüße \ud800") == r"grüße \ud800"
    assert is_text(Path("grüße")) and not is_text(Path(odd))
    save_content(tmp_path / "page.html", f"<p>{odd}</p>")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == r"<p>caf\udce9.png</p>"
