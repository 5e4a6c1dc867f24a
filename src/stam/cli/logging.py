"""Metrics to TensorBoard, for those who want them there."""

from functools import cache
from pathlib import Path
from typing import Any

from stam.errors import require_package
from stam.learning.loop import MetricLogger


def tensorboard_logger(folder: Path) -> MetricLogger:
    """Returns a logger that writes every number to TensorBoard files in the run folder.

    Nothing is written before the first epoch ends, so that the folder may be made later.
    """
    require_package("tensorboard", extra="logging")
    from torch.utils.tensorboard import SummaryWriter

    writer = cache(lambda: SummaryWriter(str(folder / "tensorboard")))

    def log(metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            writer().add_scalar(name, value, metrics["epoch"])
        writer().flush()

    return log
