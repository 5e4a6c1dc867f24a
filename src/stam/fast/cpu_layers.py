"""Layers with their weights packed once, to look on a CPU.

For the few rows of a single look, half of a matrix product is the library rearranging the weights before it
multiplies, every time anew. oneDNN takes them rearranged once. Where it cannot be had (another processor, a
build of torch without it), the plain product runs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.model.actor_critic import Actor
from stam.model.vit import Block
from stam.shapes import Float, Int

_LEAST = 100_000  # weights: for smaller layers calling oneDNN takes longer than it saves
_ROWS = 64  # oneDNN lays weights out for a number of rows; this one serves 1 to some hundred


def _can_pack() -> bool:
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


class PackedLinear:
    """A linear layer with packed weights, and what may follow it in the same pass."""

    def __init__(self, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"]) -> None:
        weight = weight.detach()
        self.num_inputs = weight.shape[1]
        self.is_packed = weight.numel() >= _LEAST and _can_pack()
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if self.is_packed else weight.clone()
        )
        self.bias = bias.detach().clone()

    def __call__(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """Returns W x + b."""
        return self._multiply(x, "none") if self.is_packed else F.linear(x, self.weight, self.bias)

    def gelu(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """Returns GELU(W x + b)."""
        return self._multiply(x, "gelu") if self.is_packed else F.gelu(self(x))

    def relu(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """Returns ReLU(W x + b)."""
        return self._multiply(x, "relu") if self.is_packed else F.relu(self(x))

    def added_to(
        self, total: Float[Tensor, "*rows outputs"], x: Float[Tensor, "*rows inputs"]
    ) -> Float[Tensor, "*rows outputs"]:
        """Returns total + W x + b."""
        if not self.is_packed:
            return total + self(x)
        add = torch.ops.mkldnn._linear_pointwise.binary
        return add(x, total.contiguous(), self.weight, self.bias, "add")

    def _multiply(self, x: Tensor, then: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, then, [], "none")


class PackedNorm:
    """A layer norm."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        self.shape, self.eps = list(norm.normalized_shape), norm.eps
        self.weight, self.bias = norm.weight.detach().clone(), norm.bias.detach().clone()

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises each row."""
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class PackedBlock:
    """A transformer block."""

    def __init__(self, block: Block) -> None:
        self.num_heads = block.attn.num_heads
        self.norm1, self.norm2 = PackedNorm(block.norm1), PackedNorm(block.norm2)
        self.qkv = PackedLinear(block.attn.qkv.weight, block.attn.qkv.bias)
        self.proj = PackedLinear(block.attn.proj.weight, block.attn.proj.bias)
        self.fc1 = PackedLinear(block.mlp.fc1.weight, block.mlp.fc1.bias)
        self.fc2 = PackedLinear(block.mlp.fc2.weight, block.mlp.fc2.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the tokens after the block."""
        return self.finish(x, self.project(x))

    def project(self, x: Tensor) -> Tensor:
        """Returns queries, keys and values: what each token needs no other for."""
        return self.qkv(self.norm1(x))

    def finish(self, x: Tensor, projected: Tensor, num_queries: int | None = None) -> Tensor:
        """Returns the first tokens after the block, all by default, given what `project` made of them all."""
        query, key, value = self._heads(projected)
        return self._after_attention(x[:, :num_queries], query[:, :, :num_queries], key, value)

    def step(
        self,
        x: Float[Tensor, "batch tokens width"],
        cache: Float[Tensor, "batch room both"],
        taken: int,
        num_queries: int,
        mask: Tensor | None,
    ) -> Float[Tensor, "batch queries width"]:
        """Returns the last tokens after the block; all are written into the cache after those before."""
        batch, new, width = x.shape
        end = taken + new
        projected = self.project(x)  # (B, n, 3 D)
        cache.narrow(1, taken, new).copy_(projected.narrow(2, width, 2 * width))
        both = cache.narrow(1, 0, end).view(batch, end, 2, self.num_heads, -1)
        key, value = both.permute(2, 0, 3, 1, 4).unbind()  # each (B, heads, end, D / heads)
        last = x.narrow(1, new - num_queries, num_queries)
        query = projected.narrow(1, new - num_queries, num_queries).narrow(2, 0, width)
        query = query.view(batch, num_queries, self.num_heads, -1).transpose(1, 2)
        return self._after_attention(last, query, key, value, mask)

    def _heads(self, projected: Tensor) -> tuple[Tensor, ...]:
        split = projected.unflatten(2, (-1, self.num_heads, self.proj.num_inputs // self.num_heads))
        return split.permute(2, 0, 3, 1, 4).unbind()  # each (B, heads, tokens, D / heads)

    def _after_attention(
        self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        mixed = F.scaled_dot_product_attention(query, key, value, mask)
        x = self.proj.added_to(x, mixed.transpose(1, 2).flatten(2))
        return self.fc2.added_to(x, self.fc1.gelu(self.norm2(x)))


class PackedLastBlock(PackedBlock):
    """The last block, after which only the first tokens are read: only those have queries."""

    def __init__(self, block: Block, num_queries: int) -> None:
        super().__init__(block)
        width, weight, bias = block.attn.qkv.in_features, block.attn.qkv.weight, block.attn.qkv.bias
        self.num_queries = num_queries
        self.query = PackedLinear(weight[:width], bias[:width])
        self.qkv = PackedLinear(weight[width:], bias[width:])  # keys and values

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the first tokens after the block."""
        normed = self.norm1(x)
        (query,) = self._heads(self.query(normed[:, : self.num_queries]))
        key, value = self._heads(self.qkv(normed))
        return self._after_attention(x[:, : self.num_queries], query, key, value)


class PackedActor:
    """The actor in evaluation mode, its batch norms a part of its packed weights."""

    def __init__(self, actor: Actor) -> None:
        scale, shift = scale_and_shift(actor.bn0)
        of_state, of_location = actor.fc0.weight.detach().split(
            (actor.fc0.in_features - actor.location_embedding.shape[1], actor.location_embedding.shape[1]), 1
        )
        self.of_state = PackedLinear(of_state * scale[:, None], actor.fc0.bias * scale + shift)
        self.of_location = F.linear(actor.location_embedding.detach(), of_location) * scale  # (L, hidden)
        self.fc1, self.fc2 = _with_norm(actor.fc1, actor.bn1), _with_norm(actor.fc2, actor.bn2)
        self.fc_final = PackedLinear(actor.fc_final.weight, actor.fc_final.bias)

    def __call__(
        self, state: Float[Tensor, "batch features"], candidates: Int[Tensor, "batch candidates"]
    ) -> Float[Tensor, "batch candidates"]:
        """Returns a logit for each candidate."""
        rows = self.of_state(state)[:, None] + F.embedding(candidates, self.of_location)
        rows = self.fc2.relu(self.fc1.relu(rows.relu_().flatten(0, 1)))
        return self.fc_final(rows).view(candidates.shape)


def scale_and_shift(norm: nn.BatchNorm1d) -> tuple[Float[Tensor, " features"], Float[Tensor, " features"]]:
    """Returns what a batch norm that is not trained does: it multiplies by the first and adds the second."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = norm.weight.detach() * (norm.running_var + norm.eps).rsqrt()
    return scale, norm.bias.detach() - norm.running_mean * scale


def _with_norm(layer: nn.Linear, norm: nn.BatchNorm1d) -> PackedLinear:
    """Returns a linear layer that includes the batch norm after it."""
    scale, shift = scale_and_shift(norm)
    return PackedLinear(layer.weight.detach() * scale[:, None], layer.bias.detach() * scale + shift)
