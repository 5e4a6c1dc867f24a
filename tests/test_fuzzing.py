"""Damaged files of every format are opened, or refused in one line; `tests/fuzzing.py` tries many more."""

import contextlib
import json
import os
import resource
import signal
from pathlib import Path

import pytest
from agents import tiny_config
from fuzzing import Target, TooSlowError, make_targets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_up import made_up

from stam.config import AgentConfig, from_plain, to_plain
from stam.data import SplitRecord
from stam.errors import ConfigError, StamError
from stam.evaluation import Evaluation
from stam.learning.recipes import get_recipe
from stam.scene.grid import Grid
from stam.settings import RunConfig

FORMATS = [
    "config.json of an agent",
    "config.json of a teacher",
    "model.safetensors",
    "saved session",
    "run.json",
    "split.json",
    "metrics.jsonl",
    "timing.jsonl",
    "settings .toml",
    "settings .json",
    "trackers.json",
    "list of images .csv",
    "answers of stam predict .csv",
    "state.pt",
    "state.pt of an agent",
    "config.json of the zoo",
    "model.safetensors of the zoo",
    "run.json of the zoo",
    "digits .npz",
    "remembered image check",
    "remembered tar listing",
    "evaluation.json",
    "examples.npz",
    "DeiT .pth",
    "DeiT .pth before torch 1.6",
    "DeiT of Hugging Face",
    "the authors' .pth",
    "DeiT .safetensors",
    *(f"image .{kind}" for kind in ("png", "jpeg", "bmp", "gif", "tiff", "webp", "ppm")),
    "boxes of fMoW",
    "shards.json",
    "train.npy of shards",
    "shard .tar",
    "tar without an index",
]
HINTS = ("remembered image check", "remembered tar listing", "boxes of fMoW")
FEW = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, Target]:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp() / "cache")
    return make_targets(tmp_path_factory.mktemp("fuzzed"))


def test_every_format_is_fuzzed(targets):
    assert sorted(targets) == sorted(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
@FEW
@given(seed=st.integers(0, 2**32))
def test_a_damaged_file_is_opened_or_refused(targets, name, seed):
    assert targets[name].try_one(seed) in ("opened", "refused")


@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_noticed(targets, name):
    """The files are damaged indeed: some are refused, but for what is only a hint and read again."""
    found = {targets[name].try_one(seed) for seed in range(40)}
    assert "refused" in found or name in HINTS


@pytest.mark.parametrize("kind", ["pipe", "folder", "huge", "missing"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_file_of_a_sensible_size_is_not_waited_for(targets, name, kind):
    """Nothing is read from a pipe, and no more memory is taken than for a file of a sensible size."""
    target = targets[name]
    target.try_one(0)
    content = target.path.read_bytes()
    target.path.unlink()
    if kind == "pipe":
        os.mkfifo(target.path)
    elif kind == "folder":
        target.path.mkdir()
    elif kind == "huge":
        target.path.write_bytes(content)
        os.truncate(target.path, 8 * 2**30)  # sparse: it takes no room
    try:
        with limited(seconds=10, memory=3 * 2**30), contextlib.suppress(StamError):
            target.use()
    finally:
        target.path.rmdir() if kind == "folder" else target.path.unlink(missing_ok=True)


@contextlib.contextmanager
def limited(seconds, memory):
    """Raises within it where something takes longer, or more memory than there is now."""

    def too_slow(*_):
        raise TooSlowError(f"it took more than {seconds} s")

    earlier = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, too_slow)
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory, earlier[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, earlier)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
RECORDS = {
    AgentConfig: to_plain(tiny_config(labels=tuple("abcde"))),
    RunConfig: to_plain(get_recipe("tiny")),
    SplitRecord: to_plain(SplitRecord(("a", "b"), 2, 1, "x", 0, ("a", "b"), ("c",))),
    Evaluation: to_plain(made_up(grid=Grid(32, 16, 8))),
}


def places(value) -> list[list]:
    """Every path into a document."""
    entries = list(value.items()) if isinstance(value, dict) else []
    entries += enumerate(value) if isinstance(value, list) else []
    return [path for key, item in entries for path in ([key], *([key, *rest] for rest in places(item)))]


PLACES = {cls: places(record) for cls, record in RECORDS.items()}


@pytest.mark.parametrize("cls", RECORDS)
@settings(FEW, max_examples=80)
@given(data=st.data())
def test_any_value_anywhere_is_taken_or_refused(cls, data):
    document = json.loads(json.dumps(RECORDS[cls]))
    *path, last = data.draw(st.sampled_from(PLACES[cls]))
    inner = document
    for key in path:
        inner = inner[key]
    inner[last] = data.draw(ANYTHING)
    try:
        again = from_plain(cls, document)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert from_plain(cls, to_plain(again)) == again


@settings(FEW, max_examples=100)
@given(value=ANYTHING, cls=st.sampled_from(list(RECORDS)))
def test_a_document_of_anything_is_refused(value, cls):
    try:
        from_plain(cls, value)
    except ConfigError:
        return
    assert cls is RunConfig
