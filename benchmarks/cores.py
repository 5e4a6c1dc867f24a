"""How much sooner a causal core looks than the paper's, which encodes all glimpses again after each.

    python benchmarks/cores.py --size tiny --threads 2
    python benchmarks/cores.py --size tiny --device cuda --batch-sizes 600

All are timed in turn, round after round, so that a busy machine slows them alike; medians over the rounds.
look: a look of all glimpses, with the actor of the shipped agents (512 wide).
core: the same by a fixed order, without the actor.
step: the last glimpse of a live session, right after the glimpses before it (on a CPU).
exported: the same as an ONNX graph (`stam export`), run by onnxruntime, where that is installed.
compiled: the causal core as `agent.compiled()` has it (on a CPU with a C++ compiler).
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
from stam.config import ACTORS
from stam.evaluation import multiply_adds
from stam.fast import prepare
from stam.fast.cuda_graph import GraphedLook
from stam.learning.optimisation import autocast
from stam.learning.timing import in_turn, median_ratio
from stam.live import Session
from stam.model.agent import Looker

CORES = ("reencoding", "causal")


def build(given: argparse.Namespace, core: str, device: torch.device) -> stam.Agent:
    torch.manual_seed(0)
    settings = {"core": core, "actor": given.actor, "actor_width": given.actor_width, "drop_path": 0.0}
    return stam.Agent(stam.AgentConfig.of_size(given.size, 10, **settings)).eval().to(device)


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


class LiveSession:
    """A live session up to its last glimpse, and that."""

    def __init__(self, looker: Looker, num_glimpses: int) -> None:
        self.looker, self.num_glimpses = looker, num_glimpses
        self.glimpses = torch.randn(looker.grid.num_locations, 3, *looker.grid.glimpse_size)

    def begin(self) -> None:
        """Observes all glimpses but the last."""
        self.session = Session(self.looker, first_location=0)
        for _ in range(self.num_glimpses - 1):
            self.observe()

    def observe(self) -> object:
        """Observes the glimpse that is asked for."""
        assert self.session.location is not None
        return self.session.observe(self.glimpses[self.looker.grid.index(self.session.location)])


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
    agents = {core: build(arguments, core, device) for core in CORES}
    lookers: dict[str, Looker] = {core: prepare(agent) for core, agent in agents.items()}
    if arguments.compile:
        lookers["compiled"] = agents["causal"].compiled()
    count, rows = arguments.num_glimpses, []
    for batch_size in arguments.batch_sizes:
        images = torch.randn(batch_size, 3, 224, 224, device=device)
        for name, policy in (("look", "learned"), ("core", "spiral")):
            runs = {core: look(looker, images, count, policy) for core, looker in lookers.items()}
            rows.append(summary(name, batch_size, in_turn(runs, device, arguments.rounds)))
    if device.type == "cpu":
        live = {core: LiveSession(looker, count) for core, looker in lookers.items()}
        begin = {core: session.begin for core, session in live.items()}
        runs = {core: session.observe for core, session in live.items()}
        rows.append(summary("step", 1, in_turn(runs, device, arguments.rounds, before=begin)))
        if importlib.util.find_spec("onnxruntime") is not None:
            runs = {core: last_exported_step(agents[core], count) for core in CORES}
            rows.append(summary("exported", 1, in_turn(runs, device, arguments.rounds)))
    products = [
        sum(multiply_adds(lookers[core].config, count, lookers[core].policy("spiral")).core) for core in CORES
    ]
    rows.append({"what": "products of the core", "share": round(products[1] / products[0], 4)})
    return rows


def summary(what: str, batch_size: int, times: dict[str, list[float]]) -> dict[str, object]:
    """Returns the medians, and how many times as fast as the paper's core the others are."""
    found: dict[str, object] = {"what": what, "batch": batch_size}
    found |= {f"{core} ms": round(1e3 * statistics.median(each), 2) for core, each in times.items()}
    others = [core for core in times if core != "reencoding"]
    ratios = {core: round(median_ratio(times["reencoding"], times[core]), 2) for core in others}
    return found | {f"{core} times as fast": ratio for core, ratio in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="tiny", choices=("tiny", "small", "base"))
    parser.add_argument("--num-glimpses", type=int, default=21)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--actor", default="pairwise", choices=ACTORS)
    parser.add_argument("--actor-width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="compile the causal core too (on a CPU)")
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
