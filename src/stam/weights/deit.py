"""DeiT, plain or distilled, in DeiT's own, timm's or Hugging Face's naming."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stam.config import AgentConfig
from stam.errors import WeightsError
from stam.model.agent import Agent, interpolate_positions
from stam.model.teacher import Teacher
from stam.model.vit import VisionTransformer
from stam.scene.grid import Grid, Size
from stam.weights.folder import recorded_patch_grid
from stam.weights.state_dict import (
    Source,
    StateDict,
    load_strictly,
    named,
    outline,
    read_state_dict,
    require_shapes,
    shapes_of,
)

# Hugging Face's names of DeiT's parameters, after the prefix `deit.` or `vit.`
_HUGGING_FACE = [
    (r"embeddings\.cls_token", "cls_token"),
    (r"embeddings\.distillation_token", "dist_token"),
    (r"embeddings\.position_embeddings", "pos_embed"),
    (r"embeddings\.patch_embeddings\.projection\.(\w+)", r"patch_embed.proj.\1"),
    (r"encoder\.layer\.(\d+)\.layernorm_before\.(\w+)", r"blocks.\1.norm1.\2"),
    (r"encoder\.layer\.(\d+)\.layernorm_after\.(\w+)", r"blocks.\1.norm2.\2"),
    (r"encoder\.layer\.(\d+)\.attention\.attention\.(query|key|value)\.(\w+)", r"blocks.\1.attn.\2.\3"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.dense\.(\w+)", r"blocks.\1.attn.proj.\2"),
    (r"encoder\.layer\.(\d+)\.intermediate\.dense\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
    (r"encoder\.layer\.(\d+)\.output\.dense\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
    (r"layernorm\.(\w+)", r"norm.\1"),
    (r"(?:cls_)?classifier\.(\w+)", r"head.\1"),
    (r"distillation_classifier\.(\w+)", r"head_dist.\1"),
]
_UNUSED_BY_CLASSIFIERS = ("pooler.", "embeddings.mask_token")


def _from_hugging_face(state: StateDict, source: str) -> StateDict:
    renamed: StateDict = {}
    for full_name, value in state.items():
        name = re.sub(r"^(deit|vit)\.", "", full_name)
        if name.startswith(_UNUSED_BY_CLASSIFIERS):
            continue
        for pattern, replacement in _HUGGING_FACE:
            if re.fullmatch(pattern, name):
                renamed[re.sub(pattern, replacement, name)] = value
                break
        else:
            raise WeightsError(f"{source} has {full_name!r:.80}, which is not a parameter of DeiT")
    for name in [name for name in renamed if ".attn.query." in name]:
        parts = [renamed.pop(name.replace("query", part), None) for part in ("query", "key", "value")]
        present = [part for part in parts if part is not None and part.ndim > 0]
        if len(present) < 3 or len({part.shape for part in present}) > 1:
            raise WeightsError(f"{source} lacks the key or the value beside '{name}', or one of that shape")
        renamed[name.replace("query", "qkv")] = torch.cat(present)
    return renamed


def read_deit(source: Source) -> StateDict:
    """Reads a DeiT, plain or distilled, in DeiT's, timm's or Hugging Face's naming, into timm's naming.

    Of an agent of ours it reads the core.
    """
    state = read_state_dict(source)
    if "core.cls_token" in state:
        state = {name.removeprefix("core."): value for name, value in state.items() if name[:5] == "core."}
    if any(".attention.attention." in name for name in state):
        state = _from_hugging_face(state, named(source))
    _require_sound(state, named(source))
    return state


# the parameters that the others' shapes follow from, and their numbers of dimensions
_DEFINING = {
    "cls_token": 3,
    "pos_embed": 3,
    "patch_embed.proj.weight": 4,
    "blocks.0.attn.qkv.weight": 2,
    "blocks.0.mlp.fc1.weight": 2,
}


def _require_sound(state: StateDict, source: str) -> None:
    """Raises unless the parameters are those of one DeiT: before a model of their sizes is built.

    Classifiers, and what an agent has beside its core, are looked at by who needs them.
    """
    for name, dimensions in _DEFINING.items():
        if name not in state:
            raise WeightsError(f"{source} is not a DeiT: it lacks '{name}'")
        shape = tuple(state[name].shape)
        if len(shape) != dimensions or 0 in shape:
            raise WeightsError(f"{source} is not a DeiT: '{name}' has the shape {shape}")
    for name in ("head.weight", "head_dist.weight"):
        if name in state and state[name].ndim != 2:
            raise WeightsError(f"{source} is not a DeiT: '{name}' has {state[name].ndim} dimensions")
    settings = core_settings(state, num_heads=1)
    distilled = "dist_token" in state
    num_patches = state["pos_embed"].shape[1] - 1 - distilled
    patch_height, patch_width = state["patch_embed.proj.weight"].shape[2:]
    if num_patches < 1:
        raise WeightsError(f"{source} is not a DeiT: 'pos_embed' has no patch positions")
    expected = outline(
        lambda: VisionTransformer(
            num_classes=1,
            patch_size=(patch_height, patch_width),
            image_patches=(1, num_patches),
            distilled=distilled,
            **settings,
        ),
        source,
    )
    found = shapes_of(state)
    core = {name: shape for name, shape in expected.items() if not name.startswith("head")}
    require_shapes(core, {name: found[name] for name in core if name in found}, source)


def _depth(state: StateDict) -> int:
    numbers = {name.split(".")[1] for name in state if name.startswith("blocks.")}
    depth = next(number for number in itertools.count() if str(number) not in numbers)
    if depth < len(numbers):
        raise WeightsError(f"the blocks of a DeiT are numbered from 0 on: {depth} is missing")
    return depth


def _num_heads(width: int, given: int | None) -> int:
    if given is not None:
        return given
    if width % 64:
        raise WeightsError(f"the number of heads of a core of width {width} is not plain: give num_heads=")
    return width // 64  # every published DeiT has heads of width 64


def heads_like(path: Source, width: int, num_heads: int) -> int | None:
    """Returns the attention heads of a DeiT file: those of a model that is as wide, otherwise not known."""
    return num_heads if read_deit(path)["cls_token"].shape[-1] == width else None


def square_side(count: int, what: str, source: str) -> int:
    """Returns the side of a square grid of so many cells; another count is an error that names `what`."""
    side = math.isqrt(count)
    if side * side != count:
        raise WeightsError(f"{source} has {count} {what}, not a square grid")
    return side


def core_settings(state: StateDict, num_heads: int | None) -> dict[str, Any]:
    """Reads the architecture of a core from its parameters."""
    width = state["cls_token"].shape[-1]
    return {
        "width": width,
        "depth": _depth(state),
        "num_heads": _num_heads(width, num_heads),
        "channels": state["patch_embed.proj.weight"].shape[1],
        "mlp_ratio": state["blocks.0.mlp.fc1.weight"].shape[0] / width,
    }


def _with_distillation(state: StateDict) -> StateDict:
    """Fills the distillation token, its position and its classifier from the class token's."""
    if "dist_token" in state:
        return dict(state)
    filled = dict(state)
    filled["dist_token"] = state["cls_token"].clone()
    positions = state["pos_embed"]
    filled["pos_embed"] = torch.cat((positions[:, :1], positions[:, :1], positions[:, 1:]), dim=1)
    for part in ("weight", "bias"):
        if f"head.{part}" in state:
            filled[f"head_dist.{part}"] = state[f"head.{part}"].clone()
    return filled


def _fit_positions(
    state: StateDict,
    num_readout: int,
    goal: tuple[int, int],
    source: str,
    patch_grid: tuple[int, int] | None = None,
) -> None:
    """Resizes position embeddings to another grid of patches; weights that do not say have a square one."""
    positions = state["pos_embed"]
    if patch_grid is None:
        side = square_side(positions.shape[1] - num_readout, "patch positions", source)
        patch_grid = side, side
    patches = interpolate_positions(positions[:, num_readout:], patch_grid, goal)
    state["pos_embed"] = torch.cat((positions[:, :num_readout], patches), dim=1)


def _fit_classifiers(
    state: StateDict,
    fresh: Mapping[str, Tensor],
    num_classes: int,
    class_indices: Sequence[int] | None,
    source: str,
) -> None:
    """Keeps the classifiers, takes the rows named, or replaces them with fresh ones of another size."""
    for head in ("head", "head_dist"):
        if f"{head}.weight" not in fresh:
            continue
        available = state[f"{head}.weight"].shape[0] if f"{head}.weight" in state else 0
        for name in (f"{head}.weight", f"{head}.bias"):
            if class_indices is not None:
                if len(class_indices) != num_classes:
                    raise WeightsError(
                        f"class_indices names {len(class_indices)} classes, num_classes is {num_classes}"
                    )
                if not all(0 <= index < available for index in class_indices):
                    raise WeightsError(f"class_indices must be below {available}, the classes of {source}")
                if name not in state or len(state[name]) != available:
                    raise WeightsError(f"{source} lacks a '{name}' of {available} classes")
                state[name] = state[name][list(class_indices)]
            elif available != num_classes:
                state[name] = fresh[name].clone()


def read_classifiers(path: Source) -> list[tuple[Tensor, Tensor]]:
    """Returns weight and bias of both classifiers of a DeiT file; nothing where it lacks one.

    The one of a plain DeiT stands for both, as in `load_deit`. An agent of ours has none in this sense: its
    classifiers have learned from glimpses.
    """
    raw = read_state_dict(path)
    if "core.cls_token" in raw:
        return []
    state = _with_distillation(read_deit(raw))
    names = [[f"{head}.weight", f"{head}.bias"] for head in ("head", "head_dist")]
    if any(name not in state for pair in names for name in pair):
        return []
    return [(state[weight].float(), state[bias].float()) for weight, bias in names]


def load_deit(
    path: Source,
    num_classes: int,
    class_indices: Sequence[int] | None = None,
    *,
    image_size: Size = 224,
    glimpse_size: Size = 32,
    num_heads: int | None = None,
    patch_grid: tuple[int, int] | None = None,
    **settings: Any,
) -> Agent:
    """Builds an agent on a pretrained DeiT: the core and classifiers from the file, a fresh actor.

    Args:
        path: A DeiT `.pth`, a timm or a Hugging Face file, plain or distilled; or its state dict.
        num_classes: Classes the agent tells apart. Where the file has another number, the classifiers
            start afresh, unless `class_indices` names rows to keep.
        class_indices: For each class of the agent, its row in the file's classifier.
        image_size: Pixels of a scene; positions are interpolated to another grid of patches.
        glimpse_size: Pixels of a glimpse.
        num_heads: Attention heads; needed only where they are not 64 wide.
        patch_grid: Rows and columns of patches that the file's position embeddings are of; needed only where
            they are not as many and no `config.json` of ours beside the file says so.
        settings: Any other field of `AgentConfig`.
    """
    source = named(path)
    state = read_deit(path)
    patch_height, patch_width = state["patch_embed.proj.weight"].shape[2:]
    config = AgentConfig(
        num_classes=num_classes,
        image_size=image_size,
        glimpse_size=glimpse_size,
        patch_size=(patch_height, patch_width),
        **{**core_settings(state, num_heads), **settings},
    )
    agent = Agent(config)
    state = _with_distillation(state)
    _fit_positions(state, 2, config.grid.image_patches, source, patch_grid or recorded_patch_grid(path))
    _fit_classifiers(state, agent.core.state_dict(), num_classes, class_indices, source)
    load_strictly(agent.core, state, source)
    agent.reset_location_embedding()
    return agent.eval()


def copy_teacher(teacher: Teacher, agent: Agent) -> None:
    """Makes an agent's core and both classifiers those of its teacher.

    Raises:
        WeightsError: The teacher is not a DeiT of the same size.
    """
    if not isinstance(teacher.model, VisionTransformer):
        raise WeightsError(
            "the agent cannot start from this teacher, which is no DeiT: use --no-start-from-teacher"
        )
    state = _with_distillation(teacher.model.state_dict())
    load_strictly(agent.core, {name: value.clone() for name, value in state.items()}, "the teacher")
    agent.reset_location_embedding()


def load_teacher(
    path: Source,
    num_classes: int,
    class_indices: Sequence[int] | None = None,
    *,
    image_size: Size = 224,
    num_heads: int | None = None,
) -> Teacher:
    """Builds a teacher from a DeiT file as it is: distilled or plain.

    Args:
        path: A DeiT `.pth`, a timm or a Hugging Face file; or its state dict.
        num_classes: Classes it must tell apart; another number in the file is an error.
        class_indices: For each class, its row in the file's classifier.
        image_size: Pixels of a scene; positions are interpolated to another grid of patches.
        num_heads: Attention heads; needed only where they are not 64 wide.
    """
    source = named(path)
    state = read_deit(path)
    if "dist_token" in state and "head_dist.weight" not in state:  # Hugging Face has one classifier for both
        for name in ("weight", "bias"):
            if f"head.{name}" in state:
                state = {**state, f"head_dist.{name}": state[f"head.{name}"].clone()}
    found = state["head.weight"].shape[0] if "head.weight" in state else 0
    if class_indices is None and found != num_classes:
        raise WeightsError(
            f"the teacher {source} tells {found} classes apart, the data has {num_classes}: "
            "fine-tune it on the data first (stam teacher)"
        )
    fitted, settings = adapt_deit(
        state,
        num_classes,
        class_indices,
        image_size=image_size,
        num_heads=num_heads,
        patch_grid=recorded_patch_grid(path),
    )
    grid = _patch_grid(state, image_size)
    model = VisionTransformer(
        num_classes=num_classes, patch_size=grid.patch_size, image_patches=grid.image_patches, **settings
    )
    load_strictly(model, fitted, source)
    return Teacher(model, num_classes)


def adapt_deit(
    path: Source,
    num_classes: int,
    class_indices: Sequence[int] | None = None,
    *,
    image_size: Size = 224,
    num_heads: int | None = None,
    patch_grid: tuple[int, int] | None = None,
) -> tuple[StateDict, dict[str, Any]]:
    """Fits a DeiT file, distilled or plain as it is, to other classes and another image size.

    The arguments are those of `load_deit`.

    Returns:
        The parameters, and the settings of the `VisionTransformer` they belong to (but for its geometry).
    """
    source = named(path)
    state = dict(read_deit(path))
    grid = _patch_grid(state, image_size)
    settings = {**core_settings(state, num_heads), "distilled": "dist_token" in state}
    fresh = VisionTransformer(
        num_classes=num_classes, patch_size=grid.patch_size, image_patches=grid.image_patches, **settings
    )
    known = patch_grid or recorded_patch_grid(path)
    _fit_positions(state, fresh.num_readout, grid.image_patches, source, known)
    _fit_classifiers(state, fresh.state_dict(), num_classes, class_indices, source)
    load_strictly(fresh, state, source)
    return state, settings


def _patch_grid(state: StateDict, image_size: Size) -> Grid:
    height, width = state["patch_embed.proj.weight"].shape[2:]
    return Grid(image_size, (height, width), (height, width))
