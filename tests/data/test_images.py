import io
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stam.data import IMAGE_SUFFIXES, decode_image
from stam.data.images import decode_opened
from stam.errors import DataError


def gradient(height: int = 48, width: int = 64) -> np.ndarray:
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 5, columns * 3, (rows + columns) * 2], axis=-1).astype(np.uint8)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("suffix", IMAGE_SUFFIXES)
def test_every_format_becomes_rgb(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"image{suffix}"
    image = Image.fromarray(gradient())
    (image.convert("L") if suffix == ".pgm" else image).save(path)
    pixels = decode_image(path)
    assert pixels.shape == (48, 64, 3)
    assert pixels.dtype == np.uint8


@pytest.mark.parametrize("suffix", IMAGE_SUFFIXES)
def test_a_truncated_file_is_an_error_that_names_it(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"cut{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    (image.convert("L") if suffix == ".pgm" else image).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"^cannot read .*cut\..*: \S") as caught:
        decode_image(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LA", "RGBA", "RGB"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    kind = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
    pixels = decode_image(encode(Image.fromarray(gradient()).convert(mode), kind))
    assert pixels.shape == (48, 64, 3)


def test_cmyk_jpeg() -> None:
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))  # red
    red, green, blue = decode_image(encode(image, "JPEG"))[4, 4]
    assert red > 200
    assert max(green, blue) < 60


def test_transparent_pixels_lie_on_white() -> None:
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    image.putpixel((1, 1), (255, 0, 0, 255))
    pixels = decode_image(encode(image, "PNG"))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[1, 1].tolist() == [255, 0, 0]


def test_a_transparent_palette_colour_lies_on_white() -> None:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((2, 2), 1)
    pixels = decode_image(encode(image, "GIF", transparency=0))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[2, 2].tolist() == [40, 50, 60]


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_keep_the_upper_eight(kind: str) -> None:
    deep = np.array([[0, 255, 256], [32768, 65280, 65535]], dtype=np.uint16)
    pixels = decode_image(encode(Image.fromarray(deep), kind))
    assert pixels[..., 0].tolist() == [[0, 0, 1], [128, 255, 255]]


def test_floating_point_pixels_are_refused() -> None:
    content = encode(Image.fromarray(np.ones((4, 4), dtype=np.float32)), "TIFF")
    with pytest.raises(DataError, match="cannot read x.tif: its pixels are floating-point numbers; save it"):
        decode_image(content, "x.tif")


def test_the_first_frame_of_a_gif_counts() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    content = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(content)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])  # Pillow turns a TIFF by itself
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int, kind: str) -> None:
    stored = Image.fromarray(gradient())
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encode(stored, kind, exif=exif)
    pixels = decode_image(content)
    assert np.array_equal(pixels, decode_opened(Image.open(io.BytesIO(content))))
    assert min(decode_image(content, decode_size=24).shape[:2]) == 24
    upright = {1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud}
    upright |= {5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, -1)}
    upright |= {7: lambda a: np.rot90(a, 2).swapaxes(0, 1), 8: np.rot90}
    assert np.array_equal(pixels, upright[orientation](gradient()))


@pytest.mark.parametrize("place", range(20, 100, 10))
def test_a_damaged_png_is_refused(place: int) -> None:
    """A byte was changed, or the rest is empty, as where a download was cut short: the size is right."""
    content = encode(Image.fromarray(gradient(300, 400)), "PNG")
    at = len(content) * place // 100
    changed = content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
    empty = content[:at] + bytes(len(content) - at)
    for damaged in (changed, empty):
        with pytest.raises(DataError, match="cannot read"):
            decode_image(damaged)


def test_broken_metadata_does_not_matter() -> None:
    content = encode(Image.fromarray(gradient()), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f broken")
    assert decode_image(content).shape == (48, 64, 3)


def test_decode_size_shrinks_the_shorter_side_only_downwards() -> None:
    content = encode(Image.fromarray(gradient(300, 400)), "JPEG")
    assert decode_image(content, decode_size=75).shape == (75, 100, 3)
    assert decode_image(content, decode_size=400).shape == (300, 400, 3)


def test_decode_size_keeps_what_is_seen() -> None:
    image = Image.fromarray(gradient(300, 400))
    shrunk = decode_image(encode(image, "JPEG", quality=95), decode_size=75)
    expected = np.asarray(image.resize((100, 75), Image.Resampling.BICUBIC))
    inner = np.abs(shrunk.astype(int) - expected)[2:-2, 2:-2]
    assert np.median(inner) <= 4


def test_decode_size_turns_with_the_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encode(Image.fromarray(gradient(300, 400)), "JPEG", exif=exif)
    assert decode_image(content, decode_size=75).shape == (100, 75, 3)


def test_decode_size_bounds_the_longer_side_too() -> None:
    content = encode(Image.new("RGB", (4000, 20)), "PNG")
    assert decode_image(content, decode_size=100).shape == (2, 400, 3)


def huge_png(side: int) -> bytes:
    """A PNG that promises many pixels in a few bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore")  # the bomb is an error whatever the user does with warnings
@pytest.mark.parametrize("side", [10_000, 100_000])
def test_a_decompression_bomb_is_an_error(side: int) -> None:
    with pytest.raises(DataError, match="cannot read bomb.png: it has more than 89 million pixels; make it"):
        decode_image(huge_png(side), "bomb.png")


def test_what_is_no_image_is_an_error() -> None:
    with pytest.raises(DataError, match=r"cannot read x.jpg: it is not an image in a known format"):
        decode_image(b"hello", "x.jpg")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read .*gone.png"):
        decode_image(tmp_path / "gone.png")


def test_only_the_documented_formats_are_decoded(tmp_path):
    """Others start programs of their own (EPS: Ghostscript), or are no pictures."""
    for kind in ("EPS", "PDF", "ICO", "TGA", "PCX"):
        path = tmp_path / f"{kind}.jpg"
        Image.new("RGB", (8, 8)).save(path, kind)
        with pytest.raises(DataError, match="it is not an image in a known format"):
            decode_image(path)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    path = tmp_path / "pipe.png"
    os.mkfifo(path)
    with pytest.raises(DataError, match="it is not a regular file"):
        decode_image(path)
