"""A pool of scenes that leave when the agent is sure, without the GPU it is made for."""

import math

import numpy as np
import pytest
import torch
from evaluating import make_agent

from stam.evaluation import look_until_sure
from stam.evaluation.scenes import first_locations, random_orders
from stam.fast import kernels
from stam.fast.cuda import fuse
from stam.fast.exit_pool import ExitPool, can_pool, next_size
from stam.model.policy import FirstThen


@pytest.mark.parametrize("policy", ["learned", "learned:3", "spiral"])
@pytest.mark.parametrize("batch_size", [1, 5, 16])
@pytest.mark.parametrize("is_late", [False, True])
def test_scenes_leave_a_pool_where_they_leave_a_batch(policy, batch_size, is_late):
    agent = make_agent()
    scenes = torch.randn(16, 3, 24, 32, generator=torch.Generator().manual_seed(5))
    first, chosen = first_locations(agent.grid, np.arange(16), 0), agent.policy(policy)
    how = {"is_graphed": False, "is_late": is_late}
    pool = ExitPool(fuse(agent), chosen, 12, most_scenes=20, batch_size=batch_size, **how)
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
    pool = ExitPool(agent, agent.policy(), 12, most_scenes=16, batch_size=4, is_graphed=False, is_late=False)
    found = pool(scenes, first, 0.4)
    assert 12 < found.num_glimpses.sum() < 16 * 12
    assert sum(rows) < found.num_glimpses.sum() + 12 * 2 and max(rows) == 4


@pytest.mark.parametrize("is_late", [False, True])
def test_the_host_may_choose_the_size_of_a_batch_one_step_late(is_late):
    """Where it does not wait for the last step, a batch is as large as those who were left before it."""
    agent, rows = make_agent(), []
    agent.core.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[0]))
    scenes = torch.randn(8, 3, 24, 32, generator=torch.Generator().manual_seed(5))
    first = torch.arange(8)
    how = {"is_graphed": False, "is_late": is_late}
    found = ExitPool(agent, agent.policy(), 12, most_scenes=8, batch_size=8, **how)(scenes, first, 0.4)
    left = [int((found.num_glimpses > count).sum()) for count in range(12)]  # after so many glimpses
    seen_by_host = [8, *left[:-1]] if is_late else left
    assert 12 < found.num_glimpses.sum() < 8 * 12
    assert rows == [next_size(count) for count in seen_by_host if count > 0]


def test_sizes_waste_at_most_an_eighth():
    sizes = {1: 1, 7: 7, 9: 9, 17: 18, 33: 36, 65: 72, 129: 144, 256: 256, 257: 288, 600: 640}
    assert {count: next_size(count) for count in sizes} == sizes


def test_a_policy_of_its_own_for_each_scene_is_not_pooled(monkeypatch):
    agent, images = make_agent(), torch.zeros(2, 3, 24, 32)
    assert not can_pool(fuse(agent), agent.policy(), images)  # there are no kernels here
    monkeypatch.setattr(kernels, "usable", lambda tensor: True)
    orders = random_orders(agent.grid, np.arange(2), 0)
    assert not can_pool(fuse(agent), orders, images)
    assert not can_pool(fuse(agent), FirstThen(agent.policy(), orders, 3), images)
    assert all(can_pool(fuse(agent), agent.policy(name), images) for name in ("learned", "learned:3", "plus"))
