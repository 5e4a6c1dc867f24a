"""A pool of scenes that leave when the agent is sure, without the GPU it is made for."""

import math

import numpy as np
import pytest
import torch
from evaluating import make_agent

from stam.evaluation import look_until_sure
from stam.evaluation.scenes import first_locations, random_orders
from stam.fast.cuda import fuse
from stam.fast.exit_pool import ExitPool, can_pool, next_size


@pytest.mark.parametrize("policy", ["learned", "spiral"])
@pytest.mark.parametrize("batch_size", [1, 5, 16])
def test_scenes_leave_a_pool_where_they_leave_a_batch(policy, batch_size):
    agent = make_agent()
    scenes = torch.randn(16, 3, 24, 32, generator=torch.Generator().manual_seed(5))
    first, chosen = first_locations(agent.grid, np.arange(16), 0), agent.policy(policy)
    pool = ExitPool(fuse(agent), chosen, 12, most_scenes=20, batch_size=batch_size, is_graphed=False)
    middle = float(agent.look(scenes, 12, first, chosen).confidences.median())
    for threshold in (middle, math.inf, 0.0, middle):  # what an earlier pool left does not matter
        wanted = look_until_sure(agent, scenes, threshold, first, chosen)
        found = pool(scenes, first, threshold)
        assert found.num_glimpses.equal(wanted.num_glimpses)
        assert found.locations.equal(wanted.locations)
        torch.testing.assert_close(found.probabilities, wanted.probabilities, atol=1e-5, rtol=0)


def test_what_is_left_is_computed_in_full_batches():
    agent, rows = make_agent(), []
    agent.core.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[0]))
    scenes = torch.randn(16, 3, 24, 32)
    first = torch.zeros(16, dtype=torch.long)
    pool = ExitPool(agent, agent.policy(), 12, most_scenes=16, batch_size=4, is_graphed=False)
    found = pool(scenes, first, 0.4)
    assert 12 < found.num_glimpses.sum() < 16 * 12
    assert sum(rows) < found.num_glimpses.sum() + 12 * 2 and max(rows) == 4


def test_sizes_waste_at_most_a_third():
    assert [next_size(count) for count in (1, 2, 3, 4, 5, 7, 9, 13, 600)] == [1, 2, 3, 4, 6, 8, 12, 16, 768]


def test_a_policy_of_its_own_for_each_scene_is_not_pooled():
    agent, images = make_agent(), torch.zeros(2, 3, 24, 32)
    assert not can_pool(fuse(agent), random_orders(agent.grid, np.arange(2), 0), images)
    assert not can_pool(fuse(agent), agent.policy(), images)  # there are no kernels here
