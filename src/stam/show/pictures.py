"""Pictures of an agent looking: a strip of frames, and an animation. Pillow is all they need."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from stam.errors import StamError
from stam.files import save_content
from stam.scene.grid import Grid
from stam.shapes import UInt8

PAPER = (247, 245, 240)
INK = (29, 28, 36)
SOFT = (93, 90, 104)
COVER = (217, 212, 200)
COVER_EDGE = (203, 197, 183)
ACCENT = (67, 56, 202)
TRACK = (226, 222, 213)

_TILE = 168  # pixels of a frame's longer side in a strip
_STAGE = 448  # and in an animation
_GAP = 14


@dataclass(frozen=True)
class Story:
    """What an agent looked at in one scene, and what it said after each glimpse.

    Attributes:
        name: What to call the scene.
        image: The whole scene; only what was looked at is drawn.
        grid: Where glimpses lie.
        locations: Grid index of each glimpse.
        labels: The label it held most likely after each.
        confidences: How sure it was.
    """

    name: str
    image: UInt8[np.ndarray, "height width 3"]
    grid: Grid
    locations: Sequence[int]
    labels: Sequence[str]
    confidences: Sequence[float]


def draw_frame(story: Story, num_glimpses: int, longer_side: int = _TILE) -> Image.Image:
    """Draws the covered scene with the first glimpses uncovered and the latest framed."""
    height, width = story.grid.image_size
    scale = longer_side / max(height, width)
    size = round(width * scale), round(height * scale)
    sampling = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.BICUBIC
    scene = Image.fromarray(story.image).resize(size, sampling)
    frame = Image.new("RGB", size, COVER)
    draw = ImageDraw.Draw(frame)
    seen = list(story.locations[:num_glimpses])
    for location in range(story.grid.num_locations):
        box = _scaled_box(story.grid, location, scale)
        if location in seen:
            frame.paste(scene.crop(box), box[:2])
        else:
            draw.rectangle((box[0], box[1], box[2] - 1, box[3] - 1), outline=COVER_EDGE)
    if seen:
        left, top, right, bottom = _scaled_box(story.grid, seen[-1], scale)
        line = max(2, round(longer_side / 80))
        draw.rectangle((left, top, right - 1, bottom - 1), outline=ACCENT, width=line)
    return frame


def _scaled_box(grid: Grid, location: int, scale: float) -> tuple[int, int, int, int]:
    top, left, bottom, right = grid.pixel_box(location)
    return round(left * scale), round(top * scale), round(right * scale), round(bottom * scale)


def _write(
    draw: ImageDraw.ImageDraw,
    place: tuple[float, float],
    words: str,
    size: int,
    colour: tuple[int, int, int] = INK,
    width: int | None = None,
    anchor: str = "la",
) -> None:
    """Writes a line of text, shortened in the middle where it would be wider than `width`."""
    font = ImageFont.load_default(size)
    shown, kept = words, len(words)
    while width is not None and font.getlength(shown) > width and kept > 4:
        kept -= 1
        shown = f"{words[: kept - kept // 2]}…{words[len(words) - kept // 2 :]}"
    draw.text(place, shown, fill=colour, font=font, anchor=anchor)


def strip_counts(total: int, most: int = 8) -> list[int]:
    """Returns which counts of glimpses a strip shows: all, or the first ones and then ever larger steps."""
    if total <= most:
        return list(range(1, total + 1))
    spread = np.unique(np.round(np.geomspace(1, total, most)).astype(int)).tolist()
    missing = [count for count in range(1, total) if count not in spread]
    return sorted(spread + missing[: most - len(spread)])


def draw_strip(stories: Sequence[Story], most_frames: int = 8) -> Image.Image:
    """Draws one row of frames for each scene, each with what the agent said by then."""
    rows = [_draw_row(story, most_frames) for story in stories]
    width = max(row.width for row in rows)
    strip = Image.new("RGB", (width, sum(row.height for row in rows)), PAPER)
    top = 0
    for row in rows:
        strip.paste(row, (0, top))
        top += row.height
    return strip


def _draw_row(story: Story, most_frames: int) -> Image.Image:
    counts = strip_counts(len(story.locations), most_frames)
    frames = [draw_frame(story, count) for count in counts]
    width, height = frames[0].size
    row = Image.new("RGB", (_GAP + max(3, len(frames)) * (width + _GAP), height + 34 + 46 + _GAP), PAPER)
    draw = ImageDraw.Draw(row)
    share = len(story.locations) / story.grid.num_locations
    _write(draw, (_GAP, 9), story.name, 15, INK, width=width * 2)
    verdict = f"{len(story.locations)} glimpses, {share:.0%} of the scene"
    _write(draw, (_GAP + 2 * (width + _GAP), 9), verdict, 15, SOFT)
    for index, (count, frame) in enumerate(zip(counts, frames, strict=True)):
        left = _GAP + index * (width + _GAP)
        row.paste(frame, (left, 34))
        last = count == len(story.locations)
        below = 34 + height + 6
        _write(draw, (left, below), story.labels[count - 1], 16, ACCENT if last else INK, width=width - 60)
        sure = f"{story.confidences[count - 1]:.0%}"
        _write(draw, (left + width, below + 1), sure, 15, SOFT, anchor="ra")
        _draw_bar(draw, left, below + 24, width, story.confidences[count - 1], last)
        draw.rounded_rectangle((left + 3, 37, left + 11 + 7 * len(str(count)), 52), 4, fill=PAPER)
        _write(draw, (left + 7, 38), str(count), 12, SOFT)
    return row


def _draw_bar(draw: ImageDraw.ImageDraw, left: int, top: int, width: int, share: float, strong: bool) -> None:
    draw.rounded_rectangle((left, top, left + width - 1, top + 5), 3, fill=TRACK)
    filled = max(6, round(width * share))
    draw.rounded_rectangle((left, top, left + filled - 1, top + 5), 3, fill=ACCENT if strong else SOFT)


def draw_animation(story: Story) -> list[Image.Image]:
    """Draws the frames of an animation: the cover, then one frame for each glimpse."""
    frames = []
    for count in range(len(story.locations) + 1):
        scene = draw_frame(story, count, _STAGE)
        frame = Image.new("RGB", (_STAGE + 2 * _GAP, scene.height + 2 * _GAP + 74), PAPER)
        left = (frame.width - scene.width) // 2
        frame.paste(scene, (left, _GAP))
        draw = ImageDraw.Draw(frame)
        below = scene.height + _GAP + 12
        share = count / story.grid.num_locations
        if count:
            confidence, last = story.confidences[count - 1], count == len(story.locations)
            _write(draw, (_GAP, below), story.labels[count - 1], 26, ACCENT if last else INK, _STAGE - 90)
            _write(draw, (_GAP + _STAGE, below + 2), f"{confidence:.0%}", 24, SOFT, anchor="ra")
            _draw_bar(draw, _GAP, below + 36, _STAGE, confidence, last)
        else:
            _write(draw, (_GAP, below), story.name, 20, SOFT, _STAGE)
        words = f"{count} glimpse{'s' if count != 1 else ''}, {share:.0%} of the scene"
        _write(draw, (_GAP, below + 46), words, 14, SOFT)
        frames.append(frame)
    return frames


def save_strip(stories: Sequence[Story], path: Path) -> None:
    """Writes a strip as an image file."""
    _save(draw_strip(stories), path)


def save_gif(stories: Sequence[Story], path: Path, milliseconds: int = 450) -> None:
    """Writes an animation; several scenes are shown one after the other."""
    frames: list[Image.Image] = []
    durations: list[int] = []
    for story in stories:
        drawn = draw_animation(story)
        frames += drawn
        durations += [milliseconds * 2, *[milliseconds] * (len(drawn) - 2), milliseconds * 5]
    largest = max(frame.width for frame in frames), max(frame.height for frame in frames)
    padded = [_pad(frame, largest).quantize(dither=Image.Dither.NONE) for frame in frames]
    _save(padded[0], path, save_all=True, append_images=padded[1:], duration=durations, loop=0)


def _pad(frame: Image.Image, size: tuple[int, int]) -> Image.Image:
    padded = Image.new("RGB", size, PAPER)
    padded.paste(frame, (0, 0))
    return padded


def _save(image: Image.Image, path: Path, **options: object) -> None:
    kind = Image.registered_extensions().get(path.suffix.lower())
    buffer = io.BytesIO()
    try:
        if kind is None:
            raise ValueError(f"unknown file extension: {path.suffix or 'none'}")
        image.save(buffer, kind, **options)
    except (OSError, ValueError, KeyError) as error:
        raise StamError(f"could not write '{path}': {error}; name a .png or .gif") from error
    save_content(path, buffer.getvalue())
