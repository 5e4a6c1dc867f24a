"""The causal core on a CPU: its cache has room for the glimpses to come, and nothing in it is copied."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from stam.fast.cpu_layers import PackedBlock, PackedLinear, PackedNorm
from stam.model.causal import CausalCore
from stam.model.randomness import Randomness
from stam.model.vit import Block
from stam.shapes import Float, Int

_LEAST_ROOM = 24  # rows


class _Rows:
    """Keys and values of a batch of scenes in all blocks, with room for more; several memories may share it.

    Attributes:
        values: Keys beside values, (depth, batch, room, 2 D).
        count: How many rows are taken, by the longest of the memories that share it.
    """

    def __init__(self, values: Tensor, count: int) -> None:
        self.values, self.count = values, count

    @staticmethod
    def with_room_for(like: Tensor, depth: int, batch: int, count: int, width: int) -> "_Rows":
        """Returns rows not written yet, with room for as many again after `count` of them."""
        return _Rows(like.new_empty(depth, batch, max(_LEAST_ROOM, 2 * count), width), count)

    def before(self, taken: int, more: int) -> "_Rows":
        """Returns rows of which the first are as these, and after which as many more can be written.

        They are these themselves, where nobody has written after `taken`; so a look copies nothing, and two
        memories that go on from the same one do not disturb each other.
        """
        if self.count == taken and taken + more <= self.values.shape[2]:
            return self
        depth, batch, _, width = self.values.shape
        larger = _Rows.with_room_for(self.values, depth, batch, taken + more, width)
        larger.values[:, :, :taken] = self.values[:, :, :taken]
        return larger


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
        """Returns the memory of some samples, without padding that none of them needs."""
        unused, padding = 0, None
        if self.padding is not None and len(samples):
            padding = self.padding[samples]
            unused = int(padding.min())
            padding = padding - unused if bool((padding > unused).any()) else None
        count = self.count - unused
        values = self.rows.values.narrow(2, unused, count).index_select(1, samples)
        return PackedCausalMemory(_Rows(values, count), count, self.features[samples], padding)

    @staticmethod
    def join(memories: Sequence["PackedCausalMemory"]) -> "PackedCausalMemory":
        """Joins memories into one batch, of different numbers of glimpses too."""
        count = max(memory.count for memory in memories)
        features = torch.cat([memory.features for memory in memories])
        depth, _, _, width = memories[0].rows.values.shape
        rows = _Rows.with_room_for(features, depth, len(features), count, width)
        paddings = []
        parts = rows.values.split([len(memory.features) for memory in memories], dim=1)
        for memory, part in zip(memories, parts, strict=True):
            missing = count - memory.count
            part[:, :, :missing] = 0  # nobody attends to it, but what is not a number would still count
            part[:, :, missing:count] = memory.rows.values[:, :, : memory.count]
            own = torch.zeros(part.shape[1], dtype=torch.long) if memory.padding is None else memory.padding
            paddings.append(own + missing)
        padding = torch.cat(paddings)
        return PackedCausalMemory(rows, count, features, padding if bool(padding.any()) else None)


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
        self.num_heads, self.hidden_width = blocks[0].attn.num_heads, blocks[0].mlp.fc1.out_features
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
        tokens = self.embed.added_to(F.embedding(positions, self.position_embedding), patches)
        x = torch.cat((tokens, self.readout.expand(batch, -1, -1)), dim=1)  # (B, n, D) with n = p + R
        num_new, width = x.shape[1:]
        if memory is None:
            rows, taken, padding = _Rows(x.new_empty(len(self.blocks), batch, 0, 2 * width), 0), 0, None
        else:
            rows, taken, padding = memory.rows, memory.count, memory.padding
        rows = rows.before(taken, num_new)
        features = self._encode(x, rows.values, taken, padding)
        rows.count = taken + new
        return PackedCausalMemory(rows, taken + new, features, padding)

    def _encode(
        self,
        x: Float[Tensor, "batch tokens width"],
        cache: Float[Tensor, "depth batch room both"],
        taken: int,
        padding: Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch readouts width"]:
        """Writes the keys and values of new tokens into the cache after `taken`, and returns the features.

        Calls, not numbers, are what a step of few tokens costs. So every block works in the same memory, and
        its views are made once.
        """
        (batch, num_new, width), end = x.shape, taken + x.shape[1]
        slots = cache.narrow(2, taken, num_new).unbind()
        seen = cache.narrow(2, 0, end).unflatten(3, (2, self.num_heads, -1))
        keys, values = (each.unbind() for each in seen.permute(3, 0, 1, 4, 2, 5))  # each (B, heads, end, d)
        rows = x.view(-1, width)
        projected, hidden = rows.new_empty(len(rows), 3 * width), rows.new_empty(len(rows), self.hidden_width)
        query, both = projected.view(batch, num_new, -1).split((width, 2 * width), dim=2)
        query = query.unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, n, d)
        mask = None
        if padding is not None:  # as numbers: of truth values, every block would make them anew
            mask = x.new_zeros(batch, 1, 1, end)
            mask.masked_fill_(torch.arange(end) < padding[:, None, None, None], -torch.inf)
        for block, slot, key, value in zip(self.blocks, slots, keys, values, strict=True):
            block.write_projected(rows, projected)
            slot.copy_(both)
            if block is self.blocks[-1]:  # after which only the read-out tokens are read
                rows = x[:, -self.num_readout :].reshape(-1, width)
                query, hidden = query[:, :, -self.num_readout :], hidden[: len(rows)]
            mixed = F.scaled_dot_product_attention(query, key, value, mask)
            block.finish_in_place(rows, mixed.transpose(1, 2).reshape(rows.shape), hidden)
        return self.norm(rows).view(batch, self.num_readout, width)

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
