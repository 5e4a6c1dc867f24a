"""The run folder: everything a training leaves behind, each file whole or absent.

run.json        the configuration, seed and versions
split.json      which images train and which validate
metrics.jsonl   one line an epoch; the same after a resume as without one
timing.jsonl    how fast it went, which no two runs share
state.pt        everything needed to go on exactly where it stopped
last/ best/     agents to use: the latest, and the best on the validation images
teacher/        the teacher, where one was fine-tuned for this run
.lock           who trains in it now
"""

import json
import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from stam.config import from_plain, to_plain
from stam.data import SplitRecord, load_record, save_record
from stam.errors import StamError
from stam.files import make_folder, save_content, write_atomically
from stam.learning.distributed import is_distributed
from stam.settings import DataConfig, RunConfig
from stam.weights.locate import RUN_FILE, FoundAgent

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = "stam-run"
FORMAT_VERSION = "1.0"


class RunError(StamError):
    """A run folder that cannot be used as asked."""


class RunFolder:
    """A folder that belongs to one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path) -> "RunFolder":
        """Makes a new folder; one that holds something is refused.

        What a start leaves that was killed before `run.json` was there is nothing: it begins anew.
        """
        run = cls(path)
        if run.path.is_file():
            raise RunError(f"--out '{path}' is a file: name a folder")
        names = {file.name for file in run.path.iterdir()} if run.path.is_dir() else set()
        if not all(name in ("split.json", ".lock") or name.endswith(".writing") for name in names):
            raise RunError(
                f"--out '{path}' is not empty: pass --resume to go on with the run in it, "
                "or name another folder"
            )
        make_folder(run.path)
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Opens a run that was begun."""
        run = cls(path)
        if not run.path.is_dir():
            raise RunError(f"no run at '{path}': leave --resume out to begin one")
        if not run.record_file.is_file():
            raise RunError(f"'{path}' holds no run (run.json is missing): name another folder")
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
        record = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "recipe": recipe,
            "seed": config.training.seed,
            "versions": versions(),
            "config": to_plain(config),
        }
        save_record(split, self.path / "split.json")
        save_content(self.record_file, json.dumps(record, indent=2) + "\n")  # with it the run has begun

    def record(self) -> dict[str, Any]:
        """Reads what the run is."""
        try:
            return json.loads(self.record_file.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RunError(f"'{self.record_file}' is damaged: {error}") from error

    def config(self) -> RunConfig:
        """Reads the run's configuration."""
        return from_plain(RunConfig, self.record()["config"])

    def data_config(self) -> DataConfig:
        """Reads what the run was trained on, whatever was trained."""
        return from_plain(DataConfig, self.record()["config"]["data"])

    def split(self) -> SplitRecord | None:
        """Reads which images train and which validate."""
        file = self.path / "split.json"
        return load_record(file) if file.is_file() else None

    def log(self, metrics: dict[str, Any], file: str = "metrics.jsonl") -> None:
        """Appends one line of metrics."""
        with (self.path / file).open("a") as log:
            log.write(json.dumps(metrics) + "\n")

    def save_state(self, state: dict[str, Any]) -> None:
        """Saves everything needed to go on, with how much of the metrics belongs to it."""
        length = self.metrics_file.stat().st_size if self.metrics_file.exists() else 0
        write_atomically(self.state_file, lambda path: torch.save(state | {"metrics_length": length}, path))

    def load_state(self) -> dict[str, Any] | None:
        """Reads the saved state, if any, and takes back the metrics logged after it."""
        if not self.state_file.is_file():
            self.metrics_file.unlink(missing_ok=True)
            return None
        try:
            state = torch.load(self.state_file, map_location="cpu", weights_only=True)
            length = int(state["metrics_length"])
        except Exception as error:  # a damaged file makes torch raise nearly anything
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise RunError(
                f"'{self.state_file}' is damaged ({reason}): bring it back from a copy, or begin another run "
                f"with --init {self.path}, which starts from the agents saved in it"
            ) from error
        found = self.metrics_file.stat().st_size if self.metrics_file.exists() else 0
        if found < length:
            raise RunError(
                f"'{self.metrics_file}' has {found} bytes, it had {length} when the state was saved: "
                "bring it back"
            )
        if self.metrics_file.exists():
            os.truncate(self.metrics_file, length)
        return state

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within it no other process can train in this folder; the lock goes with its process."""
        if fcntl is None:  # no such locks on this system
            yield
            return
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise RunError(
                    f"the run in '{self.path}' is being trained by {holder}: wait for it"
                ) from error
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
            yield


def versions() -> dict[str, str]:
    """Returns the versions a result depends on."""
    from stam import __version__

    return {
        "stam": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


class Interruption:
    """Whether Ctrl-C or a termination was asked for; true from the first time on."""

    def __init__(self) -> None:
        self.requested = False

    def __bool__(self) -> bool:
        return self.requested


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the batch; a second stops at once.

    Of several processes each gets Ctrl-C twice, the second time from torchrun: there it changes nothing.
    """
    interruption = Interruption()

    def request(number: int, frame: FrameType | None) -> None:
        if interruption.requested and not is_distributed():
            raise KeyboardInterrupt
        interruption.requested = True

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def recorded_resize_size(agent: FoundAgent) -> int | None:
    """Returns what the shorter side of a scene becomes before the centre is cropped, for an agent.

    Its run says it. Agents without a run take whole scenes: `None`.
    """
    return None if agent.run is None else RunFolder(agent.run).record()["config"]["data"]["resize_size"]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the metrics a training logged; none where it logged none."""
    if not path.is_file():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RunError(f"'{path}' is damaged: {error}") from error
