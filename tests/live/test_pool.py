import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sessions import feed, sensor_of

from stam.errors import SensorError, StamError
from stam.live import OutOfStepError, PoolFullError, Session, SessionPool, UnknownSessionError


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def pool(agent):
    with SessionPool(agent) as opened:
        yield opened


def test_a_hundred_sessions_from_many_threads_and_none_mixed_up(agent, pool):
    scenes = torch.randn(100, 3, 24, 32, generator=torch.Generator().manual_seed(4))
    batches = []
    looker, believe = pool.agent, pool.agent.believe

    def noted(memory):
        belief = believe(memory)
        batches.append(len(belief.state))
        return belief

    looker.believe = noted

    def look(index):
        sensor = sensor_of(agent, scenes[index])
        key = pool.open(first_location=index % 12, threshold=1.0)
        steps = []
        for _ in range(1 + index % 12):
            steps.append(pool.observe(key, sensor.sense(pool.get(key).location)))
        return steps

    with ThreadPoolExecutor(100) as threads:
        everything = list(threads.map(look, range(100)))
    del looker.believe
    assert max(batches) > 1  # some were thought about together
    for index, steps in enumerate(everything):
        alone = feed(agent.session(first_location=index % 12), sensor_of(agent, scenes[index]), len(steps))
        for step, want in zip(steps, alone, strict=True):
            torch.testing.assert_close(step.probabilities, want.probabilities, atol=1e-5, rtol=0)
            assert (step.location, step.num_glimpses) == (want.location, want.num_glimpses)
    assert len(pool) == 100


def test_glimpses_of_one_session_are_taken_in_order(agent, pool, images):
    sensor = sensor_of(agent, images[0])
    key = pool.open(first_location=0)
    order = [3, 9, 1, 0, 11, 5, 2]
    steps = [future.result() for future in [pool.submit(key, sensor.sense(place), place) for place in order]]
    assert [step.num_glimpses for step in steps] == list(range(1, 8))
    assert [agent.grid.index(place) for place in pool.get(key).seen] == order


def test_a_glimpse_that_waits_twice_is_taken_once(agent, pool, images):
    """A sensor's second try may arrive while its first still waits for the agent."""
    sensor = sensor_of(agent, images[0])
    key = pool.open(first_location=5, policy="random")
    tries = [pool.submit(key, sensor.sense(5), num_glimpses=0) for _ in range(3)]
    first, *again = [future.result() for future in tries]
    assert pool.get(key).num_glimpses == 1
    for step in again:
        assert step.location == first.location and torch.equal(step.probabilities, first.probabilities)
    pool.call(key, Session.missed).result()
    later = pool.observe(key, sensor.sense(5), num_glimpses=0)
    assert later.location == pool.get(key).location != first.location  # where to look now, not then
    with pytest.raises(OutOfStepError, match="of 7 glimpses, and 1 have been seen"):
        pool.observe(key, sensor.sense(0), num_glimpses=7)


def test_a_bad_glimpse_fails_alone(agent, pool, images):
    sensor = sensor_of(agent, images[0])
    keys = [pool.open(first_location=0) for _ in range(3)]
    glimpses = [sensor.sense(0), torch.zeros(3, 1, 1), sensor.sense(0)]
    futures = [pool.submit(key, glimpse) for key, glimpse in zip(keys, glimpses, strict=True)]
    assert futures[0].result().num_glimpses == futures[2].result().num_glimpses == 1
    with pytest.raises(SensorError):
        futures[1].result()
    assert pool.get(keys[1]).num_glimpses == 0


def test_an_agent_that_fails_tells_everyone_who_waits(agent, pool, images):
    key = pool.open(first_location=0)
    pool.agent.believe = lambda memory, masks=None: 1 / 0
    with pytest.raises(ZeroDivisionError):
        pool.observe(key, sensor_of(agent, images[0]).sense(0))
    del pool.agent.believe
    assert pool.observe(key, sensor_of(agent, images[0]).sense(0)).num_glimpses == 1


def test_other_calls_wait_their_turn(agent, pool, images):
    sensor = sensor_of(agent, images[0])
    key = pool.open(first_location=0)
    pool.submit(key, sensor.sense(0))
    elsewhere = pool.call(key, Session.missed).result()
    assert elsewhere == pool.get(key).location
    assert pool.call(key, Session.policy_map).result().shape == (3, 4)
    assert pool.call(key, lambda session: session.rewind(0)).result() is None
    with pytest.raises(StamError, match="cannot rewind"):
        pool.call(key, lambda session: session.rewind(5)).result()


def test_sessions_expire_when_idle_and_when_old(agent, images):
    clock = Clock()
    with SessionPool(agent, idle_seconds=10, lifetime_seconds=25, clock=clock) as pool:
        used, idle = pool.open(), pool.open()
        for _ in range(2):
            clock.seconds += 8
            pool.get(used)
        assert len(pool) == 1 and pool.expires_in(used) == 9
        with pytest.raises(UnknownSessionError, match="no session"):
            pool.observe(idle, None)
        clock.seconds += 8
        pool.get(used)
        clock.seconds += 2
        with pytest.raises(UnknownSessionError, match="expired"):
            pool.get(used)


def test_no_more_sessions_than_allowed(agent):
    with SessionPool(agent, max_sessions=2) as pool:
        first = pool.open()
        pool.open()
        with pytest.raises(PoolFullError, match="2 sessions are open"):
            pool.open()
        pool.discard(first)
        pool.open()
        with pytest.raises(UnknownSessionError):
            pool.discard(first)


def test_an_agent_in_training_is_refused(agent):
    with pytest.raises(StamError, match=r"in training mode: call agent.eval\(\)"):
        SessionPool(copy.deepcopy(agent).train())


def test_policies_that_no_session_uses_are_forgotten(agent):
    with SessionPool(agent) as pool:
        kept = pool.open(policy="learned:1")
        for count in range(2, 30):
            pool.discard(pool.open(policy=f"learned:{count}"))
        assert len(pool._policies) == 2 and "learned:1" in pool._policies
        assert pool.get(kept).policy is pool._policies["learned:1"]


def test_a_seed_makes_a_session_repeatable(agent, pool, images):
    sensor = sensor_of(agent, images[0])

    def path(seed):
        key = pool.open(policy="random", seed=seed)
        return [pool.observe(key, sensor.sense(pool.get(key).location)).location for _ in range(6)]

    assert path(1) == path(1) != path(2)


def test_a_closed_pool_ends_its_thread_and_takes_nothing(agent, images):
    others = set(threading.enumerate())
    pool = SessionPool(agent)
    key = pool.open(first_location=0)
    waiting = pool.submit(key, sensor_of(agent, images[0]).sense(0))
    pool.close()
    assert waiting.result().num_glimpses == 1
    assert not any(thread.name == "stam-session-pool" for thread in set(threading.enumerate()) - others)
    with pytest.raises(StamError, match="closed"):
        pool.observe(key, sensor_of(agent, images[0]).sense(1))


@pytest.mark.parametrize("wrong", [{"max_sessions": 0}, {"max_batch": 0}, {"idle_seconds": 0}])
def test_wrong_limits_are_refused(agent, wrong):
    with pytest.raises(StamError):
        SessionPool(agent, **wrong)
