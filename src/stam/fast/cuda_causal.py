"""The causal core computed by fused kernels: all steps in one pass, or one step against what is kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from stam.fast import kernels
from stam.fast.cuda_transformer import attend_within, embed, through_blocks, token_table
from stam.model.causal import CausalCore, CausalMemory, causal_mask
from stam.model.randomness import Randomness
from stam.model.vit import Attention, Block
from stam.shapes import Float, Int


class _Rows:
    """Keys and values of a batch of scenes in all blocks, with room for more; several memories may share it.

    Attributes:
        values: (depth, batch, room, 2 width), in half precision.
        count: How many rows are taken, by the longest of the memories that share it.
        table: What tokens start from (`token_table`), where it has been made: an episode needs it once.
    """

    def __init__(self, values: Tensor, count: int, table: Tensor | None = None) -> None:
        self.values, self.count, self.table = values, count, table

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
        return _Rows(larger, taken, self.table)


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
        owners = torch.arange(batch, dtype=torch.int32, device=patches.device)
        if memory is None:
            rows, lengths = self.no_rows(batch, 4 * new, patches.device), torch.zeros_like(owners)
        else:
            rows, lengths = memory.rows.with_room(memory.count, new), memory.lengths
        if rows.table is None:
            rows.table = self.token_table()
        features = self.step(patches, positions, rows.values, owners, lengths, table=rows.table)
        rows.count += new
        return FusedCausalMemory(rows, rows.count, lengths + new, features)

    def no_rows(self, places: int, room: int, device: torch.device) -> "_Rows":
        """Returns room for the keys and values of so many patches of so many scenes."""
        core, half = self._core, torch.get_autocast_dtype("cuda")
        shape = len(core.blocks), places, room, 2 * core.pos_embed.shape[2]
        return _Rows(torch.empty(shape, dtype=half, device=device), 0)

    def token_table(self) -> Float[Tensor, "rows width"]:
        """Returns what tokens start from: the read-out tokens, then what is added at each position."""
        return token_table(self._core)

    def step(
        self,
        patches: Float[Tensor, "batch patches pixels"],
        positions: Int[Tensor, "batch patches"],
        rows: Float[Tensor, "depth places room keys_and_values"],
        owners: Int[Tensor, " batch"],
        lengths: Int[Tensor, " batch"],
        grows: bool = True,
        table: Tensor | None = None,
    ) -> Float[Tensor, "batch 2 width"]:
        """Encodes the patches of one glimpse, given those before; keeps their keys and values.

        Args:
            patches: The patches.
            positions: Where they lie in the whole image.
            rows: Keys and values that are kept.
            owners: At which place those of each sample lie.
            lengths: How many patches of each sample come before.
            grows: Whether to keep those of the new patches too.
            table: What `token_table` returns, where it has been made.
        """
        from stam.fast.kernels.cached_attention import Kept, linear_cached_attention

        core = self._core

        def attend(index: int, attention: Attention, x: Tensor, num_queries: int | None) -> Tensor:
            kept = Kept(rows[index], owners, lengths, core.num_readout, grows)
            weight, bias = attention.qkv.weight, attention.qkv.bias
            return linear_cached_attention(x, weight, bias, attention.num_heads, kept)[:, :num_queries]

        x = embed(core, patches, positions, table=table)
        return through_blocks(core, x, core.num_readout, attend)

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
        owners = torch.arange(len(patches), dtype=torch.int32, device=patches.device)
        owners, lengths = (part.repeat_interleave(tried) for part in (owners, (num_glimpses * each).int()))
        features = self.step(
            patches.flatten(0, 1), positions.flatten(0, 1), memory.rows.values, owners, lengths, grows=False
        )
        return features.unflatten(0, (-1, tried))

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
