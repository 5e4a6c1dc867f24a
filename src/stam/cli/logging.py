"""Metrics to TensorBoard, Weights & Biases or MLflow, for those who want them there.

Nothing is sent or written before the first epoch ends, so that the run folder may be made later.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from stam.errors import FileError, require_package
from stam.files import read_json, save_content
from stam.learning.loop import MetricLogger
from stam.learning.runs import RunFolder

OPTIONS = ("--tensorboard", "--wandb", "--mlflow")
_PROJECT = "stam"  # unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME says otherwise
_IDS_FILE = "trackers.json"  # what the run is called elsewhere, so that a resumed one goes on there
_MOST_CHARACTERS = 500  # of a parameter; MLflow takes no longer ones


def metric_loggers(folder: Path, tensorboard: bool, wandb: bool, mlflow: bool) -> tuple[MetricLogger, ...]:
    """Returns what gets the metrics of a run beside its own file.

    Args:
        folder: The run folder.
        tensorboard: Whether TensorBoard files are written into it.
        wandb: Whether Weights & Biases gets them.
        mlflow: Whether MLflow does.

    Raises:
        MissingPackageError: The package of one of them is not installed.
    """
    makers = {tensorboard_logger: tensorboard, wandb_logger: wandb, mlflow_logger: mlflow}
    return tuple(make(folder) for make, wanted in makers.items() if wanted)


def tensorboard_logger(folder: Path) -> MetricLogger:
    """Returns a logger that writes every number to TensorBoard files in the run folder."""
    require_package("tensorboard", extra="logging")
    from torch.utils.tensorboard import SummaryWriter

    writer = cache(lambda: SummaryWriter(str(folder / "tensorboard")))

    def log(metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            writer().add_scalar(name, value, metrics["epoch"])
        writer().flush()

    return log


def wandb_logger(folder: Path) -> MetricLogger:
    """Returns a logger for Weights & Biases, with the settings of the run beside its metrics."""
    wandb = require_package("wandb", extra="wandb")

    @cache
    def begin() -> Any:
        known = _ids(folder).get("wandb")
        begun = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=folder.resolve().name,
            dir=str(folder),
            config=_settings(folder),
            id=known,
            resume="allow" if known else None,
        )
        _remember(folder, "wandb", begun.id)
        return begun

    def log(metrics: dict[str, Any]) -> None:
        begin().log(metrics, step=metrics["epoch"])

    return log


def mlflow_logger(folder: Path) -> MetricLogger:
    """Returns a logger for MLflow, with the settings of the run as its parameters."""
    mlflow = require_package("mlflow", extra="mlflow")

    @cache
    def begin() -> None:
        known = _ids(folder).get("mlflow")
        if "MLFLOW_EXPERIMENT_NAME" not in os.environ:
            mlflow.set_experiment(_PROJECT)
        if known:
            mlflow.start_run(run_id=known)
            return
        begun = mlflow.start_run(run_name=folder.resolve().name)
        mlflow.log_params({name: str(value)[:_MOST_CHARACTERS] for name, value in _flat(_settings(folder))})
        _remember(folder, "mlflow", begun.info.run_id)

    def log(metrics: dict[str, Any]) -> None:
        begin()
        # a name may have letters, digits and _-. :/ only
        named = {name.replace("@", "_at_"): float(value) for name, value in metrics.items()}
        mlflow.log_metrics(named, step=metrics["epoch"])

    return log


def _settings(folder: Path) -> dict[str, Any]:
    return RunFolder.open(folder).record()["config"]


def _flat(settings: Mapping[str, Any], where: str = "") -> list[tuple[str, Any]]:
    """Returns settings with those of their parts, by names such as `training.epochs`."""
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        inner = isinstance(value, Mapping)
        found += _flat(value, f"{where}{name}.") if inner else [(f"{where}{name}", value)]
    return found


def _ids(folder: Path) -> dict[str, str]:
    file = folder / _IDS_FILE
    found = read_json(file) if file.is_file() else {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise FileError(f"'{file}' is damaged: delete it, and the run is begun anew there")
    return found


def _remember(folder: Path, tracker: str, name: str) -> None:
    save_content(folder / _IDS_FILE, json.dumps(_ids(folder) | {tracker: name}, indent=1) + "\n")
