"""From an image file, whatever its format and mode, to RGB pixels.

Transparent pixels are laid on white. 16-bit greyscale keeps its upper 8 bits, so 65535 is white. Of several
frames the first is taken. The EXIF orientation is applied.
"""

import io
import threading
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

from stam.errors import DataError
from stam.shapes import UInt8

IMAGE_SUFFIXES = (
    ".bmp",
    ".gif",
    ".jpeg",
    ".jpg",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)

# what those suffixes stand for: no other decoder of Pillow's is started, whatever a file is called
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_MOST_BYTES = 512_000_000
_EXIF_ORIENTATION = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# A longer side of more decode sizes is shrunk too: one panorama would set the width of its whole batch.
_MAX_ASPECT = 4
# `warnings.catch_warnings` swaps a list that all threads share.
_warnings_lock = threading.Lock()


def is_image(name: str) -> bool:
    """Tells by its suffix whether a file is an image we read."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def decode_image(
    source: Path | bytes, name: str | None = None, decode_size: int | None = None
) -> UInt8[np.ndarray, "height width 3"]:
    """Decodes an image file to RGB.

    Args:
        source: The file, or its bytes.
        name: What to call the image in an error; the path if not given.
        decode_size: A shorter side above this is shrunk to it, in the JPEG decoder as far as possible, which
            is several times faster; as is if not given.

    Raises:
        DataError: The image cannot be read, with its name and the reason.
    """
    name = name or str(source if isinstance(source, Path) else "an image")
    try:
        image, orientation = _open(source)
        with image:
            size = _shrunk_size(image.size, decode_size)
            if size != image.size:
                image.draft(None, size)
            rgb = _to_rgb(image)
    except MemoryError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        limit = (Image.MAX_IMAGE_PIXELS or 0) // 1_000_000
        raise DataError(
            f"cannot read {name}: it has more than {limit} million pixels; make it smaller, or remove it"
        ) from error
    except Exception as error:  # a broken file makes a decoder raise nearly anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "it is not an image in a known format"
        raise DataError(f"cannot read {name}: {reason}") from error
    if rgb.size != size:
        rgb = rgb.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    if orientation in _TRANSPOSE:
        rgb = rgb.transpose(_TRANSPOSE[orientation])
    return np.asarray(rgb)


def decode_opened(image: Image.Image) -> UInt8[np.ndarray, "height width 3"]:
    """Returns the RGB pixels of an image that Pillow has opened or made, turned as its EXIF data say."""
    try:
        rgb = _to_rgb(image)
        orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception as error:  # its file is decoded only now, and may be broken in any way
        raise DataError(f"cannot read the image: {error or type(error).__name__}") from error
    return np.asarray(rgb.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else rgb)


def _open(source: Path | bytes) -> tuple[Image.Image, int]:
    """Reads the header: the image, still undecoded, and its EXIF orientation."""
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd metadata is no reason to trouble the user
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        if isinstance(source, Path) and source.exists():
            if not source.is_file():
                raise ValueError("it is not a regular file")
            if source.stat().st_size > _MOST_BYTES:  # some decoders read all of it at once
                raise ValueError(f"it has more than {_MOST_BYTES // 1_000_000} MB; make it smaller")
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=_FORMATS)
        try:
            return image, image.getexif().get(_EXIF_ORIENTATION, 1)
        except Image.DecompressionBombWarning:
            raise
        except Exception:  # broken metadata; the pixels may be sound
            return image, 1


def _shrunk_size(size: tuple[int, int], decode_size: int | None) -> tuple[int, int]:
    if decode_size is None:
        return size
    scale = min(1.0, decode_size / min(size), _MAX_ASPECT * decode_size / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        deep = np.asarray(image)
        if deep.min() < 0 or deep.max() > 65535:
            raise ValueError("its pixels need more than 16 bits; save it with 8 or 16 bits")
        return Image.fromarray((deep >> 8).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info:
        opaque = Image.new("RGBA", image.size, "white")
        opaque.alpha_composite(image.convert("RGBA"))
        return opaque.convert("RGB")
    return image.convert("RGB")
