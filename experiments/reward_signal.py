"""How much of what a glimpse is rewarded for is due to its place, rather than to the scene or to chance.

    python experiments/reward_signal.py aid-tiny --data aid.tar --out experiments/results/aid-signal.json

The same scenes are looked at several times, always from the same first glimpse, each time with other
locations drawn from the policy of training. For every kind of reward, the share of its variance (R^2) that
the distance of the second glimpse from the centre explains: once as it is, once after taking away each
scene's mean, which is the best that a critic could do. The fewer, the more samples it takes to learn where to
look: their number goes with 1 / R^2. The agent itself, seeing the whole scene, stands in for its teacher.
Also says how undecided the policy of training is after the first glimpse.
"""

import json
import math

import torch
from torch import Tensor
from who_chooses import agent_parser, view_scenes

import stam
from stam.data import open_scenes
from stam.data.randomness import random_order
from stam.learning.objective import kl_divergence
from stam.model.agent import Agent
from stam.model.episode import ensemble_log_probabilities
from stam.model.policy import SampledPolicy, random_locations
from stam.model.teacher import Teacher

BATCH = 50
DISCOUNTS = (0.0, 0.5, 0.7, 0.9, 1.0)


@torch.no_grad()
def roll_out(
    agent: Agent, images: Tensor, passes: int, num_glimpses: int, tau: float
) -> tuple[Tensor, Tensor]:
    """Returns the second location (passes, scenes) and the agreement after each glimpse (..., glimpses)."""
    assert agent.actor is not None
    parts = images.split(BATCH)
    teacher = Teacher(agent.core, agent.config.num_classes)
    log_q = torch.cat([teacher(part) for part in parts])
    first = random_locations(agent.grid, len(images), agent.device, torch.Generator().manual_seed(0))
    policy = SampledPolicy(agent.actor, tau)
    second, agreement = [], []
    for number in range(passes):
        generator = torch.Generator().manual_seed(number)
        traces = [
            agent.look_from(part, num_glimpses, start, policy, generator)
            for part, start in zip(parts, first.split(BATCH), strict=True)
        ]
        second.append(torch.cat([trace.locations[:, 1] for trace in traces]))
        log_p = torch.cat(
            [ensemble_log_probabilities(trace.class_logits, trace.distill_logits) for trace in traces]
        )
        steps = [-kl_divergence(log_p[:, step], log_q) for step in range(num_glimpses)]
        agreement.append(torch.stack(steps, dim=1))
        print(f"pass {number + 1} of {passes}", flush=True)
    return torch.stack(second), torch.stack(agreement)


@torch.no_grad()
def indecision(agent: Agent, images: Tensor, tau: float) -> dict[str, float]:
    """Returns the entropy of the policy after one glimpse, the most it could be, and its largest share."""
    assert agent.actor is not None
    first = random_locations(agent.grid, len(images), agent.device, torch.Generator().manual_seed(0))
    glimpses = agent.grid.cut(images, first[:, None])[:, 0]
    state = agent.believe(agent.remember(None, glimpses, first)).state
    seen = torch.zeros(len(images), agent.grid.num_locations, dtype=torch.bool)
    seen.scatter_(1, first[:, None], True)
    log_pi = SampledPolicy(agent.actor, tau).log_probabilities(state, seen, num_seen=1)
    entropy = -(log_pi.exp() * log_pi.masked_fill(seen, 0)).sum(1).mean()
    most = math.log(agent.grid.num_locations - 1)
    return {"entropy": float(entropy), "most": most, "largest": float(log_pi.exp().amax(1).mean())}


def explained(values: Tensor, groups: Tensor) -> float:
    """Returns the share of the variance that the groups' means have."""
    centred = values - values.mean()
    between = sum((groups == group).sum() * centred[groups == group].mean() ** 2 for group in groups.unique())
    return float(between / centred.square().sum())


def main() -> None:
    parser = agent_parser(__doc__, 200, "of the validation split, at random")
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--glimpses", type=int, default=21)
    parser.add_argument("--tau", type=float, default=4.0)
    arguments = parser.parse_args()
    agent = stam.load(arguments.agent).eval()
    scenes = open_scenes(arguments.data).val
    chosen = random_order(len(scenes), "signal", 0)[: arguments.scenes]
    images = view_scenes(agent, scenes, chosen)
    second, agreement = roll_out(agent, images, arguments.passes, arguments.glimpses, arguments.tau)

    undecided = indecision(agent, images, arguments.tau)
    entropy, most, largest = undecided.values()
    print(f"policy after one glimpse: entropy {entropy:.2f} of {most:.2f}, most {largest:.3f}")

    grid = agent.grid
    down = (second // grid.columns - grid.rows // 2).abs()
    across = (second % grid.columns - grid.columns // 2).abs()
    rings = torch.maximum(down, across)
    kinds = {"agreement": agreement[..., 1:], "gain": agreement[..., 1:] - agreement[..., :-1]}
    rows = []
    for kind, rewards in kinds.items():
        rewards = (rewards - rewards.mean((0, 1))) / rewards.std((0, 1)).clamp_min(1e-6)
        for discount in DISCOUNTS:
            weights = discount ** torch.arange(rewards.shape[2])
            returns = (rewards * weights).sum(2)
            as_it_is, best = explained(returns, rings), explained(returns - returns.mean(0), rings)
            rows.append({"reward": kind, "discount": discount, "r2": as_it_is, "r2_ideal_critic": best})
            print(f"{kind:<10} discount {discount}: R2 {as_it_is:.5f}, with an ideal critic {best:.5f}")
    by_chance = (len(rings.unique()) - 1) / rings.numel()
    print(f"by chance alone: about {by_chance:.5f}")
    found = {
        "agent": arguments.agent,
        "num_scenes": len(images),
        "passes": arguments.passes,
        "by_chance": by_chance,
        "policy": undecided,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
