"""The transformer computed by fused kernels, from the parameters of its own modules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stam.fast import kernels
from stam.model.vit import Attention, Block, VisionTransformer
from stam.shapes import Float, Int

# (index of the block, its attention, tokens, how many of the first are read: all by default) -> mixed values
Attend = Callable[[int, Attention, Tensor, int | None], Tensor]


def encode(
    vit: VisionTransformer,
    patches: Float[Tensor, "batch patches pixels"],
    positions: Int[Tensor, "batch patches"],
    drop_masks: Float[Tensor, "depth 2 batch 1 1"] | None = None,
) -> Float[Tensor, "batch readout width"]:
    """Computes `vit(patches, positions, drop_masks)`.

    A residual branch ends with a linear layer, and after its sum comes a norm: all three are one step. So a
    branch is passed on as what its last layers are to be applied to.
    """
    if not kernels.usable(patches):
        return vit(patches, positions, drop_masks)
    return through_blocks(
        vit, embed(vit, patches, positions), vit.num_readout, attend_within(None), drop_masks
    )


def through_blocks(
    vit: VisionTransformer,
    x: Float[Tensor, "batch tokens width"],
    num_read: int,
    attend: Attend,
    drop_masks: Float[Tensor, "depth 2 batch 1 1"] | None = None,
) -> Float[Tensor, "batch read width"]:
    """Takes tokens through all blocks and returns the first `num_read`, normalised."""
    branch = None
    for index, module in enumerate(vit.blocks):
        block = cast(Block, module)
        scales = (None, None) if drop_masks is None else drop_masks[index].unbind()
        num_queries = num_read if index == len(vit.blocks) - 1 else None
        x, normed = _add_norm(x, branch, block.norm1)
        attended = attend(index, block.attn, normed, num_queries)
        branch = _Branch(attended, (block.attn.proj,), scales[0])
        x, normed = _add_norm(x[:, :num_queries], branch, block.norm2)
        branch = _Branch(normed, (block.mlp.fc1, block.mlp.fc2), scales[1])
    return _add_norm(x, branch, vit.norm)[1]


def embed(
    vit: VisionTransformer, patches: Tensor, positions: Tensor, steps: int = 1, table: Tensor | None = None
) -> Tensor:
    """Returns what the transformer starts from, in half precision, with the read-out tokens of each step."""
    from stam.fast.kernels import embedding

    table = token_table(vit, steps) if table is None else table
    return embedding.embed(patches, vit.patch_embed.proj.weight, table, positions, steps * vit.num_readout)


def token_table(vit: VisionTransformer, steps: int = 1) -> Float[Tensor, "rows width"]:
    """Returns the read-out tokens of each step, then what is added to the patch at each position."""
    readout = vit.readout_tokens()[0].repeat(steps, 1)
    bias = vit.patch_embed.proj.get_parameter("bias")
    return torch.cat((readout, vit.pos_embed[0, vit.num_readout :] + bias))


@dataclass(frozen=True)
class _Branch:
    """A residual branch that is still to be added.

    Attributes:
        inputs: What its last layers are to be applied to.
        layers: Those layers: one, or two with GELU in between.
        scale: Factor of the branch for each sample (drop-path).
    """

    inputs: Float[Tensor, "batch tokens features"]
    layers: tuple[nn.Linear, ...]
    scale: Float[Tensor, "batch 1 1"] | None


def _add_norm(x: Tensor, branch: _Branch | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Returns the sum of x and a branch, and its norm."""
    from stam.fast.kernels import residual
    from stam.fast.kernels.gelu import linear_gelu

    if branch is None:
        return residual.norm(x, norm.weight, norm.bias, norm.eps)
    inputs, layers = branch.inputs, branch.layers
    if len(layers) > 1 and not torch.is_grad_enabled():
        inputs, layers = linear_gelu(inputs, layers[0].weight, layers[0].bias), layers[1:]
    weights = tuple((layer.weight, layer.bias) for layer in layers)
    return residual.linear_add_norm(x, inputs, weights, branch.scale, (norm.weight, norm.bias), norm.eps)


def attend_within(mask: Tensor | None) -> Attend:
    """Returns attention among the tokens alone, of those that a mask lets see each other."""
    tiles: list[Tensor] = []  # the mask as the kernels want it, made in the first block for all
    return lambda index, attention, x, num_queries: _attend(attention, x, num_queries, mask, tiles)


def _attend(
    attention: Attention, x: Tensor, num_queries: int | None, mask: Tensor | None, tiles: list[Tensor]
) -> Tensor:
    """Returns what attention gives for the first tokens, but for its projection."""
    from stam.fast.kernels.attention import fits, linear_attention, tile_of

    (tokens, width), heads = x.shape[1:], attention.num_heads
    weight, bias = attention.qkv.weight, attention.qkv.bias
    if fits(width // heads, tokens):  # faster for all tokens than torch's for a few
        if mask is not None and not tiles:
            tiles.append(tile_of(mask))
        return linear_attention(x, weight, bias, heads, tiles[0] if tiles else None)[:, :num_queries]
    query = F.linear(x[:, :num_queries], weight[:width], bias[:width])
    key, value = F.linear(x, weight[width:], bias[width:]).chunk(2, dim=2)
    query, key, value = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in (query, key, value))
    # not by cuDNN, which makes a plan anew for every number of tokens: an episode has one a glimpse
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        mixed = F.scaled_dot_product_attention(
            query, key, value, None if mask is None else mask[:num_queries]
        )
    return mixed.transpose(1, 2).flatten(2)
