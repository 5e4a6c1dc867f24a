"""Whether modules are as `stam.model` builds them, so that something else may compute what they compute."""

from torch import nn
from torch.nn.modules import module as torch_module

from stam.model.actor_critic import Actor, Critic, JointActor, PairLinear, RowNorm
from stam.model.agent import Agent
from stam.model.causal import CausalCore
from stam.model.core import ReencodingCore
from stam.model.vit import Attention, Block, Mlp, PatchEmbed, VisionTransformer

_KNOWN = {
    Agent,
    CausalCore,
    ReencodingCore,
    VisionTransformer,
    PatchEmbed,
    Block,
    Attention,
    Mlp,
    Actor,
    Critic,
    JointActor,
    PairLinear,
    nn.Conv2d,
    nn.GELU,
    nn.LayerNorm,
    nn.Linear,
    nn.ModuleList,
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def unknown_part(model: nn.Module) -> str | None:
    """Returns the first part of a model that is not as it was built, as `name (class)`; `None` if all are."""
    for name, part in model.named_modules():
        is_known = type(part) in _KNOWN or isinstance(part, RowNorm)  # its subclasses differ in training only
        replaced = not is_known or _is_overridden(part) or _lacks_weights(part)
        hooked = any(getattr(part, kind) for kind in _HOOKS)
        other_gelu = isinstance(part, nn.GELU) and part.approximate != "none"
        if replaced or hooked or other_gelu:
            return f"{name or 'the model'} ({type(part).__name__}{', hooked' if hooked else ''})"
    return "every module (hooked)" if _has_global_hooks() else None


def _is_overridden(part: nn.Module) -> bool:
    """Tells whether a method of the class was replaced on the instance."""
    return any(callable(value) and hasattr(type(part), name) for name, value in vars(part).items())


def _lacks_weights(part: nn.Module) -> bool:
    """Tells a layer that has no weights or no bias where ours have both."""
    return isinstance(part, (nn.Linear, nn.LayerNorm, nn.Conv2d)) and (
        part.weight is None or part.bias is None
    )


def _has_global_hooks() -> bool:
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
