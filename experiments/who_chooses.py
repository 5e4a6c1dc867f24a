"""One trained agent, other choosers: how much of its accuracy is knowing where to look.

    python experiments/who_chooses.py aid-tiny --data aid.tar --out experiments/results/aid-choosers.json

The agent classifies; its own policy, an order or chance picks the locations, or its own policy the first so
many and an order from the centre outward the rest (`--handovers`). What it learned it learned from
its own glimpses, so orders are at a disadvantage here that agents trained for them do not have. Also keeps
the paths of a few scenes, with what the agent thought on the way.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import stam
from stam.data import EvaluationView, Scenes, Subset, open_scenes
from stam.data.randomness import random_order
from stam.evaluation import EvaluationPlan, evaluate
from stam.model.agent import Agent
from stam.scene.pixels import normalise

CHOOSERS = ("learned", "plus", "spiral", "centre-out", "random")


def agent_parser(description: str | None, scenes: int | None, of: str) -> argparse.ArgumentParser:
    """Returns a parser of what every look at one trained agent takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("agent")
    parser.add_argument("--data", required=True)
    parser.add_argument("--scenes", type=int, default=scenes, help=of)
    parser.add_argument("--out", type=Path, required=True)
    return parser


def view_scenes(agent: Agent, scenes: Scenes, indices: np.ndarray) -> Tensor:
    """Returns some scenes as evaluation shows them to an agent."""
    view = EvaluationView(agent.config.image_size, None)
    pixels = np.stack([view(scenes, int(index)) for index in indices]).transpose(0, 3, 1, 2)
    return normalise(torch.from_numpy(pixels), agent.config.mean, agent.config.std)


def main() -> None:
    parser = agent_parser(__doc__, 1000, "of the validation split, at random")
    parser.add_argument("--seeds", type=int, default=1, help="of the first location")
    parser.add_argument("--glimpses", type=int, default=21)
    parser.add_argument("--handovers", type=int, nargs="*", default=[6, 8, 12])
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--paths", type=int, default=12, help="scenes whose paths are kept")
    parser.add_argument("--threads", type=int, help="of torch")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    agent = stam.load(arguments.agent).eval()
    scenes = open_scenes(arguments.data).val
    chosen = random_order(len(scenes), "who chooses", 0)[: arguments.scenes]
    part = Subset(scenes, np.sort(chosen))
    accuracy = {}
    own = agent.config.handover
    choosers: list[tuple[str, str, int | None]] = [(policy, policy, None) for policy in CHOOSERS]
    choosers += [(f"learned to {count}", "learned", count) for count in arguments.handovers]
    for name, policy, handover in choosers:
        agent.configure(handover=handover)
        plan = EvaluationPlan(
            num_seeds=arguments.seeds,
            num_glimpses=arguments.glimpses,
            policy=policy,
            low_resolution=False,
            cost=False,
            most_timed=0,
            most_calibration=64,
            precision=arguments.precision,
        )
        curve = evaluate(agent, part, plan, name=name, source=arguments.data, progress=False)
        accuracy[name] = curve.accuracy.ensemble.top1.mean
        shown = " ".join(f"{100 * value:.1f}" for value in accuracy[name])
        print(f"{name:<13} mean {100 * np.mean(accuracy[name]):.2f}  {shown}", flush=True)

    agent.configure(handover=own)
    few = chosen[: arguments.paths]
    images = view_scenes(agent, scenes, few)
    trace = agent.look(images, arguments.glimpses, generator=torch.Generator().manual_seed(0))
    paths = [
        {
            "label": agent.labels[int(scenes.labels[index])],
            "locations": trace.locations[place].tolist(),
            "predictions": [agent.labels[name] for name in trace.predictions[place].tolist()],
            "confidences": [round(value, 4) for value in trace.confidences[place].tolist()],
        }
        for place, index in enumerate(few)
    ]
    found = {
        "agent": arguments.agent,
        "num_scenes": len(part),
        "num_seeds": arguments.seeds,
        "grid": [agent.grid.rows, agent.grid.columns],
        "threshold": agent.threshold,
        "accuracy": accuracy,
        "paths": paths,
    }
    arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
