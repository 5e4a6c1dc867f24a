"""The same numbers as `stam.model`, sooner. `Agent.prepared` and `Agent.ready` are the ways in from there.

`prepare` gives an agent ready to look: on a CPU a snapshot with packed weights, on a GPU fused kernels over
the agent's own parameters. `cuda.fuse` does the latter for training. Both know the modules of `stam.model` as
they were built. Where one was replaced or hooked (LoRA, quantisation, a forward hook), the plain modules run,
so that the change takes effect.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stam.fast import cpu
from stam.fast.known import unknown_part
from stam.model.agent import Agent, Looker, PlainLooker


def prepare(agent: Agent, fast: bool = True) -> Looker:
    """Returns an agent ready to look: as fast as can be, or with `fast=False` by its own plain modules.

    On a CPU it is a snapshot: later changes of the agent do not reach it.
    """
    if fast and unknown_part(agent) is None and not torch.compiler.is_compiling():
        if agent.device.type == "cuda":
            from stam.fast import cuda

            return cuda.fuse(agent)
        if cpu.can_prepare(agent):
            return cpu.PackedLooker(agent)
    return PlainLooker(agent)


@dataclass(frozen=True)
class Kept:
    """A prepared agent, with copies of the weights it was made from, to tell whether they have changed."""

    looker: Looker
    weights: tuple[Tensor, ...]


def prepare_again(agent: Agent, kept: Kept | None) -> Kept:
    """Prepares an agent, or returns what was kept if the agent is still exactly what that was made from.

    Every weight is compared. Nothing less would notice all the ways in which weights can change: writing
    through `.data` or a numpy view and fused optimisers leave no trace, and a look takes 50 times as long.
    """
    if kept is not None and isinstance(kept.looker, cpu.PackedLooker) and _is_current(kept, agent):
        return kept
    looker = prepare(agent)
    is_snapshot = isinstance(looker, cpu.PackedLooker)
    return Kept(looker, tuple(weight.detach().clone() for weight in _weights(agent)) if is_snapshot else ())


def _is_current(kept: Kept, agent: Agent) -> bool:
    now = _weights(agent)
    return (
        kept.looker.config == agent.config
        and unknown_part(agent) is None
        and cpu.can_prepare(agent)
        and len(now) == len(kept.weights)
        and all(
            old.shape == new.shape and torch.equal(old, new)
            for old, new in zip(kept.weights, now, strict=True)
        )
    )


def _weights(agent: Agent) -> list[Tensor]:
    """Returns all that a look depends on."""
    modules = [agent.core] if agent.actor is None else [agent.core, agent.actor]
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
