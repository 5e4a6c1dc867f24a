"""How much sooner a causal core looks than the paper's, which encodes all glimpses again after each.

    python benchmarks/cores.py --size tiny --threads 2
    python benchmarks/cores.py --size tiny --device cuda --batch-sizes 600

Both are timed in turn, round after round, so that a busy machine slows both alike; medians over the rounds.
look: a look of all glimpses, with the actor of the shipped agents (512 wide).
core: the same by a fixed order, without the actor.
step: the last glimpse of a live session (on a CPU).
exported: the same as an ONNX graph (`stam export`), run by onnxruntime, where that is installed.
"""

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable
from functools import partial

import torch
from live_latency import exported

import stam
from stam.evaluation import multiply_adds
from stam.fast import prepare
from stam.fast.cuda_graph import GraphedLook
from stam.learning.optimisation import autocast
from stam.learning.timing import in_turn, median_ratio
from stam.live import Session
from stam.model.agent import Looker

CORES = ("reencoding", "causal")


def build(size: str, core: str, actor_width: int, device: torch.device) -> stam.Agent:
    torch.manual_seed(0)
    config = stam.AgentConfig.of_size(size, 10, core=core, actor_width=actor_width, drop_path=0.0)
    return stam.Agent(config).eval().to(device)


def look(looker: Looker, images: torch.Tensor, num_glimpses: int, policy: str) -> Callable[[], object]:
    first = torch.arange(len(images), device=images.device) % looker.grid.num_locations
    chosen = looker.policy(policy)
    if images.device.type == "cuda":
        graphed = GraphedLook(looker, num_glimpses, lambda: chosen)

        def run() -> object:
            with autocast(images.device, "auto"):
                return graphed(images, first)

        return run
    return partial(looker.look_from, images, num_glimpses, first, chosen)


def last_step(looker: Looker, num_glimpses: int, times: int) -> Callable[[], object]:
    """Returns a call that feeds the next of some live sessions its last glimpse."""
    glimpses = torch.randn(looker.grid.num_locations, 3, *looker.grid.glimpse_size)
    sessions = [Session(looker, first_location=0) for _ in range(times)]
    for session in sessions:
        for _ in range(num_glimpses - 1):
            assert session.location is not None
            session.observe(glimpses[looker.grid.index(session.location)])
    return lambda: sessions.pop().observe(glimpses[0])


def last_exported_step(agent: stam.Agent, num_glimpses: int) -> Callable[[], object]:
    """Returns a call of the exported graph for the last glimpse."""
    from stam.integrations.onnx import empty_state

    graph = exported(agent)
    glimpses = torch.randn(1, num_glimpses, 3, *agent.grid.glimpse_size).numpy()
    locations = torch.arange(num_glimpses)[None].numpy()
    if agent.config.core != "causal":
        return partial(graph.run, None, {"glimpses": glimpses, "locations": locations})
    seen, cache = (part.numpy() for part in empty_state(agent.config, 1))

    def inputs(step: int) -> dict[str, object]:
        latest = slice(step, step + 1)
        return {
            "glimpses": glimpses[:, latest],
            "locations": locations[:, latest],
            "seen": seen,
            "cache": cache,
        }

    for step in range(num_glimpses - 1):
        seen, cache = graph.run(["new_seen", "new_cache"], inputs(step))
    return partial(graph.run, None, inputs(num_glimpses - 1))


@torch.no_grad()
def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    device = torch.device(arguments.device)
    agents = {core: build(arguments.size, core, arguments.actor_width, device) for core in CORES}
    lookers = {core: prepare(agent) for core, agent in agents.items()}
    count, rows = arguments.num_glimpses, []
    cases: list[tuple[str, int, dict[str, Callable[[], object]]]] = []
    for batch_size in arguments.batch_sizes:
        images = torch.randn(batch_size, 3, 224, 224, device=device)
        for name, policy in (("look", "learned"), ("core", "spiral")):
            runs = {core: look(lookers[core], images, count, policy) for core in CORES}
            cases.append((name, batch_size, runs))
    if device.type == "cpu":
        cases.append(
            ("step", 1, {core: last_step(lookers[core], count, arguments.rounds + 1) for core in CORES})
        )
        if importlib.util.find_spec("onnxruntime") is not None:
            runs = {core: last_exported_step(agents[core], count) for core in CORES}
            cases.append(("exported", 1, runs))
    for name, batch_size, runs in cases:
        times = in_turn(runs, device, arguments.rounds)
        medians = {f"{core} ms": round(1e3 * statistics.median(times[core]), 2) for core in CORES}
        ratio = median_ratio(times["reencoding"], times["causal"])
        rows.append({"what": name, "batch": batch_size} | medians | {"times as fast": round(ratio, 2)})
    products = [
        sum(multiply_adds(lookers[core].config, count, lookers[core].policy("spiral")).core) for core in CORES
    ]
    rows.append({"what": "products of the core", "share": round(products[1] / products[0], 4)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="tiny", choices=("tiny", "small", "base"))
    parser.add_argument("--num-glimpses", type=int, default=21)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--actor-width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = measure(arguments)
    if not arguments.json:
        print(f"{arguments.size}, {arguments.num_glimpses} glimpses, {arguments.device}")
    for row in rows:
        print(
            json.dumps(row) if arguments.json else "  ".join(f"{key} {value}" for key, value in row.items())
        )


if __name__ == "__main__":
    main()
