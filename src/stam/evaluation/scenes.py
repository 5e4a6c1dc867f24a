"""How an agent is taken through scenes: batches of pixels, and where each scene's looking begins.

Everything random belongs to a (seed, scene), never to a batch or a process: the same scene is looked at the
same way whatever the batch size and however many processes share the work.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from stam.data.loader import BatchLoader, EvaluationView
from stam.data.randomness import random_words
from stam.data.sampler import evaluation_indices
from stam.data.scenes import Scenes
from stam.learning import distributed
from stam.model.policy import Decision, Policy, Seen, State
from stam.model.randomness import Randomness, RandomSource
from stam.scene.grid import Grid
from stam.scene.pixels import IMAGENET_MEAN, IMAGENET_STD, normalise
from stam.shapes import Float, Int, UInt8


class SceneRandomness(RandomSource):
    """Random numbers that belong to a (seed, scene): a scene gets the same ones in whatever batch it is."""

    def __init__(self, indices: Int[np.ndarray, " batch"], seed: int) -> None:
        super().__init__()
        self._indices, self._seed, self._calls = indices, seed, 0

    def uniform(self, shape: tuple[int, ...], device: torch.device, batch_dim: int = 0) -> Tensor:
        """Returns numbers in [0, 1), others at each call."""
        others = [size for dim, size in enumerate(shape) if dim != batch_dim]
        words = self._words(math.prod(others)).reshape(len(self._indices), *others)
        numbers = torch.from_numpy((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24))
        return numbers.movedim(0, batch_dim).to(device)

    def integers(self, high: int, batch_size: int, device: torch.device) -> Tensor:
        """Returns a number from 0 to high - 1 for each scene."""
        return torch.from_numpy((self._words(1)[:, 0] % high).astype(np.int64)).to(device)

    def _words(self, count: int) -> np.ndarray:
        self._calls += 1
        each = [random_words(count, "look", self._seed, self._calls, int(scene)) for scene in self._indices]
        return np.stack(each) if each else np.zeros((0, count), np.uint64)


class SceneOrders(Policy):
    """An order of locations for each scene of a batch; the random policy, pinned to scenes."""

    def __init__(self, priorities: Float[Tensor, "batch locations"]) -> None:
        self.priorities = priorities

    def decide(
        self, state: State, seen: Seen, generator: Randomness = None, num_seen: int | None = None
    ) -> Decision:
        """Picks the unseen location of highest priority."""
        self.priorities = self.priorities.to(seen.device)
        return Decision(self.priorities.masked_fill(seen, -1).argmax(dim=1))

    def select(self, samples: Int[Tensor, " kept"]) -> "SceneOrders":
        """Returns the orders of some samples."""
        return SceneOrders(self.priorities.to(samples.device)[samples])


def first_locations(grid: Grid, indices: Int[np.ndarray, " batch"], seed: int) -> Int[Tensor, " batch"]:
    """Draws where the first glimpse of each scene is sensed, uniformly, by seed and scene."""
    num_scenes = int(indices.max()) + 1 if len(indices) else 0
    words = random_words(num_scenes, "first location", seed)[indices]
    return torch.from_numpy((words % grid.num_locations).astype(np.int64))


def random_orders(grid: Grid, indices: Int[np.ndarray, " batch"], seed: int) -> SceneOrders:
    """Returns the random policy for some scenes: an order for each, by seed and scene."""
    words = [random_words(grid.num_locations, "random policy", seed, int(index)) for index in indices]
    priorities = np.stack(words).astype(np.float64) / 2.0**64
    return SceneOrders(torch.from_numpy(priorities.astype(np.float32)))


def policy_for(policy: str, grid: Grid, indices: Int[np.ndarray, " batch"], seed: int) -> Policy | str:
    """Returns what to give `look` for some scenes: the random policy is pinned to them, any other named."""
    return random_orders(grid, indices, seed) if policy == "random" else policy


@dataclass(frozen=True)
class SceneBatch:
    """Scenes ready for an agent.

    Attributes:
        images: Normalised, on the agent's device.
        labels: Class labels, on the same device.
        indices: Which scenes these are.
        pixels: The same images as bytes.
    """

    images: Float[Tensor, "batch channels height width"]
    labels: Int[Tensor, " batch"]
    indices: Int[np.ndarray, " batch"]
    pixels: UInt8[Tensor, "batch channels height width"]


@dataclass(frozen=True)
class SceneReader:
    """Reads scenes for an agent: resized, cropped, normalised and on its device.

    Attributes:
        scenes: Labelled images.
        image_size: Height and width of the scenes that the agent takes.
        resize_size: The shorter side before the centre crop; `None` resizes straight to the image size.
        batch_size: Scenes at once.
        num_workers: Processes that load.
        device: Where the agent is.
        mean: Channel means of the normalisation.
        std: Channel standard deviations.
        progress: Whether to show progress bars, on a terminal.
    """

    scenes: Scenes
    image_size: tuple[int, int]
    resize_size: int | None = None
    batch_size: int = 64
    num_workers: int = 0
    device: torch.device | str = "cpu"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    progress: bool = True

    def own_share(self) -> Int[np.ndarray, " part"]:
        """Returns the scenes that fall to this process: over all processes, each exactly once."""
        return evaluation_indices(len(self.scenes), distributed.rank(), distributed.world_size())

    def batches(self, indices: Int[np.ndarray, " chosen"], title: str) -> Iterator[SceneBatch]:
        """Yields the scenes in order, with a progress bar on stderr."""
        starts = range(0, len(indices), self.batch_size)
        chunks = [indices[start : start + self.batch_size] for start in starts]
        view = EvaluationView(self.image_size, self.resize_size)
        loader = BatchLoader(self.scenes, chunks, view, self.num_workers)
        hidden = None if self.progress and distributed.rank() == 0 else True
        with tqdm(total=len(indices), desc=title, unit="img", disable=hidden) as bar:
            for batch in loader:
                pixels = batch.images.to(self.device)
                yield SceneBatch(
                    normalise(pixels, self.mean, self.std),
                    batch.labels.to(self.device),
                    batch.indices.numpy(),
                    pixels,
                )
                bar.update(len(batch))
