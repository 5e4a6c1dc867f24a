"""What early termination saves, in wall-clock time and not only in glimpses, on this machine.

An agent of a named size looks at random scenes; thresholds fitted to several budgets make it stop early, and
whoever is sure leaves the batch. Untrained weights will do, since the time of a step depends on shapes alone.
Example: `python benchmarks/early_exit.py --size tiny --batch 64 --device cuda`.
"""

import argparse
import json

import numpy as np
import torch

import stam
from stam.evaluation.early_exit import TimedBatch, fit_threshold, time_early_exit
from stam.evaluation.scenes import first_locations


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="tiny", help="DeiT size of the core (default: tiny)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of a scene's side (default: 224)")
    parser.add_argument("--scenes", type=int, default=64, help="scenes to look at (default: 64)")
    parser.add_argument("--batch", type=int, default=32, help="scenes that start together (default: 32)")
    parser.add_argument("--device", default="cpu", help="where it runs (default: cpu)")
    parser.add_argument(
        "--threads", type=int, default=None, help="threads of torch (default: torch's choice)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    config = stam.AgentConfig.of_size(arguments.size, 100, image_size=arguments.image_size)
    agent = stam.Agent(config).eval().to(arguments.device)
    with torch.no_grad():  # answers that differ from scene to scene, so that scenes end at different times
        for head in (agent.core.head, agent.core.head_dist):
            head.weight.normal_(std=1.0)
    rows = measure(agent, arguments.scenes, arguments.batch)
    if arguments.json:
        print(json.dumps({"settings": vars(arguments), "rows": rows}))
        return
    print(f"{arguments.size}, {arguments.scenes} scenes, batch {arguments.batch}, {rows[0]['device']}")
    print("mean glimpses   seconds   of all   glimpses saved %   time saved %")
    for row in rows:
        print(
            f"{row['glimpses']:13.1f} {row['seconds']:9.2f} {row['all_seconds']:8.2f} "
            f"{100 * row['glimpses_saved']:18.0f} {100 * row['time_saved']:14.0f}"
        )


def measure(agent: stam.Agent, num_scenes: int, batch_size: int) -> list[dict]:
    grid, count = agent.grid, agent.grid.num_locations
    images = torch.randn(num_scenes, 3, *grid.image_size, device=agent.device)
    first = first_locations(grid, np.arange(num_scenes), 0).to(agent.device)
    parts = torch.arange(num_scenes, device=agent.device).split(batch_size)
    traces = [agent.look(images[part], count, first[part]) for part in parts]
    sure = torch.cat([trace.confidences for trace in traces]).cpu().numpy()[:, None]  # (scenes, 1, n)
    right = np.ones(sure.shape, dtype=bool)
    labels = torch.zeros(num_scenes, dtype=torch.long, device=agent.device)
    policy = agent.policy()
    batches = [TimedBatch(images[part], labels[part], first[part], policy) for part in parts]
    rows = []
    for budget in (count / 8, count / 4, count / 2, 3 * count / 4):
        threshold = fit_threshold(sure, right, sure, right, budget=budget).threshold
        found = time_early_exit(agent, batches, threshold, count)
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
