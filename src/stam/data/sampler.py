"""Which scenes make up each batch: pure functions, so that a run can go on at any batch of any epoch."""

import numpy as np

from stam.data.randomness import random_key, random_order
from stam.errors import require
from stam.shapes import Int


def epoch_size(num_scenes: int, fraction: float, batch_size: int = 1) -> int:
    """Returns how many scenes an epoch shows; see `epoch_indices`."""
    require(0 < fraction <= 1, f"fraction must be above 0 and at most 1, got {fraction}")
    return min(num_scenes, max(round(fraction * num_scenes), batch_size))


def epoch_indices(
    num_scenes: int, epoch: int, fraction: float, seed: int, batch_size: int = 1, run_length: int = 1
) -> Int[np.ndarray, "chosen"]:
    """Returns the scenes of one epoch, in the order they are shown: a fresh random part of the data.

    The paper shows 1/T of the data an epoch, since a batch makes T updates.

    Args:
        num_scenes: Scenes to choose from.
        epoch: Which epoch; each has its own subset.
        fraction: The share of the scenes to show.
        seed: The seed of the run.
        batch_size: The least number of scenes, where there are so many.
        run_length: Scenes that lie side by side and are shown one after another; where a run begins differs
            from epoch to epoch, and so does who is shown together.
    """
    num_chosen = epoch_size(num_scenes, fraction, batch_size)
    if run_length == 1:
        return random_order(num_scenes, "epoch", seed, epoch)[:num_chosen].copy()  # a slice keeps the rest
    before = random_key("runs", seed, epoch) % run_length  # scenes of the first run that are not there
    runs = random_order(-(-(num_scenes + before) // run_length), "epoch", seed, epoch)
    runs = runs[: num_chosen // run_length + 3]  # the first and the last may be short
    indices = (runs[:, None] * run_length - before + np.arange(run_length)).reshape(-1)
    return indices[(indices >= 0) & (indices < num_scenes)][:num_chosen].copy()


def num_whole_batches(num_chosen: int, batch_size: int, world_size: int = 1) -> int:
    """Returns how many batches `batches` makes of so many scenes without a last incomplete one."""
    _require_shareable(num_chosen, batch_size, world_size)
    return num_chosen // batch_size


def batches(
    indices: Int[np.ndarray, "chosen"],
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool = True,
) -> list[Int[np.ndarray, "_"]]:
    """Cuts scenes into batches and returns this rank's part of each.

    All ranks get the same number of batches, and together the same global batches whatever their number.

    Args:
        indices: The scenes, in order.
        batch_size: Scenes in a global batch, over all ranks.
        rank: Which part to return.
        world_size: Into how many parts each batch is divided.
        drop_last: Whether a last incomplete batch is left out. If not, its parts differ by one scene at most,
            and it is still left out where it has fewer scenes than there are ranks.
    """
    _require_rank(rank, world_size)
    _require_shareable(len(indices) if drop_last else batch_size, batch_size, world_size)
    starts = range(0, len(indices), batch_size)
    whole = [indices[start : start + batch_size] for start in starts]
    if whole and len(whole[-1]) < (batch_size if drop_last else world_size):
        whole.pop()
    return [np.array_split(batch, world_size)[rank] for batch in whole]


def evaluation_indices(num_scenes: int, rank: int = 0, world_size: int = 1) -> Int[np.ndarray, "part"]:
    """Returns the scenes this rank evaluates: over all ranks each exactly once, none twice as padding."""
    _require_rank(rank, world_size)
    return np.arange(rank, num_scenes, world_size)


def _require_rank(rank: int, world_size: int) -> None:
    require(0 <= rank < world_size, f"rank must be in 0..{world_size - 1}, got {rank}")


def _require_shareable(num_scenes: int, batch_size: int, world_size: int) -> None:
    """Raises where scenes do not make one batch, or ranks cannot share it."""
    require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
    require(
        batch_size % world_size == 0,
        f"batch_size {batch_size} cannot be shared by {world_size} processes: use a multiple of {world_size}",
    )
    require(
        num_scenes >= batch_size,
        f"batch_size {batch_size} is larger than the {num_scenes} scenes: use at most {num_scenes}",
    )
