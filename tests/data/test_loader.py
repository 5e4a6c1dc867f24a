import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from stam.data import (
    BatchLoader,
    CachedScenes,
    ClutteredDigits,
    EvaluationView,
    RawBatch,
    TrainingView,
    batches,
    pad_images,
)
from stam.errors import DataError

# On a machine of one core two workers are one too many for torch.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Patterns:
    """Scenes of different sizes; scene i is filled with i + 1."""

    classes = ("even", "odd")

    def __init__(self, num: int = 12, broken: int | None = None) -> None:
        self.labels = np.arange(num) % 2
        self.broken = broken
        self.loads: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, decode_size: int | None = None) -> np.ndarray:
        self.loads.append(index)
        if index == self.broken:
            raise DataError(f"cannot read image {index}: it is broken")
        height, width = 4 + index, 9 - index % 3
        image = np.full((height, width, 3), index + 1, dtype=np.uint8)
        return image if decode_size is None else image[:decode_size, :decode_size]


class Killer(Patterns):
    """Scenes of which the first ends its process, as the kernel does when memory runs out."""

    def load(self, index: int, decode_size: int | None = None) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def same(one: RawBatch, other: RawBatch) -> bool:
    names = ("images", "sizes", "labels", "indices")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_images_are_padded_to_the_largest(num_workers: int) -> None:
    groups = [np.array([3, 0]), np.array([5, 1, 2])]
    first, second = BatchLoader(Patterns(), groups, num_workers=num_workers)
    assert first.images.shape == (2, 3, 7, 9)
    assert first.images.dtype == torch.uint8
    assert first.sizes.tolist() == [[7, 9], [4, 9]]
    assert first.labels.tolist() == [1, 0]
    assert first.labels.dtype == torch.int64
    assert first.indices.tolist() == [3, 0]
    assert len(second) == 3
    for image, (height, width), index in zip(second.images, second.sizes, second.indices, strict=True):
        assert (image[:, :height, :width] == index + 1).all()
        assert (image[:, height:] == 0).all()
        assert (image[:, :, width:] == 0).all()


def test_padding_keeps_the_channels_apart() -> None:
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    padded, sizes = pad_images([image, np.zeros((3, 1, 3), dtype=np.uint8)])
    assert padded.shape == (2, 3, 3, 4)
    assert np.array_equal(padded[0, :, :2], image.transpose(2, 0, 1))
    assert sizes.tolist() == [[2, 4], [3, 1]]


def test_the_decode_size_reaches_the_source() -> None:
    (batch,) = BatchLoader(Patterns(), [np.array([0, 8])], TrainingView(decode_size=5))
    assert batch.sizes.tolist() == [[4, 5], [5, 5]]


def test_evaluation_has_one_size() -> None:
    (batch,) = BatchLoader(Patterns(), [np.arange(12)], EvaluationView((6, 8), resize_size=10))
    assert batch.images.shape == (12, 3, 6, 8)
    assert (batch.images[:, 0, 3, 4] == batch.indices + 1).all()
    assert batch.sizes.unique(dim=0).tolist() == [[6, 8]]


def test_workers_change_nothing() -> None:
    digits = ClutteredDigits("test", num_scenes=64)
    groups = batches(np.arange(64)[::-1].copy(), 8)
    runs = [list(BatchLoader(digits, groups, num_workers=workers)) for workers in (0, 1, 2)]
    for together in zip(*runs, strict=True):
        assert same(together[0], together[1])
        assert same(together[0], together[2])


def test_loading_goes_on_at_any_batch() -> None:
    groups = batches(np.arange(12), 3)
    whole, rest = list(BatchLoader(Patterns(), groups)), list(BatchLoader(Patterns(), iter(groups[2:])))
    assert len(rest) == 2
    assert all(same(one, other) for one, other in zip(whole[2:], rest, strict=True))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_leaves_the_random_numbers_alone(num_workers: int) -> None:
    before = torch.get_rng_state()
    list(BatchLoader(Patterns(), [np.array([1])], num_workers=num_workers))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_unreadable_image_keeps_its_one_line(num_workers: int) -> None:
    loader = BatchLoader(Patterns(broken=4), batches(np.arange(12), 2), num_workers=num_workers)
    seen = []
    with pytest.raises(DataError) as caught:
        seen.extend(batch.indices.tolist() for batch in loader)
    assert str(caught.value) == "cannot read image 4: it is broken"
    assert seen == [[0, 1], [2, 3]]


def test_a_worker_that_dies_is_a_clear_error() -> None:
    with pytest.raises(DataError, match="a process that loads images died, .*; use fewer than 1 workers or"):
        list(BatchLoader(Killer(), [np.array([0])], num_workers=1))


def test_a_batch_moves_to_a_device() -> None:
    (batch,) = BatchLoader(Patterns(), [np.array([1, 2])])
    moved = batch.to("cpu")
    assert same(batch, moved)


def children_of(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_an_interrupt_leaves_no_process_behind() -> None:
    script = """
import numpy as np
from stam.data import BatchLoader, ClutteredDigits, batches
groups = batches(np.arange(60_000), 64)
try:
    for batch in BatchLoader(ClutteredDigits(), groups * 100, num_workers=2):
        print("batch", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as main:
        assert main.stdout is not None
        assert main.stderr is not None
        assert main.stdout.readline() == b"batch\n"
        workers = children_of(main.pid)
        assert len(workers) >= 2
        os.killpg(main.pid, signal.SIGINT)  # as a terminal does: the workers get it too
        output, errors = main.stdout.read(), main.stderr.read()
    assert output.endswith(b"interrupted\n")
    assert errors == b""
    assert main.returncode == 0
    deadline = time.monotonic() + 5
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))


def test_a_cache_loads_each_scene_once() -> None:
    source = Patterns()
    cached = CachedScenes(source)
    for _ in range(3):
        (batch,) = BatchLoader(cached, [np.array([3, 1])])
    assert source.loads == [3, 1]
    assert cached.num_cached == 2
    assert same(batch, next(iter(BatchLoader(Patterns(), [np.array([3, 1])]))))
    cached.load(3, decode_size=2)
    assert source.loads == [3, 1, 3]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cache_can_be_filled_ahead(num_workers: int) -> None:
    source = Patterns(40)
    cached = CachedScenes(source)
    cached.fill(num_workers=num_workers, progress=False)
    source.loads.clear()
    assert cached.num_cached == 40
    assert all(np.array_equal(cached.load(i), Patterns(40).load(i)) for i in range(40))
    assert source.loads == []
    before = cached.num_bytes
    cached.fill(progress=False)
    assert cached.num_bytes == before


def test_a_cache_keeps_to_its_memory() -> None:
    source = Patterns()
    cached = CachedScenes(source, max_bytes=300)
    cached.fill(progress=False)
    assert cached.num_bytes <= 300
    assert 0 < cached.num_cached < 12
    assert np.array_equal(cached.load(11), Patterns().load(11))
