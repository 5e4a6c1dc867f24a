"""Reading weights: DeiT in three dialects, the authors' STAM checkpoints, and our own folder.

Nothing is ever unpickled into code: `.safetensors` holds tensors only, and a `.pth` is read by torch's
restricted loader.
"""

import argparse
import hashlib
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from stam.config import AgentConfig, from_plain, to_plain
from stam.errors import StamError, WeightsError, did_you_mean, require_package
from stam.files import save_folder
from stam.model.agent import Agent, interpolate_positions
from stam.model.teacher import Teacher
from stam.model.vit import VisionTransformer
from stam.scene.grid import Grid, Size

FORMAT = "stam-agent"
TEACHER_FORMAT = "stam-teacher"
FORMAT_VERSION = "1.0"
MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"

HASHES_FILE = "hashes.json"  # of the models that ship with the package: name, SHA-256 of its weights
_ASSETS = Path(str(files("stam"))) / "assets"

StateDict = dict[str, Tensor]
Source = str | Path | Mapping[str, Tensor]


def read_state_dict(source: Source) -> StateDict:
    """Reads a file of tensors (`.safetensors`, or what torch saved) with floats as float32."""
    state = dict(source) if isinstance(source, Mapping) else _read_file(Path(source))
    for wrapper in ("model", "state_dict", "model_state_dict"):
        if isinstance(state.get(wrapper), Mapping):
            state = dict(state[wrapper])
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise WeightsError(f"{_named(source)} holds no tensors: give a DeiT, timm or STAM weights file")
    prefix = "module."  # left by torch's data-parallel wrapper
    stripped = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return {
        name: value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        for name, value in stripped.items()
    }


def _named(source: Source) -> str:
    return "the state dict" if isinstance(source, Mapping) else f"'{source}'"


def _read_file(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise WeightsError(f"'{path}' is a folder: give the weights file in it")
    if not path.exists():
        raise WeightsError(f"no weights file '{path}': check the path")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        # argparse.Namespace: the settings that DeiT's own script saves beside the weights; a plain record
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error) or "Weights only load failed" in str(error):
            raise WeightsError(
                f"'{path}' holds more than tensors and is not opened, since unpickling can run code: "
                "save its state dict alone, best as .safetensors"
            ) from error
        raise WeightsError(f"'{path}' is not a weights file or is damaged: {_first_line(error)}") from error
    except (SafetensorError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise WeightsError(f"'{path}' is not a weights file or is damaged: {_first_line(error)}") from error
    if not isinstance(loaded, Mapping):
        raise WeightsError(f"'{path}' holds a {type(loaded).__name__}, not a state dict of tensors")
    return dict(loaded)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def load_strictly(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Copies a state dict into a module; names the first parameter that does not fit, with both shapes."""
    expected = module.state_dict()
    for name, parameter in expected.items():
        want = tuple(parameter.shape)
        if name not in state:
            raise WeightsError(f"{source} lacks '{name}': expected shape {want}")
        found = tuple(state[name].shape)
        if found != want:
            raise WeightsError(f"{source} does not fit at '{name}': expected shape {want}, found {found}")
    for name, value in state.items():
        if name not in expected:
            raise WeightsError(f"{source} has '{name}' of shape {tuple(value.shape)}, which the model lacks")
    module.load_state_dict(dict(state))


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
            raise WeightsError(f"{source} has '{full_name}', which is not a parameter of DeiT")
    for name in [name for name in renamed if ".attn.query." in name]:
        parts = [renamed.pop(name.replace("query", part), None) for part in ("query", "key", "value")]
        if any(part is None for part in parts):
            raise WeightsError(f"{source} lacks the key or the value beside '{name}'")
        renamed[name.replace("query", "qkv")] = torch.cat([part for part in parts if part is not None])
    return renamed


def read_deit(source: Source) -> StateDict:
    """Reads a DeiT, plain or distilled, in DeiT's, timm's or Hugging Face's naming, into timm's naming.

    Of an agent of ours it reads the core.
    """
    state = read_state_dict(source)
    if "core.cls_token" in state:
        state = {name.removeprefix("core."): value for name, value in state.items() if name[:5] == "core."}
    if any(".attention.attention." in name for name in state):
        state = _from_hugging_face(state, _named(source))
    for name in ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight"):
        if name not in state:
            raise WeightsError(f"{_named(source)} is not a DeiT: it lacks '{name}'")
    return state


def _depth(state: StateDict) -> int:
    return 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))


def _num_heads(width: int, given: int | None) -> int:
    if given is not None:
        return given
    if width % 64:
        raise WeightsError(f"the number of heads of a core of width {width} is not plain: give num_heads=")
    return width // 64  # every published DeiT has heads of width 64


def _square_side(count: int, what: str, source: str) -> int:
    side = math.isqrt(count)
    if side * side != count:
        raise WeightsError(f"{source} has {count} {what}, not a square grid")
    return side


def _core_settings(state: StateDict, num_heads: int | None) -> dict[str, Any]:
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


def _fit_positions(state: StateDict, num_readout: int, goal: tuple[int, int], source: str) -> None:
    positions = state["pos_embed"]
    side = _square_side(positions.shape[1] - num_readout, "patch positions", source)
    patches = interpolate_positions(positions[:, num_readout:], (side, side), goal)
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
                state[name] = state[name][list(class_indices)]
            elif available != num_classes:
                state[name] = fresh[name].clone()


def load_deit(
    path: Source,
    num_classes: int,
    class_indices: Sequence[int] | None = None,
    *,
    image_size: Size = 224,
    glimpse_size: Size = 32,
    num_heads: int | None = None,
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
        settings: Any other field of `AgentConfig`.
    """
    source = _named(path)
    state = read_deit(path)
    patch_height, patch_width = state["patch_embed.proj.weight"].shape[2:]
    config = AgentConfig(
        num_classes=num_classes,
        image_size=image_size,
        glimpse_size=glimpse_size,
        patch_size=(patch_height, patch_width),
        **{**_core_settings(state, num_heads), **settings},
    )
    agent = Agent(config)
    state = _with_distillation(state)
    _fit_positions(state, 2, config.grid.image_patches, source)
    _fit_classifiers(state, agent.core.state_dict(), num_classes, class_indices, source)
    load_strictly(agent.core, state, source)
    agent.reset_location_embedding()
    return agent.eval()


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
    source = _named(path)
    state = read_deit(path)
    found = state["head.weight"].shape[0] if "head.weight" in state else 0
    if class_indices is None and found != num_classes:
        raise WeightsError(
            f"the teacher {source} tells {found} classes apart, the data has {num_classes}: "
            "fine-tune it on the data first (stam teacher)"
        )
    fitted, settings = adapt_deit(
        state, num_classes, class_indices, image_size=image_size, num_heads=num_heads
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
) -> tuple[StateDict, dict[str, Any]]:
    """Fits a DeiT file, distilled or plain as it is, to other classes and another image size.

    Returns:
        The parameters, and the settings of the `VisionTransformer` they belong to (but for its geometry).
    """
    source = _named(path)
    state = dict(read_deit(path))
    grid = _patch_grid(state, image_size)
    settings = {**_core_settings(state, num_heads), "distilled": "dist_token" in state}
    fresh = VisionTransformer(
        num_classes=num_classes, patch_size=grid.patch_size, image_patches=grid.image_patches, **settings
    )
    _fit_positions(state, fresh.num_readout, grid.image_patches, source)
    _fit_classifiers(state, fresh.state_dict(), num_classes, class_indices, source)
    load_strictly(fresh, state, source)
    return state, settings


def _patch_grid(state: StateDict, image_size: Size) -> Grid:
    height, width = state["patch_embed.proj.weight"].shape[2:]
    return Grid(image_size, (height, width), (height, width))


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
    source = _named(state_dict)
    state = read_deit(state_dict)
    for name in ("loc_pos_embed", "location_module.fc1.weight", "dist_token"):
        if name not in state:
            raise WeightsError(f"{source} is not a STAM checkpoint of the authors: it lacks '{name}'")
    patch_height, patch_width = state["patch_embed.proj.weight"].shape[2:]
    patch_side = _square_side(state["pos_embed"].shape[1] - 2, "patch positions", source)
    side = _square_side(state["loc_pos_embed"].shape[1], "locations", source)
    image_size = (patch_side * patch_height, patch_side * patch_width)
    config = AgentConfig(
        num_classes=state["head.weight"].shape[0],
        image_size=image_size,
        glimpse_size=(image_size[0] // side, image_size[1] // side),
        patch_size=(patch_height, patch_width),
        actor_width=state["location_module.fc1.weight"].shape[0],
        critic_width=state["critic.fc1.weight"].shape[0] if "critic.fc1.weight" in state else 512,
        **{**_core_settings(state, num_heads), **settings},
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


def save_agent(agent: Agent, folder: str | Path, half: bool = False) -> None:
    """Writes an agent, without its critic, as a folder of `model.safetensors` and `config.json`.

    The folder appears whole or not at all: it is written beside its place and moved there at the end.

    Args:
        agent: The agent to save.
        folder: Where to; an agent that lies there already is replaced.
        half: Whether to store floats in half precision.
    """
    folder = Path(folder)
    if folder.exists() and not is_agent_folder(folder) and any(folder.iterdir()):
        raise StamError(f"'{folder}' is not empty and holds no agent: choose another folder")
    _write_folder(folder, agent, {"format": FORMAT, "agent": to_plain(agent.config)}, half)


def _write_folder(folder: Path, module: nn.Module, record: dict[str, Any], half: bool) -> None:
    state = {
        name: (value.half() if half and value.is_floating_point() else value).detach().cpu().contiguous()
        for name, value in module.state_dict().items()
        if not name.startswith("critic.")
    }
    record = {"format": record.pop("format"), "format_version": FORMAT_VERSION, **record}
    save_folder(folder, {MODEL_FILE: save(state), CONFIG_FILE: json.dumps(record, indent=2) + "\n"})


def save_teacher(model: nn.Module, folder: str | Path, record: Mapping[str, Any], half: bool = False) -> None:
    """Writes a teacher's model as a folder of `model.safetensors` and `config.json`.

    Args:
        model: The model to save.
        folder: Where to.
        record: How to build its model again: `labels`, `image_size`, and `vit` settings or a `timm` name.
        half: Whether to store floats in half precision.
    """
    _write_folder(Path(folder), model, {"format": TEACHER_FORMAT, "teacher": dict(record)}, half)


def load_teacher_folder(folder: str | Path) -> tuple[Teacher, tuple[str, ...]]:
    """Reads a teacher that `save_teacher` wrote; returns it with its class names."""
    folder = Path(folder)
    record = _read_record(folder, TEACHER_FORMAT)["teacher"]
    labels = tuple(record["labels"])
    if "timm" in record:
        timm = require_package("timm", extra="timm")
        model = timm.create_model(record["timm"], num_classes=len(labels), **record.get("timm_settings", {}))
    else:
        sizes = (record["image_size"], record["vit"]["patch_size"])
        image_size, patch_size = (tuple(size) if isinstance(size, list) else size for size in sizes)
        grid = Grid(image_size, patch_size, patch_size)
        settings = {**record["vit"], "patch_size": grid.patch_size, "image_patches": grid.image_patches}
        model = VisionTransformer(num_classes=len(labels), **settings)
    load_strictly(model, read_state_dict(folder / MODEL_FILE), f"'{folder / MODEL_FILE}'")
    return Teacher(model, len(labels)), labels


def is_agent_folder(folder: Path) -> bool:
    """Tells whether a folder holds a saved agent."""
    return (folder / CONFIG_FILE).is_file() and (folder / MODEL_FILE).is_file()


def _read_record(folder: Path, expected_format: str) -> dict[str, Any]:
    if not is_agent_folder(folder):
        raise WeightsError(f"'{folder}' is not a saved model: it needs {MODEL_FILE} and {CONFIG_FILE}")
    file = folder / CONFIG_FILE
    try:
        record = json.loads(file.read_text())
        found, version = record["format"], str(record["format_version"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise WeightsError(f"'{file}' is not a configuration of ours: {error!r}") from error
    if found != expected_format:
        raise WeightsError(f"'{folder}' is a {found}, not a {expected_format}")
    if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise WeightsError(
            f"'{folder}' has format {version}, this version reads {FORMAT_VERSION}: upgrade stam-vision"
        )
    return record


def load_agent(folder: str | Path) -> Agent:
    """Reads an agent that `save_agent` wrote."""
    folder = Path(folder)
    agent = Agent(from_plain(AgentConfig, _read_record(folder, FORMAT)["agent"]))
    load_strictly(agent, read_state_dict(folder / MODEL_FILE), f"'{folder / MODEL_FILE}'")
    return agent.eval()


def package_folder(name: str) -> Path:
    """Returns the folder of a model that ships with the package, and checks that it is as it was shipped."""
    if name not in package_names():
        raise WeightsError(f"the package has no model '{name}': {did_you_mean(name, package_names())}")
    folder = _ASSETS / name
    recorded = json.loads((_ASSETS / HASHES_FILE).read_text()).get(name)
    if hashlib.sha256((folder / MODEL_FILE).read_bytes()).hexdigest() != recorded:
        raise WeightsError(f"the model '{name}' is not as it was shipped: install stam-vision again")
    return folder


def package_names() -> list[str]:
    """Returns the names of the models that ship with the package."""
    return sorted(path.name for path in _ASSETS.iterdir() if is_agent_folder(path))


def load(path: str | Path) -> Agent:
    """Loads an agent in evaluation mode.

    Args:
        path: A run folder (its best checkpoint is taken), a weights folder, or the name of an agent that
            ships with the package, such as `digits`.
    """
    folder = Path(path)
    if not folder.exists():
        if str(path) not in package_names():
            known = ", ".join(package_names())
            raise WeightsError(
                f"no agent at '{folder}': give a run folder, a weights folder, or one of {known}"
            )
        folder = package_folder(str(path))
    for candidate in (folder, folder / "best", folder / "last"):
        if is_agent_folder(candidate):
            return load_agent(candidate)
    raise WeightsError(
        f"'{folder}' holds no agent: expected {MODEL_FILE} and {CONFIG_FILE} in it, in best/ or in last/"
    )
