"""Cropping, resizing, shifting and rotating a batch of images, as PIL does it image by image.

Resizing filters with Keys' cubic, a = -1/2, widened by the factor of a reduction (antialiasing), first along
the rows, then along the columns, and rounds to whole grey levels after each. Shifting and rotating
interpolate between neighbours, bilinearly or with Keys' cubic, a = -1, and round down.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stam.errors import require
from stam.scene.grid import Size, as_pair
from stam.scene.pixels import to_device
from stam.shapes import Bool, Int, UInt8

_DENSE_BYTES = 1 << 28  # room for a batch in floating point; a larger one is done in parts


def resample(
    images: UInt8[Tensor, "batch 3 max_height max_width"],
    boxes: Int[Tensor, "batch 4"],
    out_size: Size,
    flips: Bool[Tensor, "batch 2"] | None = None,
) -> UInt8[Tensor, "batch 3 height width"]:
    """Cuts a box from each image and resizes it: PIL's `image.crop(box).resize(out_size, BICUBIC)`.

    Pixels outside the box have no influence. The result is within one grey level of PIL's; within two in
    isolated pixels, where the rounding between rows and columns tips over.

    Args:
        images: On any device.
        boxes: Top, left, height and width of each box, on the host.
        out_size: Size of the result, one number or (height, width).
        flips: Which results to turn upside down and which to mirror, on the host.
    """
    resized = torch.tensor(as_pair("out_size", out_size)).expand(len(boxes), 2)  # (B, 2)
    return _carry_out(_Plan(boxes, resized, torch.zeros_like(resized), flips), images, out_size)


def resize_and_centre_crop(
    images: UInt8[Tensor, "batch 3 max_height max_width"],
    sizes: Int[Tensor, "batch 2"],
    resize_size: Size,
    image_size: Size,
    flips: Bool[Tensor, "batch 2"] | None = None,
) -> UInt8[Tensor, "batch 3 height width"]:
    """Resizes each image until it just covers `resize_size`, its aspect kept, then keeps the centre.

    With one number for `resize_size` that is the length of the shorter side. As near to PIL as `resample`.

    Args:
        images: Each in the upper left corner of its frame, on any device.
        sizes: Each image's own height and width, on the host.
        resize_size: What the resized image covers, one number or (height, width); at least `image_size`.
        image_size: Size of the result, one number or (height, width).
        flips: Which results to turn upside down and which to mirror, on the host.
    """
    cover = torch.tensor(as_pair("resize_size", resize_size))
    keep = torch.tensor(as_pair("image_size", image_size))
    is_covered = bool((cover >= keep).all())
    require(is_covered, f"resize_size {resize_size} must not be below image_size {image_size}")
    sizes = sizes.cpu().long()  # (B, 2)
    by_height, by_width = cover[0] * sizes // sizes[:, :1], cover[1] * sizes // sizes[:, 1:]  # (B, 2) each
    is_wide = sizes[:, 1:] * cover[0] >= sizes[:, :1] * cover[1]  # (B, 1)
    resized = torch.where(is_wide, by_height, by_width)  # (B, 2)
    offset = ((resized - keep) / 2).round().long()  # (B, 2)
    whole = torch.cat([torch.zeros_like(sizes), sizes], dim=1)  # (B, 4)
    return _carry_out(_Plan(whole, resized, offset, flips), images, image_size)


def move_rows(images: Tensor, distances: Tensor, bicubic: Tensor, fill: Tensor) -> Tensor:
    """Moves each row of each image left: 4 taps, where a general transform takes 16.

    Args:
        images: uint8 (n, 3, H, W).
        distances: Pixels, (n, H).
        bicubic: How to interpolate each image, (n,): 1 bicubically, 0 bilinearly.
        fill: Colour of what comes in from outside, (3, 1, 1).
    """
    width = images.shape[3]
    distances = distances[:, None, :, None]  # (n, 1, H, 1)
    start, between = _split(distances)
    window = torch.arange(-1, width + 2, device=images.device)  # one more tap on the left, two on the right
    source = (window + start).clamp(0, width - 1)  # (n, 1, H, W + 3)
    pixels = images.gather(3, source.expand(-1, 3, -1, -1)).float()
    total = torch.zeros(images.shape, device=images.device)
    for tap, weight in enumerate(_taps(between, bicubic[:, None, None, None])):
        total.addcmul_(pixels[..., tap : tap + width], weight)
    source_x = torch.arange(width, device=images.device) + 0.5 + distances  # (n, 1, H, W)
    return _fill_outside(total, (source_x >= 0) & (source_x < width), fill)


def rotate_about_centre(images: Tensor, degrees: Tensor, bicubic: Tensor, fill: Tensor) -> Tensor:
    """Rotates each image counter-clockwise.

    Args:
        images: uint8 (n, 3, H, W).
        degrees: Angles, (n,).
        bicubic: How to interpolate each image, (n,): 1 bicubically, 0 bilinearly.
        fill: Colour of what comes in from outside, (3, 1, 1).
    """
    height, width = images.shape[2:]
    angle = (degrees * (torch.pi / 180))[:, None, None]  # (n, 1, 1)
    x = torch.arange(width, device=images.device) + 0.5 - width / 2  # (W,)
    y = (torch.arange(height, device=images.device) + 0.5 - height / 2)[:, None]  # (H, 1)
    source_x = angle.cos() * x - angle.sin() * y + width / 2  # (n, H, W)
    source_y = angle.sin() * x + angle.cos() * y + height / 2  # (n, H, W)
    left, across = _split(source_x - 0.5)
    top, down = _split(source_y - 0.5)
    # With its edges repeated twice all around, an image has every tap at the same distance from the first.
    stride = width + 4
    padded = F.pad(images.float(), (2, 2, 2, 2), mode="replicate").flatten(2)  # (n, 3, (H + 4) stride)
    first = (top.clamp(-1, height - 1) + 1) * stride + left.clamp(-1, width - 1) + 1  # (n, H, W)
    first = first.flatten(1)[:, None].expand(-1, 3, -1)  # (n, 3, H W)
    taps_x, taps_y = (_taps(between, bicubic[:, None, None]) for between in (across, down))
    total = torch.zeros(images.shape, device=images.device)
    for row, weight_y in enumerate(taps_y):
        for column, weight_x in enumerate(taps_x):
            pixels = padded[..., row * stride + column :].gather(2, first).view_as(images)
            total.addcmul_(pixels, (weight_y * weight_x)[:, None])
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    return _fill_outside(total, inside[:, None], fill)


def to_bytes(pixels: Tensor) -> Tensor:
    """Rounds grey levels down and clips them to 0..255, in place as far as possible."""
    return pixels.clamp_(0, 255).short().byte()  # straight to bytes takes a CPU four times as long


@dataclass(frozen=True)
class _Plan:
    """Which part of each image to cut, to what size to bring it, and where the window to keep begins."""

    boxes: Tensor  # (B, 4) top, left, height, width
    resized: Tensor  # (B, 2) height, width
    offset: Tensor  # (B, 2) top, left
    flips: Tensor | None  # (B, 2) vertical, horizontal

    def part(self, part: slice) -> "_Plan":
        flips = None if self.flips is None else self.flips[part]
        return _Plan(self.boxes[part], self.resized[part], self.offset[part], flips)


def _carry_out(plan: _Plan, images: Tensor, out_size: Size) -> Tensor:
    out_size = as_pair("out_size", out_size)
    # A CPU does best with the few taps that matter, a GPU with matrix products that hold mostly zeros.
    if images.device.type == "cpu":
        return _resample_each(plan, images, out_size)
    dtype = torch.half if images.device.type == "cuda" else torch.float
    return _resample_dense(plan, images, out_size, dtype)


def _resample_each(plan: _Plan, images: Tensor, out_size: tuple[int, int]) -> Tensor:
    result = images.new_empty((*images.shape[:2], *out_size))
    height, width = out_size
    # The resizing is faster from memory without gaps; of the two layouts, keep the one that is there.
    layout = torch.contiguous_format if images.is_contiguous() else torch.channels_last
    flips_or_none = [(False, False)] * len(images) if plan.flips is None else plan.flips.tolist()
    numbers = (plan.boxes.tolist(), plan.resized.tolist(), plan.offset.tolist(), flips_or_none)
    for index, (box, resized, (down, right), flips) in enumerate(zip(*numbers, strict=True)):
        top, left, rows, columns = box
        crop = images[index : index + 1, :, top : top + rows, left : left + columns]
        crop = crop.contiguous(memory_format=layout)
        crop = F.interpolate(crop, size=resized, mode="bicubic", antialias=True)[0]
        crop = crop[:, down : down + height, right : right + width]  # (3, H, W)
        result[index] = crop.flip([axis + 1 for axis in (0, 1) if flips[axis]]) if any(flips) else crop
    return result


def _resample_dense(plan: _Plan, images: Tensor, out_size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    part_size = max(1, _DENSE_BYTES // (images[0].numel() * dtype.itemsize))
    parts = [slice(start, start + part_size) for start in range(0, len(images), part_size)]
    return torch.cat([_multiply(plan.part(part), images[part], out_size, dtype) for part in parts])


def _multiply(plan: _Plan, images: Tensor, out_size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    # Half precision holds 0..255 exactly and a weight to 2^-11, an error of at most about 0.2 grey levels.
    across = _axis_weights(plan, 1, images, out_size[1]).to(dtype)  # (B, W, Wmax)
    down = _axis_weights(plan, 0, images, out_size[0]).to(dtype)  # (B, H, Hmax)
    pixels = images.to(dtype, memory_format=torch.contiguous_format)  # (B, 3, Hmax, Wmax)
    pixels = pixels.flatten(1, 2) @ across.mT  # (B, 3 Hmax, W)
    pixels = pixels.round_().clamp_(0, 255).unflatten(1, images.shape[1:3])  # (B, 3, Hmax, W)
    pixels = down[:, None] @ pixels  # (B, 3, H, W)
    return pixels.round_().clamp_(0, 255).byte()


def _axis_weights(plan: _Plan, axis: int, images: Tensor, out_length: int) -> Tensor:
    """What each source pixel along one axis (0: down, 1: across) gives to each output pixel: (B, out, in)."""
    device = images.device
    flips = torch.zeros_like(plan.offset) if plan.flips is None else plan.flips
    numbers = [plan.boxes[:, :2], plan.boxes[:, 2:], plan.resized, plan.offset, flips]  # (B, 2) each
    on_axis = torch.stack([number[:, axis].float() for number in numbers])[..., None, None]
    start, length, resized, offset, flipped = to_device(on_axis, device)  # (B, 1, 1) each
    outputs = torch.arange(out_length, device=device)[:, None]  # (out, 1)
    outputs = torch.where(flipped > 0, out_length - 1 - outputs, outputs)  # (B, out, 1)
    scale = length / resized
    centre = start + (offset + outputs + 0.5) * scale  # (B, out, 1)
    inputs = torch.arange(images.shape[axis + 2], device=device) + 0.5  # (in,)
    weights = _keys_cubic((inputs - centre).abs() / scale.clamp(min=1))  # (B, out, in)
    weights *= (inputs > start) & (inputs < start + length)
    return weights / weights.sum(dim=2, keepdim=True)


def _keys_cubic(distance: Tensor) -> Tensor:
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0))


def _split(position: Tensor) -> tuple[Tensor, Tensor]:
    whole = position.floor()
    return whole.long(), position - whole


def _taps(between: Tensor, bicubic: Tensor) -> list[Tensor]:
    """Weights of the 4 pixels around a place `between` the middle two, all of the same shape."""
    rest = 1 - between
    left, right = bicubic * between * rest**2, bicubic * rest * between**2  # what cubic adds to linear
    return [-left, rest + left, between + right, -right]


def _fill_outside(pixels: Tensor, inside: Tensor, fill: Tensor) -> Tensor:
    return to_bytes(pixels.mul_(inside).add_(fill * ~inside))  # `torch.where` is slow on a CPU
