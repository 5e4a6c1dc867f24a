"""How long a look takes, beside the plain modules and beside the transformer forwards it contains.

    python benchmarks/look.py --size small --num-glimpses 21 --threads 2

All are timed in turn, round after round, so that a busy machine slows all of them alike; the median over the
rounds is reported.

look: `agent.look`, which compares every weight with the snapshot it kept, and looks with that.
prepared: `agent.prepared().look`, without the comparison.
plain: the same look by the plain modules (`--no-fast`).
forwards: only the transformer forwards of the same glimpses, by the plain modules.
"""

import argparse
import json
import statistics
from collections.abc import Callable

import torch

import stam
from stam.fast import prepare
from stam.learning.timing import in_turn, median_ratio

NAMES = ("look", "prepared", "plain", "forwards")


@torch.no_grad()
def measure(size: str, num_glimpses: int, batch_size: int, rounds: int) -> dict[str, float]:
    agent = stam.Agent(stam.AgentConfig.of_size(size, 1000)).eval()
    images = torch.randn(batch_size, 3, 224, 224)
    trace = agent.look(images, num_glimpses)
    patches = agent.grid.patches(agent.grid.cut(images, trace.locations))
    positions = agent.positions[trace.locations].flatten(1)
    ends = [n * agent.grid.patches_per_glimpse for n in range(1, num_glimpses + 1)]
    first, prepared, plain = trace.locations[:, 0], agent.prepared(), prepare(agent, fast=False)
    runs: dict[str, Callable[[], object]] = {
        "look": lambda: agent.look(images, num_glimpses, first),
        "prepared": lambda: prepared.look(images, num_glimpses, first),
        "plain": lambda: plain.look(images, num_glimpses, first),
        "forwards": lambda: [agent.core(patches[:, :end], positions[:, :end]) for end in ends],
    }
    times = in_turn(runs, agent.device, rounds)
    medians = {name: statistics.median(times[name]) for name in NAMES}
    return medians | {f"look_over_{name}": median_ratio(times["look"], times[name]) for name in NAMES[1:]}


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
    print("batch   look  prepared  plain  forwards   look/prepared  look/plain  look/forwards")
    for row in rows:
        print(
            f"{row['batch']:>5} {row['look']:>6.3f} {row['prepared']:>9.3f} {row['plain']:>6.3f}"
            f" {row['forwards']:>9.3f} {row['look_over_prepared']:>15.3f}"
            f" {row['look_over_plain']:>11.3f} {row['look_over_forwards']:>14.3f}"
        )


if __name__ == "__main__":
    main()
