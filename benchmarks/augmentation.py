"""How fast the batched augmentation is, beside the usual one that takes one image at a time through PIL.

Both start from decoded images and end with a normalised batch of 224 x 224 pixels; decoding costs the same
either way. On a CPU each takes one thread.

Example: `python benchmarks/augmentation.py --device cuda --batch 256`.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps

from stam.data.augment import Augment
from stam.learning.timing import in_turn
from stam.scene.pixels import IMAGENET_MEAN, IMAGENET_STD
from stam.settings import AugmentConfig

IMAGE_SIZE = 224
BATCHES = 8  # of ours in one run: a single one is too short to time
OURS = "batched"
FILL = tuple(round(255 * value) for value in IMAGENET_MEAN)
PerImage = Callable[[Image.Image], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="where the batched augmentation runs (default: cpu)")
    parser.add_argument("--batch", type=int, default=128, help="images a batch (default: 128)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)

    photos = [fake_photo(seed) for seed in range(min(arguments.batch, 64))]
    images, sizes = collate(photos, arguments.batch)
    pipelines: dict[str, PerImage] = {"PIL, one image at a time": in_pil}
    if find_spec("timm") and find_spec("torchvision"):
        pipelines["timm, one image at a time"] = in_timm()
    augment = Augment(AugmentConfig(interpolation="bicubic"), IMAGE_SIZE)
    images = images.to(device)
    waits = device.type == "cuda" and waits_for_device(lambda: augment(images, sizes, seed=0))
    runs: dict[str, Callable[[], object]] = {
        name: partial(augment_each, pipeline, photos, arguments.batch) for name, pipeline in pipelines.items()
    }
    runs[OURS] = lambda: [augment(images, sizes, seed=seed) for seed in range(BATCHES)]
    times = in_turn(runs, device, arguments.rounds)
    medians = {name: statistics.median(each) for name, each in times.items()}
    counts = {name: arguments.batch * (BATCHES if name == OURS else 1) for name in runs}
    rates = {name: counts[name] / seconds for name, seconds in medians.items()}
    batched = rates.pop(OURS)
    ratios = {name: batched / rate for name, rate in rates.items()}

    if arguments.json:
        result = {
            "device": arguments.device,
            "batch": arguments.batch,
            "batched_images_per_s": round(batched, 1),
            "waits_for_device": waits,
            "per_image_images_per_s": {name: round(rate, 1) for name, rate in rates.items()},
            "ratio": {name: round(ratio, 2) for name, ratio in ratios.items()},
        }
        print(json.dumps(result))
        return
    print(f"{'pipeline':<44}{'images/s':>10}{'batched is':>12}")
    for name, rate in rates.items():
        print(f"{name + ' (cpu, one process)':<44}{rate:>10.0f}{ratios[name]:>11.2f}x")
    print(f"{f'ours, batch {arguments.batch} on {arguments.device}':<44}{batched:>10.0f}")
    print(f"waits for the device: {'yes' if waits else 'no'}")


def fake_photo(seed: int) -> Image.Image:
    """An image of about 256 pixels with the low frequencies of a photograph, and some of its noise."""
    rng = np.random.default_rng(seed)
    width, height = (256, int(rng.integers(256, 385)))[:: rng.choice((1, -1))]
    coarse = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float64)
    return Image.fromarray((smooth + rng.normal(0, 8, smooth.shape)).clip(0, 255).astype(np.uint8))


def collate(photos: list[Image.Image], batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = [photos[index % len(photos)] for index in range(batch)]
    sizes = torch.tensor([(photo.height, photo.width) for photo in chosen])
    height, width = sizes.amax(dim=0).tolist()
    images = torch.zeros(batch, 3, height, width, dtype=torch.uint8)
    for image, photo in zip(images, chosen, strict=True):
        image[:, : photo.height, : photo.width] = torch.from_numpy(np.array(photo)).permute(2, 0, 1)
    return images, sizes


def waits_for_device(call: Callable[[], object]) -> bool:
    """Whether a call waits for the GPU, as torch's own check sees it."""
    call()  # the first one loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def augment_each(pipeline: PerImage, photos: list[Image.Image], batch: int) -> torch.Tensor:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker process of torch's DataLoader
    result = torch.stack([pipeline(photos[index % len(photos)]) for index in range(batch)])
    torch.set_num_threads(num_threads)
    return result


def in_timm() -> PerImage:
    from timm.data import create_transform

    transform = create_transform(
        IMAGE_SIZE,
        is_training=True,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.0,
    )

    def augment(photo: Image.Image) -> torch.Tensor:
        try:
            return transform(photo)
        except ValueError:  # Pillow 13 refuses the 0 bits that timm rarely posterizes to
            return transform(photo)

    return augment


def in_pil(photo: Image.Image) -> torch.Tensor:
    """The same augmentation, one image at a time."""
    left, top, right, bottom = random_box(photo.width, photo.height)
    image = photo.crop((left, top, right, bottom)).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for operation in random.choices(PIL_OPERATIONS, k=2):
        if random.random() < 0.5:
            level = min(max(random.gauss(9.0, 0.5), 0.0), 10.0) / 10
            image = operation(image, level, random.choice((-1.0, 1.0)))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
    return pixels.sub_(MEAN).div_(STD)


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            left, top = random.randint(0, width - columns), random.randint(0, height - rows)
            return left, top, left + columns, top + rows
    return 0, 0, width, height


def affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    method, resampling = Image.Transform.AFFINE, Image.Resampling.BICUBIC
    return image.transform(image.size, method, matrix, resample=resampling, fillcolor=FILL)


def solarize_add(image: Image.Image, added: int) -> Image.Image:
    return image.point([min(255, level + added) if level < 128 else level for level in range(256)] * 3)


def factor(level: float, sign: float) -> float:
    return max(0.1, 1 + sign * level * 0.9)


MEAN = torch.tensor(IMAGENET_MEAN).view(3, 1, 1)
STD = torch.tensor(IMAGENET_STD).view(3, 1, 1)
PIL_OPERATIONS: list[Callable[[Image.Image, float, float], Image.Image]] = [
    lambda image, level, sign: ImageOps.autocontrast(image),
    lambda image, level, sign: ImageOps.equalize(image),
    lambda image, level, sign: ImageOps.invert(image),
    lambda image, level, sign: image.rotate(sign * level * 30, Image.Resampling.BICUBIC, fillcolor=FILL),
    lambda image, level, sign: ImageOps.posterize(image, max(1, 4 - int(level * 4))),
    lambda image, level, sign: ImageOps.solarize(image, 256 - int(level * 256)),
    lambda image, level, sign: solarize_add(image, int(level * 110)),
    lambda image, level, sign: ImageEnhance.Color(image).enhance(factor(level, sign)),
    lambda image, level, sign: ImageEnhance.Contrast(image).enhance(factor(level, sign)),
    lambda image, level, sign: ImageEnhance.Brightness(image).enhance(factor(level, sign)),
    lambda image, level, sign: ImageEnhance.Sharpness(image).enhance(factor(level, sign)),
    lambda image, level, sign: affine(image, (1, sign * level * 0.3, 0, 0, 1, 0)),
    lambda image, level, sign: affine(image, (1, 0, 0, sign * level * 0.3, 1, 0)),
    lambda image, level, sign: affine(image, (1, 0, sign * level * 0.45 * image.width, 0, 1, 0)),
    lambda image, level, sign: affine(image, (1, 0, 0, 0, 1, sign * level * 0.45 * image.height)),
]

if __name__ == "__main__":
    main()
