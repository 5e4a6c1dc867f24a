"""The loop that learners share: what it keeps in memory, and when it draws what."""

import signal
import tracemalloc

import numpy as np
import pytest

from stam.data import sampler
from stam.errors import Interrupted
from stam.learning import progress
from stam.learning.loop import Learner, Place, Plan, load_batches, run_loop
from stam.learning.recipes import get_recipe
from stam.learning.runs import RunFolder
from stam.learning.training import plan
from stam.settings import DataConfig

IMAGENET = 1_281_167


class Blank:
    """As many scenes as asked for, all alike."""

    def __init__(self, count: int) -> None:
        self.classes = ("a", "b")
        self.labels = np.zeros(count, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, decode_size: int | None = None) -> np.ndarray:
        return np.zeros((1, 1, 3), dtype=np.uint8)


class StoppedError(Exception):
    """Enough was seen."""


class FirstBatch(Learner):
    """Ends with the first batch, which it keeps."""

    def train_batch(self, place, raw):
        self.shown = raw.indices.numpy()
        raise StoppedError

    end_epoch = state_dict = load_state_dict = save = progress = lambda self, *_: {}


@pytest.fixture
def drawn(monkeypatch) -> list[int]:
    """The epochs whose order was drawn."""
    epochs: list[int] = []
    order = sampler.random_order

    def noted(count: int, purpose: str, seed: int, epoch: int) -> np.ndarray:
        epochs.append(epoch)
        return order(count, purpose, seed, epoch)

    monkeypatch.setattr(sampler, "random_order", noted)
    return epochs


@pytest.mark.parametrize("start", [(0, 0), (137, 5)])
def test_the_first_batch_of_imagenet_takes_one_order_and_little_memory(tmp_path, drawn, start):
    made, data = plan(IMAGENET, get_recipe("imagenet-small")), DataConfig(num_workers=0, check=False)
    scenes, learner = Blank(IMAGENET), FirstBatch()
    learner.position = start
    tracemalloc.start()
    try:
        with pytest.raises(StoppedError):
            run_loop(learner, RunFolder(tmp_path), made, scenes, data, "test", 1, "")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert drawn == [start[0]] and most < 64 * 2**20  # two orders, and what sorting them takes
    assert np.array_equal(learner.shown, made.batches_of(start[0])[start[1]])


class HalfWay(Learner):
    """Stops half-way through a batch, as a second Ctrl-C does."""

    def train_batch(self, place, raw):
        self.on_progress(0.5)
        raise KeyboardInterrupt

    end_epoch = state_dict = load_state_dict = save = progress = lambda self, *_: {}


def test_progress_moves_within_a_batch_and_stopping_at_once_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    seconds = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))
    made, data = Plan(40, 3, 20, 1.0, 0), DataConfig(num_workers=0, check=False)
    with pytest.raises(Interrupted, match="stopped at once; to go on from .*: stam go on") as stopped:
        run_loop(HalfWay(), RunFolder(tmp_path), made, Blank(40), data, "test", 1, "stam go on")
    assert stopped.value.number == signal.SIGINT
    said = capsys.readouterr().err
    assert said.startswith("test: 6 batches of 20 images in 3 epochs\n")
    assert "10/120" in said and "to go at this speed; Ctrl-C saves" in said


def test_durations_are_said_as_people_say_them():
    said = [progress.duration(seconds) for seconds in (12, 89, 100, 5000, 9000)]
    assert said == ["12 s", "89 s", "2 min", "83 min", "2.5 hours"]


def test_no_batch_keeps_the_order_it_was_cut_from():
    made = plan(IMAGENET, get_recipe("imagenet-small"))
    for part in made.batches_of(0):
        whole = part
        while whole.base is not None:
            whole = whole.base
        assert whole.nbytes <= 8 * IMAGENET / 20  # an epoch shows 1/21 of the images


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_drawn_as_they_are_loaded(drawn, workers):
    made = Plan(100, epochs=50, batch_size=10, fraction=0.2, seed=3)
    loaded = load_batches(Blank(100), made.batches_from((4, 1)), DataConfig(num_workers=workers))
    place, raw = next(loaded)
    assert place == Place(4, 1, True) and len(drawn) <= 5  # what workers load ahead
    assert raw.indices.tolist() == made.batches_of(4)[1].tolist()
    rest = [(place, raw.indices.tolist()) for place, raw in loaded]
    assert rest == [(place, part.tolist()) for place, part in made.batches_from((5, 0))]
    assert made.num_batches() == 100 and made.num_batches((4, 1)) == 1 + len(rest) == 91
