"""How much better an agent could look: a greedy oracle that knows the answer, beside the agent's own policy.

    python experiments/oracle.py digits --data digits --scenes 600 --glimpses 12 --out oracle.json
    python experiments/oracle.py aid-tiny --data aid.tar --scenes 200 --glimpses 8 --out oracle.json

After each glimpse the oracle tries every location that is left, and takes the one after which the agent gives
the true class the highest probability. It looks one glimpse ahead only. Since it knows the answer, it also
takes glimpses that suggest the right class by chance. So no policy can reach all of it.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stam.data import BatchLoader, EvaluationView, Scenes, Subset
from stam.data.randomness import random_order
from stam.data.sources import open_for_evaluation
from stam.fast import prepare
from stam.model.agent import Looker
from stam.model.episode import sense_images
from stam.model.policy import random_locations
from stam.scene.pixels import normalise
from stam.weights import load_agent
from stam.weights.locate import find_agent


def load(scenes: Scenes, looker: Looker, count: int) -> tuple[Tensor, Tensor]:
    """Returns some scenes as the agent sees them, and their labels."""
    chosen = np.sort(random_order(len(scenes), "oracle")[:count])
    view = EvaluationView(looker.config.image_size, looker.config.preprocess_size)
    (batch,) = BatchLoader(Subset(scenes, chosen), [np.arange(len(chosen))], view)
    return normalise(batch.images, looker.config.mean, looker.config.std), batch.labels


@torch.no_grad()
def greedy_oracle(
    looker: Looker, images: Tensor, labels: Tensor, first_location: Tensor, num_glimpses: int
) -> list[float]:
    """Returns the accuracy after each glimpse."""
    sense, rows = sense_images(images, looker.grid), torch.arange(len(images))
    seen = torch.zeros(len(images), looker.grid.num_locations, dtype=torch.bool)
    memory, location, found = None, first_location, []
    while True:
        memory = looker.remember(memory, sense(rows, location), location)
        seen[rows, location] = True
        said = looker.believe(memory).log_probabilities().argmax(dim=1)
        found.append((said == labels).float().mean().item())
        if len(found) == num_glimpses:
            return found
        tried = torch.full(seen.shape, -torch.inf)
        for place in range(looker.grid.num_locations):
            there = torch.full_like(location, place)
            after = looker.remember(memory, sense(rows, there), there)
            tried[:, place] = looker.believe(after).log_probabilities()[rows, labels]
        location = tried.masked_fill(seen, -torch.inf).argmax(dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("agent", help="a run, a weights folder or the name of a shipped agent")
    parser.add_argument("--data", required=True, help="scenes to evaluate on, as for stam evaluate")
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--glimpses", type=int, default=8)
    parser.add_argument(
        "--policies", nargs="+", default=["learned", "plus", "spiral", "centre-out", "random"]
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    looker = prepare(load_agent(find_agent(given.agent).folder).eval())
    images, labels = load(open_for_evaluation(given.data, looker.config.labels), looker, given.scenes)
    first = random_locations(looker.grid, len(images), images.device, torch.Generator().manual_seed(0))
    curves = {}
    for policy in given.policies:
        generator = torch.Generator().manual_seed(1)
        trace = looker.look_from(images, given.glimpses, first, looker.policy(policy), generator)
        curves[policy] = (trace.predictions == labels[:, None]).float().mean(dim=0).tolist()
    curves["greedy oracle"] = greedy_oracle(looker, images, labels, first, given.glimpses)
    print(f"{given.agent}, {len(images)} scenes; accuracy in % after 1 to {given.glimpses} glimpses")
    for name, curve in curves.items():
        print(f"{name:14}" + "".join(f"{100 * value:7.1f}" for value in curve))
    given.out.write_text(json.dumps({"agent": given.agent, "scenes": len(images), "accuracy": curves}))


if __name__ == "__main__":
    main()
