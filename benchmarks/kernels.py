"""How fast each kernel is, with several ways to launch it, beside copying as many bytes.

    python benchmarks/kernels.py --out kernels.json

Every kernel is timed alone, many launches replayed as one CUDA graph, at the sizes of a training step.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stam.config import AgentConfig

LAUNCHES = 10


def microseconds(run: Callable[[], object]) -> float:
    """Times one launch, without what the host takes to start it."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            run()
    times = []
    for _ in range(7):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / LAUNCHES)
    return statistics.median(times)


def ways(**values: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def cases(batch: int, tokens: int, config: AgentConfig) -> list[tuple[str, Any, int, Any, Any]]:
    """Returns for each kernel its name, a launch, the bytes it moves, its settings and ways to set them."""
    from stam.fast.kernels import (  # they need Triton
        attention,
        embedding,
        gelu,
        location_sums,
        residual,
        sums,
    )
    from stam.fast.kernels import rows as row_kernels

    rows, width, heads = batch * tokens, config.width, config.num_heads
    hidden = int(width * config.mlp_ratio)
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, dx = torch.randn(2, batch, tokens, width, **half)
    branch, dnormed = torch.randn(2, rows, width, **half)
    scale = torch.ones(batch, 1, 1, device="cuda")
    weight, bias = torch.randn(2, width, device="cuda")
    before, dy = torch.randn(2, rows, hidden, **half)
    normed, matrix, hidden_bias = (
        torch.randn(shape, **half) for shape in ((rows, width), (hidden, width), (hidden,))
    )
    qkv = torch.randn(rows, 3 * width, **half)
    dout = torch.randn(batch, tokens, width, **half)
    side = max(32, 1 << (tokens - 1).bit_length())
    elements = rows * width
    parts = torch.randn(1056, 3, width, device="cuda")
    # the actor: a row for each location that has not been seen
    grid, actor = config.grid, config.actor_width
    seen = (tokens - 2) // grid.patches_per_glimpse
    left = grid.num_locations - seen
    chosen = torch.rand(batch, grid.num_locations, device="cuda").argsort(dim=1)[:, :left].contiguous()
    of_sample, of_location = torch.randn(batch, actor, **half), torch.randn(grid.num_locations, actor, **half)
    long, dlong = torch.randn(2, batch * left, actor, **half)
    norm = torch.nn.BatchNorm1d(actor, device="cuda")
    each, pairs = row_kernels.Groups(len(long)), row_kernels.Groups(*chosen.shape)
    found = row_kernels.statistics_of(long, None, None, each, None, norm)
    factors = norm.weight.detach(), norm.bias.detach(), found
    sums_given = of_sample, of_location, chosen, dlong, *factors, pairs
    collected = location_sums.collect_gradient_of_sums(*sums_given)
    collecting = ways(rows=(8, 16, 32), columns=(64, 128), warps=(4, 8), stages=(1, 3, 4))
    count, entries = tokens - 2, 2 + grid.num_patches
    table, embedded = torch.randn(entries, width, device="cuda"), torch.randn(batch * count, width, **half)
    positions = torch.rand(batch, grid.num_patches, device="cuda").argsort(dim=1)[:, :count].contiguous()
    return [
        (
            "batch norm, statistics",
            lambda: row_kernels.statistics_of(long, None, None, each, None, norm),
            2 * long.numel(),
            row_kernels.COLLECT,
            collecting,
        ),
        (
            "batch norm, gradient's sums",
            lambda: row_kernels.collect_gradient(long, dlong, None, *factors, each),
            4 * long.numel(),
            row_kernels.COLLECT_GRADIENT,
            collecting,
        ),
        (
            "batch norm of sums, statistics",
            lambda: row_kernels.statistics_of(of_sample, of_location, chosen, pairs, None, norm),
            2 * of_sample.numel(),
            row_kernels.COLLECT,
            collecting,
        ),
        (
            "batch norm of sums, gradient's sums",
            lambda: location_sums.collect_gradient_of_sums(*sums_given),
            2 * long.numel() + 12 * of_sample.numel(),
            location_sums.COLLECT,
            ways(rows=(4, 8, 16), columns=(128, 256, 512), warps=(2, 4), stages=(1, 2, 3)),
        ),
        (
            "batch norm of sums, shared gradient",
            lambda: location_sums.share_gradient(*sums_given, *collected),
            2 * long.numel(),
            location_sums.SHARE,
            ways(rows=(8, 16, 32), columns=(64, 128), warps=(2, 4), stages=(1, 2, 3), parts=(2, 3, 5)),
        ),
        (
            "tokens",
            lambda: embedding.assemble(embedded, table, positions, 2),
            4 * elements,
            embedding.FORWARD,
            ways(rows=(2, 4, 8), warps=(1, 2, 4)),
        ),
        (
            "tokens, backward",
            lambda: embedding.assemble_backward(dx, positions, 2, entries, torch.bfloat16),
            4 * elements,
            embedding.BACKWARD,
            ways(rows=(4, 8, 16), warps=(2, 4), parts=(4, 8, 16)),
        ),
        (
            "add and norm",
            lambda: residual.add_norm(x, branch, scale, weight, bias, 1e-6),
            8 * elements,
            residual.FORWARD,
            ways(rows=(1, 2, 4), warps=(1, 2)),
        ),
        (
            "add and norm, backward",
            lambda: residual.add_norm_backward(x, scale, weight, dx, dnormed, 1e-6, True),
            10 * elements,
            residual.BACKWARD,
            ways(rows=(1, 2), warps=(1,), stages=(1, 2, 3), programs=(8, 16, 32)),
        ),
        (
            "gelu",
            lambda: gelu.gelu(before),
            4 * rows * hidden,
            gelu.FORWARD,
            ways(rows=(4, 8, 16), columns=(256,), warps=(4, 8)),
        ),
        (
            "gelu, backward",
            lambda: gelu.gelu_backward(before, dy),
            6 * rows * hidden,
            gelu.BACKWARD,
            ways(rows=(4, 8), columns=(256,), warps=(4, 8), stages=(1, 2, 3)),
        ),
        (
            "adding up",
            lambda: sums.add_up(parts),
            4 * parts.numel(),
            sums.LAUNCH,
            ways(rows=(64, 128, 256, 512), columns=(8, 16, 32, 64), warps=(4, 8)),
        ),
        (
            "linear and gelu, in turn",
            lambda: gelu.gelu(torch.addmm(hidden_bias, normed, matrix.t())),
            2 * elements + 6 * rows * hidden,
            {},
            [],
        ),
        (
            "linear and gelu, at once",
            lambda: torch._addmm_activation(hidden_bias, normed, matrix.t(), use_gelu=True),
            2 * elements + 2 * rows * hidden,
            {},
            [],
        ),
        (
            "attention",
            lambda: attention.attention(qkv, batch, heads),
            8 * elements,
            attention.WARPS["forward"],
            [{side: warps} for warps in ((1, 2, 4, 8) if side < 128 else (4, 8))],
        ),
        (
            "attention, backward",
            lambda: attention.attention_backward(qkv, dout, heads),
            14 * elements,
            attention.WARPS["backward"],
            [{side: warps} for warps in ((1, 2, 4, 8) if side < 64 else (4, 8))],
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small"])
    parser.add_argument("--batches", nargs="+", type=int, default=[600, 1024], help="one a size")
    parser.add_argument("--tokens", nargs="+", type=int, default=[22, 50, 86])
    parser.add_argument("--kernels", default="", help="only those whose name has this in it")
    parser.add_argument("--best", type=int, default=4, help="ways to show of each kernel")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernels.py measures kernels for a GPU, and there is none here")
    found = []
    for size, batch in zip(given.sizes, given.batches, strict=True):
        for tokens in given.tokens:
            config = AgentConfig.of_size(size, 10)
            for name, launch, num_bytes, settings, others in cases(batch, tokens, config):
                if given.kernels not in name:
                    continue
                copied = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
                goal = torch.empty_like(copied)
                least = microseconds(lambda goal=goal, copied=copied: goal.copy_(copied))  # type: ignore[misc]
                usual = dict(settings)
                now = microseconds(launch)
                times = []
                for way in others:
                    settings.update(way)
                    times.append((microseconds(launch), way))
                settings.update(usual)
                times.sort(key=lambda pair: pair[0])
                row = {"size": size, "tokens": tokens, "kernel": name, "now": now, "copy": least}
                found.append(row | {"ways": [[time, way] for time, way in times]})
                best = "; ".join(f"{time:.1f} {way}" for time, way in times[: given.best])
                times_now = f"now {now:6.1f} us, copying {least:6.1f}"
                print(f"{size} {tokens:>3} {name:<24} {times_now}; {best}", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
