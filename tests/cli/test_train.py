"""The command line end to end on tiny data: train, interrupt, resume; mistakes before the first batch."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from images import make_image_folder
from processes import run_together
from torch import Tensor, nn

import stam
from stam import cli
from stam.cli.recipes import recipe_first
from stam.data import SplitRecord
from stam.learning import finetuning, fitting
from stam.learning.expected_time import Cost, Speed
from stam.learning.loop import Meter
from stam.learning.recipes import get_recipe
from stam.learning.runs import RunFolder
from stam.settings import REMOVED

AGENT = (
    "--image-size 32 --glimpse-size 16 --patch-size 8 --width 16 --depth 1 --num-heads 2 --actor-width 8"
    " --critic-width 8"
).split()
TRAINING = (
    "--num-glimpses 2 --epochs 3 --batch-size 4 --validate-every 2 --resize-size 36 --num-workers 0".split()
)
TEACHER = (
    "--teacher-training.epochs 2 --teacher-training.batch-size 6 --teacher-training.validate-every 1"
    " --teacher-training.warmup-epochs 0"
).split()
TINY = ["--no-fit", *AGENT, *TRAINING, *TEACHER, "--init", "none", "--device", "cpu"]


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return make_image_folder(tmp_path_factory.mktemp("data") / "images")


def run(*arguments: str) -> None:
    cli.main([str(argument) for argument in arguments])


def fails(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    complaint = capsys.readouterr().err
    assert "Traceback" not in complaint
    return complaint


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_images_to_a_trained_agent_with_its_own_teacher(images, tmp_path, capsys):
    out = tmp_path / "run"
    run("train", "tiny", images, "--out", out, *TINY)
    shown = capsys.readouterr().err
    assert "fine-tuning one on the data first" in shown
    assert f"next: stam evaluate {out}" in shown
    assert {path.name for path in out.iterdir() if path.name != ".lock"} == {
        "run.json", "split.json", "metrics.jsonl", "timing.jsonl", "state.pt", "last", "best", "teacher",
    }  # fmt: skip
    agent = stam.load(out)
    assert agent.labels == ("class0", "class1", "class2")
    assert agent.config.preprocess_size == 36  # what --resize-size said
    metrics = lines(out / "metrics.jsonl")
    assert [line["epoch"] for line in metrics] == [0, 1, 2]
    assert {"tau", "lr/core", "lr/actor", "lr/critic", "loss/supervised", "loss/consistency"} <= set(
        metrics[0]
    )
    assert {"loss/actor", "loss/critic", "reward"} <= set(metrics[0])
    assert "val/accuracy@2" in metrics[1] and "val/score" in metrics[2] and "val/score" not in metrics[0]
    record = json.loads((out / "run.json").read_text())
    assert record["recipe"] == "tiny" and record["versions"]["torch"] == torch.__version__
    assert record["config"]["training"]["epochs"] == 3


def test_one_word_is_enough_for_a_folder(images, tmp_path):
    run("train", images, "--out", tmp_path / "run", *TINY, "--epochs", "1")
    assert json.loads((tmp_path / "run/run.json").read_text())["recipe"] == "tiny"


# Sends itself a signal: in the middle of an epoch, or where the state of that batch is to replace the last.
SIGNALLED = """
import os, pathlib, sys
import torch
torch.set_num_threads(1)  # as many as here: sums are rounded otherwise with another number
from stam import cli
from stam.learning.training import AgentLearner

place, number, *arguments = sys.argv[1:]
learn, replace, counts = AgentLearner.train_batch, pathlib.Path.replace, {"batch": 0, "save": 0}

def count(name):
    counts[name] += 1
    if name == place and counts[name] == 10:
        os.kill(os.getpid(), int(number))

def train_batch(self, *given):
    count("batch")
    learn(self, *given)

def replace_file(self, target):
    if pathlib.Path(target).name == "state.pt":
        count("save")
    return replace(self, target)

AgentLearner.train_batch, pathlib.Path.replace = train_batch, replace_file
cli.main(arguments)
"""


@pytest.mark.parametrize(
    ("kill", "place", "core"),
    [(signal.SIGINT, "batch", "reencoding"), (signal.SIGKILL, "save", "causal")],
)
def test_interrupted_at_any_step_and_resumed_gives_the_same_metrics(images, tmp_path, kill, place, core):
    settings = [*TINY, "--teacher", str(tmp_path / "teacher"), "--epochs", "4", "--save-minutes", "0"]
    settings += ["--ema-batches", "5", "--core", core]
    teacher = [*TEACHER, "--init", "none", "--num-workers", "0", "--resize-size", "36"]
    teacher = [word.replace("--teacher-training.", "--") for word in teacher]
    agent = [word.replace("--", "--agent.") if word.startswith("--") else word for word in AGENT]
    run("teacher", "tiny", images, "--out", tmp_path / "teacher", *teacher, *agent, "--device", "cpu")
    run("train", "tiny", images, "--out", tmp_path / "whole", *settings)
    command = [place, int(kill), "train", "tiny", images, "--out", tmp_path / "cut", *settings]
    (ended,) = run_together(SIGNALLED, command, [{}], tmp_path)
    metrics = tmp_path / "cut/metrics.jsonl"
    if kill == signal.SIGINT:
        assert ended.code == 130 and "finishing this batch, then saving" in ended.said
        resume = f"stam train --resume --out {tmp_path / 'cut'}"
        assert resume in ended.said and "Traceback" not in ended.said
    else:
        assert ended.code == -kill
    assert len(lines(metrics)) == 2  # of four batches an epoch
    run("train", "--resume", "--out", tmp_path / "cut")
    assert metrics.read_text() == (tmp_path / "whole/metrics.jsonl").read_text()
    whole, cut = (stam.load(tmp_path / name / "last").state_dict() for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    for name, value in cut.items():
        assert value.equal(whole[name]), name


def test_a_teacher_can_be_trained_alone_and_used(images, tmp_path, capsys):
    agent = [word.replace("--", "--agent.") if word.startswith("--") else word for word in AGENT]
    run(
        "teacher", "tiny", images, "--out", tmp_path / "teacher", "--init", "none", "--epochs", "2",
        "--batch-size", "6", "--resize-size", "36", "--num-workers", "0", *agent,
    )  # fmt: skip
    assert "next: stam train tiny" in capsys.readouterr().err
    assert lines(tmp_path / "teacher/metrics.jsonl")[-1]["val/score"] >= 0
    run("train", "tiny", images, "--out", tmp_path / "run", *TINY, "--teacher", tmp_path / "teacher")
    assert not (tmp_path / "run/teacher").exists()
    run("train", "tiny", images, "--out", tmp_path / "again", *TINY, "--init", tmp_path / "run", "--teacher",
        tmp_path / "teacher")  # fmt: skip
    two = make_image_folder(tmp_path / "two", classes=2)
    complaint = fails(
        capsys, "train", "tiny", two, "--out", tmp_path / "x", *TINY, "--teacher", tmp_path / "teacher"
    )
    assert "tells 3 classes apart" in complaint and "the data has 2" in complaint


def test_an_agent_that_follows_an_order_trains_without_an_actor(images, tmp_path):
    run(
        "train",
        "tiny",
        images,
        "--out",
        tmp_path / "run",
        *TINY,
        "--policy",
        "spiral",
        "--consistency",
        "none",
    )
    assert stam.load(tmp_path / "run").actor is None


def test_a_folder_without_a_split_gets_one_that_is_recorded(tmp_path, capsys):
    data = make_image_folder(tmp_path / "flat", train=8, split=False)
    run("train", "tiny", data, "--out", tmp_path / "run", *TINY, "--save-minutes", "0")
    record = json.loads((tmp_path / "run/split.json").read_text())
    assert record["num_train"] + record["num_val"] == 24 and record["num_val"] >= 3
    (data / "class0/0.png").unlink()
    assert "no longer holds" in fails(capsys, "train", "--resume", "--out", tmp_path / "run")


def test_a_batch_of_more_images_than_there_are_is_made_smaller(images, tmp_path, capsys):
    large = ("--batch-size", "99", "--teacher-training.batch-size", "50", "--epochs", "1")
    run("train", "tiny", images, "--out", tmp_path / "run", *TINY, *large)
    said = capsys.readouterr().err
    assert "stam: --batch-size is 18 instead of 99: there are 18 training images" in said
    assert "--teacher-training.batch-size is 18 instead of 50" in said
    assert "training: 1 batch of 18 images in 1 epoch\n" in said
    config = RunFolder.open(tmp_path / "run").config()
    assert config.training.batch_size == config.teacher_training.batch_size == 18


class TestMistakesBeforeTheFirstBatch:
    def test_out(self, images, tmp_path, capsys):
        (tmp_path / "full").mkdir()
        (tmp_path / "full/thesis.txt").touch()
        complaint = fails(capsys, "train", "tiny", images, "--out", tmp_path / "full", *TINY)
        assert "is not empty and holds no run: name another folder" in complaint
        assert "holds no run" in fails(capsys, "train", "--resume", "--out", tmp_path / "full")
        assert "no run at" in fails(capsys, "train", "--resume", "--out", tmp_path / "none")
        assert "--out" in fails(capsys, "train", images)  # no option at all

    def test_recipe_and_options(self, images, tmp_path, capsys):
        assert "did you mean 'digits'" in fails(capsys, "train", "digit", "--out", tmp_path / "x")
        assert "needs data" in fails(capsys, "train", "tiny", "--out", tmp_path / "x")
        assert "--epochs" in fails(capsys, "train", "digits", "--out", tmp_path / "x", "--epoch", "3")
        assert "come from the data" in fails(
            capsys, "train", "digits", "--out", tmp_path / "x", "--num-classes", "3"
        )
        complaint = fails(capsys, "train", "digits", "--out", tmp_path / "x", "--preprocess-size", "3")
        assert "--resize-size" in complaint
        complaint = fails(capsys, "train", "digits", "--out", tmp_path / "x", "--policy", "spirl")
        assert "did you mean 'spiral'" in complaint
        assert "one word too many" in fails(capsys, "train", "tiny", images, "oops", "--out", tmp_path / "x")
        complaint = fails(
            capsys, "train", "tiny", images, "--out", tmp_path / "x", *TINY, "--glimpse-size", "15"
        )
        assert "does not divide" in complaint

    def test_a_misspelt_folder_is_called_that(self, images, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(images.parent)
        near = f"did you mean '{images.name}'?"
        for word in (images.name + "z", f"./{images.name}z", f"~/../{images.name}/nowhere/at/all"):
            complaint = fails(capsys, "train", word, "--out", tmp_path / "x")
            assert f"no such folder: '{word}'" in complaint and "fmow" not in complaint
        assert f"no such folder: 'x{images.name}'; {near}" in fails(
            capsys, "train", f"x{images.name}", "--out", tmp_path / "x"
        )
        assert "no such folder" in fails(capsys, "teacher", "no/such", "--out", tmp_path / "x")
        assert "did you mean 'gfnet'" in fails(capsys, "train", "gfnt", "--out", tmp_path / "x")
        complaint = fails(capsys, "train", "qqqq", images, "--out", tmp_path / "x")
        assert "unknown recipe 'qqqq': stam train --help lists them" in complaint

    def test_data_and_recipe_may_be_swapped(self, images, tmp_path, capsys):
        swapped = fails(capsys, "train", images, "timy", "--out", tmp_path / "x")
        assert "unknown recipe 'timy': did you mean 'tiny'?" in swapped
        complaint = fails(capsys, "train", "gfnets", images, "--out", tmp_path / "x")
        assert "unknown recipe 'gfnets': did you mean 'gfnet'?" in complaint
        for command, recipe in (("train", "tiny"), ("train", "gfnet"), ("teacher", "tiny")):
            complaint = fails(capsys, command, images, recipe, "--out", tmp_path / "x", "--num-workers", "-1")
            assert "num_workers" in complaint and "recipe" not in complaint
        assert recipe_first(["digits", "tiny"]) == ["tiny", "digits"]
        assert recipe_first(["digits", "imgz"]) == ["digits", "imgz"]
        assert recipe_first(["tiny", "digits"]) == ["tiny", "digits"]

    def test_data(self, tmp_path, capsys):
        assert "no such data" in fails(
            capsys, "train", "tiny", tmp_path / "nowhere", "--out", tmp_path / "x", *TINY
        )
        one = make_image_folder(tmp_path / "one", classes=1)
        assert "one class only" in fails(capsys, "train", "tiny", one, "--out", tmp_path / "x", *TINY)
        empty = make_image_folder(tmp_path / "empty")
        shutil.rmtree(empty / "train/class1")
        (empty / "train/class1").mkdir()
        assert "class1" in fails(capsys, "train", "tiny", empty, "--out", tmp_path / "x", *TINY)

    def test_unreadable_image(self, tmp_path, capsys):
        data = make_image_folder(tmp_path / "data")
        broken = data / "train/class1/2.png"
        broken.write_bytes(broken.read_bytes()[:400])
        complaint = fails(capsys, "train", "tiny", data, "--out", tmp_path / "x", *TINY)
        assert "2.png" in complaint and "--skip-unreadable" in complaint
        assert not (tmp_path / "x").exists()
        run("train", "tiny", data, "--out", tmp_path / "run", *TINY, "--skip-unreadable", "--epochs", "1")
        assert "skipped 1 unreadable training image" in capsys.readouterr().err
        next((data / "val").rglob("*.png")).write_bytes(b"no image")
        run("evaluate", tmp_path / "run", "--seeds", "1", "--no-cost")  # they are skipped there too

    def test_device(self, images, tmp_path, capsys):
        complaint = fails(
            capsys, "train", "tiny", images, "--out", tmp_path / "x", *TINY, "--device", "cuda:7"
        )
        assert "not there" in complaint and "--device cpu" in complaint

    def test_weights(self, images, tmp_path, capsys):
        complaint = fails(
            capsys, "train", "tiny", images, "--out", tmp_path / "x", *TINY, "--init", "no/file.pth"
        )
        assert "no weights at" in complaint
        complaint = fails(
            capsys, "train", "tiny", images, "--out", tmp_path / "x", *TINY, "--init", "package:digit-core"
        )
        assert "did you mean 'digits-core'" in complaint
        complaint = fails(
            capsys, "train", "tiny", images, "--out", tmp_path / "x", *TINY, "--init", "package:digits-core"
        )
        assert "--width" in complaint or "glimpse" in complaint or "divide" in complaint
        complaint = fails(
            capsys, "train", "tiny", images, "--out", tmp_path / "x", *TINY, "--class-indices", "0", "1", "2"
        )
        assert "class_indices are rows of a classifier of --init" in complaint
        complaint = fails(
            capsys, "train", "tiny", images, "--out", tmp_path / "x", *TINY, "--teacher", str(images)
        )
        assert "holds no teacher" in complaint

    def test_resume_takes_no_other_settings(self, tmp_path, capsys):
        complaint = fails(capsys, "train", "--resume", "--out", tmp_path / "run", "--batch-size", "9")
        assert "leave out --batch-size" in complaint
        for name, recipe in (("train", "digits"), ("teacher", "teacher:digits")):
            run_folder = RunFolder.create(tmp_path / name)
            run_folder.write_record(recipe, get_recipe("digits"), SplitRecord(("a", "b"), 3, 2, "x"))
        for words, said in (
            (("aid", "elsewhere"), "was begun with the recipe 'digits': leave out aid"),
            (("digits", "elsewhere"), "was begun with the data 'digits': leave out elsewhere"),
        ):
            for command in ("train", "teacher"):
                complaint = fails(capsys, command, *words, "--resume", "--out", tmp_path / command)
                assert said in complaint
        complaint = fails(capsys, "teacher", "--resume", "--out", tmp_path / "teacher", "--seed", "9")
        assert "leave out --seed" in complaint
        complaint = fails(capsys, "train", "--resume", "--out", tmp_path / "teacher")
        assert "was begun with stam teacher: stam teacher --resume --out" in complaint
        assert [path.name for path in (tmp_path / "teacher").iterdir() if path.is_dir()] == []
        assert "was begun with stam train" in fails(
            capsys, "teacher", "--resume", "--out", tmp_path / "train"
        )

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (("--epoch", "3"), "Unrecognized options: --epoch, 3; did you mean --epochs? see stam train"),
            (("--epochs", "three"), "Error parsing --epochs: invalid literal"),
            (("--policy",), "Missing value for argument '--policy'"),
        ],
    )
    def test_mistakes_in_options_are_one_line(self, capsys, options, said):
        complaint = fails(capsys, "train", "digits", *options)
        assert said in complaint and complaint.startswith("stam: ") and complaint.count("\n") == 1

    def test_a_core_that_is_not_as_asked_for_is_refused(self, tmp_path, capsys):
        given = ("--patch-size", "8", "--num-heads", "6")
        complaint = fails(capsys, "train", "digits", "--out", tmp_path / "x", *given)
        assert "num_heads 3 instead of 6, patch_size 4 instead of 8: set --num-heads 3 --patch-size 4" in (
            complaint
        )

    def test_a_demo_goes_on_with_a_demo_only(self, tmp_path, capsys):
        folder = RunFolder.create(tmp_path / "run")
        folder.write_record("aid", get_recipe("aid"), SplitRecord(("a", "b"), 3, 2, "x"))
        assert "is no demo" in fails(capsys, "demo", "--resume", "--out", tmp_path / "run")
        assert "leave out --epochs" in fails(capsys, "demo", "--resume", "--epochs", "2")
        assert "--num-scenes must be at least 1" in fails(capsys, "demo", "--num-scenes", "0")

    def test_a_teacher_that_cannot_be_fine_tuned_leaves_no_folder(self, images, tmp_path, capsys):
        out = tmp_path / "run"
        command = ("train", "tiny", images, "--out", out, *TINY)
        complaint = fails(capsys, *command, "--teacher-training.model", "timm:no_such_model")
        assert "timm" in complaint
        assert not out.exists()

    @pytest.mark.parametrize(
        "given", [("--init", "weights.pth"), ("--class_indices", "1", "2"), ("--drop-path", "0.3")]
    )
    def test_what_a_timm_teacher_would_ignore_is_refused(self, images, tmp_path, capsys, given):
        command = ("teacher", "tiny", images, "--out", tmp_path / "run", "--model", "timm:resnet50")
        complaint = fails(capsys, *command, *given)
        assert (
            f"{given[0].replace('_', '-')} cannot be set here: timm:resnet50 starts from timm's" in complaint
        )

    @pytest.mark.parametrize(
        ("option", "value", "said"),
        [
            ("--base-lr", "inf", "base_lr must be a finite number"),
            ("--actor-lr", "-1", "actor_lr must be 0 or more"),
            ("--actor-lr", "nan", "actor_lr must be a finite number"),
            ("--temperature", "inf", "temperature must be a finite number"),
            ("--seed", "99999999999999999999", "seed must be from 0 to 2**63 - 1"),
            ("--large-crop-fraction", "0.5", "needs random crops"),
            ("--policy", "plus:3", "no other policy takes a number"),
        ],
    )
    def test_values_that_make_no_sense(self, tmp_path, capsys, option, value, said):
        complaint = fails(capsys, "train", "digits", "--out", tmp_path / "x", option, value)
        assert said in complaint and not (tmp_path / "x").exists()

    def test_unreadable_images_are_skipped_only_where_all_are_checked(self, images, tmp_path, capsys):
        complaint = fails(capsys, "train", "digits", images, "--out", tmp_path / "x", "--skip-unreadable")
        assert "pass --check" in complaint

    def test_features_that_do_not_fit_leave_no_folder(self, tmp_path, capsys):
        out = tmp_path / "features"
        complaint = fails(
            *(capsys, "train", "digits", "--out", out, "--init", "none", "--width", "48"),
            *("--feature-weight", "1"),
        )
        assert "this one is 96 wide: use feature_weight 0" in complaint and not out.exists()


def test_training_that_diverges_says_so(images, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Meter, "means", lambda self: {"supervised": float("nan")})
    complaint = fails(capsys, "train", "tiny", images, "--out", tmp_path / "x", *TINY)
    assert "training diverged, loss/supervised is nan in epoch 1" in complaint
    assert not (tmp_path / "x/metrics.jsonl").exists()


def test_ctrl_c_at_the_end_of_the_teacher_begins_no_agent(images, tmp_path, capsys, monkeypatch):
    validated, left = finetuning.whole_image_accuracy, [2]  # validations of the teacher

    def interrupted(*given):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return validated(*given)

    monkeypatch.setattr(finetuning, "whole_image_accuracy", interrupted)
    with pytest.raises(SystemExit) as stopped:
        run("train", "tiny", images, "--out", tmp_path / "x", *TINY)
    assert stopped.value.code == 130
    assert "interrupted and saved; to go on: stam train --resume --out" in capsys.readouterr().err
    assert not (tmp_path / "x/metrics.jsonl").exists()
    monkeypatch.undo()
    run("train", "--resume", "--out", tmp_path / "x")
    assert (tmp_path / "x/metrics.jsonl").exists()


def test_a_hub_name_without_the_hub_says_which_file_to_bring(images, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    complaint = fails(
        capsys, "train", "tiny", images, "--out", tmp_path / "x", *TINY, "--init", "hub:some/deit"
    )
    assert "bring the file model.safetensors of 'some/deit'" in complaint and "[hub]'" in complaint


def test_no_space_left(images, tmp_path, capsys, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    complaint = fails(capsys, "train", "tiny", images, "--out", tmp_path / "run", *TINY)
    assert "No space left on device" in complaint


def test_bare_and_wrong_commands_show_examples(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 2 and "stam train path/to/images" in capsys.readouterr().out
    assert "did you mean 'train'" in fails(capsys, "trian")
    cli.main(["--version"])
    assert stam.__version__ in capsys.readouterr().out


def help_of(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 0
    return capsys.readouterr().out


def options_in(shown: str) -> set[str]:
    return set(re.findall(r"^(?:│ |  )(--[\w.-]+)", shown, re.MULTILINE))


@pytest.mark.parametrize("command", ["train", "teacher"])
def test_help_shows_a_few_options_and_help_all_every_one(command, capsys):
    shown, everything = help_of(capsys, command, "tiny", "--help"), help_of(capsys, command, "--help-all")
    assert help_of(capsys, command, "tiny", "-h") == shown
    for text in (shown, everything):
        assert "DATA is a folder" in text and f"For example: stam {command} " in text
    assert "stam list names all" in shown and "imagenette-hard" not in shown
    assert "imagenette-hard" in everything and "imagenet-small-glimpse48" in everything
    assert f"stam {command} --help-all lists every setting" in shown and "docs/settings.md" in shown
    assert f"usage: stam {command} [RECIPE] " in shown
    assert "Defaults are those of the recipe tiny" in shown and "of the recipe tiny" in everything
    assert ("chosen by your images" in shown) == (command == "train")
    few, every = options_in(shown), options_in(everything)
    assert {"--out", "--resume", "--init", "--epochs", "--batch-size", "--device"} <= few
    assert few < every and len(few) <= 14 and len(every) >= 50
    assert "digits-spiral-no-consistency" in everything
    assert "None" not in shown and len(shown.splitlines()) <= 60


def test_help_shows_the_defaults_in_force(images, capsys):
    for words in ((), ("tiny",), (images,)):  # help is mostly asked for by those who have images
        shown = help_of(capsys, "train", *words, "--help")
        assert "package:imagenette-tiny" in re.sub(r"[│\s]+", " ", shown) and "--test-fraction" in shown
        assert shown.count("chosen for your images") + shown.count("chosen for your ") >= 3
    assert "package:digits-causal-core" in help_of(capsys, "train", "digits", "--help")
    assert "(default: 15)" in help_of(capsys, "train", "digits", "--help")  # nothing is fitted to digits
    assert "--actor-width" in help_of(capsys, "train", "tiny", "--help-all")


def test_recipe_and_data_may_stand_behind_options(images, tmp_path, capsys):
    out = tmp_path / "run"
    run("train", "--no-fit", "--out", out, "tiny", *TINY, "--epochs", "1", images, "--policy", "random")
    record = json.loads((out / "run.json").read_text())
    assert record["recipe"] == "tiny" and record["config"]["data"]["path"] == str(images)
    assert record["config"]["training"]["epochs"] == 1
    capsys.readouterr()
    complaint = fails(capsys, "train", "--out", tmp_path / "x", images, "tiny", "oops")
    assert "one word too many: 'oops'" in complaint
    assert "Unrecognized options: --epoch, 3" in fails(capsys, "train", "--out", out, images, "--epoch", "3")


def test_a_run_begun_with_a_setting_that_is_gone_is_resumed_only_if_it_did_nothing(images, tmp_path, capsys):
    out = tmp_path / "run"
    run("train", "tiny", images, "--out", out, *TINY, "--policy", "random", "--epochs", "1")
    record = json.loads((out / "run.json").read_text())
    (out / "state.pt").unlink()
    record["config"]["training"] |= REMOVED | {"discount": 0.9, "mixup": 0.2}
    (out / "run.json").write_text(json.dumps(record))
    capsys.readouterr()
    complaint = fails(capsys, "train", "--resume", "--out", out)
    assert "was begun with discount 0.9, mixup 0.2, which this version does not have" in complaint
    assert complaint.count("\n") == 1 and not (out / "state.pt").exists()
    record["config"]["training"] |= REMOVED
    (out / "run.json").write_text(json.dumps(record))
    run("train", "--resume", "--out", out)
    assert (out / "state.pt").exists()


def test_prepare_names_the_dataset(tmp_path, capsys):
    assert "stam prepare fmow SOURCE" in fails(capsys, "prepare", "--out", tmp_path)
    assert "'fmw' is unknown: did you mean 'fmow'" in fails(
        capsys, "prepare", "fmw", tmp_path, "--out", tmp_path / "o"
    )


def test_metrics_go_to_tensorboard_when_asked(images, tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `logging` is not installed")
    run("train", "tiny", images, "--out", tmp_path / "run", *TINY, "--policy", "random", "--tensorboard")
    (events,) = (tmp_path / "run/tensorboard").glob("events.*")
    assert b"val/score" in events.read_bytes()


def test_own_images_are_fitted_and_explained(images, tmp_path, capsys, monkeypatch):
    """Without any setting: what is chosen is said before the start, and recorded."""
    speed = Speed(Cost(0, 0.2, 0.004), Cost(0, 0.1, 0.002), 0.0004, glimpses=12)  # the same on every machine
    monkeypatch.setattr(fitting, "measure", lambda *given: speed)
    fit_to = ["--init", "none", "--device", "cpu", "--num-glimpses", "3", "--minutes", "0.2", *AGENT]
    run(
        "train",
        images,
        "--out",
        tmp_path / "run",
        *fit_to,
        "--test-fraction",
        "0.2",
        "--num-workers",
        "0",
        "--base-lr",
        "0.01",
        "--actor-objective",
        "gains",  # needs a causal core, which nobody has to name
    )
    said = capsys.readouterr().err
    for part in ("training and", "epochs", "learning rate", "vertical flips", "teacher:", "expected time:"):
        assert part in said
    assert "but base-lr 0.01, as you say" in said
    config = RunFolder.open(tmp_path / "run").config()
    assert config.agent.core == "causal"  # on a CPU
    assert config.start_from_teacher and config.training.feature_weight == 2
    assert RunFolder.open(tmp_path / "run").split().num_test > 0
    assert "--minutes is for" in fails(capsys, "train", "digits", "--out", tmp_path / "x", "--minutes", "1")
    both = ("--minutes", "1", "--epochs", "2")
    assert "leave out --epochs" in fails(capsys, "train", images, "--out", tmp_path / "x", *both)
    assert "not empty" in fails(capsys, "train", images, "--out", tmp_path / "run", *fit_to)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((), ("causal", "joint", "gains", 1)),
        (("--actor", "joint"), ("causal", "joint", "gains", 1)),
        (("--actor-objective", "gains"), ("causal", "joint", "gains", 1)),
        (("--actor", "pairwise"), ("causal", "pairwise", "gains", 1)),
        (("--core-fraction", "0.5", "--num-cores", "2"), ("causal", "joint", "gains", 2)),
        (("--core-fraction", "0"), ("causal", "joint", "gains", 0)),
        (("--actor-objective", "actor-critic"), ("causal", "pairwise", "actor-critic", 0)),
        (("--core", "reencoding"), ("reencoding", "pairwise", "actor-critic", 0)),
    ],
)
def test_core_actor_and_stages_go_together(images, tmp_path, monkeypatch, given, wanted):
    """Whatever of them is given; by default as on a CPU."""
    speed = Speed(Cost(0, 0.2, 0.004), Cost(0, 0.1, 0.002), 0.0004, glimpses=12)
    monkeypatch.setattr(fitting, "measure", lambda *given: speed)
    few = ["--num-glimpses", "3", "--num-workers", "0", "--teacher-training.epochs", "1", "--epochs", "4"]
    few += ["--init", "none", "--device", "cpu", "--actor-steps", "2", *AGENT]
    run("train", images, "--out", tmp_path / "run", *few, *given)
    config = RunFolder.open(tmp_path / "run").config()
    num_cores = sum(stage.learns == "core" for stage in config.training.stages)
    found = config.agent.core, config.agent.actor, config.training.actor_objective, num_cores
    assert found == wanted


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (("--core-fraction", "0.5", "--core", "reencoding"), "pass --core causal, not reencoding"),
        (("--core-fraction", "1"), "core_fraction 1 leaves no epoch for the actor"),
        (("--core-fraction", "0.5", "--actor-objective", "actor-critic"), "pass --actor-objective gains"),
    ],
)
def test_stages_that_cannot_be_are_refused_before_the_fit(images, tmp_path, capsys, given, complaint):
    few = ["--init", "none", "--device", "cpu", "--num-glimpses", "3", *AGENT]
    said = fails(capsys, "train", images, "--out", tmp_path / "run", *few, *given)
    assert complaint in said
    assert not (tmp_path / "run").exists()


def test_a_finished_training_in_stages_can_be_extended(images, tmp_path, capsys):
    """Its actor learns longer, with the core as it is."""
    out = tmp_path / "run"
    stages = "--core causal --actor joint --actor-objective gains --core-fraction 0.67 --actor-steps 2"
    run("train", "tiny", images, "--out", out, *TINY, *stages.split())
    core = stam.load(out / "last").core.state_dict()
    run("train", "--resume", "--out", out, "--epochs", "5")
    assert "The last stage becomes longer" in capsys.readouterr().err
    stages = RunFolder.open(out).config().training.stages
    assert [(stage.learns, stage.end) for stage in stages] == [("core", 2), ("actor", 5)]
    assert all(value.equal(core[name]) for name, value in stam.load(out / "last").core.state_dict().items())
    learned = [{"loss/supervised", "loss/actor"} & set(line) for line in lines(out / "metrics.jsonl")]
    assert learned == 2 * [{"loss/supervised"}] + 3 * [{"loss/actor"}]


def test_a_number_of_epochs_stays_and_schedules_follow_it(images, tmp_path, capsys, monkeypatch):
    speed = Speed(Cost(0, 0.2, 0.004), Cost(0, 0.1, 0.002), 0.0004, glimpses=12)
    monkeypatch.setattr(fitting, "measure", lambda *given: speed)
    few = ["--num-glimpses", "3", "--num-workers", "0", "--teacher-training.epochs", "1", *AGENT]
    given = ["--init", "none", "--device", "cpu", "--epochs", "8", "--ema-batches", "7"]
    run("train", images, "--out", tmp_path / "run", *given, *few)
    said = capsys.readouterr().err
    assert "but epochs 8, as you say" in said and "but ema-batches 7, as you say" in said
    assert "tau-epochs" not in said, "it follows from the epochs"
    training = RunFolder.open(tmp_path / "run").config().training
    assert (training.epochs, training.ema_batches) == (8, 7)
    assert training.tau_epochs == pytest.approx(4, abs=1)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 8


class ToyConv(nn.Module):
    """A classifier as timm makes them."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, stride=4), nn.Linear(4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.conv(images).relu().mean(dim=(2, 3)))

    def get_classifier(self) -> nn.Module:
        return self.fc


def test_own_images_with_a_teacher_of_another_kind(images, tmp_path, capsys, monkeypatch):
    timm = ModuleType("timm")
    timm.create_model = lambda name, num_classes, pretrained=False: ToyConv(num_classes)
    monkeypatch.setitem(sys.modules, "timm", timm)
    out = tmp_path / "run"
    run(
        *("train", images, "--out", out, "--init", "none", "--device", "cpu", "--num-glimpses", "3", *AGENT),
        *("--minutes", "0.2", "--teacher-training.device", "cpu", "--teacher-training.model", "timm:toy"),
    )
    assert "timm:toy fine-tuned first" in capsys.readouterr().err
    config = RunFolder(out).config()
    assert config.training.feature_weight == 0 and not config.start_from_teacher
    assert (out / "teacher" / "best").is_dir() and (out / "last" / "model.safetensors").is_file()
