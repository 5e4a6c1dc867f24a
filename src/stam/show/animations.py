"""An agent looking, as an animation: a frame for each glimpse, with the answer and each confidence so far."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from stam.files import save_content
from stam.show.pictures import (
    GAP,
    PAPER,
    SOFT,
    TRACK,
    Story,
    draw_frame,
    image_bytes,
    place_frame,
    write,
)

_STAGE = 448  # pixels of the scene's longer side
_BARS = 44  # pixels of a bar that is certain


def draw_animation(story: Story) -> list[Image.Image]:
    """Draws the frames of an animation: the cover, then one frame for each glimpse."""
    return [_draw_step(story, count) for count in range(story.num_glimpses + 1)]


def _draw_step(story: Story, count: int) -> Image.Image:
    scene = draw_frame(story, count, _STAGE)
    page = Image.new("RGB", (_STAGE + 2 * GAP, scene.height + 2 * GAP + 118), PAPER)
    place_frame(page, scene, ((page.width - scene.width) // 2, GAP))
    draw = ImageDraw.Draw(page)
    below = scene.height + GAP + 12
    name = story.name if story.right is None else f"true class: {story.name}"
    if count:
        write(draw, (GAP, below), story.labels[count - 1], 26, story.colour(count), _STAGE - 90)
        sure = f"{story.confidences[count - 1]:.0%}"
        write(draw, (GAP + _STAGE, below + 2), sure, 24, SOFT, anchor="ra")
    else:
        write(draw, (GAP, below + 4), name, 20, SOFT, _STAGE)
    _draw_confidences(draw, story, count, below + 38)
    words = f"{count} glimpse{'s' if count != 1 else ''}, {story.share(count):.0%} of the scene"
    words += ", unsure" if story.unsure and count == story.num_glimpses else ""
    write(draw, (GAP, below + _BARS + 46), words, 14, SOFT)
    if count and story.right is not None:
        write(draw, (GAP + _STAGE, below + _BARS + 46), name, 14, SOFT, _STAGE // 2, anchor="ra")
    return page


def _draw_confidences(draw: ImageDraw.ImageDraw, story: Story, count: int, top: int) -> None:
    """Draws the confidence after each glimpse so far as a bar; glimpses to come are empty bars."""
    total = story.num_glimpses
    step = min(_STAGE / total, 48)
    between = 3 if step >= 6 else 1
    for index in range(total):
        left = GAP + round(index * step)
        right = max(left, GAP + round((index + 1) * step) - between)
        draw.rectangle((left, top, right, top + _BARS), fill=TRACK)
        if index < count:
            high = max(1, round(_BARS * story.confidences[index]))
            draw.rectangle((left, top + _BARS - high, right, top + _BARS), fill=story.bar_colour(index + 1))


def save_gif(stories: Sequence[Story], path: Path) -> None:
    """Writes an animation; several scenes are shown one after the other."""
    save_content(path, animation_bytes(stories, path))


def animation_bytes(
    stories: Sequence[Story], path: Path = Path("animation.gif"), milliseconds: int = 450
) -> bytes:
    """Returns an animation as the content of a file, of the kind its path says."""
    drawn = [draw_animation(story) for story in stories]
    size = max(each[0].width for each in drawn), max(each[0].height for each in drawn)
    frames: list[Image.Image] = []
    durations: list[int] = []
    for each in drawn:
        # One palette for a scene, so that a frame of the file holds only what changed.
        palette = _join([each[0], each[-1]], (2 * size[0], size[1])).quantize(kmeans=1)
        frames += [_join([frame], size).quantize(palette=palette, dither=Image.Dither.NONE) for frame in each]
        durations += [milliseconds * 2, *[milliseconds] * (len(each) - 2), milliseconds * 5]
    more = dict(save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return image_bytes(frames[0], path, **more)


def _join(frames: Sequence[Image.Image], size: tuple[int, int]) -> Image.Image:
    page = Image.new("RGB", size, PAPER)
    for index, frame in enumerate(frames):
        page.paste(frame, (index * frame.width, 0))
    return page
