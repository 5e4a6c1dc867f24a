import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stam.data import batches, epoch_indices, evaluation_indices
from stam.errors import ConfigError

counts = st.integers(0, 400)


@settings(deadline=None)
@given(num=counts, world_size=st.integers(1, 5))
def test_evaluation_takes_every_scene_exactly_once(num: int, world_size: int) -> None:
    parts = [evaluation_indices(num, rank, world_size) for rank in range(world_size)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(num))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(deadline=None)
@given(num=counts, batch_size=st.integers(1, 64), world_size=st.integers(1, 5))
def test_evaluation_batches_lose_nothing(num: int, batch_size: int, world_size: int) -> None:
    seen = [
        index
        for rank in range(world_size)
        for batch in batches(evaluation_indices(num, rank, world_size), batch_size, drop_last=False)
        for index in batch.tolist()
    ]
    assert sorted(seen) == list(range(num))


@settings(deadline=None)
@given(
    num=st.integers(1, 400),
    epoch=st.integers(0, 500),
    seed=st.integers(0, 2**40),
    fraction=st.floats(0.01, 1),
    run_length=st.integers(1, 40),
)
def test_an_epoch_is_a_subset_without_repeats(
    num: int, epoch: int, seed: int, fraction: float, run_length: int
) -> None:
    chosen = epoch_indices(num, epoch, fraction, seed, 8, run_length)
    assert len(chosen) == min(num, max(round(fraction * num), 8))
    assert len(set(chosen.tolist())) == len(chosen)
    assert chosen.min() >= 0
    assert chosen.max() < num
    assert np.array_equal(chosen, epoch_indices(num, epoch, fraction, seed, 8, run_length))


def test_runs_are_whole_and_begin_elsewhere_in_each_epoch() -> None:
    beginnings = set()
    for epoch in range(30):
        order = epoch_indices(1000, epoch, 1.0, seed=0, run_length=32)
        first = order[np.flatnonzero(np.diff(order, prepend=-9) != 1)]  # of each run
        assert 29 <= len(first) <= 33  # 32 or 33 runs, of which two may lie side by side by chance
        beginnings.add(int(first.max()))
        assert not np.array_equal(first, np.sort(first))
    assert len(beginnings) > 10


def test_every_epoch_and_seed_has_its_own_subset() -> None:
    subsets = {
        tuple(epoch_indices(1000, epoch, 1 / 21, seed).tolist()) for epoch in range(20) for seed in (0, 1)
    }
    assert len(subsets) == 40
    shown = np.concatenate([epoch_indices(1000, epoch, 1 / 21, 0) for epoch in range(210)])
    assert len(np.unique(shown)) > 990


def test_subsets_stay_the_same_for_ever() -> None:
    """A run must resume alike under another version of numpy: these numbers never change."""
    assert epoch_indices(10, epoch=3, fraction=0.5, seed=7).tolist() == [4, 1, 0, 3, 9]
    in_runs = epoch_indices(10, epoch=3, fraction=0.5, seed=7, run_length=3)
    assert in_runs.tolist() == [1, 2, 3, 0, 7]


@settings(deadline=None)
@given(
    num=st.integers(60, 400), share=st.integers(1, 12), world_size=st.integers(1, 5), drop_last=st.booleans()
)
def test_ranks_share_the_same_global_batches(num: int, share: int, world_size: int, drop_last: bool) -> None:
    indices = epoch_indices(num, 0, 1.0, 0)
    whole = batches(indices, share * world_size, drop_last=drop_last)
    parts = [batches(indices, share * world_size, rank, world_size, drop_last) for rank in range(world_size)]
    assert len({len(part) for part in parts}) == 1
    for number, together in enumerate(zip(*parts, strict=True)):
        assert all(len(part) for part in together)
        assert np.concatenate(together).tolist() == whole[number].tolist()


def test_the_last_batch_is_dropped_or_kept() -> None:
    assert [len(batch) for batch in batches(np.arange(10), 4)] == [4, 4]
    assert [len(batch) for batch in batches(np.arange(10), 4, drop_last=False)] == [4, 4, 2]
    assert [len(batch) for batch in batches(np.arange(9), 4, 1, 2, drop_last=False)] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.arange(10), 16), "batch_size 16 is larger than the 10 scenes: use at most 10"),
        ((np.arange(10), 0), "batch_size must be at least 1, got 0"),
        ((np.arange(10), 4, 0, 3), "batch_size 4 cannot be shared by 3 processes: use a multiple of 3"),
        ((np.arange(10), 4, 2, 2), "rank must be in 0..1, got 2"),
    ],
)
def test_batches_that_cannot_be(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        batches(*arguments)


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_the_fraction_is_checked(fraction: float) -> None:
    with pytest.raises(ConfigError, match="fraction must be above 0 and at most 1, got"):
        epoch_indices(10, 0, fraction, 0)
