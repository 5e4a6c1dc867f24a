"""Which scene the page is to open with: one where the agent does as it does on average.

For each scene that the page offers, this prints after how many glimpses the agent stops: with its own policy,
at random locations (mean of several seeds) and in a spiral, all from its first location. `*` marks scenes of
a known class that it names rightly. The scene to open with is a marked one, looked at with fewer glimpses
than at random. Of these it is the one whose count is nearest to the mean: of early exit on the test set,
where the agent's README has it.

    python experiments/first_scenes.py digits
    python experiments/first_scenes.py imagenette-tiny --mean 5.0
    python experiments/first_scenes.py aid-tiny --mean 6.3
"""

import argparse

import numpy as np
import torch

from stam.cli.agents import open_agent
from stam.scene.pixels import normalise
from stam.web.scenes import sample_scenes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("agent")
    parser.add_argument("--mean", type=float, help="glimpses it takes on average; by default on these scenes")
    parser.add_argument("--seeds", type=int, default=4)
    given = parser.parse_args()
    agent, resize_size = open_agent(given.agent)
    grid, facts, threshold = agent.grid, agent.facts, agent.config.threshold
    scenes = sample_scenes(facts, None, resize_size)
    pixels = torch.from_numpy(np.stack([scene.load() for scene in scenes])).permute(0, 3, 1, 2)
    images = normalise(pixels, facts.mean, facts.std)

    def stops(policy: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        trace = agent.look(images, grid.num_locations, agent.first_location, policy, generator)
        confidence, answers = trace.probabilities.float().max(-1)
        sure = confidence > threshold
        sure[:, -1] = True  # everything has been seen
        first = sure.int().argmax(1)
        return first + 1, answers[torch.arange(len(scenes)), first]

    own, answers = stops(agent.config.policy)
    random = torch.stack([stops("random", seed)[0] for seed in range(given.seeds)]).float().mean(0)
    spiral, _ = stops("spiral")
    mean = float(own.float().mean()) if given.mean is None else given.mean
    best, nearest = None, float("inf")
    for index, scene in enumerate(scenes):
        said = facts.labels[int(answers[index])]
        count, chance = int(own[index]), float(random[index])
        right = said == scene.label
        if right and count < chance and abs(count - mean) < nearest:
            best, nearest = scene.name, abs(count - mean)
        mark = "*" if right else " "
        print(
            f"{mark} {count:3} own  {chance:5.1f} random  {int(spiral[index]):3} spiral  "
            f"{said:18} {scene.name[:50]}"
        )
    print(f"open with: {best}")


if __name__ == "__main__":
    main()
