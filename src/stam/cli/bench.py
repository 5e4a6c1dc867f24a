"""`stam bench [--device] [--json]`."""

import dataclasses
import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from stam.cli.parsing import next_command, parse, split_positionals
from stam.config import CORE_SIZES
from stam.errors import ConfigError, require, require_choice
from stam.evaluation.speed import LookSpeed, TrainingSpeed, look_speed, peak_tera_flops, training_speed
from stam.files import save_content
from stam.learning.optimisation import choose_device
from stam.learning.runs import versions

# (batch, glimpses) that take seconds on such a machine
_ON_GPU = {"tiny": (600, 21), "small": (1024, 21), "base": (256, 21)}
_ON_CPU = {"tiny": (4, 5), "small": (2, 5), "base": (1, 3)}


@dataclass(frozen=True)
class Arguments:
    """What `stam bench` takes.

    Attributes:
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        sizes: Cores to measure.
        batch_sizes: Scenes in a training batch, several to see how cost grows; none is what suits the device.
        num_glimpses: Glimpses in an episode, likewise; looking takes the most of them, or 21.
        look_batch: Scenes looked at together; none is 512 on a GPU and 1 elsewhere.
        batches: How many training batches to time, and how many looks.
        files: Also train from image files, with augmentation.
        fast: Use fused kernels and CUDA graphs, on a GPU.
        json: Print JSON.
        plot: Also draw images a second against batch and glimpses, to this file (extra `figures`).
    """

    device: str = "auto"
    sizes: tuple[str, ...] = ("tiny", "small")
    batch_sizes: tuple[int, ...] | None = None
    num_glimpses: tuple[int, ...] | None = None
    look_batch: int | None = None
    batches: int = 3
    files: bool = False
    fast: bool = True
    json: bool = False
    plot: Path | None = None


def run(arguments: list[str]) -> None:
    """Measures how fast training and looking are on this machine."""
    _, options = split_positionals(arguments, most=0)
    parsed = parse(Arguments, "bench", options, default=Arguments())
    for size in parsed.sizes:
        require_choice("size", size, tuple(CORE_SIZES))
    for name in ("batch_sizes", "num_glimpses"):
        given = getattr(parsed, name)
        require(
            given is None or all(number >= 1 for number in given), f"{name} must be at least 1, got {given}"
        )
    require(parsed.batches >= 1, f"batches must be at least 1, got {parsed.batches}")
    look_batch = parsed.look_batch
    require(look_batch is None or look_batch >= 1, f"look_batch must be at least 1, got {look_batch}")
    if parsed.plot is not None and parsed.plot.suffix not in (".png", ".svg"):
        raise ConfigError(f"cannot draw '{parsed.plot}': name a .png or .svg file")
    device = choose_device(parsed.device)
    usual = _ON_GPU if device.type == "cuda" else _ON_CPU
    _say(f"measuring on {machine(device)}")
    peak = peak_tera_flops(device)
    trained, looked = [], []
    for size in parsed.sizes:
        batch, glimpses = usual[size]
        for count in parsed.num_glimpses or (glimpses,):
            for batch_size in parsed.batch_sizes or (batch,):
                for from_files in (False, True) if parsed.files else (False,):
                    trained.append(
                        training_speed(
                            size, batch_size, count, str(device), parsed.fast, parsed.batches, from_files
                        )
                    )
                    _say(_training_row(trained[-1], peak))
        together = look_batch or (512 if device.type == "cuda" else 1)
        most = max(parsed.num_glimpses or (21,))
        looked.append(look_speed(size, together, most, str(device), rounds=parsed.batches))
        _say(_look_row(looked[-1]))
    if parsed.plot is not None:
        from stam.show.figures import speed as drawing  # needs the extra `figures`
        from stam.show.figures import to_bytes

        save_content(parsed.plot, to_bytes(drawing.training_speed(trained), parsed.plot.suffix[1:]))
    if parsed.json:
        result = {
            "machine": machine(device),
            "versions": versions(),
            "peak_tera_flops": peak,
            "training": [dataclasses.asdict(speed) for speed in trained],
            "looking": [dataclasses.asdict(speed) for speed in looked],
        }
        print(json.dumps(result, indent=1))
    else:
        print(f"{machine(device)}: {peak:.1f} TFLOP/s in a large matrix product\n")
        print(TRAINING_HEAD)
        for speed in trained:
            print(_training_row(speed, peak))
        print(f"\n{LOOK_HEAD}")
        for look in looked:
            print(_look_row(look))
    next_command("stam train digits --out runs/digits")


def machine(device: torch.device) -> str:
    """Names what is measured."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


TRAINING_HEAD = "training  batch  T  images from    img/s     GiB  TFLOP/s  of peak  first two batches"
LOOK_HEAD = "looking   batch  T       img/s  plain float32  plain bfloat16"


def _training_row(speed: TrainingSpeed, peak: float) -> str:
    memory = "-" if speed.memory_gib is None else f"{speed.memory_gib:.1f}"
    return (
        f"{speed.size:<8} {speed.batch_size:>6} {speed.num_glimpses:>2}  {speed.source:<11} "
        f"{speed.images_per_second:>7.1f} {memory:>7} {speed.tera_flops:>8.2f} "
        f"{100 * speed.tera_flops / peak:>7.0f}%  {speed.first_seconds:>7.1f} s"
    )


def _look_row(speed: LookSpeed) -> str:
    half = speed.plain_half_images_per_second
    return (
        f"{speed.size:<8} {speed.batch_size:>6} {speed.num_glimpses:>2} {speed.images_per_second:>11.1f} "
        f"{speed.plain_images_per_second:>14.1f} {'-' if half is None else f'{half:.1f}':>15}"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
