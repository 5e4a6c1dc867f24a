"""The causal core on a CPU: its cache has room for the glimpses to come, and nothing in it is copied."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from stam.fast.cpu_layers import PackedBlock, PackedLinear, PackedNorm
from stam.model.causal import CausalCore, CausalMemory
from stam.model.randomness import Randomness
from stam.model.vit import Block
from stam.shapes import Float, Int


class _Rows:
    """Keys and values of a batch of scenes in all blocks, with room for more; several memories may share it.

    Attributes:
        values: Keys beside values, (depth, batch, room, 2 D).
        count: How many rows are taken, by the longest of the memories that share it.
    """

    def __init__(self, values: Tensor, count: int) -> None:
        self.values, self.count = values, count

    def with_room(self, taken: int, more: int) -> "_Rows":
        """Returns rows of which the first are as these, and after which as many more can be written.

        They are these themselves, where nobody has written after `taken`; so a look copies nothing, and two
        memories that go on from the same one do not disturb each other.
        """
        if self.count == taken and taken + more <= self.values.shape[2]:
            return self
        depth, batch, _, both = self.values.shape
        larger = self.values.new_empty(depth, batch, 2 * (taken + more), both)
        larger[:, :, :taken] = self.values[:, :, :taken]
        return _Rows(larger, taken)


@dataclass(frozen=True)
class PackedCausalMemory:
    """What later glimpses need of the patches seen so far, and what was read after the latest.

    Attributes:
        rows: The patches' keys and values; the first `count` are of this memory.
        count: How many patches each sample has, padding included.
        features: Class and distillation feature after the latest glimpse.
        padding: How many of each sample's first patches are padding; `None` where none are.
    """

    rows: _Rows
    count: int
    features: Float[Tensor, "batch 2 width"]
    padding: Int[Tensor, " batch"] | None = None

    def select(self, samples: Int[Tensor, " kept"]) -> "PackedCausalMemory":
        """Returns the memory of some samples."""
        return self._of(self._plain().select(samples))

    @staticmethod
    def join(memories: Sequence["PackedCausalMemory"]) -> "PackedCausalMemory":
        """Joins memories into one batch, of different numbers of glimpses too."""
        return PackedCausalMemory._of(CausalMemory.join([memory._plain() for memory in memories]))

    def _plain(self) -> CausalMemory:
        both = self.rows.values[:, :, : self.count].unflatten(3, (2, 1, -1))  # as if of one head
        cache = both.permute(0, 3, 1, 4, 2, 5)  # (depth, 2, B, 1, count, D)
        return CausalMemory(cache, self.features, self.padding)

    @staticmethod
    def _of(memory: CausalMemory) -> "PackedCausalMemory":
        values = memory.cache.permute(0, 2, 4, 1, 3, 5).flatten(3)
        count = values.shape[2]
        return PackedCausalMemory(_Rows(values, count), count, memory.features, memory.padding)


class PackedCausalCore:
    """The causal core with packed weights. New tokens are written behind the cached ones they attend to.

    Patches come before read-out tokens, which are written over by the next glimpse.
    """

    mixes_counts = True

    def __init__(self, core: CausalCore) -> None:
        embed = core.patch_embed.proj
        assert embed.bias is not None
        self.num_readout = core.num_readout
        self.embed = PackedLinear(embed.weight.flatten(1), embed.bias)
        self.position_embedding = core.pos_embed[0, core.num_readout :].detach().clone()
        self.readout = core.readout_tokens().detach().clone()
        blocks = [cast(Block, block) for block in core.blocks]
        self.blocks = [PackedBlock(block) for block in blocks]
        self.norm = PackedNorm(core.norm)
        self.heads = tuple(PackedLinear(head.weight, head.bias) for head in (core.head, core.head_dist))

    def remember(
        self,
        memory: PackedCausalMemory | None,
        patches: Float[Tensor, "batch patches pixels"],
        positions: Int[Tensor, "batch patches"],
    ) -> PackedCausalMemory:
        """Encodes the patches of one more glimpse, given those before."""
        batch, new = positions.shape
        tokens = self.embed(patches) + F.embedding(positions, self.position_embedding)
        x = torch.cat((tokens, self.readout.expand(batch, -1, -1)), dim=1)  # (B, p + R, D)
        taken, padding = (0, None) if memory is None else (memory.count, memory.padding)
        if memory is None:
            empty = x.new_empty(len(self.blocks), batch, 0, 2 * x.shape[2])
            rows = _Rows(empty, 0).with_room(0, 4 * x.shape[1])
        else:
            rows = memory.rows.with_room(taken, x.shape[1])
        mask = None
        if padding is not None:
            mask = (torch.arange(taken + x.shape[1]) >= padding[:, None])[:, None, None]
        for block, cache in zip(self.blocks, rows.values.unbind(), strict=True):
            num_queries = self.num_readout if block is self.blocks[-1] else x.shape[1]
            x = block.step(x, cache, taken, num_queries, mask)
        rows.count = taken + new
        return PackedCausalMemory(rows, taken + new, self.norm(x), padding)

    def read(
        self, memory: PackedCausalMemory, drop_masks: Tensor | None = None
    ) -> Float[Tensor, "batch 2 width"]:
        """Returns the features after the latest glimpse."""
        return memory.features

    def classify(self, features: Float[Tensor, "batch 2 width"]) -> tuple[Tensor, ...]:
        """Returns the logits of the two classifiers."""
        return tuple(head(features[:, index]) for index, head in enumerate(self.heads))

    def sample_drop_path(self, batch_size: int, generator: Randomness = None) -> None:
        """Nothing is dropped: nothing is trained."""
        return
