from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from stam.errors import ConfigError, StamError
from stam.model.actor_critic import Actor
from stam.model.orders import ORDERS
from stam.model.policy import POLICIES, GreedyPolicy, RandomPolicy, SampledPolicy, make_policy
from stam.scene.grid import Grid

small_grids = st.builds(lambda r, c: Grid((r * 2, c * 2), 2, 1), st.integers(1, 6), st.integers(1, 6))


@given(small_grids, st.sampled_from(["plus", "spiral", "centre-out"]))
def test_orders_visit_every_location_once_from_the_centre(grid, name):
    visited = ORDERS[name](grid)
    assert sorted(visited) == list(range(grid.num_locations))
    assert visited[0] == grid.index((grid.rows // 2, grid.columns // 2))


@given(small_grids)
def test_spiral_goes_ring_by_ring(grid):
    centre = (grid.rows // 2, grid.columns // 2)
    rings = [
        max(abs(r - centre[0]), abs(c - centre[1])) for r, c in map(grid.row_column, ORDERS["spiral"](grid))
    ]
    assert rings == sorted(rings)


def test_spiral_steps_to_a_neighbour_on_an_odd_square():
    grid = Grid(7, 1, 1)
    steps = [grid.row_column(location) for location in ORDERS["spiral"](grid)]
    assert all(abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1 for a, b in pairwise(steps))


def test_plus_is_the_cross_outward_then_the_rest_by_distance():
    grid = Grid(7, 1, 1)
    visited = [grid.row_column(location) for location in ORDERS["plus"](grid)]
    cross = visited[:13]
    assert all(row == 3 or column == 3 for row, column in cross)
    reach = [abs(row - 3) + abs(column - 3) for row, column in cross]
    assert reach == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    rest = [(row - 3) ** 2 + (column - 3) ** 2 for row, column in visited[13:]]
    assert rest == sorted(rest)


def score_by_index(state, candidates):
    return candidates.float()


@pytest.mark.parametrize("name", ["random", "plus", "spiral", "centre-out", "learned"])
@pytest.mark.parametrize("shape", [(7, 7), (2, 5), (1, 3)])
def test_no_policy_looks_twice_at_one_place(name, shape):
    grid = Grid((shape[0] * 2, shape[1] * 2), 2, 1)
    policy = make_policy(name, grid, score_by_index)
    seen = torch.zeros(3, grid.num_locations, dtype=torch.bool)
    state = torch.zeros(3, 4)
    for _ in range(grid.num_locations):
        location = policy.choose(state, seen)
        assert not seen.gather(1, location[:, None]).any()
        seen = seen.scatter(1, location[:, None], True)
    assert seen.all()


def test_samples_may_have_seen_different_numbers():
    seen = torch.tensor([[False, True, True, True], [False, False, True, False]])
    assert GreedyPolicy(score_by_index).choose(torch.zeros(2, 1), seen).tolist() == [0, 3]
    log_probabilities = SampledPolicy(score_by_index, 2.0).log_probabilities(torch.zeros(2, 1), seen)
    assert (log_probabilities.exp().sum(1) - 1).abs().max() < 1e-6
    assert (log_probabilities == -torch.inf).equal(seen)


def test_observed_locations_have_probability_zero_and_the_rest_is_the_scaled_softmax():
    seen = torch.tensor([[True, False, False, True, False]])
    got = SampledPolicy(score_by_index, tau=3.0).log_probabilities(torch.zeros(1, 1), seen).exp()[0]
    logits = torch.tensor([1.0, 2.0, 4.0])
    want = (3 * logits / logits.norm()).softmax(0)
    torch.testing.assert_close(got, torch.tensor([0, want[0], want[1], 0, want[2]]))


def test_sampling_follows_the_probabilities():
    policy = SampledPolicy(score_by_index, tau=2.0)
    seen = torch.tensor([[True, False, False, False]]).expand(20_000, -1)
    state, generator = torch.zeros(20_000, 1), torch.Generator().manual_seed(3)
    decision = policy.decide(state, seen, generator)
    frequencies = torch.bincount(decision.location, minlength=4) / 20_000
    probabilities = policy.log_probabilities(state[:1], seen[:1]).exp()[0]
    torch.testing.assert_close(frequencies, probabilities, atol=0.015, rtol=0)
    torch.testing.assert_close(decision.log_probability, probabilities[decision.location].log())


def test_random_is_uniform_over_the_unseen():
    seen = torch.tensor([[False, True, False, False]]).expand(20_000, -1)
    location = RandomPolicy().choose(torch.zeros(20_000, 1), seen, torch.Generator().manual_seed(0))
    frequencies = torch.bincount(location, minlength=4) / 20_000
    torch.testing.assert_close(frequencies, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3]), atol=0.015, rtol=0)


def test_one_location_left_is_certain():
    seen = torch.tensor([[True, True, False]])
    decision = SampledPolicy(score_by_index, 4.0).decide(torch.zeros(1, 1), seen)
    assert decision.location.tolist() == [2]
    assert decision.log_probability.tolist() == [0.0]


def test_nowhere_left_is_an_error():
    with pytest.raises(StamError, match="nowhere left to look"):
        GreedyPolicy(score_by_index).choose(torch.zeros(1, 1), torch.ones(1, 3, dtype=torch.bool))


def test_equal_logits_are_uniform_with_a_finite_gradient():
    logits = torch.zeros(1, 4, requires_grad=True)
    policy = SampledPolicy(lambda state, candidates: logits.gather(1, candidates), 4.0)
    log_probabilities = policy.log_probabilities(torch.zeros(1, 1), torch.zeros(1, 4, dtype=torch.bool))
    torch.testing.assert_close(log_probabilities.exp(), torch.full((1, 4), 0.25))
    log_probabilities[0, 1].backward()
    assert torch.isfinite(logits.grad).all()


def test_after_its_glimpses_an_order_decides_and_the_actor_is_not_asked():
    grid, asked = Grid(5, 1, 1), []

    def actor(state, candidates):
        asked.append(len(candidates))
        return -candidates.float()  # the first unseen location

    policy = make_policy("learned:3", grid, actor)
    seen = torch.zeros(3, 25, dtype=torch.bool)
    for row, count in enumerate((2, 3, 4)):
        seen[row, :count] = True
    rows = policy.decide(torch.zeros(3, 4), seen).location.tolist()
    assert rows == [2, 12, 12]  # the middle comes first in the order
    asked.clear()
    for row, count in enumerate((2, 3, 4)):
        one = seen[row : row + 1]
        for num_seen in (None, count):
            assert policy.decide(torch.zeros(1, 4), one, num_seen=num_seen).location.tolist() == [rows[row]]
    assert asked == [1, 1]
    assert isinstance(make_policy("learned", grid, actor), GreedyPolicy)
    assert policy.at(2) is policy.first and policy.at(3) is policy.then


def test_probabilities_are_as_sharp_as_in_training():
    """The choice is the same; the paper's training knows logits only up to their length."""
    seen = torch.zeros(1, 4, dtype=torch.bool)
    seen[0, 3] = True

    def actor(state, candidates):
        return torch.tensor([0.0, 1.0, 0.5, 9.0])[candidates]

    plain, sharp = GreedyPolicy(actor), GreedyPolicy(actor, sharpness=4.0)
    wanted = torch.tensor([0.0, 4.0, 2.0]).softmax(0)
    torch.testing.assert_close(sharp.probabilities(torch.zeros(1, 1), seen)[0, :3], wanted)
    ((found),) = plain.probabilities(torch.zeros(1, 1), seen)
    norm = (1 + 0.25) ** 0.5
    torch.testing.assert_close(found[:3], (4 * torch.tensor([0.0, 1.0, 0.5]) / norm).softmax(0))
    assert found[3] == 0 and sharp.choose(torch.zeros(1, 1), seen).tolist() == [1]


@pytest.mark.parametrize("name", ["lerned", "learned:0", "learned:x", "learned:", "spiral:3", ""])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ConfigError, match="is unknown"):
        make_policy(name, Grid(5, 1, 1), score_by_index)


@pytest.mark.parametrize("name", [*POLICIES, "learned:2"])
def test_probabilities_cover_what_is_unseen_and_agree_with_the_choice(name):
    policy, seen = make_policy(name, Grid(4, 1, 1), score_by_index), torch.zeros(2, 16, dtype=torch.bool)
    seen[0, [3, 15]] = True
    seen[1, 5] = True
    likely = policy.probabilities(torch.zeros(2, 4), seen)
    torch.testing.assert_close(likely.sum(1), torch.ones(2))
    assert not likely[seen].any()
    if not policy.draws:
        assert likely.argmax(1).equal(policy.choose(torch.zeros(2, 4), seen))
    assert policy.probabilities(torch.zeros(2, 4), torch.ones_like(seen)).sum() == 0


def test_an_agent_without_an_actor_says_so():
    with pytest.raises(StamError, match="without an actor"):
        make_policy("learned", Grid(4, 2, 1))


def test_log_probabilities_of_a_path_are_those_of_its_steps():
    torch.manual_seed(0)
    actor = Actor(num_locations=9, width=4, hidden=8).train()
    torch.nn.init.normal_(actor.location_embedding)
    policy, states = SampledPolicy(actor, 3.0), torch.randn(4, 5, 8)
    order = torch.stack([torch.randperm(9) for _ in range(5)])
    seen = torch.stack([F.one_hot(order[:, :count], 9).sum(dim=1).bool() for count in range(1, 5)])
    locations = order[:, 1:5].t()
    found = policy.log_probabilities_of(locations, states, seen)
    for step in range(4):
        each = policy.log_probabilities(states[step], seen[step], step + 1)
        torch.testing.assert_close(found[step], each.gather(1, locations[step][:, None])[:, 0])
