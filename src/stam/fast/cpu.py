"""Linear layers whose weights are packed once for a CPU, for as long as an agent looks.

For the few rows of a single look, half of a matrix product is the library rearranging the weights before it
multiplies, every time anew. oneDNN takes them rearranged once. Where it cannot be had (another processor, a
build of torch without it), nothing changes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.fast import kernels
from stam.shapes import Float

_LEAST = 100_000  # weights: for smaller layers calling oneDNN takes longer than it saves
_ROWS = 64  # oneDNN lays weights out for a number of rows; this one serves 1 to some hundred


class Linear(nn.Linear):
    """A linear layer that computes with packed weights while it holds them.

    Attributes:
        packed: The weights, packed.
        packed_with_norm: Instead of them, where a batch norm comes next: weights and a bias that include it.
    """

    packed: Tensor | None = None
    packed_with_norm: tuple[Tensor, Tensor] | None = None
    _norm: tuple[nn.BatchNorm1d, ...] = ()

    def comes_before(self, norm: nn.BatchNorm1d) -> None:
        """Says which norm takes what this layer gives: packed, they are one product."""
        self._norm = (norm,)  # in a tuple: it is no part of this module

    def norm_to_include(self) -> nn.BatchNorm1d | None:
        """Returns the norm that packed weights include: one that nobody is training."""
        return next((norm for norm in self._norm if not norm.training), None)

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
            from stam.fast.kernels.gelu import linear_gelu

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
        return _multiply(x, packed, self.bias, then)


def multiply_and_rectify(
    x: Float[Tensor, "*rows features"], packed: tuple[Tensor, Tensor]
) -> Float[Tensor, "*rows outputs"]:
    """Returns ReLU(x W' + b), for packed weights and a bias."""
    return _multiply(x, *packed, "relu")


def _multiply(x: Tensor, packed: Tensor, bias: Tensor, then: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, then, [], "none")


def scale_and_shift(norm: nn.BatchNorm1d) -> tuple[Float[Tensor, " features"], Float[Tensor, " features"]]:
    """Returns what a batch norm that is not trained does: it multiplies by the first and adds the second."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return scale, norm.bias - norm.running_mean * scale


class PackedWeights:
    """Keeps the packed weights of a module's linear layers, and packs again those that have changed."""

    def __init__(self, module: nn.Module, least: int = _LEAST) -> None:
        """Takes a module, and the least number of weights for which a layer is packed."""
        layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
        self._layers = [layer for layer in layers if layer.weight.numel() >= least]
        self._kept: dict[int, tuple[tuple[int, ...], Any]] = {}

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
            norm = layer.norm_to_include()
            if norm is None:
                layer.packed = self._keep(index, (layer.weight,), partial(_pack, layer.weight))
            else:
                layer.packed_with_norm = self._packed_with_norm(index, layer, norm)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.packed = layer.packed_with_norm = None

    def forget(self) -> None:
        """Packs all anew when next in use.

        What changes weights may leave no trace by which to notice it: a fused optimiser on a CPU does not.
        """
        self._kept = {}

    def _can_pack(self) -> bool:
        if not self._layers or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        weight = self._layers[0].weight
        plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.is_inference()
        tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
        return plain and not tracing and torch.backends.mkldnn.is_available() and _has_operations()

    def _packed_with_norm(self, index: int, layer: Linear, norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
        def pack() -> tuple[Tensor, Tensor]:
            scale, shift = scale_and_shift(norm)
            return _pack(layer.weight * scale[:, None]), layer.bias * scale + shift

        used = (*layer.parameters(), *norm.parameters(), *norm.buffers())
        return self._keep(index, used, pack)

    def _keep(self, index: int, used: tuple[Tensor, ...], pack: Callable[[], Any]) -> Any:
        """Returns what was packed of a layer, anew where one of the tensors it was made of has changed."""
        state = tuple(number for tensor in used for number in (tensor.data_ptr(), tensor._version))
        kept = self._kept.get(index)
        if kept is None or kept[0] != state:
            kept = state, pack()
            self._kept[index] = kept
        return kept[1]


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)


def _has_operations() -> bool:
    return all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
