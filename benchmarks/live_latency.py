"""How long a live agent takes to answer: many sessions, ONNX against PyTorch, grouping against padding.

    python benchmarks/live_latency.py --size digits sessions
    python benchmarks/live_latency.py --size tiny onnx
    python benchmarks/live_latency.py --size small batching

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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import stam
from stam.live import SessionPool
from stam.live.session import Session, by_count, settle
from stam.model.agent import Memory


def build(size: str) -> stam.Agent:
    if size == "digits":
        config = stam.AgentConfig(
            num_classes=10,
            image_size=56,
            glimpse_size=8,
            patch_size=4,
            width=96,
            depth=4,
            num_heads=3,
            actor_width=256,
        )
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


def median_ms(function: Callable[[], object], repeats: int) -> float:
    function()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        taken.append(time.perf_counter() - started)
    return round(statistics.median(taken) * 1e3, 2)


def onnx(agent: stam.Agent, repeats: int) -> list[dict]:
    """One step of one session at several counts of glimpses."""
    import onnxruntime

    from stam.integrations.onnx import StepGraph, export_onnx

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agent.onnx"
        export_onnx(agent, path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    graph, rows = StepGraph(agent), []
    most = agent.grid.num_locations
    for count in (1, 7, 14, 28, most):
        glimpses = torch.randn(1, count, agent.config.channels, *agent.grid.glimpse_size)
        locations = torch.arange(count)[None]
        inputs = {"glimpses": glimpses.numpy(), "locations": locations.numpy()}
        with torch.no_grad():
            torch_ms = median_ms(lambda g=glimpses, places=locations: graph(g, places), repeats)  # type: ignore[misc]
        onnx_ms = median_ms(lambda given=inputs: session.run(None, given), repeats)  # type: ignore[misc]
        rows.append({"glimpses": count, "PyTorch ms": torch_ms, "ONNX ms": onnx_ms})
    return rows


@torch.no_grad()
def padded_believe(agent: stam.Agent, memories: list[Memory]) -> Tensor:
    """Encodes memories of different lengths in one pass: shorter ones are padded, and masked."""
    core = agent.core
    positions = [agent.positions[memory.locations].flatten(1) for memory in memories]
    longest = max(place.shape[1] for place in positions)

    def fill(rows: list[Tensor]) -> Tensor:
        return torch.cat([F.pad(row, (0, 0, 0, longest - row.shape[1])) for row in rows])

    tokens = core.embed(
        fill([memory.patches for memory in memories]), fill([place[..., None] for place in positions])[..., 0]
    )
    x = torch.cat((core._readout_tokens(len(memories)), tokens), dim=1)
    lengths = torch.tensor([place.shape[1] + core.num_readout for place in positions])
    mask = (torch.arange(x.shape[1]) < lengths[:, None])[:, None, None]
    blocks: list[Any] = list(core.blocks)
    for block in blocks:
        attention = block.attn
        query, key, value = attention._heads(attention.qkv(block.norm1(x)), 3)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + attention.proj(mixed.transpose(1, 2).flatten(2))
        x = x + block.mlp.fc2(block.mlp.fc1.with_gelu(block.norm2(x)))
    return core.norm(x[:, : core.num_readout])


def batching(agent: stam.Agent, repeats: int) -> list[dict]:
    """One step of 32 sessions whose counts of glimpses are spread over 1 to `most`."""
    grid, rows = agent.grid, []
    for most in (4, 16, grid.num_locations):
        counts = torch.randint(1, most + 1, (32,), generator=torch.Generator().manual_seed(0)).tolist()
        updates = []
        for count in counts:
            session = Session(agent)
            for place in range(count):
                glimpse = torch.zeros(3, *grid.glimpse_size)
                update = session.prepare(glimpse, place)
                session.commit(update.snapshot)
            updates.append(update)
        memories = [update.snapshot.memory for update in updates]
        grouped = median_ms(lambda u=updates: [agent_pass(group) for group in by_count(u)], repeats)  # type: ignore[misc]
        padded = median_ms(lambda m=memories: padded_believe(agent, m), repeats)  # type: ignore[misc]
        alone = median_ms(lambda m=memories: [believe(agent, one) for one in m], repeats)  # type: ignore[misc]
        whole = median_ms(lambda u=updates: [settle(group) for group in by_count(u)], repeats)  # type: ignore[misc]
        rows.append(
            {
                "counts": f"1 to {most}",
                "grouped ms": grouped,
                "padded ms": padded,
                "one by one ms": alone,
                "grouped, with the policy ms": whole,
            }
        )
    return rows


def agent_pass(group: list) -> object:
    agent = group[0].session.agent
    return believe(agent, agent.join([update.snapshot.memory for update in group]))


@torch.no_grad()
def believe(agent: stam.Agent, memory: Memory) -> object:
    return agent.believe(memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("sessions", "onnx", "batching"))
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
        rows = (onnx if given.what == "onnx" else batching)(agent, given.repeats)
    for row in rows:
        print(json.dumps({"size": given.size, "threads": torch.get_num_threads(), **row}))


if __name__ == "__main__":
    main()
