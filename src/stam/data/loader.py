"""From scenes and batches of indices to tensors: decoded by worker processes, ready for the device."""

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stam.data.scenes import Scenes, read_ahead
from stam.errors import DataError, StamError
from stam.scene.grid import Size
from stam.scene.pixels import prepare_for_evaluation
from stam.shapes import Int, UInt8


@dataclass(frozen=True)
class RawBatch:
    """Images as bytes. Smaller ones lie at the top left of their padding, which is black.

    Attributes:
        images: The pixels.
        sizes: The true (height, width) of each image.
        labels: Class labels, int64.
        indices: Which scenes these are.
    """

    images: UInt8[Tensor, "batch 3 height width"]
    sizes: Int[Tensor, "batch 2"]
    labels: Int[Tensor, "batch"]
    indices: Int[Tensor, "batch"]

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "RawBatch":
        """Copies the batch to a device; from pinned memory the copy does not wait."""
        return RawBatch(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))

    def pin_memory(self) -> "RawBatch":
        """Copies the batch to pinned memory; `DataLoader` calls this."""
        return RawBatch(*(getattr(self, field.name).pin_memory() for field in fields(self)))


# Which pixels of a scene go into a batch: (height, width, 3), uint8.
View = Callable[[Scenes, int], np.ndarray]


@dataclass(frozen=True)
class TrainingView:
    """The whole image, for augmentation on the device.

    Attributes:
        decode_size: A shorter side above this is shrunk to it, so that a batch of photographs fits in memory.
    """

    decode_size: int | None = None

    def __call__(self, scenes: Scenes, index: int) -> UInt8[np.ndarray, "height width 3"]:
        """Returns the image."""
        return scenes.load(index, self.decode_size)


@dataclass(frozen=True)
class EvaluationView:
    """The fixed view that evaluation takes; see `prepare_for_evaluation`.

    Attributes:
        image_size: Pixels of the view.
        resize_size: The shorter side before the centre is cropped; `None` resizes straight to `image_size`.
    """

    image_size: Size
    resize_size: int | None

    def __call__(self, scenes: Scenes, index: int) -> UInt8[np.ndarray, "height width 3"]:
        """Returns the view."""
        return prepare_for_evaluation(scenes.load(index), self.resize_size, self.image_size)


class BatchLoader:
    """Yields a `RawBatch` for each batch of indices, in order, whatever the number of workers.

    One loader may serve a whole run: give an iterator over the batches of all remaining epochs, and the
    workers go on to the next epoch without a pause.
    """

    def __init__(
        self,
        scenes: Scenes,
        batches: Iterable[Int[np.ndarray, "_"]],
        view: View | None = None,
        num_workers: int = 0,
    ) -> None:
        """Sets up the loader; nothing is read and no process started before the first batch is asked for.

        Args:
            scenes: The source.
            batches: The indices of each batch, such as `sampler.batches` returns.
            view: Which pixels of a scene to take; the whole image if not given.
            num_workers: Processes that load; 0 loads in this one.
        """
        self.scenes = scenes
        self.batches = batches
        self.view = view or TrainingView()
        self.num_workers = num_workers

    def __iter__(self) -> Iterator[RawBatch]:
        """Yields the batches.

        Raises:
            DataError: An image cannot be read, or a worker died.
        """
        batches = DataLoader(
            _BatchDataset(self.scenes, self.view),
            sampler=self.batches,
            batch_size=None,  # an item of the dataset is a batch already
            num_workers=self.num_workers,
            collate_fn=_as_is,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # its own, lest every start draw from the run's random numbers
        )
        try:
            for batch in batches:
                if isinstance(batch, StamError):
                    raise batch
                yield batch
        except RuntimeError as error:
            if str(error).startswith("DataLoader worker (pid"):
                raise DataError(
                    f"a process that loads images died, most likely for lack of memory; use fewer than "
                    f"{self.num_workers} workers or a smaller batch ({str(error).splitlines()[0]})"
                ) from error
            raise


def pad_images(
    images: Sequence[UInt8[np.ndarray, "_ _ 3"]],
) -> tuple[UInt8[np.ndarray, "batch 3 height width"], Int[np.ndarray, "batch 2"]]:
    """Lays images into one array as large as the largest, and returns it with their true sizes."""
    sizes = np.array([image.shape[:2] for image in images], dtype=np.int64)
    height, width = sizes.max(axis=0)
    padded = np.zeros((len(images), 3, height, width), dtype=np.uint8)
    for place, image in zip(padded, images, strict=True):
        place[:, : image.shape[0], : image.shape[1]] = image.transpose(2, 0, 1)
    return padded, sizes


class _BatchDataset(Dataset[RawBatch | StamError]):
    """A dataset whose items are batches, keyed by their indices."""

    def __init__(self, scenes: Scenes, view: View) -> None:
        self._scenes = scenes
        self._view = view

    def __getitem__(self, indices: np.ndarray) -> RawBatch | StamError:
        try:
            read_ahead(self._scenes, indices)
            padded, sizes = pad_images([self._view(self._scenes, int(index)) for index in indices])
        except StamError as error:  # raised in the worker it would arrive wrapped in a traceback
            return error
        labels = self._scenes.labels[indices]
        return RawBatch(*(torch.from_numpy(part) for part in (padded, sizes, labels, np.array(indices))))


def _as_is(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    """Leaves Ctrl-C to the main process, which stops its workers when it is done with them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _report_unless_main_left


def _report_unless_main_left(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Keeps a worker quiet that was handing over a batch when the main process was interrupted."""
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)
