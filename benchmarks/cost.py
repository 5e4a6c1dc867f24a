"""What each glimpse costs: multiply-adds counted from the architecture, and latency measured on this machine.

Example: `python benchmarks/cost.py --size small --glimpses 21 --batch 1 64 --device cuda`.
"""

import argparse
import json

import torch

import stam
from stam.config import to_plain
from stam.evaluation import measure_cost


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="small", help="DeiT size of the core (default: small)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of a scene's side (default: 224)")
    parser.add_argument(
        "--glimpse-size", type=int, default=32, help="pixels of a glimpse's side (default: 32)"
    )
    parser.add_argument("--glimpses", type=int, default=21, help="glimpses of an episode (default: 21)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64], help="batch sizes (default: 1 64)")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to measure each (default: 5)")
    parser.add_argument("--device", default="cpu", help="where it runs (default: cpu)")
    parser.add_argument(
        "--threads", type=int, default=None, help="threads of torch (default: torch's choice)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    sizes = dict(image_size=arguments.image_size, glimpse_size=arguments.glimpse_size)
    config = stam.AgentConfig.of_size(arguments.size, 1000, **sizes)
    agent = stam.Agent(config).eval().to(arguments.device)
    cost = measure_cost(agent, arguments.glimpses, None, tuple(arguments.batch), arguments.seconds)
    if arguments.json:
        print(json.dumps({"settings": vars(arguments), "cost": to_plain(cost)}))
        return
    times = "".join(f"   batch {each.batch_size}: step, so far (ms)" for each in cost.latency)
    whole = f"{cost.whole_image / 1e9:.2f} G multiply-adds for the whole image at once"
    print(f"{arguments.size} on {cost.latency[0].device}; {whole}")
    print(f"glimpses   core (G)   actor (G)   so far (G){times}")
    for n in range(arguments.glimpses):
        counts = (cost.core[n] / 1e9, cost.actor[n] / 1e9, cost.cumulative[n] / 1e9)
        row = "{:8d} {:10.3f} {:11.3f} {:12.3f}".format(n + 1, *counts)
        for each in cost.latency:
            row += f"{each.per_step_ms[n]:20.2f} {each.cumulative_ms[n]:11.2f}"
        print(row)


if __name__ == "__main__":
    main()
