"""Looking on a CPU: a snapshot of an agent with its weights laid out once (`cpu_layers`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from stam.fast.cpu_causal import PackedCausalCore
from stam.fast.cpu_layers import PackedBlock, PackedLastBlock, PackedLinear, PackedNorm, pack_actor
from stam.model.agent import Agent, Looker
from stam.model.causal import CausalCore
from stam.model.core import Core, ReencodingCore
from stam.model.randomness import Randomness
from stam.model.vit import Block
from stam.shapes import Float, Int


def can_prepare(agent: Agent) -> bool:
    """Tells whether an agent computes in single precision on a CPU, as a snapshot does."""
    weight = agent.core.pos_embed
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and not torch.is_autocast_enabled("cpu") and not torch.jit.is_tracing()


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
        self.first, self.rest = PackedBlock(first), [PackedBlock(block) for block in middle[:-1]]
        self.rest += [PackedLastBlock(block, core.num_readout) for block in middle[-1:]]
        self.norm = PackedNorm(core.norm)
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


class PackedLooker(Looker):
    """A snapshot of an agent, ready to look on a CPU. It never changes, and shares nothing with the agent."""

    core: Core

    def __init__(self, agent: Agent) -> None:
        self.config = agent.config
        with torch.no_grad():
            core = agent.core
            self.core = PackedCausalCore(core) if isinstance(core, CausalCore) else PackedCore(core)
            self.actor = None if agent.actor is None else pack_actor(agent.actor)
        self.critic = None
        self.positions = agent.positions.clone()

    def __deepcopy__(self, memo: dict[int, object]) -> "PackedLooker":
        """What never changes need not be copied."""
        return self
