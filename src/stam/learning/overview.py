"""What a run is and how far it came, from the files in its folder alone."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stam.learning.experiment import TEACHER, recipe_of
from stam.learning.runs import RunError, RunFolder, read_metrics
from stam.weights.locate import RUN_FILE


@dataclass(frozen=True)
class RunOverview:
    """A run in a few words.

    Attributes:
        path: Its folder.
        kind: What is trained: `agent`, `teacher`, or the name of a system of the zoo.
        recipe: The recipe or system it was begun with.
        data: What it is trained on.
        images: Training, validation and test images.
        epochs_done: Epochs whose metrics are there.
        epochs: Epochs in all.
        best: The best validation score: for an agent the mean accuracy over the glimpses of an episode, for
            another system the accuracy after the last look, for a teacher that of the whole image.
        best_epoch: The epoch, counted from 1, that had it.
        seconds: How long it trained, all starts together.
        seed: Its seed.
        versions: What it was begun with.
        config: All of its settings, as recorded.
    """

    path: str
    kind: str
    recipe: str
    data: str
    images: dict[str, int]
    epochs_done: int
    epochs: int
    best: float | None
    best_epoch: int | None
    seconds: float
    seed: int
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def find_runs(folder: Path) -> list[Path]:
    """Returns the runs in a folder and in those inside it, but not the teachers of runs."""
    found: list[Path] = []
    for place in sorted(path.parent for path in folder.rglob(RUN_FILE)):
        if not any(run in place.parents for run in found):
            found.append(place)
    return found


def overview(path: str | Path) -> RunOverview:
    """Reads what a run folder says of its run.

    Raises:
        RunError: It holds no run, or one whose files are damaged.
    """
    folder = RunFolder.open(path)
    record, split = folder.record(), folder.split()
    config, recipe = record["config"], recipe_of(folder)
    kind = "teacher" if record["recipe"].startswith(TEACHER) else str(config.get("name", "agent"))
    epochs = config.get("teacher_training" if kind == "teacher" else "training", {}).get("epochs", 0)
    if type(epochs) is not int:
        raise RunError(f"'{folder.record_file}' is damaged: epochs is {epochs!r:.40}")
    metrics = read_metrics(folder.metrics_file)
    scores = {line["epoch"] + 1: _score(line) for line in metrics if _score(line) is not None}
    best_epoch = max(scores, key=lambda epoch: scores[epoch] or 0.0) if scores else None
    return RunOverview(
        path=str(path),
        kind=kind,
        recipe=recipe,
        data=folder.data_config().path,
        images={} if split is None else _counts(split.num_train, split.num_val, split.num_test),
        epochs_done=metrics[-1]["epoch"] + 1 if metrics else 0,
        epochs=epochs,
        best=None if best_epoch is None else scores[best_epoch],
        best_epoch=best_epoch,
        seconds=_seconds(folder.path / "timing.jsonl"),
        seed=record["seed"],
        versions=record["versions"],
        config=config,
    )


def _counts(train: int, val: int, test: int) -> dict[str, int]:
    return {"train": train, "val": val} | ({"test": test} if test else {})


def _score(metrics: dict[str, Any]) -> float | None:
    after = [value for name, value in metrics.items() if name.startswith("val/accuracy@")]
    return metrics.get("val/score", after[-1] if after else None)


def _seconds(file: Path) -> float:
    """Returns the seconds of all starts; each counts from 0."""
    total = before = 0.0
    for line in read_metrics(file):
        seconds = float(line.get("seconds", before))
        total += seconds - before if seconds >= before else seconds
        before = seconds
    return total
