"""Scenes that the page opens with, and reading images that strangers send."""

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from stam.data import ClutteredDigits, decode_image
from stam.data.folder import image_files
from stam.data.scenes import Scenes, name_of
from stam.errors import DataError
from stam.files import shown
from stam.model.looker import Facts
from stam.scene.pixels import prepare_for_evaluation
from stam.shapes import UInt8
from stam.web.photographs import photographs

MAX_SAMPLES = 48
FIRST_DIGITS = 2  # of the scenes of digits, the one that the page opens with: see experiments/first_scenes.py
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_DIGITS = tuple("0123456789")
_SMALLEST_DIGIT_SCENE = 30
_THUMBNAIL_SIZE = 112  # pixels of the longer side


class TooManyPixelsError(DataError):
    """An image that is too large to decode for a stranger."""


@dataclass(frozen=True)
class SampleScene:
    """A scene ready to be looked at; it is read when first asked for."""

    name: str
    label: str | None
    load: Callable[[], UInt8[np.ndarray, "height width 3"]]


def read_upload(data: bytes, max_pixels: int) -> UInt8[np.ndarray, "height width 3"]:
    """Decodes an image that came over the network; its size is checked before its pixels are touched."""
    width, height = image_header(data)
    if width * height > max_pixels:
        raise TooManyPixelsError(
            f"the image has {width}x{height} pixels, at most {max_pixels} are allowed: make it smaller"
        )
    return decode_image(data, name="the image")


def image_header(data: bytes) -> tuple[int, int]:
    """Returns (width, height) of an encoded image without decoding it."""
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooManyPixelsError("the image has far too many pixels: make it smaller") from error
    except Exception as error:  # a broken header makes a decoder raise nearly anything
        kinds = ", ".join(IMAGE_FORMATS)
        raise DataError(f"the image cannot be read: it is broken, or none of {kinds}") from error
    if width * height > (Image.MAX_IMAGE_PIXELS or 0):
        raise TooManyPixelsError("the image has far too many pixels: make it smaller")
    return width, height


def fitted(
    image: UInt8[np.ndarray, "height width 3"], facts: Facts, resize_size: int | None
) -> UInt8[np.ndarray, "image_height image_width 3"]:
    """Brings an image to the size that is looked at, as evaluation does."""
    return prepare_for_evaluation(image, resize_size or facts.resize_size, facts.image_size)


def thumbnail(pixels: UInt8[np.ndarray, "height width 3"]) -> bytes:
    """Makes a small picture of a scene, as JPEG."""
    small, buffer = Image.fromarray(pixels), io.BytesIO()
    scale = _THUMBNAIL_SIZE / max(small.size)
    sampling = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    size = tuple(max(1, round(side * scale)) for side in small.size)
    small.resize((size[0], size[1]), sampling).save(buffer, format="JPEG", quality=80)
    return buffer.getvalue()


def encode_png(pixels: UInt8[np.ndarray, "height width 3"]) -> bytes:
    """Encodes pixels without loss."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def sample_scenes(
    facts: Facts,
    folder: Path | None = None,
    resize_size: int | None = None,
    own: Scenes | None = None,
) -> list[SampleScene]:
    """Returns the scenes the page offers.

    Images of a folder, evenly spread over it; without one, images of the agent's own data; otherwise
    cluttered digits for an agent that reads digits, and the images that ship (`stam.web.photographs`).

    Args:
        facts: Of who looks at them.
        folder: Images to show; one folder inside it names the class of what lies there.
        resize_size: The shorter side before the centre is cropped; by default as the facts say.
        own: Images of the data that the agent was trained for, held out of its training; as many as fit are
            offered, in the order they have.
    """
    if folder is not None:
        return _folder_scenes(facts, folder, resize_size)
    if own is not None:
        return [_own_scene(facts, own, index, resize_size) for index in range(min(len(own), MAX_SAMPLES))]
    height, width = facts.image_size
    if facts.labels == _DIGITS and height == width >= _SMALLEST_DIGIT_SCENE:
        digits = ClutteredDigits("test", scene_size=height)
        order = sorted(range(24), key=lambda index: index != FIRST_DIGITS)
        return [
            SampleScene(f"Digits {index + 1}", digits.classes[digits.labels[index]], _digit(digits, index))
            for index in order
        ]
    return _photographs(facts, resize_size)


def _own_scene(facts: Facts, own: Scenes, index: int, resize_size: int | None) -> SampleScene:
    name, label = name_of(own, index), own.classes[own.labels[index]]
    return SampleScene(shown(name), label, lambda: fitted(own.load(index), facts, resize_size))


def _digit(digits: ClutteredDigits, index: int) -> Callable[[], np.ndarray]:
    return lambda: digits.load(index)


def _photographs(facts: Facts, resize_size: int | None) -> list[SampleScene]:
    """Returns the images that ship: the collection that has classes of this agent, or all photographs."""
    labels = {_letters(label): label for label in facts.labels}
    shipped = photographs()
    matches = Counter(each.collection for each in shipped if each.label and _letters(each.label) in labels)
    fitting = matches.most_common(1)[0][0] if matches else None  # both have a church
    chosen = [each for each in shipped if (each.collection == fitting if fitting else not each.is_drawn)]

    def loader(path: Path) -> Callable[[], np.ndarray]:
        return lambda: fitted(decode_image(path), facts, resize_size)

    return [
        SampleScene(
            f"{each.title} ({each.credit})",
            labels.get(_letters(each.label)) if each.label else None,
            loader(each.path),
        )
        for each in chosen
    ]


def _letters(label: str) -> str:
    """Returns what two spellings of a class have in common: storage_tanks, StorageTanks."""
    return "".join(letter for letter in label.casefold() if letter.isalnum())


def _folder_scenes(facts: Facts, folder: Path, resize_size: int | None) -> list[SampleScene]:
    if not folder.is_dir():
        raise DataError(f"no folder of images at '{folder}': check --images")
    names = image_files(folder)
    if not names:
        raise DataError(f"no images in '{folder}': give a folder that holds some")
    chosen = [names[index * len(names) // MAX_SAMPLES] for index in range(MAX_SAMPLES)]

    def loader(path: Path) -> Callable[[], np.ndarray]:
        return lambda: fitted(decode_image(path), facts, resize_size)

    scenes = []
    for name in dict.fromkeys(chosen if len(names) > MAX_SAMPLES else names):
        path = Path(name)
        label = path.parent.name if path.parent.name in facts.labels else None
        scenes.append(SampleScene(shown(name), label, loader(folder / path)))
    return scenes
