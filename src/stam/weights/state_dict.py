"""State dicts: reading tensors from a file, and copying them into a module by name.

Nothing is ever unpickled into code: `.safetensors` holds tensors only, and a `.pth` is read by torch's
restricted loader.
"""

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from stam.errors import WeightsError

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
        raise WeightsError(f"{named(source)} holds no tensors: give a DeiT, timm or STAM weights file")
    prefix = "module."  # left by torch's data-parallel wrapper
    stripped = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return {
        name: value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        for name, value in stripped.items()
    }


def named(source: Source) -> str:
    """Returns what to call a source of weights in an error."""
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
        if state[name].is_floating_point() and not torch.isfinite(state[name]).all():
            raise WeightsError(f"{source} has values in '{name}' that are not finite: take another file")
    for name, value in state.items():
        if name not in expected:
            raise WeightsError(f"{source} has '{name}' of shape {tuple(value.shape)}, which the model lacks")
    module.load_state_dict(dict(state))
