"""How long a live agent takes to answer: many sessions at once, and ONNX against PyTorch.

    python benchmarks/live_latency.py --size digits sessions
    python benchmarks/live_latency.py --size tiny onnx

Weights are random: the time does not depend on them.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stam
from stam.learning.timing import in_turn
from stam.live import SessionPool


def build(size: str) -> stam.Agent:
    if size in ("least", "digits"):
        shape: dict[str, dict[str, Any]] = {
            "least": {"width": 32, "depth": 1, "num_heads": 1, "actor_width": 32},
            "digits": {"width": 96, "depth": 4, "num_heads": 3, "actor_width": 256},
        }
        config = stam.AgentConfig(num_classes=10, image_size=56, glimpse_size=8, patch_size=4, **shape[size])
    else:
        config = stam.AgentConfig.of_size(size, 1000)
    return stam.Agent(dataclasses.replace(config, drop_path=0.0)).eval()


def percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, share * 100))


def sessions(agent: stam.Agent, counts: list[int], seconds: float, max_glimpses: int) -> list[dict]:
    """Clients in threads, each feeding one session after another as fast as it is answered."""
    grid, rows = agent.grid, []

    def client(index: int, pool: SessionPool, deadline: float, latencies: list[float]) -> None:
        random = np.random.default_rng(index)
        scene = random.integers(0, 256, (grid.num_locations, *grid.glimpse_size, 3), dtype=np.uint8)
        while time.perf_counter() < deadline:
            key = pool.open()
            for _ in range(int(random.integers(1, max_glimpses + 1))):
                place = pool.get(key).location
                assert place is not None
                started = time.perf_counter()
                pool.observe(key, scene[grid.index(place)])
                latencies.append(time.perf_counter() - started)
                if time.perf_counter() > deadline:
                    break
            pool.discard(key)

    for count in counts:
        latencies: list[float] = []
        with SessionPool(agent) as pool:
            warm = pool.open()
            for _ in range(3):
                pool.observe(warm, np.zeros((*grid.glimpse_size, 3), np.uint8))
            deadline = time.perf_counter() + seconds
            arguments = [(index, pool, deadline, latencies) for index in range(count)]
            threads = [threading.Thread(target=client, args=given) for given in arguments]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        rows.append(
            {
                "sessions": count,
                "p50 ms": round(percentile(latencies, 0.5) * 1e3, 1),
                "p99 ms": round(percentile(latencies, 0.99) * 1e3, 1),
                "steps a second": round(len(latencies) / seconds, 1),
            }
        )
    return rows


def exported(agent: stam.Agent) -> Any:
    """Returns an onnxruntime session of an agent's step, with as many threads as PyTorch has."""
    import onnxruntime

    from stam.integrations.onnx import export_onnx

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agent.onnx"
        export_onnx(agent, path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def onnx(agent: stam.Agent, repeats: int) -> list[dict]:
    """One step of one session at several counts of glimpses."""
    from stam.integrations.onnx import StepGraph

    session, graph, rows = exported(agent), StepGraph(agent), []
    most = agent.grid.num_locations
    for count in (1, 7, 14, 28, most):
        glimpses = torch.randn(1, count, agent.config.channels, *agent.grid.glimpse_size)
        locations = torch.arange(count)[None]
        inputs = {"glimpses": glimpses.numpy(), "locations": locations.numpy()}
        runs: dict[str, Callable[[], object]] = {
            "PyTorch ms": partial(graph, glimpses, locations),
            "ONNX ms": partial(session.run, None, inputs),
        }
        with torch.no_grad():
            times = in_turn(runs, agent.device, repeats)
        medians = {name: round(1e3 * statistics.median(each), 2) for name, each in times.items()}
        rows.append({"glimpses": count} | medians)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("sessions", "onnx"))
    parser.add_argument("--size", choices=("digits", "tiny", "small", "base"), default="digits")
    parser.add_argument("--threads", type=int, default=None, help="of PyTorch and ONNX; all cores by default")
    parser.add_argument("--seconds", type=float, default=10, help="for each number of sessions")
    parser.add_argument("--max-glimpses", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    agent = build(given.size)
    if given.what == "sessions":
        rows = sessions(agent, [1, 10, 100], given.seconds, given.max_glimpses)
    else:
        rows = onnx(agent, given.repeats)
    for row in rows:
        print(json.dumps({"size": given.size, "threads": torch.get_num_threads(), **row}))


if __name__ == "__main__":
    main()
