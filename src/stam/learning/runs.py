"""The run folder: everything a training leaves behind, each file whole or absent.

run.json        the configuration, seed and versions
split.json      which images train and which validate
metrics.jsonl   one line an epoch; the same after a resume as without one
timing.jsonl    how fast it went, which no two runs share
state.pt        everything needed to go on exactly where it stopped
last/ best/     agents to use: the latest, and the best on the validation images
teacher/        the teacher, where one was fine-tuned for this run
.lock           who trains in it now
.job            which job of `torchrun` began it
"""

import json
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stam.config import from_plain, to_plain
from stam.data import SplitRecord, load_record, save_record
from stam.errors import ConfigError, FileError, StamError, require
from stam.files import (
    is_text,
    make_folder,
    parse_json,
    read_content,
    read_json,
    save_content,
    shown,
    sync,
    write_atomically,
)
from stam.learning.distributed import job, was_restarted
from stam.settings import DataConfig, RunConfig, TrainingConfig
from stam.weights.folder import is_agent_folder
from stam.weights.locate import RUN_FILE, FoundAgent

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

_HEIRS_SECONDS = 30.0
FORMAT = "stam-run"
FORMAT_VERSION = "1.0"


class RunError(StamError):
    """A run folder that cannot be used as asked."""


@dataclass(frozen=True)
class _RunRecord:
    """What `run.json` holds."""

    config: dict[str, Any]
    format: str = FORMAT
    format_version: str = FORMAT_VERSION
    recipe: str = "custom"
    seed: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    extended_from: tuple[int, ...] = ()  # epochs it had before it was given more

    def __post_init__(self) -> None:
        """Checks that it is of a run, and that the parts of its configuration are parts."""
        require(self.format == FORMAT, f"it is a '{self.format}', not a {FORMAT}")
        for name in ("agent", "data", "training", "teacher_training"):
            require(isinstance(self.config.get(name, {}), dict), f"config.{name} must be an object")


class RunFolder:
    """A folder that belongs to one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path) -> "RunFolder":
        """Makes a new folder; one that holds something is refused.

        What a start leaves that was killed before `run.json` was there is nothing: it begins anew.
        """
        run = cls.require_free(path)
        make_folder(run.path)
        return run

    @classmethod
    def begin(cls, path: str | Path, recipe: str, config: Any, split: SplitRecord) -> "RunFolder":
        """Makes a new folder with the record of a run; of two that begin at once the second is refused."""
        run = cls.create(path)
        with run.locked():
            cls.require_free(path)
            run.write_record(recipe, config, split)
        return run

    @classmethod
    def require_free(cls, path: str | Path) -> "RunFolder":
        """Returns the run that may begin in a folder; raises where something is in it. Nothing is made."""
        run = cls(path)
        if run.path.is_file():
            raise RunError(f"--out '{path}' is a file: name a folder")
        if not is_text(path):  # weights could be saved there, but not read
            raise RunError(f"--out '{shown(path)}' is not UTF-8: name another folder")
        names = {file.name for file in run.path.iterdir()} if run.path.is_dir() else set()
        if not all(name in ("split.json", ".lock", ".job") or name.endswith(".writing") for name in names):
            if not run.record_file.is_file():
                raise RunError(f"--out '{path}' is not empty and holds no run: name another folder")
            run.record()  # a damaged one cannot be resumed either, and says how to go on
            raise RunError(
                f"--out '{path}' is not empty: pass --resume to go on with the run in it, "
                "or name another folder"
            )
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Opens a run that was begun."""
        run = cls(path)
        if not run.path.is_dir():
            raise RunError(f"no run at '{path}': leave --resume out to begin one")
        if not run.record_file.is_file():
            raise RunError(f"'{path}' holds no run (run.json is missing): {run._way_on()}")
        return run

    @property
    def record_file(self) -> Path:
        """Where the configuration is."""
        return self.path / RUN_FILE

    @property
    def state_file(self) -> Path:
        """Where the state of training is."""
        return self.path / "state.pt"

    @property
    def metrics_file(self) -> Path:
        """Where the metrics are."""
        return self.path / "metrics.jsonl"

    def write_record(self, recipe: str, config: Any, split: SplitRecord) -> None:
        """Writes what the run is, before it begins: a `RunConfig`, or that of a system of the zoo."""
        record = _record(recipe, config)
        save_record(split, self.path / "split.json")
        if job():
            save_content(self.path / ".job", os.fsencode(job()))
        save_content(self.record_file, json.dumps(record, indent=2) + "\n")  # with it the run has begun

    def is_of_this_job(self) -> bool:
        """Tells whether this very job of `torchrun` began the run, before it was started again."""
        if not (was_restarted() and job() and self.record_file.is_file()):
            return False
        file = self.path / ".job"
        return file.is_file() and file.read_bytes() == os.fsencode(job())

    def was_begun_with(self, recipe: str, config: RunConfig, split: SplitRecord) -> bool:
        """Tells whether the folder holds a run that was begun with exactly these."""
        if not self.record_file.is_file():
            return False
        wanted = vars(from_plain(_RunRecord, json.loads(json.dumps(_record(recipe, config)))))
        return self.record() == wanted and self.split() == split

    def extend(self, changes: dict[str, dict[str, Any]], epochs_before: int) -> None:
        """Writes settings of a run anew that give it more epochs, and how many it had."""
        earlier = [*self.record()["extended_from"], epochs_before]
        self._change_record(changes, extended_from=earlier)

    def change_epochs(self, training: TrainingConfig) -> None:
        """Writes down that a training has another number of epochs than it was begun with."""
        changed = ("epochs", "tau_epochs", "ema_batches", "num_cores")
        self._change_record({"training": {name: getattr(training, name) for name in changed}})

    def _change_record(self, changes: dict[str, dict[str, Any]], **more: Any) -> None:
        """Writes the record anew with other settings, and more beside them."""
        record = self.record()
        for part, values in changes.items():
            record["config"][part] = record["config"].get(part, {}) | values
        save_content(self.record_file, json.dumps(record | more, indent=2) + "\n")

    def record(self) -> dict[str, Any]:
        """Reads what the run is; its `config` as it was written, which `config()` brings up to date."""
        with self._naming_the_record():
            return vars(from_plain(_RunRecord, read_json(self.record_file)))

    def config(self) -> RunConfig:
        """Reads the run's configuration."""
        with self._naming_the_record():
            return from_plain(RunConfig, self.record()["config"])

    @contextmanager
    def _naming_the_record(self) -> Iterator[None]:
        try:
            yield
        except (FileError, ConfigError) as error:
            named = str(error).startswith(f"'{self.record_file}' is damaged")
            damage = str(error) if named else f"'{self.record_file}' is damaged: {error}"
            raise RunError(f"{damage}; {self._way_on()}") from error

    def _way_on(self) -> str:
        """Says what can be done about a record that is lost or damaged."""
        agent = next((name for name in ("best", "last") if is_agent_folder(self.path / name)), None)
        if agent is None:
            return "bring it back from a copy, or name another folder"
        return (
            "bring it back from a copy, or name another folder and begin from here with "
            f"--init {self.path / agent}, which starts from the agent saved there"
        )

    def data_config(self) -> DataConfig:
        """Reads what the run was trained on, whatever was trained."""
        with self._naming_the_record():
            return from_plain(DataConfig, self.record()["config"].get("data", {}))

    def split(self) -> SplitRecord | None:
        """Reads which images train and which validate."""
        file = self.path / "split.json"
        return load_record(file) if file.is_file() else None

    def require_split(self) -> SplitRecord:
        """Reads which images train and which validate; a run that has lost its record is an error."""
        split = self.split()
        if split is None:
            raise RunError(
                f"'{self.path / 'split.json'}' is missing, so nothing tells training images from others: "
                "bring it back"
            )
        return split

    def log(self, metrics: dict[str, Any], file: str = "metrics.jsonl") -> None:
        """Appends one line of metrics, or nothing where the disk is full."""
        place = self.path / file
        length = place.stat().st_size if place.exists() else 0
        try:
            with place.open("a") as log:
                log.write(json.dumps(metrics) + "\n")
        except OSError:
            with suppress(OSError):
                os.truncate(place, length)
            raise

    def save_state(self, state: dict[str, Any]) -> None:
        """Saves everything needed to go on, with how much of the metrics belongs to it."""
        length = 0
        if self.metrics_file.exists():
            sync(self.metrics_file)  # after a power failure a state must not count lines that are lost
            length = self.metrics_file.stat().st_size
        write_atomically(self.state_file, lambda path: torch.save(state | {"metrics_length": length}, path))

    def load_state(self) -> dict[str, Any] | None:
        """Reads the saved state, if any, and takes back the metrics logged after it."""
        if not self.state_file.is_file():
            self.metrics_file.unlink(missing_ok=True)
            return None
        try:
            state = torch.load(self.state_file, map_location="cpu", weights_only=True)
            length = int(state["metrics_length"])
            require(length >= 0, f"metrics_length is {length}")
        except Exception as error:  # a damaged file makes torch raise nearly anything
            raise self.damaged_state(error) from error
        found = self.metrics_file.stat().st_size if self.metrics_file.exists() else 0
        if found < length:
            raise RunError(
                f"'{self.metrics_file}' has {found} bytes, it had {length} when the state was saved: "
                "bring it back"
            )
        if self.metrics_file.exists():
            os.truncate(self.metrics_file, length)
        return state

    def damaged_state(self, error: Exception) -> RunError:
        """Returns the error that names a damaged state and says how to go on."""
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return RunError(
            f"'{self.state_file}' is damaged ({reason}): bring it back from a copy, or begin another run "
            f"with --init {self.path}, which starts from the agents saved in it"
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within it no other process can train in this folder; the lock goes with its process."""
        if fcntl is None:  # no such locks on this system
            yield
            return
        with (self.path / ".lock").open("a+", errors="replace") as file:
            deadline = time.monotonic() + _HEIRS_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    file.seek(0)
                    holder = file.read().strip() or "another process"
                    # loading processes of one that was killed hold its lock until they notice
                    if not _is_dead(holder) or time.monotonic() > deadline:
                        raise RunError(
                            f"the run in '{self.path}' is being trained by {holder}: wait for it"
                        ) from error
                time.sleep(0.2)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
            yield


def _is_dead(holder: str) -> bool:
    """Tells whether who wrote its name into a lock was a process of this machine that is no more."""
    word, _, rest = holder.partition(" ")
    number, _, node = rest.partition(" on ")
    if word != "process" or node != platform.node() or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's
        return False
    return False


def _record(recipe: str, config: Any) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "recipe": recipe,
        "seed": config.training.seed,
        "versions": versions(),
        "config": to_plain(config),
    }


def versions() -> dict[str, str]:
    """Returns the versions a result depends on."""
    from stam import __version__

    return {
        "stam": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def recorded_resize_size(agent: FoundAgent, own: int | None) -> int | None:
    """Returns what the shorter side of a scene becomes before the centre is cropped, for an agent.

    Its own configuration says it, `own`. One of an earlier version has it in its run only; one without either
    takes whole scenes: `None`.
    """
    if own is not None or agent.run is None:
        return own
    size = RunFolder(agent.run).record()["config"].get("data", {}).get("resize_size")
    if size is not None and (type(size) is not int or size < 1):
        raise RunError(f"'{agent.run / RUN_FILE}' is damaged: resize_size is {size!r:.40}")
    return size


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the metrics a training logged; none where it logged none."""
    if not path.is_file():
        return []
    try:
        text = read_content(path).decode()
    except FileError as error:
        raise RunError(str(error)) from error
    except UnicodeDecodeError as error:
        raise RunError(f"cannot read '{path}': {error}") from error
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            metrics = parse_json(line, f"line {number}")
        except FileError as error:
            raise RunError(f"'{path}' is damaged: {error}") from error
        if not _are_metrics(metrics):
            raise RunError(f"'{path}' is damaged: line {number} must hold an epoch, names and numbers")
        lines.append(metrics)
    return lines


def _are_metrics(values: Any) -> bool:
    """Tells whether a line of metrics is one: an epoch, and a finite number for every name."""
    if not isinstance(values, dict) or type(values.get("epoch")) is not int:
        return False
    budgets = (name.partition("@")[2] for name in values if name.startswith("val/accuracy@"))
    numbers = all(type(value) in (int, float) and abs(value) < 2**63 for value in values.values())
    return numbers and values["epoch"] >= 0 and all(re.fullmatch("[0-9]{1,6}", each) for each in budgets)
