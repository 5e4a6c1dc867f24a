"""Evaluates one trained agent with several policies: its classifier stays, the choice of locations changes.

    python experiments/who_chooses.py aid-tiny --data aid.tar --out experiments/results/aid-choosers.json

Locations come from the agent's own policy, a fixed order, chance, or the actor for the first N glimpses and
centre-out after that (`learned:N`, set by `--actor-glimpses`). The classifier was trained on glimpses of its
own policy, so the fixed orders are at a disadvantage here. The paths of a few scenes are stored too.
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


def view_scenes(agent: Agent, scenes: Scenes, indices: np.ndarray) -> Tensor:
    """Returns scenes preprocessed as in evaluation."""
    view = EvaluationView(agent.config.image_size, None)
    pixels = np.stack([view(scenes, int(index)) for index in indices]).transpose(0, 3, 1, 2)
    return normalise(torch.from_numpy(pixels), agent.config.mean, agent.config.std)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("agent")
    parser.add_argument("--data", required=True)
    parser.add_argument("--scenes", type=int, default=1000, help="random scenes of the validation split")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds of the first location")
    parser.add_argument("--glimpses", type=int, default=21)
    parser.add_argument(
        "--actor-glimpses", type=int, nargs="*", default=[6, 8, 12], help="evaluate learned:N for each N"
    )
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--paths", type=int, default=12, help="scenes whose paths are stored")
    parser.add_argument("--threads", type=int, help="torch threads")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    agent = stam.load(arguments.agent).eval()
    scenes = open_scenes(arguments.data).val
    chosen = random_order(len(scenes), "who chooses", 0)[: arguments.scenes]
    part = Subset(scenes, np.sort(chosen))
    accuracy = {}
    for name in (*CHOOSERS, *(f"learned:{count}" for count in arguments.actor_glimpses)):
        plan = EvaluationPlan(
            num_seeds=arguments.seeds,
            num_glimpses=arguments.glimpses,
            policy=name,
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
