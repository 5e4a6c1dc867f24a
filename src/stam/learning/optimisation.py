"""The optimiser, and the device and precision a run uses."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stam.errors import ConfigError


def parameter_groups(
    modules: Mapping[str, Iterable[tuple[str, nn.Parameter]]], weight_decay: float
) -> list[dict[str, Any]]:
    """Returns AdamW's groups: each part twice: with weight decay, and for vectors such as biases without."""
    groups = []
    for name, parameters in modules.items():
        trained = [parameter for _, parameter in parameters if parameter.requires_grad]
        for decay, wanted in ((weight_decay, lambda p: p.ndim > 1), (0.0, lambda p: p.ndim <= 1)):
            chosen = [parameter for parameter in trained if wanted(parameter)]
            if chosen:
                groups.append({"params": chosen, "weight_decay": decay, "part": name, "lr": 0.0})
    return groups


def make_optimiser(
    modules: Mapping[str, Iterable[tuple[str, nn.Parameter]]],
    weight_decay: float,
    rates: Mapping[str, Tensor],
) -> torch.optim.AdamW:
    """Returns AdamW over named parts; the learning rate of each is a tensor, to be changed in place."""
    groups = parameter_groups(modules, weight_decay)
    for group in groups:
        group["lr"] = rates[group["part"]]
    return torch.optim.AdamW(groups, fused=True, capturable=_on_gpu(rates))


def restore_optimiser(
    optimiser: torch.optim.Optimizer, state: dict[str, Any], rates: Mapping[str, Tensor]
) -> None:
    """Goes back to a saved state of the optimiser, with the learning rates that are changed in place."""
    optimiser.load_state_dict(state)
    for group in optimiser.param_groups:
        group["lr"], group["capturable"] = rates[group["part"]], _on_gpu(rates)


@torch.no_grad()
def reset_state(optimiser: torch.optim.Optimizer) -> None:
    """Makes an optimiser forget the gradients of the past, in place: a CUDA graph may hold its state."""
    for state in optimiser.state.values():
        for value in state.values():
            value.zero_()


def gradients(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the gradients an optimiser is about to use."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _on_gpu(rates: Mapping[str, Tensor]) -> bool:
    return all(rate.device.type == "cuda" for rate in rates.values())


def choose_device(name: str) -> torch.device:
    """Returns the device meant; one that is not there is an error."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device '{name}' is unknown: use auto, cpu, cuda or cuda:0") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ConfigError(f"device '{name}' is not there, {found} GPUs were found: use --device cpu")
    return device


def is_half(device: torch.device, precision: str) -> bool:
    """Tells whether the transformer is computed in bfloat16."""
    return precision == "bfloat16" or (precision == "auto" and device.type == "cuda")


@contextmanager
def autocast(device: torch.device, precision: str) -> Iterator[None]:
    """Within it the transformer is computed in that precision.

    On a GPU attention is not computed by cuDNN, which plans anew for every number of tokens: an episode has
    one a glimpse. On a CPU in half precision it is computed by matrix products, which the processor has
    instructions for: the fused kernel takes more than twice as long there.
    """
    half = is_half(device, precision)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half), _attention(device, half):
        yield


@contextmanager
def _attention(device: torch.device, half: bool) -> Iterator[None]:
    if device.type == "cuda":
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
    elif half:
        allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # of a CPU too, or it works in float32
        try:
            with sdpa_kernel([SDPBackend.MATH]):
                yield
        finally:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)
    else:
        yield
