"""How an agent remembers glimpses and reads what they mean together: the interface, and the paper's core.

A core turns patches into features: `remember` takes in the patches of one more glimpse, `read` returns the
features of everything remembered. What a memory holds is the core's own affair; an episode only passes it on,
keeps some samples of it (`select`) or puts several into one batch (`join`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from stam.model.randomness import Randomness
from stam.model.vit import VisionTransformer
from stam.shapes import Float, Int


@runtime_checkable
class Memory(Protocol):
    """What a core remembers of a batch of scenes."""

    def select(self, samples: Int[Tensor, " kept"]) -> "Memory":
        """Returns the memory of some samples, as when the others are done and leave the batch."""
        ...

    @staticmethod
    def join(memories: Sequence[Any]) -> "Memory":
        """Joins memories into one batch: of equally many glimpses, or any where the core mixes counts."""
        ...


@runtime_checkable
class Core(Protocol):
    """What an agent needs of a core.

    Attributes:
        mixes_counts: Whether memories of different numbers of glimpses can be joined.
    """

    mixes_counts: bool

    def remember(self, memory: Any, patches: Tensor, positions: Tensor) -> Memory:
        """Returns the memory with the patches of one more glimpse; `None` is the empty memory."""
        ...

    def read(self, memory: Any, drop_masks: Tensor | None = None) -> Tensor:
        """Returns the features (B, 2, D) of the class and the distillation token."""
        ...

    def classify(self, features: Tensor) -> tuple[Tensor, ...]:
        """Returns the logits of the two classifiers."""
        ...

    def sample_drop_path(self, batch_size: int, generator: Randomness = None) -> Tensor | None:
        """Draws drop-path masks, or `None` outside training."""
        ...


@runtime_checkable
class OnePassCore(Core, Protocol):
    """A core that can say what it would have said after each glimpse in one pass, so it trains in one."""

    def read_all(self, patches: Tensor, positions: Tensor, drop_masks: Tensor | None = None) -> Tensor:
        """Returns the features after each step, (B, T, 2, D), of patches (B, T, p, pixels)."""
        ...

    def read_each(self, memory: Any, num_glimpses: Tensor, patches: Tensor, positions: Tensor) -> Tensor:
        """Returns the features (B, K, 2, D) after one more glimpse, for each of K that are only tried."""
        ...


@dataclass(frozen=True)
class PatchMemory:
    """All patches seen so far.

    Attributes:
        patches: Their pixels, flat, in token order.
        positions: Where each lies in the whole image.
    """

    patches: Float[Tensor, "batch patches pixels"]
    positions: Int[Tensor, "batch patches"]

    def select(self, samples: Int[Tensor, " kept"]) -> "PatchMemory":
        """Returns the patches of some samples."""
        return PatchMemory(self.patches[samples], self.positions[samples])

    @staticmethod
    def join(memories: Sequence["PatchMemory"]) -> "PatchMemory":
        """Joins memories of equally many patches into one batch."""
        return PatchMemory(
            torch.cat([memory.patches for memory in memories]),
            torch.cat([memory.positions for memory in memories]),
        )


class ReencodingCore(VisionTransformer):
    """The paper's core: it keeps every patch, and encodes all of them again after each glimpse."""

    mixes_counts = False

    def remember(
        self,
        memory: PatchMemory | None,
        patches: Float[Tensor, "batch patches pixels"],
        positions: Int[Tensor, "batch patches"],
    ) -> PatchMemory:
        """Adds the patches of one more glimpse."""
        if memory is None:
            return PatchMemory(patches, positions)
        return PatchMemory(
            torch.cat((memory.patches, patches), dim=1), torch.cat((memory.positions, positions), dim=1)
        )

    def read(
        self, memory: PatchMemory, drop_masks: Float[Tensor, "depth 2 batch 1 1"] | None = None
    ) -> Float[Tensor, "batch 2 width"]:
        """Encodes all patches together."""
        return self(memory.patches, memory.positions, drop_masks)
