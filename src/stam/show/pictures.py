"""An agent looking, as frames: the scene with the glimpses seen so far uncovered, and strips of such frames.

`draw_frame` is the only place that draws glimpses: strips, animations, figures and the report place its
frames. Pillow is all it needs.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from stam.errors import StamError
from stam.files import save_content
from stam.scene.grid import Grid
from stam.shapes import UInt8

Colour = tuple[int, int, int]

PAPER = (247, 245, 240)
INK = (29, 28, 36)
SOFT = (93, 90, 104)
COVER = (217, 212, 200)
ACCENT = (67, 56, 202)
TRACK = (226, 222, 213)
RIGHT, WRONG = (0, 114, 178), (192, 74, 0)
NEWEST, NEXT = (255, 159, 28), (255, 255, 255)  # frames of glimpses, seen on any scene by their dark edge
_CELL_EDGE = (128, 128, 128, 70)

_TILE = 168  # pixels of a frame's longer side in a strip
GAP = 14


@dataclass(frozen=True)
class View:
    """A rectangle of the scene that was sensed.

    Attributes:
        box: Top, left, bottom and right, as shares of the scene.
        size: Height and width in pixels it was sensed at.
    """

    box: tuple[float, float, float, float]
    size: tuple[int, int]


def views_of(boxes: np.ndarray, sizes: np.ndarray) -> list[list[View]]:
    """Returns the views of each look, from boxes (looks, parts, 4) and sizes (looks, parts, 2)."""
    return [
        [View(tuple(box), tuple(size)) for box, size in zip(*look, strict=True) if box[2] > box[0]]
        for look in zip(boxes.tolist(), sizes.tolist(), strict=True)
    ]


def readable(label: str) -> str:
    """Returns a class name as people write it: english_springer and StorageTanks are names of folders."""
    words = re.sub("_+", " ", label).strip()
    if not re.search("[a-z][A-Z]", words):
        return words
    return words[0] + re.sub("([a-z])([A-Z])", r"\1 \2", words[1:]).lower()


@dataclass(frozen=True)
class Story:
    """What an agent looked at in one scene, and what it said after each glimpse.

    Attributes:
        name: What to call the scene; its true class where `right` is given.
        image: The whole scene; only what was looked at is drawn.
        grid: Where glimpses lie; without one, `views` says what was sensed.
        locations: Grid index of each glimpse.
        labels: The most likely label after each glimpse.
        confidences: Its probability.
        right: Whether it is the true class; `None` where that is not known.
        views: What each look sensed, where there is no grid.
        shares: Pixels sensed so far, as shares of the scene's, where there is no grid.
        unsure: Whether it ended without being as confident as it has to be.
    """

    name: str
    image: UInt8[np.ndarray, "height width 3"]
    grid: Grid | None
    locations: Sequence[int]
    labels: Sequence[str]
    confidences: Sequence[float]
    right: Sequence[bool] | None = None
    views: Sequence[Sequence[View]] = ()
    shares: Sequence[float] = ()
    unsure: bool = False

    @property
    def num_glimpses(self) -> int:
        """How often the agent looked."""
        return len(self.labels)

    def share(self, count: int) -> float:
        """Returns the share of the scene sensed after so many glimpses."""
        if self.grid is not None:
            return count / self.grid.num_locations
        return self.shares[count - 1] if count else 0.0

    def colour(self, count: int) -> Colour:
        """Returns the colour of the answer after so many glimpses."""
        if self.right is not None:
            return RIGHT if self.right[count - 1] else WRONG
        return ACCENT if count == self.num_glimpses and not self.unsure else INK

    def bar_colour(self, count: int) -> Colour:
        """Returns the colour of its confidence, which stands back where the answer is plain text."""
        colour = self.colour(count)
        return SOFT if colour == INK else colour


def is_enlarged(image: np.ndarray, longer_side: int) -> bool:
    """Returns whether a frame of this size shows the pixels of the scene as squares."""
    return longer_side >= 2 * max(image.shape[:2])


def draw_scene(story: Story, longer_side: int = _TILE) -> Image.Image:
    """Draws the whole scene."""
    height, width = story.image.shape[:2]
    scale = longer_side / max(height, width)
    exact = is_enlarged(story.image, longer_side)
    sampling = Image.Resampling.NEAREST if exact else Image.Resampling.BICUBIC
    return Image.fromarray(story.image).resize((round(width * scale), round(height * scale)), sampling)


def draw_frame(
    story: Story,
    num_glimpses: int,
    longer_side: int = _TILE,
    colours: UInt8[np.ndarray, "locations 3"] | None = None,
) -> Image.Image:
    """Draws the first glimpses of a scene, the newest framed; all that was not seen is transparent.

    Args:
        story: The scene and where the agent looked.
        num_glimpses: Glimpses to uncover.
        longer_side: Pixels of the frame's longer side.
        colours: A colour for each location not seen yet, as of a policy map; the next glimpse is framed then.
    """
    if story.grid is None:
        return _draw_views(story, num_glimpses, longer_side)
    scale = longer_side / max(story.grid.image_size)
    scene = draw_scene(story, longer_side)
    frame = Image.new("RGBA", scene.size)
    draw = ImageDraw.Draw(frame)
    seen = set(story.locations[:num_glimpses])
    for location in range(story.grid.num_locations):
        left, top, right, bottom = box = _scaled_box(story.grid, location, scale)
        if location in seen:
            frame.paste(scene.crop(box), box[:2])
        elif colours is None:
            draw.rectangle((left, top, right - 1, bottom - 1), outline=_CELL_EDGE)
        else:
            draw.rectangle((left, top, right - 1, bottom - 1), fill=tuple(colours[location].tolist()))
    if colours is not None and num_glimpses < len(story.locations):
        _outline(frame, _scaled_box(story.grid, story.locations[num_glimpses], scale), NEXT)
    if num_glimpses:
        _outline(frame, _scaled_box(story.grid, story.locations[num_glimpses - 1], scale), NEWEST)
    return frame


def _draw_views(story: Story, num_glimpses: int, longer_side: int) -> Image.Image:
    """Draws what was sensed, each part as coarse as it was; sharper parts lie over coarser ones."""
    scene = draw_scene(story, longer_side)
    frame = Image.new("RGBA", scene.size)
    seen = [view for look in story.views[:num_glimpses] for view in look]
    original = Image.fromarray(story.image)
    exact = is_enlarged(story.image, longer_side)
    sampling = Image.Resampling.NEAREST if exact else Image.Resampling.BILINEAR
    for view in sorted(seen, key=_sharpness):
        left, top, right, bottom = box = _pixels_of(view, frame.size)
        inside = _pixels_of(view, original.size)
        if right > left and bottom > top:
            sensed = original.crop(inside).resize(view.size[::-1], Image.Resampling.BOX)
            frame.paste(sensed.resize((right - left, bottom - top), sampling), box[:2])
    for view in story.views[num_glimpses - 1] if num_glimpses else ():
        _outline(frame, _pixels_of(view, frame.size), NEWEST)
    return frame


def _sharpness(view: View) -> float:
    """Returns how many pixels a view has for each part of the scene."""
    top, left, bottom, right = view.box
    return view.size[0] * view.size[1] / ((bottom - top) * (right - left))


def _pixels_of(view: View, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Returns left, top, right and bottom in a picture of (width, height); what lies outside is cut off."""
    top, left, bottom, right = (min(max(side, 0.0), 1.0) for side in view.box)
    width, height = size
    return round(left * width), round(top * height), round(right * width), round(bottom * height)


def _scaled_box(grid: Grid, location: int, scale: float) -> tuple[int, int, int, int]:
    top, left, bottom, right = grid.pixel_box(location)
    return round(left * scale), round(top * scale), round(right * scale), round(bottom * scale)


def _outline(frame: Image.Image, box: tuple[int, int, int, int], colour: Colour) -> None:
    """Draws a line around a glimpse, half of it outside but all of it in the picture, and a dark edge."""
    (left, top, right, bottom), draw = box, ImageDraw.Draw(frame)
    line, edge = max(2, round(max(frame.size) / 56)), max(1, round(max(frame.size) / 200))
    for grown, kept, shade, width in ((line // 2 + edge, 0, INK, edge), (line // 2, edge, colour, line)):
        start = max(left - grown, kept), max(top - grown, kept)
        end = min(right + grown, frame.width - kept) - 1, min(bottom + grown, frame.height - kept) - 1
        draw.rectangle((start, end), outline=shade, width=width)


def place_frame(page: Image.Image, frame: Image.Image, place: tuple[int, int]) -> None:
    """Puts a frame on a page; what was not seen gets the colour of the cover."""
    left, top = place
    page.paste(COVER, (left, top, left + frame.width, top + frame.height))
    page.paste(frame, place, frame)


def write(
    draw: ImageDraw.ImageDraw,
    place: tuple[float, float],
    words: str,
    size: int,
    colour: Colour = INK,
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
    counts = strip_counts(story.num_glimpses, most_frames)
    frames = [draw_frame(story, count) for count in counts]
    width, height = frames[0].size
    row = Image.new("RGB", (GAP + max(3, len(frames)) * (width + GAP), height + 34 + 46 + GAP), PAPER)
    draw = ImageDraw.Draw(row)
    share = story.share(story.num_glimpses)
    looks = f"{story.num_glimpses} glimpse{'s' * (story.num_glimpses != 1)}"
    verdict = f"{looks}, {share:.0%} of the scene{', unsure' if story.unsure else ''}"
    room = row.width - GAP - round(ImageFont.load_default(15).getlength(verdict))
    beside = max(GAP, min(GAP + 2 * (width + GAP), room))  # few frames leave less room
    write(draw, (GAP, 9), story.name, 15, INK, width=beside - 2 * GAP)
    write(draw, (beside, 9), verdict, 15, SOFT)
    for index, (count, frame) in enumerate(zip(counts, frames, strict=True)):
        left, below = GAP + index * (width + GAP), 34 + height + 6
        place_frame(row, frame, (left, 34))
        confidence = story.confidences[count - 1]
        write(draw, (left, below), story.labels[count - 1], 16, story.colour(count), width=width - 60)
        write(draw, (left + width, below + 1), f"{confidence:.0%}", 15, SOFT, anchor="ra")
        draw.rounded_rectangle((left, below + 24, left + width - 1, below + 29), 3, fill=TRACK)
        filled = left + max(6, round(width * confidence)) - 1
        draw.rounded_rectangle((left, below + 24, filled, below + 29), 3, fill=story.bar_colour(count))
        tag = (left + 3, 37, left + 11 + 7 * len(str(count)), 52)
        draw.rounded_rectangle(tag, 4, fill=PAPER, outline=SOFT)
        write(draw, (left + 7, 38), str(count), 12, INK)
    return row


def save_strip(stories: Sequence[Story], path: Path) -> None:
    """Writes a strip as an image file."""
    save_content(path, image_bytes(draw_strip(stories), path))


def image_bytes(image: Image.Image, path: Path, **options: object) -> bytes:
    """Returns the content of an image file, of the kind its path says, with Pillow's options."""
    kind, buffer = Image.registered_extensions().get(path.suffix.lower()), io.BytesIO()
    try:
        if kind is None:
            raise ValueError(f"unknown file extension: {path.suffix or 'none'}")
        image.save(buffer, kind, **options)
    except (OSError, ValueError, KeyError) as error:
        raise StamError(f"could not write '{path}': {error}; name a .png or .gif") from error
    return buffer.getvalue()
