"""How much a whole look costs beside the transformer forwards it contains.

    python benchmarks/look.py --size small --num-glimpses 21 --threads 2

Four things are timed in turn, round after round, so that a busy machine slows all of them alike: a whole
`agent.look`; the forwards of the same tokens by calling `agent.core`; the same with the packed weights that a
look uses; and plain forwards, where every block computes every token. The median over the rounds is reported.
"""

import argparse
import json
import statistics
from collections.abc import Callable

import torch

import stam
from stam.evaluation.speed import plain_encode, seconds


@torch.no_grad()
def measure(size: str, num_glimpses: int, batch_size: int, rounds: int) -> dict[str, float]:
    agent = stam.Agent(stam.AgentConfig.of_size(size, 1000)).eval()
    images = torch.randn(batch_size, 3, 224, 224)
    trace = agent.look(images, num_glimpses)  # warms up too
    patches = agent.grid.patches(agent.grid.cut(images, trace.locations))
    positions = agent.positions[trace.locations].flatten(1)
    per_glimpse = agent.grid.patches_per_glimpse
    inputs = [
        (patches[:, : n * per_glimpse], positions[:, : n * per_glimpse]) for n in range(1, num_glimpses + 1)
    ]

    def packed_forwards() -> None:
        with agent.thinking():
            for given in inputs:
                agent.core(*given)

    runs: dict[str, Callable[[], object]] = {
        "look": lambda: agent.look(images, num_glimpses, trace.locations[:, 0]),
        "forwards": lambda: [agent.core(*given) for given in inputs],
        "packed_forwards": packed_forwards,
        "plain_forwards": lambda: [plain_encode(agent, *given) for given in inputs],
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run, agent.device))
    median = {name: statistics.median(values) for name, values in times.items()}
    ratios = {
        f"look_over_{name}": [a / b for a, b in zip(times["look"], times[name], strict=True)]
        for name in ("forwards", "packed_forwards", "plain_forwards")
    }
    return median | {name: statistics.median(values) for name, values in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="small", choices=("tiny", "small", "base"))
    parser.add_argument("--num-glimpses", type=int, default=21)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = []
    for batch_size in arguments.batch_sizes:
        result = measure(arguments.size, arguments.num_glimpses, batch_size, arguments.rounds)
        rows.append(
            {"size": arguments.size, "batch": batch_size, "num_glimpses": arguments.num_glimpses} | result
        )
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{arguments.size}, {arguments.num_glimpses} glimpses, {arguments.threads} threads (seconds, medians)"
    )
    print("batch   look  forwards  packed  plain   look/forwards  look/packed  look/plain")
    for row in rows:
        print(
            f"{row['batch']:>5} {row['look']:>6.3f} {row['forwards']:>9.3f} {row['packed_forwards']:>7.3f}"
            f" {row['plain_forwards']:>6.3f} {row['look_over_forwards']:>15.3f}"
            f" {row['look_over_packed_forwards']:>12.3f} {row['look_over_plain_forwards']:>11.3f}"
        )


if __name__ == "__main__":
    main()
