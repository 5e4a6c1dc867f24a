"""A core that encodes every glimpse once.

At each step the new patches and fresh read-out tokens see each other and all earlier patches. Earlier patches
see nothing new, and nobody sees the read-out tokens of other steps. So what a patch is to others, its keys
and values in each block, never changes: it is kept (a KV cache), and a step costs as many tokens as a glimpse
has, with two for the read-out. The same mask over the tokens of all steps gives every step in one pass.

Departs from the paper, whose core encodes all glimpses together again after each: there an earlier patch
takes later ones into account. After the first glimpse both are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stam.model.vit import VisionTransformer
from stam.shapes import Bool, Float, Int


@dataclass(frozen=True)
class CausalMemory:
    """What later glimpses need of the patches seen so far, and what was read after the latest.

    Samples may have seen different numbers of glimpses: the shorter ones begin with padding.

    Attributes:
        cache: The patches' keys and values in each block.
        features: Class and distillation feature after the latest glimpse.
        padding: How many of each sample's first patches are padding; `None` where none are.
    """

    cache: Float[Tensor, "depth 2 batch heads patches head_width"]
    features: Float[Tensor, "batch 2 width"]
    padding: Int[Tensor, " batch"] | None = None

    def select(self, samples: Int[Tensor, " kept"]) -> "CausalMemory":
        """Returns the memory of some samples, without padding that none of them needs."""
        cache, features = self.cache[:, :, samples], self.features[samples]
        if self.padding is None or len(samples) == 0:
            return CausalMemory(cache, features)
        padding = self.padding[samples]
        unused = int(padding.min())
        is_padded = bool((padding > unused).any())
        return CausalMemory(cache[..., unused:, :], features, padding - unused if is_padded else None)

    @staticmethod
    def join(memories: Sequence["CausalMemory"]) -> "CausalMemory":
        """Joins memories into one batch, of different numbers of glimpses too."""
        lengths = [memory.cache.shape[4] for memory in memories]
        features = torch.cat([memory.features for memory in memories])
        if min(lengths) == max(lengths) and all(memory.padding is None for memory in memories):
            return CausalMemory(torch.cat([memory.cache for memory in memories], dim=2), features)
        missing = [max(lengths) - length for length in lengths]
        caches = [
            F.pad(memory.cache, (0, 0, count, 0)) for memory, count in zip(memories, missing, strict=True)
        ]
        paddings = [
            features.new_full((len(memory.features),), count, dtype=torch.long)
            + (0 if memory.padding is None else memory.padding)
            for memory, count in zip(memories, missing, strict=True)
        ]
        return CausalMemory(torch.cat(caches, dim=2), features, torch.cat(paddings))


class CausalCore(VisionTransformer):
    """A core whose patches see only their own and earlier glimpses; its parameters are those of any DeiT."""

    mixes_counts = True

    def remember(
        self,
        memory: CausalMemory | None,
        patches: Float[Tensor, "batch patches pixels"],
        positions: Int[Tensor, "batch patches"],
    ) -> CausalMemory:
        """Encodes the patches of one more glimpse, given those before."""
        readout = self.readout_tokens().expand(patches.shape[0], -1, -1)
        x = torch.cat((readout, self.embed(patches, positions)), dim=1)  # (B, R + p, D)
        blocks = [
            _BlockCache(None if memory is None else memory.cache[index], self.num_readout)
            for index in range(len(self.blocks))
        ]
        mask = None if memory is None else _padding_mask(memory, x.shape[1])
        features = self.encode(x, self.num_readout, mask=mask, extend=blocks)
        cache = torch.stack([block.new for block in blocks])  # (depth, 2, B, heads, p, d)
        if memory is None:
            return CausalMemory(cache, features)
        return CausalMemory(torch.cat((memory.cache, cache), dim=4), features, memory.padding)

    def read(self, memory: CausalMemory, drop_masks: Tensor | None = None) -> Float[Tensor, "batch 2 width"]:
        """Returns the features after the latest glimpse; they were computed when it was remembered.

        Nothing was dropped then: `drop_masks` are for `read_all`, by which the core is trained.
        """
        return memory.features

    def read_all(
        self,
        patches: Float[Tensor, "batch steps patches pixels"],
        positions: Int[Tensor, "batch steps patches"],
        drop_masks: Float[Tensor, "depth 2 batch 1 1"] | None = None,
    ) -> Float[Tensor, "batch steps 2 width"]:
        """Returns the features after each step: what remembering glimpse by glimpse gives, in one pass."""
        steps, patches_per_step = patches.shape[1:3]
        readout = self.readout_tokens().repeat(patches.shape[0], steps, 1)
        tokens = self.embed(patches.flatten(1, 2), positions.flatten(1))
        x = torch.cat((readout, tokens), dim=1)  # (B, T R + T p, D): the read-outs of all steps come first
        mask = causal_mask(steps, self.num_readout, patches_per_step, x.device)
        features = self.encode(x, steps * self.num_readout, drop_masks, mask[None, None])
        return features.unflatten(1, (steps, self.num_readout))

    def read_each(
        self,
        memory: CausalMemory,
        num_glimpses: Int[Tensor, " batch"],
        patches: Float[Tensor, "batch tried patches pixels"],
        positions: Int[Tensor, "batch tried patches"],
    ) -> Float[Tensor, "batch tried 2 width"]:
        """Returns the features after one more glimpse, for each of several that are tried, not remembered.

        Args:
            memory: What is remembered of episodes.
            num_glimpses: How many of each sample's glimpses come before; it need not be all.
            patches: The patches of the glimpses to try.
            positions: Where they lie in the whole image.
        """
        tried, patches_per_glimpse = patches.shape[1:3]
        readout = self.readout_tokens().repeat(patches.shape[0], tried, 1)
        tokens = self.embed(patches.flatten(1, 2), positions.flatten(1))
        x = torch.cat((readout, tokens), dim=1)
        glimpse = _numbers(tried, self.num_readout, patches_per_glimpse, x.device)
        apart = (glimpse[:, None] == glimpse).expand(x.shape[0], -1, -1)  # nothing tried sees another
        past = torch.arange(memory.cache.shape[4], device=x.device)
        is_before = past < (num_glimpses * patches_per_glimpse)[:, None]  # (B, past)
        mask = torch.cat((apart, is_before[:, None].expand(-1, x.shape[1], -1)), dim=2)[:, None]
        blocks = [_BlockCache(each, 0) for each in memory.cache]
        features = self.encode(x, tried * self.num_readout, mask=mask, extend=blocks)
        return features.unflatten(1, (tried, self.num_readout))


class _BlockCache:
    """The keys and values of earlier patches in one block; it notes those of the new ones."""

    new: Float[Tensor, "2 batch heads patches head_width"]

    def __init__(self, past: Float[Tensor, "2 batch heads past head_width"] | None, num_readout: int) -> None:
        self.past, self.num_readout = past, num_readout

    def __call__(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the new tokens, then those of earlier patches."""
        self.new = torch.stack((key, value))[:, :, :, self.num_readout :]
        if self.past is None:
            return key, value
        return torch.cat((key, self.past[0]), dim=2), torch.cat((value, self.past[1]), dim=2)


def _padding_mask(memory: CausalMemory, num_new: int) -> Bool[Tensor, "batch 1 1 keys"] | None:
    """Marks what may be seen: all new tokens, and of the past what is not padding."""
    if memory.padding is None:
        return None
    past = torch.arange(memory.cache.shape[4], device=memory.padding.device)
    is_real = past >= memory.padding[:, None]  # (B, past)
    return F.pad(is_real, (num_new, 0), value=True)[:, None, None]


def _numbers(
    num_glimpses: int, num_readout: int, num_patches: int, device: torch.device
) -> Int[Tensor, " tokens"]:
    """Returns which glimpse each token belongs to, the read-outs of all before the patches of all."""
    each = torch.arange(num_glimpses, device=device)
    return torch.cat((each.repeat_interleave(num_readout), each.repeat_interleave(num_patches)))


def causal_mask(
    steps: int, num_readout: int, num_patches: int, device: torch.device
) -> Bool[Tensor, "tokens tokens"]:
    """Marks which tokens (rows) see which (columns), the read-outs of all steps before the patches of all.

    Both see the patches of their own and of earlier steps, and the read-outs of their own step.
    """
    step = _numbers(steps, num_readout, num_patches, device)
    is_readout = torch.arange(len(step), device=device) < steps * num_readout
    return torch.where(is_readout, step[:, None] == step, step[:, None] >= step)
