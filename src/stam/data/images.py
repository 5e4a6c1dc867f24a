"""From an image file, whatever its format and mode, to RGB pixels.

Modes are converted by `to_rgb`. Of several frames the first is taken. The EXIF orientation is applied.
"""

import io
import threading
import warnings
from pathlib import Path
from zlib import crc32

import numpy as np
from PIL import Image

from stam.errors import DataError
from stam.scene.pixels import to_rgb
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
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
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
        with _open(source) as image:
            size = _shrunk_size(image.size, decode_size)
            drafted = image.draft(None, size) if size != image.size else None
            rgb = to_rgb(image)
            orientation = _orientation(image)
            if drafted is None:
                size = _shrunk_size(rgb.size, decode_size)
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
        rgb = to_rgb(image)
        orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception as error:  # its file is decoded only now, and may be broken in any way
        raise DataError(f"cannot read the image: {error or type(error).__name__}") from error
    return np.asarray(rgb.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else rgb)


def _open(source: Path | bytes) -> Image.Image:
    """Reads the header: the image is still undecoded."""
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
        if image.format == "PNG":
            _require_sound_png(source if isinstance(source, bytes) else source.read_bytes())
    except BaseException:
        image.close()
        raise
    return image


def _require_sound_png(content: bytes) -> None:
    """Raises where the pixels of a PNG are not those that were written: Pillow does not check the last ones.

    A chunk is its length, its kind, so many bytes, and their checksum. Metadata may be damaged.
    """
    start, kind = len(_PNG_SIGNATURE), b""
    while kind != b"IEND":
        length, kind = int.from_bytes(content[start : start + 4]), content[start + 4 : start + 8]
        end = start + 8 + length
        checksum = int.from_bytes(content[end : end + 4])
        if len(content) < end + 4 or (kind == b"IDAT" and crc32(content[start + 4 : end]) != checksum):
            raise ValueError("it is damaged, or cut short; copy or download it again")
        start = end + 4


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation that is left to apply to a decoded image.

    Before it is decoded a PNG's EXIF cannot be asked for: Pillow would decode it then, and go on after an
    error as if there were none. A TIFF's own decoder turns it.
    """
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return int(image.getexif().get(_EXIF_ORIENTATION, 1))
        except Exception:  # broken metadata; the pixels are sound
            return 1


def _shrunk_size(size: tuple[int, int], decode_size: int | None) -> tuple[int, int]:
    if decode_size is None:
        return size
    scale = min(1.0, decode_size / min(size), _MAX_ASPECT * decode_size / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
