"""State dicts: reading tensors from a file, and copying them into a module by name.

Nothing is ever unpickled into code: `.safetensors` holds tensors only, and a `.pth` is read by torch's
restricted loader.
"""

import argparse
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from stam.errors import WeightsError
from stam.files import is_text, shown

StateDict = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
Source = str | Path | Mapping[str, Tensor]


def read_state_dict(source: Source) -> StateDict:
    """Reads a file of tensors (`.safetensors`, or what torch saved) with floats as float32."""
    state = dict(source) if isinstance(source, Mapping) else _read_file(Path(source))
    for wrapper in ("model", "state_dict", "model_state_dict"):
        if isinstance(state.get(wrapper), Mapping):
            state = dict(state[wrapper])
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise WeightsError(f"{named(source)} holds no tensors: give a DeiT, timm or STAM weights file")
    for name, value in tensors.items():
        if not isinstance(name, str) or not _is_plain(value):
            raise WeightsError(f"{named(source)} has something else than plain numbers as {str(name)!r:.80}")
    prefix = "module."  # left by torch's data-parallel wrapper
    stripped = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return {
        name: value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        for name, value in stripped.items()
    }


def read_shapes(path: Path) -> Shapes:
    """Reads the shape of every tensor of a `.safetensors` file from its header, and none of the numbers."""
    _require_text(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        raise WeightsError(f"'{path}' is not a weights file or is damaged: {_first_line(error)}") from error


def require_shapes(expected: Mapping[str, tuple[int, ...]], found: Shapes, source: str) -> None:
    """Raises unless tensors have the names and shapes of a model; names the first that does not fit."""
    for name, want in expected.items():
        if name not in found:
            raise WeightsError(f"{source} lacks '{name}': expected shape {want}")
        if found[name] != want:
            raise WeightsError(
                f"{source} does not fit at '{name}': expected shape {want}, found {found[name]}"
            )
    for name, shape in found.items():
        if name not in expected:
            raise WeightsError(f"{source} has {name!r:.80} of shape {shape}, which the model lacks")


def outline(build: Callable[[], nn.Module], source: str) -> Shapes:
    """Returns the shapes of a model's parameters without taking memory for them.

    Args:
        build: Builds the model, on the device that is current.
        source: What says how it is to be built, for an error.
    """
    try:
        with torch.device("meta"):
            return shapes_of(build().state_dict())
    except (RuntimeError, OverflowError, ValueError, TypeError) as error:
        raise WeightsError(f"{source} describes no model: {_first_line(error)}") from error


def shapes_of(state: Mapping[str, Tensor]) -> Shapes:
    """Returns the shape of every tensor."""
    return {name: tuple(value.shape) for name, value in state.items()}


def _is_plain(value: Tensor) -> bool:
    """Tells whether a tensor is dense numbers that are all there: a view can repeat few of them endlessly."""
    numeric = value.is_floating_point() or value.dtype in (torch.int64, torch.int32, torch.uint8, torch.bool)
    dense = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
    return numeric and dense and value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def named(source: Source) -> str:
    """Returns what to call a source of weights in an error."""
    return "the state dict" if isinstance(source, Mapping) else f"'{source}'"


def _require_text(path: Path) -> None:
    if path.suffix == ".safetensors" and not is_text(path):  # that library opens no other
        raise WeightsError(f"the path of the weights '{shown(path)}' is not UTF-8: rename it")


def _read_file(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise WeightsError(f"'{path}' is a folder: give the weights file in it")
    if not path.exists():
        raise WeightsError(f"no weights file '{path}': check the path")
    if not path.is_file():
        raise WeightsError(f"'{path}' is not a regular file: give a weights file")
    _require_text(path)
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        _require_uncompressed(path)
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
    except Exception as error:  # a damaged file makes torch raise nearly anything
        raise WeightsError(f"'{path}' is not a weights file or is damaged: {_first_line(error)}") from error
    if not isinstance(loaded, Mapping):
        raise WeightsError(f"'{path}' holds a {type(loaded).__name__}, not a state dict of tensors")
    return dict(loaded)


def _require_uncompressed(path: Path) -> None:
    """Raises where an archive would unpack to more than it is: torch packs nothing when it saves."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > path.stat().st_size:
            raise ValueError(f"it would unpack to {unpacked} bytes")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def load_strictly(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Copies a state dict into a module; names the first parameter that does not fit, with both shapes."""
    require_shapes(shapes_of(module.state_dict()), shapes_of(state), source)
    for name, value in state.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise WeightsError(f"{source} has values in '{name}' that are not finite: take another file")
    module.load_state_dict(dict(state))
