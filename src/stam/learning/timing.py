"""Timing: how long something takes, a GPU's work included, beside other things on the same noisy machine."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F


def synchronise(device: torch.device) -> None:
    """Waits for a GPU, so that a clock read next tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """Returns what to call a device in a result."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def seconds(
    run: Callable[[], object], device: torch.device, before: Callable[[], object] | None = None
) -> float:
    """Times one run, a GPU's work included, after something that is not timed."""
    synchronise(device)
    gc.collect()
    if before is not None:
        before()
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start


def in_turn(
    runs: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    warm_up: int = 1,
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, list[float]]:
    """Times several runs in turn, round after round, so that a busy machine slows all of them alike.

    Args:
        runs: What to time, by name.
        device: Where they run.
        rounds: How often each is timed.
        warm_up: Rounds before those, which are not timed.
        before: What goes before each of some of them, and is not timed.

    Returns:
        The seconds of each, round by round.
    """
    before = before or {}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(warm_up + rounds):
        for name, run in runs.items():
            times[name].append(seconds(run, device, before.get(name)))
    return {name: each[warm_up:] for name, each in times.items()}


def bf16_speedup() -> float:
    """Returns how many times as fast this CPU multiplies matrices in bfloat16 as in float32.

    A CPU that has instructions for it (AVX-512 BF16, AMX) is some 2 to 8 times as fast; others are slower.
    """
    x, weight = torch.randn(1024, 192), torch.randn(768, 192)  # of a layer of DeiT-Tiny
    runs = {
        "float32": partial(F.linear, x, weight),
        "bfloat16": partial(F.linear, x.bfloat16(), weight.bfloat16()),
    }
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where the machine has other work
    try:
        with torch.no_grad():
            times = in_turn(runs, torch.device("cpu"), rounds=9)
    finally:
        torch.set_num_threads(num_threads)
    return min(times["float32"]) / min(times["bfloat16"])  # other work can only make either longer


def median_ratio(times: list[float], baseline: list[float]) -> float:
    """Returns the median over the rounds of how much longer one run took than another."""
    return statistics.median(one / other for one, other in zip(times, baseline, strict=True))
