"""The causal core computed by fused kernels: all steps in one pass, or one step against what is kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from stam.fast import kernels
from stam.fast.cuda_transformer import Attend, attend_within, embed, through_blocks
from stam.model.causal import CausalCore, CausalMemory, causal_mask
from stam.model.randomness import Randomness
from stam.model.vit import Attention, Block
from stam.shapes import Float, Int


class _Rows:
    """Keys and values of a batch of scenes in all blocks, with room for more; several memories may share it.

    Attributes:
        values: (depth, batch, room, 2 width), in half precision.
        count: How many rows are taken, by the longest of the memories that share it.
    """

    def __init__(self, values: Tensor, count: int) -> None:
        self.values, self.count = values, count

    def with_room(self, taken: int, more: int) -> "_Rows":
        """Returns rows that begin as these, with room for more after `taken`.

        They are these themselves where nobody has written after `taken`: so a look copies little, and two
        memories that go on from the same one do not disturb each other.
        """
        depth, batch, room, width = self.values.shape
        if self.count == taken and taken + more <= room:
            return self
        larger = self.values.new_empty(depth, batch, 2 * (taken + more), width)
        larger[:, :, :taken] = self.values[:, :, :taken]
        return _Rows(larger, taken)


@dataclass(frozen=True)
class FusedCausalMemory:
    """What later glimpses need of the patches seen so far, and what was read after the latest.

    Attributes:
        rows: The patches' keys and values.
        count: How many patches the longest sample has.
        lengths: How many patches each sample has.
        features: Class and distillation feature after the latest glimpse.
    """

    rows: _Rows
    count: int
    lengths: Int[Tensor, " batch"]
    features: Float[Tensor, "batch 2 width"]

    def select(self, samples: Int[Tensor, " kept"]) -> "FusedCausalMemory":
        """Returns the memory of some samples."""
        values = self.rows.values[:, samples, : self.count]
        return FusedCausalMemory(
            _Rows(values, self.count), self.count, self.lengths[samples], self.features[samples]
        )

    @staticmethod
    def join(memories: Sequence["FusedCausalMemory"]) -> "FusedCausalMemory":
        """Joins memories into one batch, of different numbers of glimpses too."""
        count = max(memory.count for memory in memories)
        sizes = [len(memory.features) for memory in memories]
        depth, _, _, width = memories[0].rows.values.shape
        values = memories[0].rows.values.new_empty(depth, sum(sizes), count, width)
        for memory, part in zip(memories, values.split(sizes, dim=1), strict=True):
            part[:, :, : memory.count] = memory.rows.values[:, :, : memory.count]
        lengths = torch.cat([memory.lengths for memory in memories])
        return FusedCausalMemory(
            _Rows(values, count), count, lengths, torch.cat([memory.features for memory in memories])
        )


class FusedCausalCore:
    """The causal core. Outside autocast to half precision its own modules compute."""

    mixes_counts = True

    def __init__(self, core: CausalCore) -> None:
        self._core = core

    def remember(
        self,
        memory: "FusedCausalMemory | CausalMemory | None",
        patches: Float[Tensor, "batch patches pixels"],
        positions: Int[Tensor, "batch patches"],
    ) -> FusedCausalMemory | CausalMemory:
        """Encodes the patches of one more glimpse, given those before."""
        core, (batch, new) = self._core, positions.shape
        if isinstance(memory, CausalMemory) or (memory is None and not _fits(core, patches)):
            return core.remember(memory, patches, positions)
        x = embed(core, patches, positions)
        if memory is None:
            empty = x.new_empty(len(core.blocks), batch, 0, 2 * x.shape[2])
            rows = _Rows(empty, 0).with_room(0, 4 * new)
            taken, lengths = 0, torch.zeros(batch, dtype=torch.int32, device=x.device)
        else:
            rows = memory.rows.with_room(memory.count, new)
            taken, lengths = memory.count, memory.lengths
        attend = _attend_to(rows.values, lengths, core.num_readout, tried=1, keep=True)
        features = through_blocks(core, x, core.num_readout, attend)
        rows.count = taken + new
        return FusedCausalMemory(rows, rows.count, lengths + new, features)

    def read(
        self, memory: FusedCausalMemory | CausalMemory, drop_masks: Tensor | None = None
    ) -> Float[Tensor, "batch 2 width"]:
        """Returns the features after the latest glimpse."""
        return memory.features

    def read_all(
        self,
        patches: Float[Tensor, "batch steps patches pixels"],
        positions: Int[Tensor, "batch steps patches"],
        drop_masks: Float[Tensor, "depth 2 batch 1 1"] | None = None,
    ) -> Float[Tensor, "batch steps 2 width"]:
        """Returns the features after each step."""
        core, (steps, each) = self._core, patches.shape[1:3]
        if not kernels.usable(patches):
            return core.read_all(patches, positions, drop_masks)
        x = embed(core, patches.flatten(1, 2), positions.flatten(1), steps)
        mask = causal_mask(steps, core.num_readout, each, x.device)
        features = through_blocks(core, x, steps * core.num_readout, attend_within(mask), drop_masks)
        return features.unflatten(1, (steps, core.num_readout))

    def read_each(
        self,
        memory: FusedCausalMemory | CausalMemory,
        num_glimpses: Int[Tensor, " batch"],
        patches: Float[Tensor, "batch tried patches pixels"],
        positions: Int[Tensor, "batch tried patches"],
    ) -> Float[Tensor, "batch tried 2 width"]:
        """Returns the features after one more glimpse, for each of several that are tried, not remembered."""
        core, (tried, each) = self._core, patches.shape[1:3]
        if isinstance(memory, CausalMemory):
            return core.read_each(memory, num_glimpses, patches, positions)
        x = embed(core, patches.flatten(0, 1), positions.flatten(0, 1))  # (B K, R + p, D)
        lengths = (num_glimpses * each).int()
        attend = _attend_to(memory.rows.values, lengths, core.num_readout, tried, keep=False)
        return through_blocks(core, x, core.num_readout, attend).unflatten(0, (-1, tried))

    def classify(self, features: Float[Tensor, "batch 2 width"]) -> tuple[Tensor, ...]:
        """Returns the logits of the two classifiers."""
        return self._core.classify(features)

    def sample_drop_path(self, batch_size: int, generator: Randomness = None) -> Tensor | None:
        """Draws drop-path masks, or `None` outside training."""
        return self._core.sample_drop_path(batch_size, generator)


def _fits(core: CausalCore, patches: Tensor) -> bool:
    """Tells whether a step can be computed by kernels; they give no gradient."""
    if torch.is_grad_enabled() or not kernels.usable(patches):
        return False
    from stam.fast.kernels.cached_attention import fits

    attention = cast(Block, core.blocks[0]).attn
    return fits(core.pos_embed.shape[2] // attention.num_heads)


def _attend_to(rows: Tensor, lengths: Tensor, num_readout: int, tried: int, keep: bool) -> Attend:
    """Returns attention to the tokens themselves and to the patches that are kept."""
    from stam.fast.kernels.cached_attention import linear_cached_attention

    def attend(index: int, attention: Attention, x: Tensor, num_queries: int | None) -> Tensor:
        weight, bias = attention.qkv.weight, attention.qkv.bias
        mixed = linear_cached_attention(
            x, weight, bias, attention.num_heads, rows[index], lengths, num_readout, tried, keep
        )
        return mixed[:, :num_queries]

    return attend
