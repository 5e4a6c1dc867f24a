"""Run folders: who may train in one, and what is said of damaged files."""

import pytest
import torch

from stam.cli import main
from stam.learning.runs import RunError, RunFolder
from stam.learning.training import AgentLearner


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


def test_metrics_that_were_cut_off_are_not_filled_up(run):
    run.log({"epoch": 0})
    run.save_state({"position": [1, 0]})
    run.metrics_file.write_bytes(b'{"ep')
    with pytest.raises(RunError, match="has 4 bytes, it had 13"):
        run.load_state()
    assert run.metrics_file.read_bytes() == b'{"ep'


def test_a_start_that_was_killed_before_its_record_begins_anew(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("split.json", ".run.json.writing", ".lock"):
        (folder / name).touch()
    RunFolder.create(folder)
    (folder / "run.json").touch()
    with pytest.raises(RunError, match="is not empty"):
        RunFolder.create(folder)


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
