"""Strips of glimpses and policy maps, drawn by the page itself so that they wrap on a narrow screen."""

import io
from collections.abc import Iterable
from html import escape

import numpy as np
from matplotlib import colormaps
from PIL import Image

from stam.evaluation.examples import Example
from stam.show.figures import data_uri, scenes
from stam.show.figures.style import HEAT
from stam.show.report.page import folded, percent

_STRIP_STEPS = 15
_MAP_STEPS = (1, 2, 3, 5, 8, 13, 21)
_NUM_ANIMATIONS = 2


def strip(example: Example, number: int) -> str:
    """Returns one example: the scene, what was seen after each glimpse, policy maps, an animation."""
    truth = _name(example, example.label)
    scene = _Scene(example, number)
    items = [scene.whole(f'<span class="count">the scene</span><span class="answer">{truth}</span>')]
    for step in range(min(_STRIP_STEPS, len(example.locations))):
        name = _name(example, int(example.predictions[step]))
        kind, mark = ("right", scenes.RIGHT) if example.is_right[step] else ("wrong", scenes.WRONG)
        words = f'<span class="count">{step + 1}</span><span class="answer {kind}">{mark} {name}</span>'
        items.append(scene.seen(step + 1, f"{words}{100 * example.confidences[step]:.0f} %"))
    moving = ""
    if number <= _NUM_ANIMATIONS:
        source = data_uri(scenes.animation(example), "image/gif")
        moving = folded("Animation", f'<img class="gif" src="{source}" alt="the same, moving">', scroll=False)
    return f"<h3>{truth}</h3>{scene.lay_out(items)}{_maps(example, scene)}{moving}"


def _name(example: Example, label: int) -> str:
    return escape(example.classes[label].replace("_", " "))


class _Scene:
    """Draws one scene many times over; its pixels are in the page once."""

    def __init__(self, example: Example, number: int) -> None:
        self.example, self.key = example, f"scene-{number}"
        height, width = example.grid.image_size
        self._open = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label='
        self._image = f'<image id="{self.key}" width="{width}" height="{height}" href='
        self._smooth = " smooth" if max(height, width) >= 128 else ""

    def lay_out(self, items: list[str]) -> str:
        """Puts pictures in a row that wraps."""
        return f'<div class="strip{self._smooth}">{"".join(items)}</div>'

    def whole(self, words: str) -> str:
        """Returns the whole scene; it must come first, since the others refer to it."""
        pixels = f'{self._image}"{_image_uri(self.example.image)}"/>'
        return f'<div>{self._open}"the scene">{pixels}</svg>{words}</div>'

    def seen(self, count: int, words: str) -> str:
        """Returns the scene with all that was not seen after so many glimpses covered."""
        hidden = set(range(self.example.grid.num_locations)) - set(self.example.locations[:count].tolist())
        cover = f'<path class="unseen" d="{self._cells(sorted(hidden))}"/>'
        return self._covered(f"seen after {count} glimpses", cover + self._frame(count - 1, "newest"), words)

    def wanted(self, count: int, highest: float, words: str) -> str:
        """Returns the scene with all that was not seen coloured by the policy's probabilities."""
        seen = set(self.example.locations[:count].tolist())
        chances = self.example.maps[count - 1] / highest
        cover = "".join(
            f'<path fill="{_colour(float(chance))}" d="{self._cells((location,))}"/>'
            for location, chance in enumerate(chances)
            if location not in seen
        )
        frames = self._frame(count - 1, "newest") + self._frame(count, "next")
        return self._covered(f"policy after {count} glimpses", cover + frames, words)

    def _covered(self, label: str, cover: str, words: str) -> str:
        return f'<div>{self._open}"{label}"><use href="#{self.key}"/>{cover}</svg>{words}</div>'

    def _cells(self, locations: Iterable[int]) -> str:
        boxes = [self.example.grid.pixel_box(int(location)) for location in locations]
        return "".join(f"M{left} {top}H{right}V{bottom}H{left}z" for top, left, bottom, right in boxes)

    def _frame(self, step: int, kind: str) -> str:
        top, left, bottom, right = self.example.grid.pixel_box(int(self.example.locations[step]))
        line = 0.022 * max(self.example.grid.image_size)
        place = f'x="{left + line / 2:.2f}" y="{top + line / 2:.2f}"'
        size = f'width="{right - left - line:.2f}" height="{bottom - top - line:.2f}"'
        return f'<rect class="{kind}" {place} {size} stroke-width="{line:.2f}"/>'


def _maps(example: Example, scene: _Scene) -> str:
    steps = [count for count in _MAP_STEPS if count < len(example.locations)]
    if not example.has_maps or not steps:
        return ""
    highest = max(float(example.maps[count - 1].max()) for count in steps)
    items = [scene.wanted(count, highest, f'<span class="count">after {count}</span>') for count in steps]
    ramp = ", ".join(_colour(value) for value in np.linspace(0, 1, 9))
    content = (
        f'{scene.lay_out(items)}<p class="muted">Probability of looking there next. Orange frame: the '
        "newest glimpse; white: the next.</p>"
        f'<div class="ramp" style="background: linear-gradient(90deg, {ramp})"></div>'
        f'<div class="ends"><span>0 %</span><span>{percent(highest)}</span></div>'
    )
    return folded("Policy maps: where it wants to look next", content, scroll=False)


def _colour(value: float) -> str:
    red, green, blue, _ = colormaps[HEAT](value, bytes=True)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _image_uri(image: np.ndarray) -> str:
    picture, buffer = Image.fromarray(image), io.BytesIO()
    if max(image.shape) < 128:
        picture.save(buffer, format="PNG", optimize=True)
        return data_uri(buffer.getvalue(), "image/png")
    picture.save(buffer, format="JPEG", quality=88)
    return data_uri(buffer.getvalue(), "image/jpeg")
