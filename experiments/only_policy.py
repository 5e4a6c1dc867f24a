"""Where to look, learned alone: a trained agent keeps its core, and only a fresh actor and critic learn.

    python experiments/only_policy.py aid-tiny --data aid.tar --out experiments/results/aid-only-policy.json

Without a core that changes meanwhile, ways to learn a policy can be told apart in seconds on a GPU: what a
glimpse is rewarded for, how greedily locations are drawn, how fast the actor learns. Each is a trial; its
accuracy is that of the same classifier with locations picked by the actor it gave, beside the fixed orders.
The agent itself, seeing the whole scene, stands in for its teacher.

A trial with `compared` does not learn as the paper does: it tries that many next glimpses of each scene and
compares them. What the scene itself does to the reward cancels, so that a next glimpse is chosen about as
well as the state allows.
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from real_images import measure
from torch import Tensor
from who_chooses import agent_parser

import stam
from stam.data import BatchLoader, RawBatch, Subset, TrainingView, batches, open_scenes
from stam.data.augment import Augment
from stam.data.randomness import random_order
from stam.fast.cuda_graph import RecordedFunction
from stam.learning.loop import Plan
from stam.learning.objective import Objective, ValueNormaliser, kl_divergence
from stam.learning.optimisation import autocast, make_optimiser
from stam.learning.recipes import get_recipe
from stam.model.agent import Actor, Agent
from stam.model.episode import rollout
from stam.model.policy import SampledPolicy, perturbed, random_locations, unseen_candidates
from stam.model.teacher import Teacher
from stam.settings import cosine

SHOWN = (2, 3, 4, 5, 6, 8, 10, 12, 16, 21)
TRIALS = {
    "paper": {},
    "gain": {"reward": "gain", "discount": 0.0},
    "paper, tau 30": {"tau": 30.0},
    "8 compared by KL": {"compared": 8, "tau": 16.0},
    "8 compared by match": {"compared": 8, "by": "match", "tau": 16.0},
    "8 compared by match, tau 40": {"compared": 8, "by": "match", "tau": 40.0},
    "8 compared by match, differences learned": {
        "compared": 8,
        "by": "match",
        "tau": 16.0,
        "differences": True,
    },
}


def learn(
    agent: Agent, data: RawBatch, augment: Augment, trial: dict[str, Any], given: argparse.Namespace
) -> None:
    """Gives the agent a fresh actor and teaches it where to look."""
    device = agent.device
    torch.manual_seed(0)
    config = agent.config
    if trial.get("fresh", True):
        agent.actor = Actor(agent.grid.num_locations, config.width, config.actor_width).to(device)
        agent.reset_location_embedding()
    assert agent.actor is not None
    agent.actor.train()
    critic = agent.add_critic().train()
    discount, glimpses = trial.get("discount", 1.0), given.glimpses
    objective = Objective(glimpses, "soft", trial.get("reward", "agreement"), discount)
    values = ValueNormaliser(glimpses, discount=discount).to(device)
    rates = {"actor": torch.zeros((), device=device), "critic": torch.zeros((), device=device)}
    parts = {"actor": agent.actor.named_parameters(), "critic": critic.named_parameters()}
    optimiser = make_optimiser(parts, 0.05, rates)
    teacher = Teacher(agent.core, config.num_classes)
    tau = torch.ones((), device=device)
    policy = SampledPolicy(agent.actor, tau)
    generator = torch.Generator(device).manual_seed(0)

    def drawn_glimpses(images: Tensor, first_location: Tensor, log_q: Tensor) -> Iterator[Tensor]:
        """Yields the paper's loss of actor and critic after each glimpse."""

        def sense(locations: Tensor) -> Tensor:
            return agent.grid.cut(images, locations[:, None])[:, 0]

        before = None
        episode = rollout(agent, sense, glimpses, first_location, policy, generator)
        for _ in range(glimpses):
            with autocast(device, "auto"):
                step = next(episode)
                if before is not None:  # the core stands still: the look-ahead is the next step
                    losses = objective.attention(before, step.belief, critic, values, log_q)
            if before is not None:
                yield losses["actor"] + losses["critic"]
            before = step

    def learn_from(images: Tensor, first_location: Tensor) -> None:
        with torch.no_grad(), autocast(device, "auto"):
            log_q = teacher(images)
        if "compared" in trial:
            losses = compared_glimpses(agent, trial, images, first_location, log_q, glimpses, tau, generator)
        else:
            losses = drawn_glimpses(images, first_location, log_q)
        for loss in losses:
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()

    learn_fast = RecordedFunction(learn_from, generator) if device.type == "cuda" else learn_from
    shown = Plan(len(data), given.updates, given.batch, 1.0, 0).batches_from((0, 0))
    for number, (_, part) in enumerate(islice(shown, given.updates)):
        done = number / given.updates
        low, high = trial.get("tau_start", 1.0), trial.get("tau", 4.0)
        tau.fill_(low + (high - low) * min(1.0, 2 * done))
        rates["actor"].fill_(cosine(trial.get("rate", 5e-4), 1e-6, done))
        rates["critic"].fill_(cosine(1e-3, 1e-6, done))
        some = torch.from_numpy(part)
        images = augment(data.images[some.to(device)], data.sizes[some], number)
        learn_fast(images, random_locations(agent.grid, len(images), device, generator))


def compared_glimpses(
    agent: Agent,
    trial: dict[str, Any],
    images: Tensor,
    first_location: Tensor,
    log_q: Tensor,
    glimpses: int,
    tau: Tensor,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """Yields the actor's loss after each glimpse, from several next ones; the first drawn is taken."""
    assert agent.actor is not None
    batch, grid, device = len(images), agent.grid, agent.device
    samples = torch.arange(batch, device=device)
    location, seen = first_location, torch.zeros(batch, grid.num_locations, dtype=torch.bool, device=device)
    with torch.no_grad(), autocast(device, "auto"):
        memory = agent.remember(None, grid.cut(images, location[:, None])[:, 0], location)
        state = agent.believe(memory).state
    for num_seen in range(1, glimpses):
        seen = seen.scatter(1, location[:, None], True)
        unseen, _ = unseen_candidates(seen, num_seen)
        count = min(trial["compared"], unseen.shape[1])
        with autocast(device, "auto"):
            ratings = agent.actor(state, unseen).float()
        scaled = F.normalize(ratings, dim=1, eps=1e-6) * tau
        drawn = perturbed(scaled, generator).topk(count, dim=1).indices  # all of them different
        where = unseen.gather(1, drawn)
        with torch.no_grad(), autocast(device, "auto"):
            several = memory.select(samples.repeat_interleave(count))
            several = agent.remember(several, grid.cut(images, where).flatten(0, 1), where.flatten())
            ahead = agent.believe(several)
            log_p, goal = ahead.log_probabilities(), log_q.repeat_interleave(count, dim=0)
            if trial.get("by") == "match":  # the probability that draws from both distributions agree
                gains = (log_p + goal).exp().sum(dim=1).view(batch, count)
            else:
                gains = -kl_divergence(log_p, goal).view(batch, count)
            better = gains - gains.mean(dim=1, keepdim=True)
            better = better / better.square().mean().sqrt().clamp_min(1e-6)
        if trial.get("differences"):
            rated = ratings.gather(1, drawn)
            yield (rated - rated.mean(dim=1, keepdim=True) - better).square().mean()
        else:
            yield -(scaled.gather(1, drawn).softmax(dim=1) * better).sum(dim=1).mean()
        taken = samples * count
        memory, location, state = several.select(taken), where[:, 0], ahead.state[taken]


def main() -> None:
    parser = agent_parser(__doc__, None, "of either split, at random; all of them by default")
    parser.add_argument("--recipe", help="whose augmentation to use; by default the one of the agent's name")
    parser.add_argument("--trials", default=json.dumps(TRIALS), help="JSON: a name and settings, for each")
    parser.add_argument("--glimpses", type=int, default=13)
    parser.add_argument("--shown", type=int, default=21, help="glimpses, in evaluation")
    parser.add_argument("--batch", type=int, default=600)
    parser.add_argument("--updates", type=int, default=160, help="batches; each makes an update a glimpse")
    parser.add_argument("--seeds", type=int, default=3, help="of the first location, in evaluation")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    agent = stam.load(given.agent).to(given.device).eval()
    splits = open_scenes(given.data)
    train, val = (
        Subset(scenes, np.sort(random_order(len(scenes), "only policy", 0)[: given.scenes]))
        for scenes in (splits.train, splits.val)
    )
    settings = get_recipe(given.recipe or given.agent.removesuffix("-tiny")).data
    everything = batches(np.arange(len(train)), len(train))
    data = next(iter(BatchLoader(train, everything, TrainingView(settings.decode_size), 0)))
    data = data.to(given.device)
    augment = Augment(settings.augment, agent.grid.image_size, agent.config.mean, agent.config.std)
    found = {}

    def show(name: str, policy: str | None, began: float) -> None:
        evaluation = measure(agent.eval(), settings, val, given.seeds, given.shown, name, policy)
        curve = found[name] = evaluation.accuracy.ensemble.top1.mean
        shown = " ".join(f"{n}:{100 * curve[n - 1]:.1f}" for n in SHOWN if n <= len(curve))
        average = 100 * float(np.mean(curve[1:12]))
        print(
            f"{name:<41} mean of 2..12 {average:.2f}  {shown}  {time.monotonic() - began:.0f} s", flush=True
        )
        given.out.write_text(json.dumps(found, indent=1))

    for name in ("as it is", "plus", "spiral", "random"):
        show(name, None if name == "as it is" else name, time.monotonic())
    for name, trial in json.loads(given.trials).items():
        began = time.monotonic()
        learn(agent, data, augment, trial, given)
        show(name, None, began)


if __name__ == "__main__":
    main()
