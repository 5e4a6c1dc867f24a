"""What every source of labelled images looks like."""

from typing import Any, Protocol, runtime_checkable

import numpy as np

from stam.errors import DataError, did_you_mean
from stam.shapes import Int, UInt8


@runtime_checkable
class Scenes(Protocol):
    """Labelled images by index. `load` returns the same pixels whenever and wherever it is called."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names; a label is an index into them."""
        ...

    @property
    def labels(self) -> Int[np.ndarray, "scenes"]:
        """The label of every scene, int64."""
        ...

    def __len__(self) -> int: ...

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Returns one image, of any size.

        A larger shorter side may come shrunk to `decode_size` where that makes decoding cheaper.
        """
        ...


@runtime_checkable
class PaintedScenes(Scenes, Protocol):
    """Scenes that are made, not read: whole batches at once, on a device, others in each epoch."""

    def paint(self, indices: Int[np.ndarray, " batch"], epoch: int = 0) -> Any:
        """Returns a `RawBatch` of scenes on the device."""
        ...


@runtime_checkable
class StoredInRuns(Scenes, Protocol):
    """Scenes of which some lie side by side, in a random order, and are read faster together.

    Attributes:
        run_length: How many of them an epoch should show one after another.
    """

    run_length: int

    def read_ahead(self, indices: Int[np.ndarray, "_"]) -> None:
        """Reads what `load` will be asked for next, in few requests; forgets what was read ahead before."""
        ...


@runtime_checkable
class NamedScenes(Scenes, Protocol):
    """Scenes that are called something, such as a file's path within the data."""

    def name(self, index: int) -> str:
        """Returns what a scene is called."""
        ...


def name_of(scenes: Scenes, index: int) -> str:
    """Returns what a scene is called, or its number where it has no name."""
    name = scenes.name(index) if isinstance(scenes, NamedScenes) else f"scene {index}"
    return name.encode(errors="replace").decode()  # a file name may be of other bytes than UTF-8


def run_length(scenes: Scenes) -> int:
    """Returns how many scenes that lie side by side an epoch should show one after another."""
    return scenes.run_length if isinstance(scenes, StoredInRuns) else 1


def read_ahead(scenes: Scenes, indices: Int[np.ndarray, "_"]) -> None:
    """Reads the scenes of a batch in few requests, where the source can."""
    if isinstance(scenes, StoredInRuns):
        scenes.read_ahead(indices)


class Subset:
    """Some scenes of another source, in the order of `indices`.

    Attributes:
        source: The scenes they are taken from.
        indices: Which ones.
    """

    def __init__(self, scenes: Scenes, indices: Int[np.ndarray, "chosen"]) -> None:
        self.source = self._scenes = scenes
        self.indices = self._indices = indices
        self.classes = scenes.classes
        self.labels = scenes.labels[indices]
        self.run_length = run_length(scenes)

    def __len__(self) -> int:
        return len(self._indices)

    def read_ahead(self, indices: Int[np.ndarray, "_"]) -> None:
        """Reads scenes of the subset ahead, where the source can."""
        read_ahead(self._scenes, self._indices[indices])

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Returns one image of the subset."""
        return self._scenes.load(int(self._indices[index]), decode_size)

    def name(self, index: int) -> str:
        """Returns what a scene is called in the source it is of."""
        return name_of(self._scenes, int(self._indices[index]))


class Relabelled:
    """The same scenes with labels that index other class names, so an agent can be tested on new data.

    Raises:
        DataError: The scenes have a class that is not among the new ones.
    """

    def __init__(self, scenes: Scenes, classes: tuple[str, ...]) -> None:
        position = {name: label for label, name in enumerate(classes)}
        for name in scenes.classes:
            if name not in position:
                hint = did_you_mean(name, classes)
                raise DataError(f"the agent does not know the class '{name}' of this data: {hint}")
        new_label = np.array([position[name] for name in scenes.classes], dtype=np.int64)
        self.source = self._scenes = scenes
        self.classes = classes
        self.labels = new_label[scenes.labels]
        self.run_length = run_length(scenes)

    def __len__(self) -> int:
        return len(self._scenes)

    def read_ahead(self, indices: Int[np.ndarray, "_"]) -> None:
        """Reads scenes ahead, where the source can."""
        read_ahead(self._scenes, indices)

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Returns one image, unchanged."""
        return self._scenes.load(index, decode_size)

    def name(self, index: int) -> str:
        """Returns what a scene is called."""
        return name_of(self._scenes, index)
