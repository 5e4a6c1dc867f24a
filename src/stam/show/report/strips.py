"""Examples in the report: frames in rows that wrap on a narrow screen, policy maps, an animation."""

import io
from collections.abc import Iterable
from html import escape

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from PIL import Image

from stam.evaluation.examples import Example
from stam.show.animations import animation_bytes
from stam.show.figures import data_uri, scenes
from stam.show.figures.style import HEAT
from stam.show.pictures import draw_frame, draw_scene, is_enlarged
from stam.show.report.page import folded, percent

_SIDE = 192  # pixels of a frame's longer side: twice what it has on the page
_STRIP_STEPS = 15
_MOVING_STEPS = 20
_NUM_ANIMATIONS = 2


def example_strip(example: Example, number: int | None, title: str = "") -> str:
    """Returns one example: the scene, what was seen after each glimpse, policy maps, an animation.

    The first examples by number have an animation; without a number there are no policy maps either.
    """
    story = scenes.story_of(example)
    truth, items = escape(story.name), []
    whole = draw_scene(story, _SIDE)
    words = f'<span class="count">the scene</span><span class="answer">{truth}</span>'
    items.append(_item(example, whole, "the scene", words))
    for count in range(1, min(_STRIP_STEPS, story.num_glimpses) + 1):
        kind, mark = ("right", scenes.RIGHT) if example.is_right[count - 1] else ("wrong", scenes.WRONG)
        answer = f'<span class="answer {kind}">{mark} {escape(story.labels[count - 1])}</span>'
        words = f'<span class="count">{count}</span>{answer}{100 * story.confidences[count - 1]:.0f} %'
        frame = draw_frame(story, count, _SIDE)
        items.append(_item(example, frame, f"seen after {count} glimpses", words))
    moving, maps = "", _maps(example) if number is not None else ""
    if number is not None and number <= _NUM_ANIMATIONS:
        source = data_uri(animation_bytes([scenes.story_of(example, _MOVING_STEPS)]), "image/gif")
        moving = folded("Animation", f'<img class="gif" src="{source}" alt="the same, moving">', scroll=False)
    return f"<h3>{escape(title) or truth}</h3>{_strip(items)}{maps}{moving}"


def _strip(items: Iterable[str]) -> str:
    return f'<div class="strip">{"".join(items)}</div>'


def _item(example: Example, frame: Image.Image, label: str, words: str) -> str:
    exact = is_enlarged(example.image, _SIDE)
    return f'<div><img src="{_image_uri(frame, exact)}" alt="{label}">{words}</div>'


def _image_uri(frame: Image.Image, exact: bool) -> str:
    buffer = io.BytesIO()
    frame.save(buffer, format="WEBP", lossless=exact, quality=85)
    return data_uri(buffer.getvalue(), "image/webp")


def _maps(example: Example) -> str:
    counts = scenes.map_counts(example)
    if not counts:
        return ""
    highest = scenes.highest_chance(example, counts)
    items = [
        _item(
            example,
            scenes.draw_map(example, count, highest, _SIDE),
            f"policy after {count} glimpses",
            f'<span class="count">after {count}</span>',
        )
        for count in counts
    ]
    ramp = ", ".join(to_hex(colour) for colour in colormaps[HEAT](np.linspace(0, 1, 9)))
    content = (
        f'{_strip(items)}<p class="muted">Probability of looking there next. Orange frame: the '
        "newest glimpse; white: the next.</p>"
        f'<div class="ramp" style="background: linear-gradient(90deg, {ramp})"></div>'
        f'<div class="ends"><span>0 %</span><span>{percent(highest)}</span></div>'
    )
    return folded("Policy maps: where it wants to look next", content, scroll=False)
