"""The causal core on a CPU: its cache has room for the glimpses to come, and nothing in it is copied."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
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
    """Keys and values of some scenes in all blocks, with room for more; several caches may share them.

    Attributes:
        values: Keys beside values, (depth, batch, room, 2 D).
        count: How many rows are taken, by the longest of the caches that share them.
    """

    def __init__(self, values: Tensor, count: int) -> None:
        self.values, self.count = values, count

    def reserve(self, taken: int, end: int, room: int) -> "_Rows":
        """Returns rows of which the first are as these, those up to `end` the caller's to write, with room.

        They are these themselves, where nobody has come after `taken`; so a look copies nothing, and two
        caches that go on from the same one do not disturb each other.
        """
        rows = self
        if self.count != taken or room > self.values.shape[2]:
            depth, batch, _, both = self.values.shape
            room = max(_LEAST_ROOM, 2 * room)
            rows = _Rows(self.values.new_zeros(depth, batch, room, both), taken)  # never NaN
            rows.values[:, :, :taken] = self.values[:, :, :taken]
        rows.count = end
        return rows


@dataclass(frozen=True, eq=False)
class _Cache:
    """The patches of scenes that have seen equally many.

    Attributes:
        rows: Their keys and values; the first `count` are of this cache.
        count: How many patches each scene has.
    """

    rows: _Rows
    count: int

    def __len__(self) -> int:
        return self.rows.values.shape[1]

    def extend(self, num_patches: int, num_readout: int) -> "_Cache":
        """Returns the cache with new patches, to be written, and room for read-out tokens after them."""
        end = self.count + num_patches
        return _Cache(self.rows.reserve(self.count, end, end + num_readout), end)

    def select(self, scenes: list[int]) -> "_Cache":
        """Returns the cache of some scenes: itself, where they are all."""
        if scenes == list(range(len(self))):
            return self
        taken = self.rows.values[:, :, : self.count]
        return _Cache(_Rows(taken.index_select(1, torch.tensor(scenes)), self.count), self.count)


@dataclass(frozen=True)
class PackedCausalMemory:
    """What later glimpses need of the patches seen so far, and what was read after the latest.

    Scenes that come together keep their own caches, so nothing is copied or padded: live sessions meet at
    every step, at different numbers of glimpses, and part again.

    Attributes:
        caches: One or more scenes each, in order.
        features: Class and distillation feature of all scenes after the latest glimpse.
    """

    caches: tuple[_Cache, ...]
    features: Float[Tensor, "batch 2 width"]

    def select(self, samples: Int[Tensor, " kept"]) -> "PackedCausalMemory":
        """Returns the memory of some samples."""
        places = [(cache, scene) for cache in self.caches for scene in range(len(cache))]
        kept = groupby((places[sample] for sample in samples.tolist()), key=itemgetter(0))
        caches = tuple(cache.select([scene for _, scene in run]) for cache, run in kept)
        return PackedCausalMemory(caches, self.features[samples])

    @staticmethod
    def join(memories: Sequence["PackedCausalMemory"]) -> "PackedCausalMemory":
        """Joins memories into one batch, of different numbers of glimpses too."""
        caches = tuple(cache for memory in memories for cache in memory.caches)
        return PackedCausalMemory(caches, torch.cat([memory.features for memory in memories]))


class _Attention:
    """New tokens of the scenes of one cache: they attend to it and to each other, block after block.

    It works on views of the cache and of the projections, made once for all blocks.
    """

    def __init__(
        self, cache: _Cache, projected: Float[Tensor, "scenes tokens all"], num_heads: int, num_readout: int
    ) -> None:
        num_tokens, self.width = projected.shape[1], projected.shape[2] // 3
        heads = num_heads, self.width // num_heads
        query, self.new = projected.split((self.width, 2 * self.width), dim=2)
        self.query = query.unflatten(2, heads).transpose(1, 2)  # (B, heads, n, d)
        rows = cache.rows.values.narrow(2, 0, cache.count + num_readout)
        self.slots = rows.narrow(2, rows.shape[2] - num_tokens, num_tokens).unbind()
        by_head = rows.unflatten(3, (2, *heads)).permute(3, 0, 1, 4, 2, 5)
        self.keys, self.values = (each.unbind() for each in by_head)  # of each block (B, heads, rows, d)

    def ask_last(self, num_queries: int) -> None:
        """From now on only the last of the tokens ask."""
        self.query = self.query[:, :, -num_queries:]

    def __call__(self, block: int) -> Float[Tensor, "rows width"]:
        """Writes the tokens behind the cached ones, and returns what those that ask find."""
        self.slots[block].copy_(self.new)
        mixed = F.scaled_dot_product_attention(self.query, self.keys[block], self.values[block])
        return mixed.transpose(1, 2).reshape(-1, self.width)


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
        seen = (self.empty_cache(batch),) if memory is None else memory.caches
        caches = tuple(cache.extend(new, self.num_readout) for cache in seen)
        return PackedCausalMemory(caches, self._encode(x, caches))

    def empty_cache(self, batch: int) -> _Cache:
        """Returns the cache of scenes of which nothing has been seen."""
        width = self.position_embedding.shape[1]
        return _Cache(_Rows(self.position_embedding.new_empty(len(self.blocks), batch, 0, 2 * width), 0), 0)

    def _encode(
        self, x: Float[Tensor, "batch tokens width"], caches: tuple[_Cache, ...]
    ) -> Float[Tensor, "batch readouts width"]:
        """Takes new tokens through all blocks, each behind its scene's cache, and returns the features.

        Calls, not numbers, are what a step of few tokens costs. So all blocks work in the same memory.
        """
        batch, num_tokens, width = x.shape
        rows = x.view(-1, width)
        projected, hidden = rows.new_empty(len(rows), 3 * width), rows.new_empty(len(rows), self.hidden_width)
        parts = projected.view(batch, num_tokens, 3 * width).split([len(cache) for cache in caches])
        attentions = [
            _Attention(cache, part, self.num_heads, self.num_readout)
            for cache, part in zip(caches, parts, strict=True)
        ]
        for index, block in enumerate(self.blocks):
            block.write_projected(rows, projected)
            if index == len(self.blocks) - 1:  # after it only the read-out tokens are read
                rows = x[:, -self.num_readout :].reshape(-1, width)
                hidden = hidden[: len(rows)]
                for attention in attentions:
                    attention.ask_last(self.num_readout)
            mixed = [attention(index) for attention in attentions]
            block.finish_in_place(rows, torch.cat(mixed) if len(mixed) > 1 else mixed[0], hidden)
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
