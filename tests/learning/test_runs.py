"""Run folders: who may train in one, and what is said of damaged files."""

import dataclasses
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from learners import learner

from stam.cli import main
from stam.config import AgentConfig
from stam.data import SplitRecord
from stam.learning.loop import restore
from stam.learning.runs import RunError, RunFolder, read_metrics, recorded_resize_size
from stam.learning.training import AgentLearner
from stam.settings import RunConfig
from stam.weights import FoundAgent, load_agent, save_agent


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def test_two_cannot_train_in_one_folder(run):
    with run.locked(), pytest.raises(RunError, match=r"is being trained by process \d+ on"), run.locked():
        pass
    with run.locked():  # free again
        pass


@pytest.mark.parametrize("content", [b"", b"no state", b"PK\x03\x04 half an archive", b"\x80\x04K\x01."])
def test_a_damaged_state_is_named_and_a_way_on_is_offered(run, content):
    run.state_file.write_bytes(content)
    with pytest.raises(RunError, match=r"state.pt' is damaged .*--init"):
        run.load_state()


def test_a_state_of_something_else_is_damaged_too(run):
    torch.save({"epoch": 3}, run.state_file)
    with pytest.raises(RunError, match="is damaged"):
        run.load_state()


def test_a_state_that_counts_fewer_metrics_than_none_is_damaged(run):
    run.log({"epoch": 0})
    torch.save({"metrics_length": -5}, run.state_file)
    with pytest.raises(RunError, match="is damaged .metrics_length is -5"):
        run.load_state()


def test_metrics_are_on_the_disk_before_the_state_that_counts_them(run, monkeypatch):
    """After a power failure the state would count lines that are lost, and every resume be refused."""
    synced: list[str] = []
    real = os.fsync

    def fsync(number: int) -> None:
        synced.append(Path(f"/proc/self/fd/{number}").readlink().name)
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    run.log({"epoch": 0})
    run.save_state({"position": [1, 0]})
    assert synced.index("metrics.jsonl") < synced.index(".state.pt.writing")


def test_of_two_that_begin_at_once_one_is_refused(tmp_path, monkeypatch):
    """Both have found the folder empty when the first writes its record."""
    split = SplitRecord(("a", "b"), 2, 2, "0")
    config = RunConfig(AgentConfig.of_size("tiny", 2))
    create = RunFolder.create
    other = dataclasses.replace(config, training=dataclasses.replace(config.training, seed=7))

    def create_second(path):
        run = create(path)
        monkeypatch.setattr(RunFolder, "create", create)
        RunFolder.begin(path, "first", config, split)
        return run

    monkeypatch.setattr(RunFolder, "create", create_second)
    with pytest.raises(RunError, match="is not empty"):
        RunFolder.begin(tmp_path / "run", "second", other, split)
    assert RunFolder(tmp_path / "run").record()["recipe"] == "first"


def test_metrics_that_were_cut_off_are_not_filled_up(run):
    run.log({"epoch": 0})
    run.save_state({"position": [1, 0]})
    run.metrics_file.write_bytes(b'{"ep')
    with pytest.raises(RunError, match="has 4 bytes, it had 13"):
        run.load_state()
    assert run.metrics_file.read_bytes() == b'{"ep'


def test_a_full_disk_leaves_no_half_line_of_metrics(run):
    run.log({"epoch": 0, "loss/a": 1.5})
    before = run.metrics_file.read_bytes()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            run.log({"epoch": 1, "loss/a": 1.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert run.metrics_file.read_bytes() == before
    run.log({"epoch": 1, "loss/a": 1.5})
    assert [line["epoch"] for line in read_metrics(run.metrics_file)] == [0, 1]


def test_a_start_that_was_killed_before_its_record_begins_anew(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("split.json", ".run.json.writing", ".lock"):
        (folder / name).touch()
    RunFolder.create(folder)
    (folder / "run.json").touch()
    with pytest.raises(RunError, match="is damaged"):
        RunFolder.create(folder)


def test_a_run_whose_record_is_lost_or_damaged_says_how_to_go_on(run, agent):
    """Resuming it and beginning in its folder are both refused: neither may name the other as the way on."""
    for damage in ("", '{"format": "stam-r', None):
        run.record_file.unlink(missing_ok=True)
        if damage is not None:
            run.record_file.write_text(damage)
        (run.path / "state.pt").touch()
        for start in (lambda: RunFolder.open(run.path).record(), lambda: RunFolder.create(run.path)):
            with pytest.raises(RunError, match="name another folder") as refused:
                start()
            assert "--resume" not in str(refused.value)
            if damage is not None:
                assert str(refused.value).startswith(f"'{run.record_file}' is damaged: ")
    run.record_file.touch()
    save_agent(agent, run.path / "last")
    with pytest.raises(RunError, match=f"--init {run.path / 'last'}, which starts from the agent"):
        run.record()


def test_a_run_killed_at_its_last_save_is_saved_again(tmp_path, monkeypatch):
    """Nothing says that a run has ended before its last agent is there."""

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    options = ["--epochs", "2", "--epoch-share", "0.001", "--batch-size", "32", "--num-glimpses", "2"]
    options += ["--validation-images", "8", "--device", "cpu"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    main(["train", "digits", "--out", str(whole), *options])
    for dying in ("save_state", "save"):
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder if dying == "save_state" else AgentLearner, dying, die)
            with pytest.raises(Killed):
                resume = ["--resume"] if (cut / "run.json").is_file() else []
                main(["train", *([] if resume else ["digits"]), "--out", str(cut), *(resume or options)])
    main(["train", "--resume", "--out", str(cut)])
    for name in ("last/model.safetensors", "best/model.safetensors", "metrics.jsonl"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
    # of a run that has ended, what is lost, half there or older is saved again from its state
    last, saved = cut / "last", (whole / "last/model.safetensors").read_bytes()
    older = load_agent(last)
    with torch.no_grad():
        next(older.core.parameters()).add_(1)
    for lose in (
        lambda: shutil.rmtree(last),
        lambda: (last / "config.json").unlink(),
        lambda: save_agent(older, last),
    ):
        lose()
        main(["train", "--resume", "--out", str(cut)])
        assert (last / "model.safetensors").read_bytes() == saved
        assert (last / "config.json").is_file()


RECORD = {"format": "stam-run", "recipe": "tiny", "config": {"data": {"resize_size": 27}}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is damaged"),
        ("{" * 100_000, "is damaged"),
        ("[]", "must be an object"),
        ("{}", "config is missing"),
        (json.dumps(RECORD | {"config": []}), r"config must be an object, got \[\]"),
        (json.dumps(RECORD | {"config": {"data": 3}}), "config.data must be an object"),
        (json.dumps(RECORD | {"recipe": None}), "recipe must be text, got None"),
        (json.dumps(RECORD | {"seed": 1e400}).replace("Infinity", "1e400"), "is not a finite number"),
        (json.dumps(RECORD | {"format": "stam-agent"}), "it is a 'stam-agent'"),
        (json.dumps(RECORD | {"script": "x"}), "unknown setting 'script'"),
        (json.dumps(RECORD | {"config": {"data": {"resize_size": "big"}}}), "resize_size is 'big'"),
        (json.dumps(RECORD | {"config": {"data": {"resize_size": True}}}), "resize_size is True"),
    ],
)
def test_a_damaged_record_is_named(run, content, message):
    run.record_file.write_text(content)
    found = FoundAgent("run", run.path / "best", run.path, run.path, is_borrowed=False)
    with pytest.raises(RunError, match=message) as raised:
        recorded_resize_size(found, None)
    assert "run.json" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "line",
    ["[]", "{", '{"epoch": "x"}', '{"epoch": -1}', '{"loss/a": 1}', '{"epoch": 1, "loss/a": NaN}',
     '{"epoch": 1, "loss/a": null}', '{"epoch": 1, "loss/a": 1e999}', '{"epoch": 1, "val/accuracy@x": 1}',
     '{"epoch": true}', "\ud800"],
)  # fmt: skip
def test_a_damaged_line_of_metrics_is_named(run, line):
    run.metrics_file.write_bytes(b'{"epoch": 0, "loss/a": 1.5}\n' + line.encode("utf-8", "surrogatepass"))
    with pytest.raises(RunError, match=r"metrics.jsonl'( is damaged: line 2|: 'utf-8')"):
        read_metrics(run.metrics_file)


def test_a_state_that_lacks_a_part_is_damaged(run):
    made = learner()
    whole = made.state_dict() | {"position": [0, 1], "best": 0.5}
    for change in (
        {"position": None},
        {"position": [1]},
        {"best": "high"},
        {"best": 10**400},
        {"best": float("nan")},
        {"position": [-1, 0]},
        {"optimiser": {}},
        {"agent": {}},
        {"meter": None},
    ):
        run.save_state(whole | change)
        with pytest.raises(RunError, match=r"state.pt' is damaged .*--init"):
            restore(made, run)
    run.save_state(whole)
    restore(made, run)
    assert made.position == (0, 1) and made.best == 0.5


def test_a_run_whose_weights_could_not_be_read_is_not_begun(tmp_path):
    with pytest.raises(RunError, match=r"run\\udce9' is not UTF-8: name another folder"):
        RunFolder.create(tmp_path / os.fsdecode(b"run\xe9"))
    assert not list(tmp_path.iterdir())
