"""The augmentation against PIL, operation by operation, and the promises of a seed."""

import dataclasses
import importlib
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from stam.data import randaugment
from stam.data.augment import Augment, draw_crops
from stam.data.resample import (
    _carry_out,
    _Plan,
    _resample_dense,
    _resample_each,
    resample,
    resize_and_centre_crop,
)
from stam.errors import ConfigError
from stam.scene.pixels import normalise
from stam.settings import AugmentConfig

FILL = (124, 116, 104)


def photo(height: int, width: int, seed: int = 0) -> Tensor:
    """Smooth blobs, edges and a little noise, in a range that leaves contrast to gain: uint8 (3, H, W)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    waves = [np.sin(9 * rng.random() * x + 9 * rng.random() * y + 6 * rng.random()) for _ in range(3)]
    image = np.stack(waves) * 70 + 120 + 40 * (np.hypot(x - 0.4, y - 0.5) < 0.25)
    image += rng.normal(0, 4, image.shape)
    return torch.from_numpy(image.clip(13, 231).astype(np.uint8))


def to_pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def from_pil(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def difference(ours: Tensor, theirs: Image.Image) -> Tensor:
    return (ours.int() - from_pil(theirs).int()).abs()


def padded_batch() -> tuple[Tensor, Tensor]:
    """Four images of different sizes in one frame whose padding is random, so that using it shows."""
    sizes = torch.tensor([[60, 80], [91, 47], [100, 100], [33, 64]])
    images = torch.randint(0, 256, (4, 3, 100, 100), generator=torch.manual_seed(0)).byte()
    for index, (height, width) in enumerate(sizes.tolist()):
        images[index, :, :height, :width] = photo(height, width, index)
    return images, sizes


# Resampling


def assert_close(apart: Tensor) -> None:
    """One grey level; two in isolated pixels, where the rounding between the two passes tips over."""
    assert apart.max() <= 2
    assert (apart > 1).float().mean() < 1e-3


BOXES = torch.tensor([[0, 0, 60, 80], [10, 5, 80, 20], [30, 2, 13, 97], [0, 60, 33, 4]])
FLIPS = torch.tensor([[False, False], [True, False], [False, True], [True, True]])


@pytest.mark.parametrize("out_size", [(24, 24), (50, 70), (112, 112)])
def test_resample_is_pils_crop_and_resize(out_size: tuple[int, int]) -> None:
    images, _ = padded_batch()
    ours = resample(images, BOXES, out_size)
    for image, (top, left, height, width), result in zip(images, BOXES.tolist(), ours, strict=True):
        crop = to_pil(image).crop((left, top, left + width, top + height))
        theirs = crop.resize((out_size[1], out_size[0]), Image.Resampling.BICUBIC)
        assert_close(difference(result, theirs))


def test_resample_of_whole_images_is_pils_resize_with_a_box() -> None:
    images, _ = padded_batch()
    theirs = to_pil(images[2]).resize((40, 56), Image.Resampling.BICUBIC, box=(0, 0, 100, 100))
    assert_close(difference(resample(images[2:3], torch.tensor([[0, 0, 100, 100]]), (56, 40))[0], theirs))


@pytest.mark.parametrize("dtype", [torch.float, torch.half])
@pytest.mark.parametrize("out_size", [(24, 24), (90, 70)])
def test_matrices_for_a_gpu_agree_with_the_taps_for_a_cpu(
    out_size: tuple[int, int], dtype: torch.dtype
) -> None:
    images, _ = padded_batch()
    plan = _Plan(BOXES, torch.tensor(out_size).expand(4, 2), torch.zeros(4, 2).long(), FLIPS)
    apart = (
        _resample_each(plan, images, out_size).int() - _resample_dense(plan, images, out_size, dtype).int()
    ).abs()
    assert_close(apart)
    assert apart.float().mean() < 0.15  # few pixels differ at all


def test_large_batches_are_resampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    images, _ = padded_batch()
    plan = _Plan(BOXES, torch.tensor([20, 20]).expand(4, 2), torch.zeros(4, 2).long(), FLIPS)
    at_once = _resample_dense(plan, images, (20, 20), torch.float)
    monkeypatch.setattr(importlib.import_module("stam.data.resample"), "_DENSE_BYTES", 1)
    assert torch.equal(_resample_dense(plan, images, (20, 20), torch.float), at_once)


def test_flips_follow_the_resizing() -> None:
    images, _ = padded_batch()
    plain, flipped = resample(images, BOXES, (30, 40)), resample(images, BOXES, (30, 40), FLIPS)
    expected = [plain[0], plain[1].flip(1), plain[2].flip(2), plain[3].flip(1, 2)]
    assert torch.equal(flipped, torch.stack(expected))


@pytest.mark.parametrize("resize_size", [32, 40])
def test_evaluation_resizes_the_shorter_side_and_keeps_the_centre(resize_size: int) -> None:
    images, sizes = padded_batch()
    ours = resize_and_centre_crop(images, sizes, resize_size, 32)
    for image, (height, width), result in zip(images, sizes.tolist(), ours, strict=True):
        shorter = min(height, width)
        resized = (int(resize_size * width / shorter), int(resize_size * height / shorter))
        theirs = to_pil(image[:, :height, :width]).resize(resized, Image.Resampling.BICUBIC)
        left, top = round((resized[0] - 32) / 2), round((resized[1] - 32) / 2)
        assert_close(difference(result, theirs.crop((left, top, left + 32, top + 32))))


def test_evaluation_agrees_between_the_two_ways() -> None:
    images, _ = padded_batch()
    whole = torch.tensor([[0, 0, 60, 80]]).expand(4, 4)
    plan = _Plan(whole, torch.tensor([40, 53]).expand(4, 2), torch.tensor([4, 10]).expand(4, 2), FLIPS)
    apart = (
        _carry_out(plan, images, (32, 32)).int() - _resample_dense(plan, images, (32, 32), torch.float).int()
    )
    assert_close(apart.abs())


def test_evaluation_refuses_a_square_larger_than_the_image() -> None:
    images, sizes = padded_batch()
    with pytest.raises(ConfigError, match="below image_size"):
        resize_and_centre_crop(images, sizes, 30, 32)


# RandAugment's operations


def run(name: str, image: Tensor, argument: float = 0.0, bicubic: bool = False) -> Tensor:
    """Runs one operation on a batch whose other image gets another argument."""
    drawn = randaugment.Drawn(
        ops=np.full((2, 1), list(randaugment.OPERATIONS).index(name)),
        arguments=np.array([[argument * 0.5 // 0.01 * 0.01], [argument]]),
        bicubic=np.array([[not bicubic], [bicubic]]),
    )
    return randaugment.apply(torch.stack([photo(*image.shape[1:], seed=9), image]), drawn, FILL)[1]


def affine(image: Image.Image, matrix: tuple[float, ...], resample: Image.Resampling) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=resample, fillcolor=FILL)


FLAT = torch.full((3, 40, 50), 77, dtype=torch.uint8)
FEW_PIXELS = torch.arange(3 * 4 * 5, dtype=torch.uint8).reshape(3, 4, 5)


@pytest.mark.parametrize("image", [photo(64, 80), FLAT, FEW_PIXELS], ids=["photo", "flat", "few_pixels"])
@pytest.mark.parametrize(
    ("name", "argument", "in_pil"),
    [
        ("AutoContrast", 0, ImageOps.autocontrast),
        ("Equalize", 0, ImageOps.equalize),
        ("Invert", 0, ImageOps.invert),
        ("Posterize", 0, lambda image: image.point(lambda _: 0)),  # what PIL did before it refused 0 bits
        *[("Posterize", bits, lambda image, bits=bits: ImageOps.posterize(image, bits)) for bits in (1, 4)],
        *[("Solarize", at, lambda image, at=at: ImageOps.solarize(image, at)) for at in (0, 26, 150, 256)],
        (
            "SolarizeAdd",
            99,
            lambda image: image.point([min(255, i + 99) if i < 128 else i for i in range(256)] * 3),
        ),
        *[("Colour", f, lambda image, f=f: ImageEnhance.Color(image).enhance(f)) for f in (0.19, 1.81)],
        *[("Contrast", f, lambda image, f=f: ImageEnhance.Contrast(image).enhance(f)) for f in (0.19, 1.81)],
        *[
            ("Brightness", f, lambda image, f=f: ImageEnhance.Brightness(image).enhance(f))
            for f in (0.19, 1.81)
        ],
        *[
            ("Sharpness", f, lambda image, f=f: ImageEnhance.Sharpness(image).enhance(f))
            for f in (0.19, 1.81)
        ],
    ],
)
def test_colour_operation_is_pils(name: str, argument: float, in_pil, image: Tensor) -> None:
    apart = difference(run(name, image, argument), in_pil(to_pil(image)))
    assert apart.max() <= 1
    assert apart.float().mean() < 0.02  # a grey level, and that for few pixels: rounding of the last bit


@pytest.mark.parametrize("bicubic", [False, True], ids=["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("name", "argument", "in_pil"),
    [
        *[
            ("Rotate", a, lambda image, r, a=a: image.rotate(a, r, fillcolor=FILL))
            for a in (27.3, -14.0, 0.0)
        ],
        *[("ShearX", f, lambda image, r, f=f: affine(image, (1, f, 0, 0, 1, 0), r)) for f in (0.27, -0.3)],
        *[("ShearY", f, lambda image, r, f=f: affine(image, (1, 0, 0, f, 1, 0), r)) for f in (0.27, -0.3)],
        *[
            ("TranslateX", f, lambda image, r, f=f: affine(image, (1, 0, f * 80, 0, 1, 0), r))
            for f in (0.41, -0.4)
        ],
        *[
            ("TranslateY", f, lambda image, r, f=f: affine(image, (1, 0, 0, 0, 1, f * 64), r))
            for f in (0.41, -0.4)
        ],
    ],
)
def test_geometric_operation_is_pils(name: str, argument: float, in_pil, bicubic: bool) -> None:
    image = photo(64, 80)
    resampling = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    apart = difference(run(name, image, argument, bicubic), in_pil(to_pil(image), resampling))
    # PIL truncates and computes in double precision: a result near a whole number may fall to its other side.
    assert (apart <= 1).float().mean() > 0.999
    assert apart.float().mean() < 0.05


def test_arguments_follow_timms_levels() -> None:
    arguments = {
        name: operation.argument(np.array([0.9]), np.array([1.0])).item()
        for name, operation in randaugment.OPERATIONS.items()
    }
    assert arguments == pytest.approx(
        {
            "AutoContrast": 0,
            "Equalize": 0,
            "Invert": 0,
            "Rotate": 27,
            "Posterize": 1,
            "Solarize": 26,
            "SolarizeAdd": 99,
            "Colour": 1.81,
            "Contrast": 1.81,
            "Brightness": 1.81,
            "Sharpness": 1.81,
            "ShearX": 0.27,
            "ShearY": 0.27,
            "TranslateX": 0.405,
            "TranslateY": 0.405,
        }
    )
    weakest = randaugment.OPERATIONS["Contrast"].argument(np.array([1.0]), np.array([-1.0]))
    assert weakest.item() == pytest.approx(0.1)


def test_drawn_operations_are_spread_as_asked() -> None:
    uniform = np.random.default_rng(0).random((20_000, 2, randaugment.NUM_DRAWS))
    drawn = randaugment.draw(uniform)
    applied = drawn.ops >= 0
    assert applied.mean() == pytest.approx(0.5, abs=0.01)
    shares = np.bincount(drawn.ops[applied], minlength=15) / applied.sum()
    assert shares == pytest.approx(np.full(15, 1 / 15), abs=0.01)
    degrees = drawn.arguments[drawn.ops == list(randaugment.OPERATIONS).index("Rotate")]
    assert np.abs(degrees).max() <= 30
    assert np.abs(degrees).mean() == pytest.approx(27, abs=0.3)
    assert (degrees > 0).mean() == pytest.approx(0.5, abs=0.05)
    assert randaugment.draw(uniform, interpolation="bicubic").bicubic.all()
    assert not randaugment.draw(uniform, interpolation="bilinear").bicubic.any()


def test_operations_leave_other_images_and_the_input_alone() -> None:
    images = torch.stack([photo(32, 32, seed) for seed in range(3)])
    before = images.clone()
    drawn = randaugment.Drawn(np.array([[-1], [2], [-1]]), np.zeros((3, 1)), np.zeros((3, 1), dtype=bool))
    result = randaugment.apply(images, drawn, FILL)
    assert torch.equal(images, before)
    assert torch.equal(result, torch.stack([before[0], 255 - before[1], before[2]]))


# Crops


def crop_one_by_one(uniform: list[float], height: int, width: int) -> list[int]:
    """The usual procedure in plain Python, for an image that some crop fits into."""
    top, left = uniform[20:]
    for u, v in zip(uniform[:10], uniform[10:20], strict=True):
        area = height * width * (0.08 + 0.92 * u)
        ratio = math.exp(math.log(3 / 4) + v * (math.log(4 / 3) - math.log(3 / 4)))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            return [int(top * (height - rows + 1)), int(left * (width - columns + 1)), rows, columns]
    raise AssertionError("no crop fits")


def test_crops_are_those_of_the_usual_procedure() -> None:
    sizes = np.array([[300, 400], [256, 256], [500, 320]] * 300)
    uniform = np.random.default_rng(0).random((900, 22))
    boxes = draw_crops(uniform, sizes, (0.08, 1.0), (3 / 4, 4 / 3))
    assert boxes.tolist() == [
        crop_one_by_one(u, *size) for u, size in zip(uniform.tolist(), sizes.tolist(), strict=True)
    ]
    assert (boxes[:, :2] + boxes[:, 2:] <= sizes).all()


def test_an_image_no_crop_fits_into_gives_its_central_part() -> None:
    sizes = np.array([[10, 1000], [1000, 10], [1, 1]])
    boxes = draw_crops(np.random.default_rng(0).random((3, 22)), sizes, (0.9, 1.0), (3 / 4, 4 / 3))
    assert boxes.tolist() == [[0, 493, 10, 13], [493, 0, 13, 10], [0, 0, 1, 1]]


# The whole


def test_the_seed_decides_and_nothing_else() -> None:
    images, sizes = padded_batch()
    augment = Augment(AugmentConfig(vertical_flip=0.5, op_probability=1.0), image_size=32)
    first = augment(images, sizes, seed=(1, 2, 3))
    other = augment(images, sizes, seed=(1, 2, 4))
    assert first.shape == (4, 3, 32, 32)
    assert first.dtype == torch.float32
    assert torch.equal(augment(images, sizes, seed=(1, 2, 3)), first)
    assert not torch.equal(other, first)


def test_an_image_is_augmented_alike_whatever_its_batch() -> None:
    images, sizes = padded_batch()
    augment = Augment(AugmentConfig(op_probability=1.0), image_size=32)
    in_large_batch = augment(images.repeat(9, 1, 1, 1), sizes.repeat(9, 1), seed=7)
    assert in_large_batch.shape == (36, 3, 32, 32)
    assert torch.equal(in_large_batch[:3], augment(images[:3], sizes[:3], seed=7))


def test_torch_keeps_its_number_of_threads() -> None:
    images, sizes = padded_batch()
    before = torch.get_num_threads()
    Augment(AugmentConfig(), image_size=32)(images, sizes, seed=0)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("config", [AugmentConfig(), AugmentConfig.off()])
def test_the_result_may_be_oblong_and_the_input_in_any_layout(config: AugmentConfig) -> None:
    images, sizes = padded_batch()
    augment = Augment(config, image_size=(24, 40))
    result = augment(images, sizes, seed=1)
    assert result.shape == (4, 3, 24, 40)
    torch.testing.assert_close(augment(images.to(memory_format=torch.channels_last), sizes, seed=1), result)


def test_padding_never_shows() -> None:
    images, sizes = padded_batch()
    other_padding = images.clone()
    for index, (height, width) in enumerate(sizes.tolist()):
        other_padding[index, :, height:] = 0
        other_padding[index, :, :, width:] = 0
    for config in (AugmentConfig(), AugmentConfig.off()):
        augment = Augment(config, image_size=32)
        assert torch.equal(augment(images, sizes, seed=5), augment(other_padding, sizes, seed=5))


def test_off_only_brings_to_size_and_normalises() -> None:
    images, sizes = padded_batch()
    expected = normalise(resize_and_centre_crop(images, sizes, 32, 32))
    assert torch.equal(Augment(AugmentConfig.off(), 32)(images, sizes, seed=0), expected)


def test_pixels_are_the_result_before_normalisation() -> None:
    images, sizes = padded_batch()
    augment = Augment(AugmentConfig(), 32, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    pixels = augment.pixels(images, sizes, seed=3)
    assert pixels.dtype == torch.uint8
    torch.testing.assert_close(augment(images, sizes, seed=3), (pixels / 255 - 0.5) / 0.25)


@pytest.mark.parametrize("config", [AugmentConfig(op_probability=1.0), AugmentConfig.off()])
def test_no_value_is_ever_read_back_from_the_device(config: AugmentConfig) -> None:
    """On the meta device tensors have no values: whatever would wait for a GPU's values fails here."""
    images = torch.empty(64, 3, 40, 48, dtype=torch.uint8, device="meta")
    result = Augment(config, 32)(images, torch.tensor([[40, 48]]).expand(64, 2), seed=0)
    assert result.shape == (64, 3, 32, 32)


@pytest.mark.parametrize(
    "setting",
    [
        {"crop_scale": (0.0, 1.0)},
        {"crop_scale": (0.5, 0.2)},
        {"crop_ratio": (2.0, 1.0)},
        {"horizontal_flip": 1.5},
        {"vertical_flip": -0.1},
        {"num_ops": -1},
        {"magnitude": 11.0},
        {"magnitude_std": -1.0},
        {"op_probability": 2.0},
        {"interpolation": "nearest"},
    ],
)
def test_wrong_settings_are_named(setting: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        AugmentConfig(**setting)


def test_large_crops_are_larger_never_larger_than_the_largest() -> None:
    given = AugmentConfig(crop_scale=(0.25, 1.0), large_crop=0.7)
    assert given.with_large_crops() == dataclasses.replace(given, crop_scale=(0.7, 1.0))
    assert AugmentConfig(crop_scale=(0.9, 1.0), large_crop=0.7).with_large_crops().crop_scale == (0.9, 1.0)
    assert AugmentConfig(crop_scale=(0.1, 0.5), large_crop=0.7).with_large_crops().crop_scale == (0.5, 0.5)
