"""Looking on a CPU: a snapshot of an agent with its weights packed once.

For the few rows of a single look, half of a matrix product is the library rearranging the weights before it
multiplies, every time anew. oneDNN takes them rearranged once. Where it cannot be had (another processor, a
build of torch without it), the plain product runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.model.actor_critic import Actor
from stam.model.agent import Agent, Looker
from stam.model.causal import CausalCore, CausalMemory
from stam.model.core import Core, ReencodingCore
from stam.model.randomness import Randomness
from stam.model.vit import Block
from stam.shapes import Float, Int

_LEAST = 100_000  # weights: for smaller layers calling oneDNN takes longer than it saves
_ROWS = 64  # oneDNN lays weights out for a number of rows; this one serves 1 to some hundred


def can_prepare(agent: Agent) -> bool:
    """Tells whether an agent computes in single precision on a CPU, as a snapshot does."""
    weight = agent.core.pos_embed
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and not torch.is_autocast_enabled("cpu") and not torch.jit.is_tracing()


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


class _Norm:
    """A layer norm."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        self.shape, self.eps = list(norm.normalized_shape), norm.eps
        self.weight, self.bias = norm.weight.detach().clone(), norm.bias.detach().clone()

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class _PackedBlock:
    """A transformer block."""

    def __init__(self, block: Block) -> None:
        self.num_heads = block.attn.num_heads
        self.norm1, self.norm2 = _Norm(block.norm1), _Norm(block.norm2)
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
        cache: Float[Tensor, "2 batch room width"],
        taken: int,
        num_queries: int,
        mask: Tensor | None,
    ) -> Float[Tensor, "batch queries width"]:
        """Returns the last tokens after the block; all are written into the cache after those before."""
        width, end = x.shape[2], taken + x.shape[1]
        projected = self.project(x).unflatten(2, (3, width))  # (B, n, 3, D)
        cache[:, :, taken:end] = projected[:, :, 1:].permute(2, 0, 1, 3)
        key, value = cache[:, :, :end].unflatten(3, (self.num_heads, -1)).transpose(2, 3)
        query = projected[:, -num_queries:, 0].unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        return self._after_attention(x[:, -num_queries:], query, key, value, mask)

    def _heads(self, projected: Tensor) -> tuple[Tensor, ...]:
        split = projected.unflatten(2, (-1, self.num_heads, self.proj.num_inputs // self.num_heads))
        return split.permute(2, 0, 3, 1, 4).unbind()  # each (B, heads, tokens, D / heads)

    def _after_attention(
        self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        mixed = F.scaled_dot_product_attention(query, key, value, mask)
        x = self.proj.added_to(x, mixed.transpose(1, 2).flatten(2))
        return self.fc2.added_to(x, self.fc1.gelu(self.norm2(x)))


class _PackedLastBlock(_PackedBlock):
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


@dataclass(frozen=True)
class FirstBlockCache:
    """Tokens on their way through the first block, up to where they meet: each depends on itself alone.

    Attributes:
        tokens: What the transformer starts from.
        projected: Their queries, keys and values in the first block.
    """

    tokens: Float[Tensor, "batch tokens width"]
    projected: Float[Tensor, "batch tokens projections"]

    def then(self, more: "FirstBlockCache") -> "FirstBlockCache":
        """Returns these tokens followed by others."""
        return FirstBlockCache(
            torch.cat((self.tokens, more.tokens), dim=1),
            torch.cat((self.projected, more.projected), dim=1),
        )

    def select(self, samples: Int[Tensor, " kept"]) -> "FirstBlockCache":
        """Returns the tokens of some samples."""
        return FirstBlockCache(self.tokens[samples], self.projected[samples])

    @staticmethod
    def join(memories: Sequence["FirstBlockCache"]) -> "FirstBlockCache":
        """Joins memories of equally many tokens into one batch."""
        return FirstBlockCache(
            torch.cat([memory.tokens for memory in memories]),
            torch.cat([memory.projected for memory in memories]),
        )


class PackedCore:
    """The core with packed weights. What a patch alone decides is computed once, when it comes."""

    mixes_counts = False

    def __init__(self, core: ReencodingCore) -> None:
        embed = core.patch_embed.proj
        assert embed.bias is not None
        self.num_readout = core.num_readout
        self.embed = PackedLinear(embed.weight.flatten(1), embed.bias)
        self.position_embedding = core.pos_embed[0, core.num_readout :].detach().clone()
        first, *middle = (cast(Block, block) for block in core.blocks)
        self.first, self.rest = _PackedBlock(first), [_PackedBlock(block) for block in middle[:-1]]
        self.rest += [_PackedLastBlock(block, core.num_readout) for block in middle[-1:]]
        self.norm = _Norm(core.norm)
        self.heads = tuple(PackedLinear(head.weight, head.bias) for head in (core.head, core.head_dist))
        self.readout = self._start(core.readout_tokens().detach().clone())

    def _start(self, tokens: Float[Tensor, "batch tokens width"]) -> FirstBlockCache:
        return FirstBlockCache(tokens, self.first.project(tokens))

    def remember(
        self,
        memory: FirstBlockCache | None,
        patches: Float[Tensor, "batch patches pixels"],
        positions: Int[Tensor, "batch patches"],
    ) -> FirstBlockCache:
        """Takes the patches of one more glimpse as far as they go alone."""
        tokens = self.embed(patches) + F.embedding(positions, self.position_embedding)
        new = self._start(tokens)
        if memory is not None:
            return memory.then(new)
        readout = self.readout.tokens, self.readout.projected
        return FirstBlockCache(*(part.expand(len(patches), -1, -1) for part in readout)).then(new)

    def read(
        self, memory: FirstBlockCache, drop_masks: Tensor | None = None
    ) -> Float[Tensor, "batch 2 width"]:
        """Encodes all patches together, from where each got alone."""
        x = self.first.finish(memory.tokens, memory.projected, None if self.rest else self.num_readout)
        for block in self.rest:
            x = block(x)
        return self.norm(x)

    def classify(self, features: Float[Tensor, "batch 2 width"]) -> tuple[Tensor, ...]:
        """Returns the logits of the two classifiers."""
        return tuple(head(features[:, index]) for index, head in enumerate(self.heads))

    def sample_drop_path(self, batch_size: int, generator: Randomness = None) -> None:
        """Nothing is dropped: nothing is trained."""
        return


class _Rows:
    """Keys and values of a batch of scenes in all blocks, with room for more; several memories may share it.

    Attributes:
        values: (depth, 2, batch, room, width).
        count: How many rows are taken, by the longest of the memories that share it.
    """

    def __init__(self, values: Tensor, count: int) -> None:
        self.values, self.count = values, count

    def with_room(self, taken: int, more: int) -> "_Rows":
        """Returns rows of which the first are as these, and after which as many more can be written.

        They are these themselves, where nobody has written after `taken`; so a look copies nothing, and two
        memories that go on from the same one do not disturb each other.
        """
        if self.count == taken and taken + more <= self.values.shape[3]:
            return self
        depth, two, batch, _, width = self.values.shape
        larger = self.values.new_empty(depth, two, batch, 2 * (taken + more), width)
        larger[:, :, :, :taken] = self.values[:, :, :, :taken]
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
        cache = self.rows.values[:, :, :, None, : self.count]  # as if of one head
        return CausalMemory(cache, self.features, self.padding)

    @staticmethod
    def _of(memory: CausalMemory) -> "PackedCausalMemory":
        values = memory.cache[:, :, :, 0]
        count = values.shape[3]
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
        self.blocks = [_PackedBlock(block) for block in blocks]
        self.norm = _Norm(core.norm)
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
            empty = x.new_empty(len(self.blocks), 2, batch, 0, x.shape[2])
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


class PackedLooker(Looker):
    """A snapshot of an agent, ready to look on a CPU. It never changes, and shares nothing with the agent."""

    core: Core

    def __init__(self, agent: Agent) -> None:
        self.config = agent.config
        with torch.no_grad():
            core = agent.core
            self.core = PackedCausalCore(core) if isinstance(core, CausalCore) else PackedCore(core)
            self.actor = None if agent.actor is None else PackedActor(agent.actor)
        self.critic = None
        self.positions = agent.positions.clone()

    def __deepcopy__(self, memo: dict[int, object]) -> "PackedLooker":
        """What never changes need not be copied."""
        return self
