"""Around a step of early exit: glimpses are cut, and what is believed of their scenes is noted."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stam.fast.kernels.launching import padded
from stam.fast.kernels.losses import softmax_of
from stam.scene.grid import Grid


@triton.jit(do_not_specialize=["first", "longest", "tokens"])
def _cut_patches(
    images, scenes, locations, table, patches, positions, first, longest, tokens,
    channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr, columns: tl.constexpr,
    glimpse_height: tl.constexpr, glimpse_width: tl.constexpr, each: tl.constexpr, across: tl.constexpr,
    patch_height: tl.constexpr, patch_width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Cuts one patch of one glimpse of one scene."""
    row, token = tl.program_id(0), tl.program_id(1)
    scene = tl.load(scenes + row)
    location = tl.load(locations + scene * longest + first + token // each)
    patch = token % each
    top = location // columns * glimpse_height + patch // across * patch_height
    left = location % columns * glimpse_width + patch % across * patch_width
    pixel = tl.arange(0, block)
    inside = pixel < channels * patch_height * patch_width
    channel, within = pixel // (patch_height * patch_width), pixel % (patch_height * patch_width)
    y, x = within // patch_width, within % patch_width
    source = ((scene * channels + channel) * height + top + y) * width + left + x
    place = row.to(tl.int64) * tokens + token
    values = tl.load(images + source, mask=inside, other=0.0)
    tl.store(patches + place * channels * patch_height * patch_width + pixel, values, mask=inside)
    tl.store(positions + place, tl.load(table + location * each + patch))


def cut_patches(
    grid: Grid, images: Tensor, scenes: Tensor, locations: Tensor, positions: Tensor, glimpses: slice
) -> tuple[Tensor, Tensor]:
    """Returns the patches (B, tokens, pixels) of some glimpses of some scenes, and their positions.

    Args:
        grid: Where glimpses and patches lie.
        images: All scenes.
        scenes: Those to cut from, (B,).
        locations: Where all scenes were looked at, (scenes, glimpses).
        positions: Of the patches of a glimpse at each location, (locations, patches).
        glimpses: Which glimpses to cut.
    """
    (rows, across), (height, width) = grid.glimpse_patches, grid.patch_size
    channels, each = images.shape[1], rows * across
    tokens, pixels = (glimpses.stop - glimpses.start) * each, channels * height * width
    patches = images.new_empty(len(scenes), tokens, pixels)
    found = torch.empty((len(scenes), tokens), dtype=torch.long, device=images.device)
    _cut_patches[(len(scenes), tokens)](
        images, scenes, locations, positions, patches, found, glimpses.start, locations.shape[1], tokens,
        channels, *images.shape[2:], grid.columns, *grid.glimpse_size, each, across, height, width,
        padded(pixels), num_warps=1,
    )  # fmt: skip
    return patches, found


@triton.jit(do_not_specialize=["count", "longest"])
def _note(
    one, other, scenes, locations, threshold, probabilities, counts, is_done, seen,
    temperature, count, longest,
    classes: tl.constexpr, class_block: tl.constexpr, places: tl.constexpr, place_block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scene = tl.load(scenes + row)
    column = tl.arange(0, class_block)
    inside = column < classes
    mean = softmax_of(one, row, column, inside, classes, temperature)
    mean = (mean + softmax_of(other, row, column, inside, classes, temperature)) * 0.5
    tl.store(probabilities + scene * classes + column, mean, mask=inside)
    tl.store(counts + scene, count)
    tl.store(is_done + scene, (tl.max(mean, 0) > tl.load(threshold)).to(tl.uint8))
    place = tl.arange(0, place_block)
    was_seen = place < 0
    for number in range(count):
        was_seen |= tl.load(locations + scene * longest + number) == place
    tl.store(seen + row * places + place, was_seen.to(tl.uint8), mask=place < places)


def note(
    logits: tuple[Tensor, Tensor], scenes: Tensor, locations: Tensor, threshold: Tensor, temperature: float,
    count: int, num_locations: int, probabilities: Tensor, counts: Tensor, is_done: Tensor,
) -> Tensor:  # fmt: skip
    """Notes what is believed of some scenes; returns which locations each of them has seen, (B, locations).

    Args:
        logits: Of the two classifiers, (B, classes) each.
        scenes: Which scenes these are, (B,).
        locations: Where all scenes were looked at, (scenes, glimpses).
        threshold: A single number; a scene whose largest probability is above it is done.
        temperature: Divides the logits.
        count: Glimpses that were taken.
        num_locations: Locations of a scene.
        probabilities: (scenes, classes); the mean of both softmaxes is written there.
        counts: (scenes,); `count` is written there.
        is_done: (scenes,).
    """
    one, other = (part.contiguous() for part in logits)
    classes = one.shape[1]
    seen = torch.empty((len(scenes), num_locations), dtype=torch.bool, device=scenes.device)
    _note[(len(scenes),)](
        one, other, scenes, locations, threshold, probabilities, counts, is_done.view(torch.uint8),
        seen.view(torch.uint8), temperature, count, locations.shape[1],
        classes, padded(classes), num_locations, padded(num_locations), num_warps=1 if classes <= 256 else 4,
    )  # fmt: skip
    return seen
