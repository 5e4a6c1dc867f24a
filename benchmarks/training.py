"""Training and looking on a GPU: the tables of docs/performance.md, a profile, and what the parts cost.

    python benchmarks/training.py table scaling profile agreement first-batch --out results

`table`: Tiny and Small at the batches of the baseline, from the device and from files, and looking beside the
plain loop. `scaling`: against batch and glimpses, drawn too. `profile`: a batch by kind of kernel.
`agreement`: losses of every path beside the plain float32 one. `first-batch`: where the time before the
second batch goes.
`--core causal --actor-objective gains --actor-width 512` measure another agent than the paper's.
It does without `stam bench`'s command line and so needs nothing but torch. What it prints is also in `--out`.
"""

import argparse
import cProfile
import dataclasses
import io
import itertools
import json
import pstats
import re
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from stam.config import CORES, AgentConfig
from stam.evaluation.speed import (
    TrainingSpeed,
    look_speed,
    loss_agreement,
    make_learner,
    peak_tera_flops,
    random_batch,
    training_speed,
)
from stam.learning.loop import Place
from stam.learning.timing import synchronise
from stam.learning.training import AgentLearner
from stam.settings import ACTOR_OBJECTIVES, RunConfig, TrainingConfig

KINDS = {  # of kernels, by name; the first that fits counts
    "attention": r"^_attention|^_cached_attention|sdpa|flash|fmha",
    "draws of the policy": r"^_unseen|^_draw",
    "matrix products": r"nvjet|gemm|cutlass|splitK|gemv",
    "layer norm and residual": r"^_add_norm|layer_norm",
    "batch norm": r"^_(sum_)?norm_relu|^_follow_groups|^_share_with|batch_norm",
    "GELU": r"(?i)gelu",
    "optimiser and rounding": r"multi_tensor",
    "sums": r"^_add_up|reduce_kernel",
    "other": r"",
}


def learner(size: str, batch_size: int, given: argparse.Namespace) -> AgentLearner:
    training = TrainingConfig(
        num_glimpses=given.glimpses,
        batch_size=batch_size,
        device=given.device,
        actor_objective=given.actor_objective,
    )
    return make_learner(RunConfig(agent=agent(size, given), training=training))


def agent(size: str, given: argparse.Namespace) -> AgentConfig:
    return AgentConfig.of_size(size, 1000, core=given.core, actor_width=given.actor_width)


def table(given: argparse.Namespace) -> Any:
    rows = []
    for size, batch in zip(given.sizes, given.batches, strict=True):
        for from_files in (False, True):
            speed = training_speed(
                size,
                batch,
                given.glimpses,
                given.device,
                num_batches=12 if from_files and given.device != "cpu" else 4,
                from_files=from_files,
                agent=agent(size, given),
                actor_objective=given.actor_objective,
            )
            rows.append(dataclasses.asdict(speed))
            print(
                f"{size:<6} {batch:>5} {speed.source:<7} {speed.images_per_second:>8.1f} img/s  "
                f"{speed.memory_gib or 0:>5.1f} GiB  {speed.tera_flops:>6.1f} TFLOP/s  "
                f"first {speed.first_seconds:.0f} s",
                flush=True,
            )
    look = look_speed(given.sizes[-1], given.look_batch, given.glimpses, given.device, rounds=3)
    print(
        f"look {look.size} {look.batch_size}: {look.images_per_second:.0f} img/s, plain float32 "
        f"{look.plain_images_per_second:.0f}, plain bfloat16 {look.plain_half_images_per_second or 0:.0f}",
        flush=True,
    )
    peak = peak_tera_flops(torch.device(given.device))
    print(f"peak {peak:.2f} TFLOP/s")
    return {"training": rows, "looking": dataclasses.asdict(look), "peak_tera_flops": peak}


def scaling(given: argparse.Namespace) -> Any:
    rows = []
    for size, most in zip(given.sizes, given.batches, strict=True):
        for batch in sorted({max(1, most // 8), max(1, most // 4), max(1, most // 2), most}):
            for glimpses in sorted(
                {max(1, given.glimpses // 3), max(1, 2 * given.glimpses // 3), given.glimpses}
            ):
                if batch != most and glimpses != given.glimpses:
                    continue  # one line each way through the largest
                speed = training_speed(
                    size,
                    batch,
                    glimpses,
                    given.device,
                    num_batches=2,
                    agent=agent(size, given),
                    actor_objective=given.actor_objective,
                )
                rows.append(dataclasses.asdict(speed))
                print(
                    f"{size:<6} batch {batch:>5} T {glimpses:>2} {speed.images_per_second:>8.1f} img/s "
                    f"{speed.memory_gib or 0:>5.1f} GiB {speed.tera_flops:>6.1f} TFLOP/s",
                    flush=True,
                )
    if given.out is not None:
        draw(rows, given.out / "scaling.png")
    return rows


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draws images a second and memory against batch and glimpses."""
    from stam.show.figures import speed, to_bytes  # needs the extra `figures`

    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(to_bytes(speed.training_speed([TrainingSpeed(**row) for row in rows]), "png"))


def profiled(given: argparse.Namespace) -> Any:
    found = {}
    for size, batch in zip(given.sizes, given.batches, strict=True):
        made = learner(size, batch, given)
        made.use_cuda_graph = False  # the profiler sees kernels one by one
        images, labels = random_batch(made)
        made.learn_from(images, labels, Place(0, 0, False))
        on_gpu = made.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as run:
            made.learn_from(images, labels, Place(0, 1, False))
            synchronise(made.device)
        events = [
            (
                event.key,
                (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3,
                event.count,
            )
            for event in run.key_averages()
            if not event.key.startswith(("Optimizer", "ProfilerStep"))
            and (not on_gpu or event.device_type == DeviceType.CUDA)  # not the calls that launch them
        ]
        kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        for key, milliseconds, count in events:
            kind = next(name for name, pattern in KINDS.items() if re.search(pattern, key))
            kinds[kind][0] += milliseconds
            kinds[kind][1] += count
        total = sum(milliseconds for milliseconds, _ in kinds.values())
        print(f"{size} {batch}: {total:.1f} ms in {int(sum(n for _, n in kinds.values()))} launches")
        for name, (milliseconds, count) in sorted(kinds.items(), key=lambda item: -item[1][0]):
            print(f"  {milliseconds:>8.1f} ms  x{int(count):<6} {name}")
        for key, milliseconds, count in sorted(events, key=lambda event: -event[1])[: given.most]:
            print(f"    {milliseconds:>8.2f} ms  x{count:<6} {key[:100]}", flush=True)
        found[size] = {name: {"ms": ms, "launches": n} for name, (ms, n) in kinds.items()}
    return found


def agreement(given: argparse.Namespace) -> Any:
    config = AgentConfig.of_size(given.sizes[0], 10, actor_width=256)
    found = loss_agreement(
        config, given.device, batch_size=min(64, given.batches[0]), num_glimpses=given.glimpses
    )
    for path in found:
        print(f"{path.path:<20} {' '.join(f'{value:.2e}' for value in path.differences)}", flush=True)
    return [dataclasses.asdict(path) for path in found]


def first_batch(given: argparse.Namespace) -> Any:
    made = learner(given.sizes[0], given.batches[0], given)
    images, labels = random_batch(made)
    watch = cProfile.Profile()
    marks = [time.perf_counter()]
    for index in range(3):
        if index == 0:
            watch.enable()
        made.learn_from(images, labels, Place(0, index, False))
        synchronise(made.device)
        watch.disable()
        marks.append(time.perf_counter())
    each = [b - a for a, b in itertools.pairwise(marks)]
    print("first three batches: " + ", ".join(f"{value:.1f} s" for value in each))
    text = io.StringIO()
    pstats.Stats(watch, stream=text).sort_stats("cumulative").print_stats(given.most)
    print("\n".join(line[:140] for line in text.getvalue().splitlines()[4:]), flush=True)
    return each


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "table": table,
    "scaling": scaling,
    "profile": profiled,
    "agreement": agreement,
    "first-batch": first_batch,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=tuple(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--core", default="reencoding", choices=CORES)
    parser.add_argument("--actor-width", type=int, default=2048)
    parser.add_argument("--actor-objective", default="actor-critic", choices=ACTOR_OBJECTIVES)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small"])
    parser.add_argument("--batches", nargs="+", type=int, default=[600, 1024], help="one a size")
    parser.add_argument("--glimpses", type=int, default=21)
    parser.add_argument("--look-batch", type=int, default=512)
    parser.add_argument("--most", type=int, default=25, help="lines of a profile")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for part in given.parts:
        began = time.perf_counter()
        print(f"== {part}", flush=True)
        found[part] = PARTS[part](given)
        print(f"({time.perf_counter() - began:.0f} s)", flush=True)
        if given.out is not None:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / "training.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
