"""Layers with their weights laid out once, to look on a CPU.

For the few rows of a single look a matrix product takes as long as reading its weights. A linear layer keeps
them as (outputs, inputs); read as (inputs, outputs) the same product takes half the time. Layers that follow
one another write into the same memory where they can.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.model.actor_critic import Actor, JointActor
from stam.model.vit import Block
from stam.shapes import Float, Int


class PackedLinear:
    """A linear layer whose weights lie as a product reads them, and what may follow it.

    Attributes:
        weight: The weights, (inputs, outputs) in memory.
        bias: The bias.
    """

    def __init__(self, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"]) -> None:
        self.weight = weight.detach().t().clone(memory_format=torch.contiguous_format)
        self.bias = bias.detach().clone()
        self._as_layer = self.weight.t()  # for F.linear, which transposes it again

    def __call__(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """Returns W x + b."""
        return F.linear(x, self._as_layer, self.bias)

    def gelu(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """Returns GELU(W x + b)."""
        return F.gelu(self(x))

    def relu(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """Returns ReLU(W x + b)."""
        return self(x).relu_()

    def added_to(
        self, total: Float[Tensor, "*rows outputs"], x: Float[Tensor, "*rows inputs"]
    ) -> Float[Tensor, "*rows outputs"]:
        """Returns total + W x + b."""
        total = total + self.bias
        total.view(-1, self.weight.shape[1]).addmm_(x.reshape(-1, self.weight.shape[0]), self.weight)
        return total

    def add_to(self, total: Float[Tensor, "rows outputs"], x: Float[Tensor, "rows inputs"]) -> None:
        """Adds W x + b to the total, in place."""
        total.add_(self.bias).addmm_(x, self.weight)

    def write(self, x: Float[Tensor, "rows inputs"], out: Float[Tensor, "rows outputs"]) -> None:
        """Writes W x + b into memory that is there already."""
        out.copy_(self.bias).addmm_(x, self.weight)


class PackedNorm:
    """A layer norm."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        self.shape, self.eps = norm.normalized_shape, norm.eps
        self.weight, self.bias = norm.weight.detach().clone(), norm.bias.detach().clone()

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises each row."""
        return torch.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


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

    def write_projected(self, x: Float[Tensor, "rows width"], out: Float[Tensor, "rows projections"]) -> None:
        """Writes queries, keys and values of some tokens into memory that is there already."""
        self.qkv.write(self.norm1(x), out)

    def finish_in_place(
        self,
        x: Float[Tensor, "rows width"],
        mixed: Float[Tensor, "rows width"],
        hidden: Float[Tensor, "rows hidden"],
    ) -> None:
        """Takes tokens from their attention to the end of the block; `hidden` is memory to work in."""
        self.proj.add_to(x, mixed)
        self.fc1.write(self.norm2(x), hidden)
        self.fc2.add_to(x, F.gelu(hidden))

    def _heads(self, projected: Tensor) -> tuple[Tensor, ...]:
        split = projected.unflatten(2, (-1, self.num_heads, self.proj.weight.shape[0] // self.num_heads))
        return split.permute(2, 0, 3, 1, 4).unbind()  # each (B, heads, tokens, D / heads)

    def _after_attention(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(query, key, value)
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


class PackedJointActor:
    """An actor that rates all locations at once, in evaluation mode."""

    def __init__(self, actor: JointActor) -> None:
        norms = (actor.fc0, actor.bn0), (actor.fc1, actor.bn1), (actor.fc2, actor.bn2)
        self.layers = [_with_norm(layer, norm) for layer, norm in norms]
        self.fc_final = PackedLinear(actor.fc_final.weight, actor.fc_final.bias)

    def __call__(
        self, state: Float[Tensor, "batch features"], candidates: Int[Tensor, "batch candidates"]
    ) -> Float[Tensor, "batch candidates"]:
        """Returns a logit for each candidate."""
        rows = state
        for layer in self.layers:
            rows = layer.relu(rows)
        return self.fc_final(rows).gather(1, candidates)


def pack_actor(actor: Actor | JointActor) -> "PackedActor | PackedJointActor":
    """Returns an actor with its batch norms a part of its packed weights."""
    return PackedJointActor(actor) if isinstance(actor, JointActor) else PackedActor(actor)


class PackedActor:
    """The paper's actor in evaluation mode, its batch norms a part of its packed weights."""

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
        rows = F.embedding(candidates, self.of_location).add_(self.of_state(state)[:, None]).relu_()
        rows = self.fc2.relu(self.fc1.relu(rows.flatten(0, 1)))
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
