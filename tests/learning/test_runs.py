"""Run folders: who may train in one, and what is said of damaged files."""

import pytest
import torch

from stam.learning.runs import RunError, RunFolder


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
