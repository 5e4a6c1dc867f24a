"""A system in a run folder: begun, interrupted, resumed, evaluated, compared, drawn, predicting."""

import dataclasses
import json
import resource
import shutil

import pytest
import torch
from images import make_image_folder
from zooing import SMALL, glyph_file, small

import stam
from stam.cli import main
from stam.errors import StamError, WeightsError
from stam.evaluation import load_evaluation
from stam.learning import loop
from stam.learning.loop import Interrupted
from stam.learning.runs import RunFolder, read_metrics
from stam.weights import package_folder
from stam.zoo import SYSTEMS, load, load_looker, load_system, save_system
from stam.zoo.training import begin, default_config, read_config, resume

OPTIONS = {  # the small settings as options, but for scenes of 60 pixels
    name: [
        part
        for key, value in ({**settings, "num_points": 9} if name == "stn" else settings).items()
        for part in (f"--{key.replace('_', '-')}", str(value))
    ]
    for name, settings in SMALL.items()
}
BRIEF = ["--epochs", "2", "--batch-size", "8", "--device", "cpu", "--validate-every", "1"]


def run(*arguments: object) -> int:
    try:
        main([str(each) for each in arguments])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return glyph_file(tmp_path_factory.mktemp("digits"))


def brief(name: str, data, **training):
    config = default_config(name, str(data))
    system = dataclasses.replace(config.system, **SMALL[name])
    settings = {"epochs": 3, "batch_size": 8, "device": "cpu", "validation_images": 9} | training
    return dataclasses.replace(
        config, system=system, training=dataclasses.replace(config.training, **settings)
    )


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_run_is_trained_evaluated_and_drawn(name, digits, tmp_path, capsys):
    out = tmp_path / "run"
    assert run("train", name, digits, "--out", out, *OPTIONS[name], *BRIEF) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and "val/accuracy@1" in lines[-1]
    record = json.loads((out / "run.json").read_text())
    assert (record["recipe"], record["config"]["name"]) == (name, name)
    assert run("evaluate", out, "--seeds", 2, "--examples", 2) == 0
    found = load_evaluation(out / "evaluation.json")
    facts = load(out).facts
    assert (found.grid, found.image_size) == (None, (60, 60))
    assert (found.whole_to_attend, found.whole_to_classify) == (
        facts.whole_to_attend,
        facts.whole_to_classify,
    )
    assert len(found.pixels) == facts.most_glimpses and found.data.num_scenes == 9
    assert (out / "examples.npz").is_file()
    if name == "patchdrop":  # the one that draws most; drawing is the same for all
        assert run("figures", out, "--kinds", "png") == 0
        assert (out / "report.html").is_file() and (out / "figures" / "trajectory-1.png").is_file()


def test_runs_are_compared_whatever_they_are(digits, tmp_path, capsys):
    runs = [tmp_path / name for name in ("ram", "stn")]
    for out in runs:
        assert run("train", out.name, digits, "--out", out, *OPTIONS[out.name], *BRIEF) == 0
    capsys.readouterr()
    assert run("compare", *runs, "--out", tmp_path / "table.md", tmp_path / "page.html") == 0
    table = (tmp_path / "table.md").read_text()
    assert "| RAM | all looks | no | no |" in table
    rows = [line.split("|") for line in table.splitlines() if "STN" in line]
    assert rows[0][3].strip() == rows[0][4].strip() == "yes" and "64" in rows[0][5]


def test_a_batch_of_more_images_than_there_are_is_made_smaller(digits, tmp_path, capsys):
    config = brief("ram", digits)
    training = dataclasses.replace(config.training, batch_size=999, epochs=1)
    begin(dataclasses.replace(config, training=training), tmp_path / "run")
    assert "--batch-size is 24 instead of 999: there are 24 training images" in capsys.readouterr().err
    assert read_config(RunFolder.open(tmp_path / "run")).training.batch_size == 24


@pytest.mark.parametrize("name", ["ram", "gfnet", "patchdrop"])
def test_a_resumed_run_does_what_it_would_have_done(name, digits, tmp_path, monkeypatch):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    config = brief(name, digits)
    begin(config, whole)

    class Leaves:
        """Asks to stop after so many batches."""

        calls = 0
        number = None

        def __bool__(self) -> bool:
            Leaves.calls += 1
            return Leaves.calls == 5

    class Once:
        def __enter__(self):
            return Leaves()

        def __exit__(self, *given):
            return None

    with monkeypatch.context() as patch:
        patch.setattr(loop, "interruptible", Once)
        with pytest.raises(Interrupted, match="to go on: stam train --resume --out"):
            begin(config, parted)
    assert read_config(RunFolder.open(parted)).system.labels == ("0", "1", "2")
    resume(parted)
    assert (whole / "metrics.jsonl").read_text() == (parted / "metrics.jsonl").read_text()
    one, other = (load(folder).state_dict() for folder in (whole, parted))
    assert all(value.equal(other[key]) for key, value in one.items())


def test_what_is_for_agents_alone_says_so(tmp_path, capsys):
    save_system(small("ram"), tmp_path / "ram")
    with pytest.raises(StamError, match="a system of the zoo, not an agent: stam.zoo.load opens it"):
        stam.load(tmp_path / "ram")
    assert run("export", tmp_path / "ram", "--out", tmp_path / "ram.onnx") == 2
    assert "a system of the zoo" in capsys.readouterr().err
    agent = stam.load("digits")
    assert load_looker(package_folder("digits")).config == agent.config


def test_a_damaged_folder_is_named(tmp_path):
    save_system(small("ram"), tmp_path / "ram")
    record = json.loads((tmp_path / "ram/config.json").read_text())
    for changed, message in (
        (record | {"name": "rom"}, "did you mean 'ram'"),
        (record | {"format": "stam-agent"}, "is a stam-agent, not a stam-zoo"),
        (record | {"system": {"hiden_width": 3}}, "did you mean 'hidden_width'"),
        (record | {"format_version": "2.0"}, "upgrade"),
    ):
        (tmp_path / "ram/config.json").write_text(json.dumps(changed))
        with pytest.raises(WeightsError, match=message):
            load_system(tmp_path / "ram")
    (tmp_path / "ram/config.json").write_text("{")
    with pytest.raises(WeightsError, match="is not a configuration of ours"):
        load_system(tmp_path / "ram")


def test_the_command_resumes_a_run_by_its_folder_alone(digits, tmp_path, capsys):
    out = tmp_path / "run"
    assert run("train", "stn", digits, "--out", out, *OPTIONS["stn"], *BRIEF) == 0
    assert run("train", "--resume", "--out", out) == 0
    assert run("train", digits, "--resume", "--out", out) == 0
    assert run("train", "stn", digits, "--resume", "--out", out) == 0
    for word in ("ram", "tiny"):
        assert run("train", word, "--resume", "--out", out) == 2
        assert f"was begun with 'stn': leave out {word}" in capsys.readouterr().err
    assert run("train", "elsewhere", "--resume", "--out", out) == 2
    assert "leave out elsewhere" in capsys.readouterr().err
    assert run("train", "--resume", "--out", out, "--lr", 3) == 2
    assert "leave out --lr" in capsys.readouterr().err
    assert run("train", "stn", "--resume", "--out", tmp_path / "none") == 2
    assert "no run at" in capsys.readouterr().err


def test_a_run_is_extended_by_its_last_stage(digits, tmp_path, capsys):
    out = tmp_path / "run"
    begin(brief("saccader", digits), out)  # three stages, an epoch each
    stages = [line["stage"] for line in read_metrics(out / "metrics.jsonl")]
    assert stages == sorted(stages) and stages[-1] == 3
    assert run("train", "--resume", "--out", out, "--epochs", 2) == 2
    assert "has 3 epochs: give more" in capsys.readouterr().err
    for _ in range(2):  # the command can be given again
        assert run("train", "--resume", "--out", out, "--epochs", 5) == 0
    err = capsys.readouterr().err
    assert "extended from 3 to 5 epochs, of which 3 are done" in err and "has 5 epochs already" in err
    assert [line["stage"] for line in read_metrics(out / "metrics.jsonl")] == [*stages, 3, 3]
    assert RunFolder(out).record()["extended_from"] == (3,)


def test_a_system_keeps_its_preprocessing_with_its_weights(tmp_path, capsys):
    """A copied weights folder evaluates as its run does."""
    data = make_image_folder(tmp_path / "images", classes=2, train=3, val=2)
    settings = "--image-size 24 --glimpse-size 4 --num-glimpses 2 --hidden-width 8 --resize-size 31".split()
    few = ["--epochs", 1, "--batch-size", 4, "--device", "cpu", "--num-workers", 0]
    assert run("train", "ram", data, "--out", tmp_path / "run", *settings, *few) == 0
    shutil.copytree(tmp_path / "run/last", tmp_path / "copy")
    assert load(tmp_path / "copy").facts.resize_size == 31
    capsys.readouterr()
    image, answers = next(data.rglob("*.png")), []
    for agent in ("run", "copy"):
        assert run("predict", tmp_path / agent, image, "--json") == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert run("train", "ram", data, "--out", tmp_path / "x", "--preprocess-size", 3) == 2
    assert "it is --resize-size of the data" in capsys.readouterr().err


def test_absurd_sizes_of_a_system_take_no_memory(tmp_path):
    save_system(small("ram"), tmp_path / "ram")
    record = json.loads((tmp_path / "ram/config.json").read_text())
    record["system"]["hidden_width"] = 10**8
    (tmp_path / "ram/config.json").write_text(json.dumps(record))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeightsError, match="expected shape"):
        load_system(tmp_path / "ram")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_a_folder_of_images_trains_and_predicts(tmp_path, capsys):
    data = make_image_folder(tmp_path / "images")
    out = tmp_path / "run"
    options = [
        "--image-size",
        24,
        "--backbone",
        "conv",
        "--low-size",
        8,
        "--num-patches",
        3,
        "--init",
        "none",
    ]
    few = ["--epochs", 1, "--batch-size", 4, "--device", "cpu", "--num-workers", 0]
    assert run("train", "patchdrop", data, "--out", out, *options, *few) == 0
    image = next(data.rglob("*.png"))
    capsys.readouterr()
    assert run("predict", out, image, "--json", "--strip", tmp_path / "strip.png") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["label"] in load(out).facts.labels and found["num_glimpses"] == 2
    assert found["boxes"][0] == [[0, 0, 1, 1]] and found["locations"] == []
    assert (tmp_path / "strip.png").is_file()
    assert run("predict", out, image, "--json", "--threshold", "0.01") == 0
    assert json.loads(capsys.readouterr().out)[0]["num_glimpses"] == 1
    assert run("evaluate", out, "--store") == 2
    assert "leave out --store" in capsys.readouterr().err
    assert run("evaluate", out, "--policy", "random", "--seeds", 1, "--workers", 0) == 0
    assert (out / "evaluation-random.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gfnet"], "the system 'gfnet' needs data"),
        (["gfnet", "no/such/folder", "--out", "{out}"], "no such data"),
        (["gfnet", "{digits}"], "name the folder to write to"),
        (["gfnet", "{digits}", "--out", "{out}", "--labels", "a"], "the classes come from the data"),
        (["gfnet", "{digits}", "--out", "{out}", "--glimps-size", "9"], "did you mean --glimpse-size"),
        (["ram", "{digits}", "--out", "{out}", "--batch-size", "4", "--init", "hub:x"], "has no backbone"),
        (["stn", "{digits}", "--out", "{out}", "--lr", "-1"], "lr must be 0 or more"),
        (["stn", "{digits}", "--out", "{out}", "--device", "tpu"], "device 'tpu' is unknown"),
    ],
)
def test_mistakes_end_in_one_line_before_a_folder_is_made(arguments, message, digits, tmp_path, capsys):
    places = {"out": tmp_path / "out", "digits": digits}
    assert run("train", *(each.format(**places) for each in arguments)) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_diverging_run_says_so(digits, tmp_path):
    config = brief("ram", digits, lr=1e30, max_norm=1e30)
    with pytest.raises(StamError, match="training diverged"):
        begin(config, tmp_path / "run")


def test_help_lists_the_settings_of_a_system(capsys):
    with pytest.raises(SystemExit):
        main(["train", "gfnet", "--help"])
    shown = capsys.readouterr().out
    assert "--glimpse-size" in shown and "--backbone-lr" in shown and "Wang et al. 2020" in shown


def test_a_deit_starts_where_init_says(tmp_path):
    config = default_config("stn", "images")
    assert config.init == "package:imagenette-tiny"
    from stam.zoo.training import start, with_classes

    one, other = (start(with_classes(config, ("a", "b"))) for _ in range(2))
    assert one.task.net.blocks[3].mlp.fc1.weight.equal(other.task.net.blocks[3].mlp.fc1.weight)
    fresh = start(dataclasses.replace(with_classes(config, ("a", "b")), init="none"))
    assert not one.task.net.blocks[3].mlp.fc1.weight.equal(fresh.task.net.blocks[3].mlp.fc1.weight)
    assert one.task.net.pos_embed.shape[1] == 1 + 11 * 11
    assert torch.isfinite(one.look(torch.randn(1, 3, 224, 224), 1).logits).all()
