"""STAM checkpoints in the naming of the paper's authors."""

from typing import Any

from stam.config import AgentConfig
from stam.errors import WeightsError
from stam.model.agent import Agent
from stam.weights.deit import core_settings, read_deit, square_side
from stam.weights.state_dict import Source, StateDict, load_strictly, named


def load_authors(
    state_dict: Source, num_heads: int | None = None, *, with_critic: bool = False, **settings: Any
) -> Agent:
    """Reads a STAM checkpoint in the naming of the paper's authors.

    Args:
        state_dict: The checkpoint's file or state dict.
        num_heads: Attention heads; needed only where they are not 64 wide.
        with_critic: Whether to restore the critic too, to go on training.
        settings: Any other field of `AgentConfig`.
    """
    source = named(state_dict)
    state = read_deit(state_dict)
    for name, dimensions in (
        ("loc_pos_embed", 3),
        ("location_module.fc1.weight", 2),
        ("dist_token", 3),
        ("head.weight", 2),
    ):
        if name not in state or state[name].ndim != dimensions or 0 in state[name].shape:
            raise WeightsError(f"{source} is not a STAM checkpoint of the authors: it lacks '{name}'")
    patch_height, patch_width = state["patch_embed.proj.weight"].shape[2:]
    patch_side = square_side(state["pos_embed"].shape[1] - 2, "patch positions", source)
    side = square_side(state["loc_pos_embed"].shape[1], "locations", source)
    image_size = (patch_side * patch_height, patch_side * patch_width)
    config = AgentConfig(
        num_classes=state["head.weight"].shape[0],
        image_size=image_size,
        glimpse_size=(image_size[0] // side, image_size[1] // side),
        patch_size=(patch_height, patch_width),
        actor_width=state["location_module.fc1.weight"].shape[0],
        critic_width=state["critic.fc1.weight"].shape[0] if "critic.fc1.weight" in state else 512,
        **{**core_settings(state, num_heads), **settings},
    )
    agent = Agent(config)
    if with_critic:
        agent.add_critic()
    renamed: StateDict = {}
    for name, value in state.items():
        if name.startswith("location_module."):
            renamed["actor." + name.removeprefix("location_module.")] = value
        elif name == "loc_pos_embed":
            renamed["actor.location_embedding"] = value[0]
        elif name.startswith("critic."):
            renamed |= {name: value} if with_critic else {}
        elif name not in ("running_mean_popart", "running_var_popart"):
            renamed["core." + name] = value
    load_strictly(agent, renamed, source)
    return agent.eval()
