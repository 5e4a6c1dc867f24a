"""What early termination saves, in wall-clock time and not only in glimpses, on this machine.

An agent of a named size looks at random scenes; thresholds fitted to several budgets make it stop early, and
whoever is sure leaves the batch. Untrained weights will do, since the time of a step depends on shapes alone.
Example: `python benchmarks/early_exit.py --size tiny --scenes 512 --batch 1 64 512 --device cuda`.
"""

import argparse
import json

import numpy as np
import torch

import stam
from stam.config import CORES
from stam.evaluation.early_exit import TimedBatch, fit_threshold, time_early_exit
from stam.evaluation.scenes import first_locations
from stam.fast import prepare
from stam.learning.optimisation import autocast


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="tiny", help="DeiT size of the core (default: tiny)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of a scene's side (default: 224)")
    parser.add_argument("--core", default="reencoding", choices=CORES, help="how it remembers glimpses")
    parser.add_argument("--scenes", type=int, default=64, help="scenes to look at (default: 64)")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[32], help="scenes computed at once (default: 32)"
    )
    parser.add_argument("--glimpses", type=int, default=21, help="the most glimpses (default: 21)")
    parser.add_argument("--device", default="cpu", help="where it runs (default: cpu)")
    parser.add_argument(
        "--threads", type=int, default=None, help="threads of torch (default: torch's choice)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object too")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    config = stam.AgentConfig.of_size(
        arguments.size, 100, image_size=arguments.image_size, core=arguments.core
    )
    agent = stam.Agent(config).eval().to(arguments.device)
    with torch.no_grad():  # answers that differ from scene to scene, so that scenes end at different times
        for head in (agent.core.head, agent.core.head_dist):
            head.weight.normal_(std=1.0)
    print(
        f"{arguments.size}, {arguments.core} core, at most {arguments.glimpses} glimpses, {arguments.device}"
    )
    print("batch  scenes  mean glimpses   seconds   of all   glimpses saved %   time saved %")
    rows = []
    for batch in arguments.batch:
        scenes = max(arguments.scenes, batch)
        with autocast(agent.device, "auto"):
            for row in measure(agent, scenes, batch, arguments.glimpses):
                rows.append({"batch": batch, "scenes": scenes} | row)
                print(
                    f"{batch:5} {scenes:7} {row['glimpses']:14.1f} {row['seconds']:9.3f} "
                    f"{row['all_seconds']:8.3f} {100 * row['glimpses_saved']:18.0f} "
                    f"{100 * row['time_saved']:14.0f}",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps({"settings": vars(arguments), "rows": rows}))


def measure(agent: stam.Agent, num_scenes: int, batch_size: int, count: int) -> list[dict]:
    grid, looker = agent.grid, prepare(agent)
    images = torch.randn(num_scenes, 3, *grid.image_size, device=agent.device)
    first = first_locations(grid, np.arange(num_scenes), 0).to(agent.device)
    parts = torch.arange(num_scenes, device=agent.device).split(batch_size)
    traces = [agent.look(images[part], count, first[part]) for part in parts]
    sure = torch.cat([trace.confidences for trace in traces]).cpu().numpy()[:, None]  # (scenes, 1, n)
    right = np.ones(sure.shape, dtype=bool)
    labels = torch.zeros(num_scenes, dtype=torch.long, device=agent.device)
    policy = looker.policy()
    batches = [TimedBatch(images[part], labels[part], first[part], policy) for part in parts]
    rows = []
    for budget in (count / 4, count / 2):
        threshold = fit_threshold(sure, right, sure, right, budget=budget).threshold
        found = time_early_exit(looker, batches, threshold, count)
        rows.append(
            {
                "device": found.device,
                "glimpses": found.early_glimpses,
                "seconds": found.early_seconds,
                "all_seconds": found.all_seconds,
                "glimpses_saved": found.glimpses_saved,
                "time_saved": found.time_saved,
            }
        )
    return rows


if __name__ == "__main__":
    main()
