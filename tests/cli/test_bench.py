"""`stam bench`: numbers, JSON and a plot on a CPU; mistakes before anything is measured."""

import json

import pytest

from stam import cli
from stam.evaluation.speed import TrainingSpeed
from stam.show.figures import speed, to_bytes

QUICK = "--device cpu --sizes tiny --batch-sizes 1 --num-glimpses 1 2 --batches 1".split()


def test_a_table_and_a_plot(tmp_path, capsys, shallow):
    cli.main(["bench", *QUICK, "--plot", str(tmp_path / "speed.png")])
    shown = capsys.readouterr()
    assert [line.split()[:3] for line in shown.out.splitlines() if line.startswith("tiny")] == [
        ["tiny", "1", "1"],
        ["tiny", "1", "2"],
        ["tiny", "1", "2"],
    ]
    assert "next: stam train" in shown.err
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_json_and_files(capsys, shallow):
    cli.main(["bench", *QUICK[:-4], "--num-glimpses", "1", "--batches", "1", "--files", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [run["source"] for run in result["training"]] == ["device", "files"]
    assert all(run["images_per_second"] > 0 and run["first_seconds"] > 0 for run in result["training"])
    assert result["looking"][0]["plain_images_per_second"] > 0
    assert result["peak_tera_flops"] > 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--sizes huge", "'huge' is unknown"),
        ("--batches 0", "batches must be at least 1"),
        ("--batch-sizes 0", "batch_sizes must be at least 1"),
        ("--plot speed.txt", "name a .png or .svg"),
        ("--device cuda:7", "use --device cpu"),
        ("faster", "one word too many"),
    ],
)
def test_mistakes(options, complaint, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *options.split()])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_plot_shows_memory_where_it_was_measured():
    def one(batch: int, glimpses: int, memory: float | None) -> TrainingSpeed:
        return TrainingSpeed("tiny", batch, glimpses, "device", True, 100.0, (99.0, 101.0), memory, 1.0, 30.0)

    with_memory = speed.training_speed([one(1, 2, 1.0), one(2, 2, 2.0), one(2, 1, 1.5)])
    assert len(with_memory.axes) == 4
    assert len(speed.training_speed([one(1, 2, None), one(2, 2, None)]).axes) == 2
    assert to_bytes(with_memory)
