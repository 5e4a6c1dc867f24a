"""Multiply-adds counted from the architecture, against torch's own counter."""

import pytest
import torch
from agents import tiny_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import stam
from stam.evaluation import (
    actor_multiply_adds,
    core_multiply_adds,
    measure_cost,
    multiply_adds,
    step_multiply_adds,
)
from stam.model.policy import RandomPolicy

CONFIGS = [
    {},
    dict(image_size=32, glimpse_size=16, patch_size=8, width=36, depth=3, mlp_ratio=2.0, num_classes=7),
    dict(channels=1, mean=(0.5,), std=(0.5,), depth=1, actor_width=40),
    dict(actor="joint", actor_width=40),
]


def counted(call) -> int:
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():  # torch does not count the CPU's fused one
        call()
    return counter.get_total_flops() // 2  # torch counts a multiply-add as two


def unread_queries(config, patches) -> int:
    """Queries of the last block that nobody reads; the plain modules compute them, `stam.fast` does not."""
    return patches * config.width**2


@pytest.mark.parametrize("settings", CONFIGS)
def test_the_count_is_torchs(settings):
    agent = stam.Agent(tiny_config(**settings)).eval()
    config, grid = agent.config, agent.grid
    images = torch.randn(1, config.channels, *grid.image_size)
    for count in (1, 2, grid.num_locations):
        locations = torch.arange(count)[None]
        memory = None
        for here in locations.unbind(1):
            memory = agent.remember(memory, grid.cut(images, here[:, None])[:, 0], here)
        measured = counted(lambda memory=memory: agent.believe(memory))
        patches = count * grid.patches_per_glimpse
        assert core_multiply_adds(config, patches) + unread_queries(config, patches) == measured
        unseen = torch.arange(count, grid.num_locations)[None]
        if unseen.shape[1]:
            state = torch.randn(1, 2 * config.width)
            measured = counted(lambda state=state, unseen=unseen: agent.actor(state, unseen))
            assert actor_multiply_adds(config, count) == measured


@pytest.mark.parametrize("settings", CONFIGS)
def test_the_count_of_a_causal_core_is_torchs(settings):
    agent = stam.Agent(tiny_config(core="causal", **settings)).eval()
    config, grid = agent.config, agent.grid
    images, memory = torch.randn(1, config.channels, *grid.image_size), None
    for count in range(1, min(4, grid.num_locations)):
        here = torch.tensor([count])
        glimpse = grid.cut(images, here[:, None])[:, 0]

        def step(memory=memory, glimpse=glimpse, here=here):
            return agent.believe(agent.remember(memory, glimpse, here))

        unread = unread_queries(config, grid.patches_per_glimpse)
        assert step_multiply_adds(config, count) + unread == counted(step)
        memory = agent.remember(memory, glimpse, here)


def test_a_causal_core_takes_a_seventh_of_the_products():
    """The core alone, over a look of 21 glimpses of the paper's sizes."""
    for size in ("tiny", "small"):
        faithful, causal = (
            multiply_adds(stam.AgentConfig.of_size(size, 10, core=core), 21, RandomPolicy())
            for core in ("reencoding", "causal")
        )
        assert causal.core[0] == faithful.core[0] and causal.whole_image == faithful.whole_image
        assert 0.1 < sum(causal.core) / sum(faithful.core) <= 0.15
        assert 0.05 < causal.core[20] / faithful.core[20] < 0.08


@pytest.mark.parametrize("policy", ["learned", "spiral"])
def test_the_steps_add_up_to_a_whole_look(policy):
    agent = stam.Agent(tiny_config()).eval()
    images = torch.randn(1, 3, 24, 32)
    cost = multiply_adds(agent.config, 5, agent.policy(policy))
    first, chosen = torch.zeros(1, dtype=torch.long), agent.policy(policy)
    # by the plain modules: the counter does not see packed weights, and they rate locations once
    unread = sum(unread_queries(agent.config, 4 * count) for count in range(1, 6))
    assert cost.cumulative[-1] + unread == counted(lambda: agent.look_from(images, 5, first, chosen))
    assert cost.cumulative[1] == cost.per_step[0] + cost.per_step[1]
    assert cost.actor[-1] == 0  # after the last glimpse nothing is decided


def test_an_actor_costs_nothing_once_an_order_decides():
    agent = stam.Agent(tiny_config()).eval()
    plain, composed, late = (
        multiply_adds(agent.config, 6, agent.policy(name)) for name in ("learned", "learned:3", "learned:50")
    )
    assert composed.core == plain.core and composed.actor == (*plain.actor[:2], 0, 0, 0, 0)
    assert late == plain
    assert measure_cost(agent, 6, "learned:3", batch_sizes=(), seconds=0).actor == composed.actor


def test_the_papers_agent():
    """DeiT-Small on 224 x 224 pixels takes about 4.6 G multiply-adds, of which the last block saves some."""
    config = stam.AgentConfig.of_size("small", 1000)
    whole = multiply_adds(config, 49, RandomPolicy()).whole_image
    assert 4.1e9 < whole < 4.6e9
    assert core_multiply_adds(config, 196) == whole


def test_latency_is_measured_for_every_step_and_batch():
    agent = stam.Agent(tiny_config()).eval()
    cost = measure_cost(agent, 4, batch_sizes=(1, 3), seconds=0)
    assert [each.batch_size for each in cost.latency] == [1, 3]
    for each in cost.latency:
        assert len(each.per_step_ms) == len(each.cumulative_ms) == 4 and each.repeats == 3
        assert min(each.per_step_ms) > 0 and list(each.cumulative_ms) == sorted(each.cumulative_ms)
        assert each.device == "cpu"
    assert measure_cost(agent, 4, "random", batch_sizes=(1,), seconds=0).actor == (0, 0, 0, 0)
