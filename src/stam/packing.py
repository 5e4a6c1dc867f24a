"""Linear layers whose weights are packed once for a CPU, for as long as an agent looks.

For the few rows of a single look, half of a matrix product is the library rearranging the weights before it
multiplies, every time anew. oneDNN takes them rearranged once. Where it cannot be had (another processor, a
build of torch without it), nothing changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam import kernels
from stam.shapes import Float

_LEAST = 100_000  # weights: for smaller layers calling oneDNN takes longer than it saves
_ROWS = 64  # oneDNN lays weights out for a number of rows; this one serves 1 to some hundred


class Linear(nn.Linear):
    """A linear layer that computes with packed weights while it holds them."""

    packed: Tensor | None = None

    def forward(self, x: Float[Tensor, "*rows features"]) -> Float[Tensor, "*rows outputs"]:
        """Returns x W' + b."""
        packed = self.packed  # read once: another thread may be done with it
        return super().forward(x) if packed is None else self._multiply(x, packed, "none")

    def with_gelu(self, x: Float[Tensor, "*rows features"]) -> Float[Tensor, "*rows outputs"]:
        """Returns GELU(x W' + b); packed, or by a kernel of ours, in one pass."""
        packed = self.packed
        if packed is not None:
            return self._multiply(x, packed, "gelu")
        if kernels.usable(x) and not torch.is_grad_enabled():
            from stam.kernels.gelu import linear_gelu

            return linear_gelu(x, self.weight, self.bias)
        return F.gelu(super().forward(x))

    def added_to(
        self, total: Float[Tensor, "*rows outputs"], x: Float[Tensor, "*rows features"]
    ) -> Float[Tensor, "*rows outputs"]:
        """Returns total + x W' + b; packed, in one pass."""
        packed = self.packed
        if packed is None:
            return total + super().forward(x)
        return torch.ops.mkldnn._linear_pointwise.binary(x, total.contiguous(), packed, self.bias, "add")

    def _multiply(self, x: Tensor, packed: Tensor, then: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, self.bias, then, [], "none")


class PackedWeights:
    """Keeps the packed weights of a module's linear layers, and packs again those that have changed."""

    def __init__(self, module: nn.Module, least: int = _LEAST) -> None:
        """Takes a module, and the least number of weights for which a layer is packed."""
        layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
        self._layers = [layer for layer in layers if layer.weight.numel() >= least]
        self._kept: dict[int, tuple[tuple[int, int], Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy packs for itself: packed weights cannot be copied."""
        return {"_layers": self._layers, "_kept": {}}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within it, the layers compute with packed weights, where that is possible and worth it."""
        if not self._can_pack():
            yield
            return
        for index, layer in enumerate(self._layers):
            layer.packed = self._packed(index, layer.weight)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.packed = None

    def _can_pack(self) -> bool:
        if not self._layers or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        weight = self._layers[0].weight
        plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.is_inference()
        tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
        return plain and not tracing and torch.backends.mkldnn.is_available() and _has_operations()

    def _packed(self, index: int, weight: Tensor) -> Tensor:
        state = (weight.data_ptr(), weight._version)
        kept = self._kept.get(index)
        if kept is None or kept[0] != state:
            kept = state, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
            self._kept[index] = kept
        return kept[1]


def _has_operations() -> bool:
    return all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
