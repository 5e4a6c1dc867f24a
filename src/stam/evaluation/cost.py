"""What a step costs: multiply-adds counted from the architecture, and the latency measured here."""

import statistics
import time
from itertools import pairwise

import torch

from stam.config import AgentConfig
from stam.evaluation.results import Cost, Latency
from stam.learning.timing import device_name, synchronise
from stam.model.agent import Looker
from stam.model.episode import rollout, sense_images
from stam.model.policy import GreedyPolicy, Policy

BATCH_SIZES = (1, 64)


def core_multiply_adds(config: AgentConfig, num_patches: int, num_remembered: int = 0) -> int:
    """Counts the products of encoding so many patches of one scene and classifying it.

    With `num_remembered` the patches also attend to so many that were encoded before (a causal core).

    Counted are all matrix products: patch projection, query, key and value, attention (twice), its
    projection, the MLPs, and both classifiers. The last block serves the two read-out tokens only, and only
    they have queries there, as in `stam.fast`.
    """
    readout, width, hidden = 2, config.width, int(config.width * config.mlp_ratio)
    tokens = num_patches + readout
    patch_pixels = config.channels * config.grid.patch_size[0] * config.grid.patch_size[1]

    def block(queries: int) -> int:
        key_value = 2 * tokens * width * width
        query_and_projection = 2 * queries * width * width
        attention = 2 * queries * (tokens + num_remembered) * width
        mlp = 2 * queries * width * hidden
        return key_value + query_and_projection + attention + mlp

    embedding = num_patches * patch_pixels * width
    classifiers = 2 * width * config.num_classes
    return embedding + (config.depth - 1) * block(tokens) + block(readout) + classifiers


def step_multiply_adds(config: AgentConfig, num_glimpses: int) -> int:
    """Counts the products of the core after so many glimpses: all are encoded again, or the latest alone."""
    each = config.grid.patches_per_glimpse
    if config.core == "causal":
        return core_multiply_adds(config, each, each * (num_glimpses - 1))
    return core_multiply_adds(config, each * num_glimpses)


def actor_multiply_adds(config: AgentConfig, num_seen: int, batch_size: int = 1) -> int:
    """Counts the products of rating every location that one scene has not shown yet.

    The first layer's part that depends on the location alone is the same for all scenes of a batch, which
    share it.
    """
    candidates = config.grid.num_locations - num_seen
    if candidates == 0:
        return 0
    hidden = config.actor_width
    if config.actor == "joint":
        return 2 * config.width * hidden + 2 * hidden * hidden + hidden * config.grid.num_locations
    first = 2 * config.width * hidden + config.grid.num_locations * config.width * hidden // batch_size
    return first + candidates * (2 * hidden * hidden + hidden)


def multiply_adds(config: AgentConfig, num_glimpses: int, policy: Policy) -> Cost:
    """Counts the multiply-adds of each of 1..n steps; the actor's where it decides."""
    steps = range(1, num_glimpses + 1)
    core = [step_multiply_adds(config, n) for n in steps]
    decided = [n for n in range(1, num_glimpses) if isinstance(policy.at(n), GreedyPolicy)]
    actor = [actor_multiply_adds(config, n) if n in decided else 0 for n in steps]
    per_step = [sum(pair) for pair in zip(core, actor, strict=True)]
    cumulative = [sum(per_step[:n]) for n in steps]
    whole_image = core_multiply_adds(config, config.grid.num_patches)
    return Cost(tuple(core), tuple(actor), tuple(per_step), tuple(cumulative), whole_image, ())


@torch.no_grad()
def measure_latency(
    agent: Looker,
    batch_size: int,
    num_glimpses: int,
    policy: Policy,
    *,
    seconds: float = 3.0,
    most_repeats: int = 10,
) -> Latency:
    """Times each step of an episode on random pixels: sensing, encoding, classifying, deciding.

    Args:
        agent: In evaluation mode.
        batch_size: Scenes at once.
        num_glimpses: Steps to time.
        policy: Picks the locations.
        seconds: No further repeat begins after so long; at least three are made.
        most_repeats: The most repeats.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, agent.config.channels, *agent.grid.image_size)
    images = torch.randn(shape, generator=generator).to(agent.device)
    first = torch.randint(agent.grid.num_locations, (batch_size,), generator=generator).to(agent.device)

    sense = sense_images(images, agent.grid)

    def episode() -> list[float]:
        ticks = [time.perf_counter()]
        for _ in rollout(agent, sense, num_glimpses, first, policy, generator):
            synchronise(agent.device)
            ticks.append(time.perf_counter())
        return [1000 * (after - before) for before, after in pairwise(ticks)]

    episode()  # the first use of a kernel is not what is asked for
    repeats: list[list[float]] = []
    start = time.perf_counter()
    while len(repeats) < 3 or (len(repeats) < most_repeats and time.perf_counter() - start < seconds):
        repeats.append(episode())
    per_step = [statistics.median(times) for times in zip(*repeats, strict=True)]
    totals = [statistics.median(sum(times[: n + 1]) for times in repeats) for n in range(num_glimpses)]
    return Latency(
        batch_size=batch_size,
        device=device_name(agent.device),
        threads=torch.get_num_threads(),
        repeats=len(repeats),
        per_step_ms=tuple(per_step),
        cumulative_ms=tuple(totals),
    )


def measure_cost(
    agent: Looker,
    num_glimpses: int,
    policy: Policy | str | None = None,
    batch_sizes: tuple[int, ...] = BATCH_SIZES,
    seconds: float = 3.0,
) -> Cost:
    """Counts the multiply-adds and measures the latency of an agent, for each batch size."""
    chosen = agent.policy(policy)
    counted = multiply_adds(agent.config, num_glimpses, chosen)
    latency = [measure_latency(agent, size, num_glimpses, chosen, seconds=seconds) for size in batch_sizes]
    return Cost(
        counted.core,
        counted.actor,
        counted.per_step,
        counted.cumulative,
        counted.whole_image,
        tuple(latency),
    )
