"""The commands: `stam evaluate`, `stam figures`, `stam compare`."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
from evaluating import CLASSES, make_agent, make_data, make_run
from images import make_image_folder

import stam
from stam.cli import main
from stam.evaluation import examples_path, figures_folder, load_evaluation, load_examples, mistakes_path, runs
from stam.evaluation.opening import open_run
from stam.weights import save_agent

TINY = (
    "--image-size 32 --glimpse-size 16 --patch-size 8 --width 16 --depth 1 --num-heads 2 --actor-width 8"
    " --num-glimpses 2 --epochs 1 --batch-size 4 --num-workers 0 --teacher-training.epochs 1"
    " --teacher-training.batch-size 6 --teacher-training.warmup-epochs 0 --init none --device cpu"
).split()
QUICK = ["--seeds", "2", "--no-cost", "--no-figures", "--batch-size", "8"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two runs on the same data, of which the first was evaluated."""
    home = tmp_path_factory.mktemp("home")
    data = make_data(home / "data")
    make_run(home / "a", data)
    make_run(home / "b", data, with_teacher=False, seed=1, policy="random")
    main(["evaluate", str(home / "a"), *QUICK, "--examples", "1"])
    return home


def stam_says(capsys, *arguments) -> tuple[str, str]:
    capsys.readouterr()
    main([str(argument) for argument in arguments])
    return capsys.readouterr()


def stam_refuses(capsys, *arguments) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2
    return said[-1]


def test_evaluate_leaves_its_result_in_the_run(home, capsys):
    out, err = stam_says(capsys, "evaluate", home / "a", *QUICK, "--examples", "1")
    assert "20 scenes of data, learned policy, 2 seeds" in out
    assert "teacher, whole image" in out and "95% interval" in out
    assert "top-5" not in out  # five classes: every answer is among the first five
    assert "AT CHANCE" in out and "with early exit         not reported" in out and "time saved" not in out
    assert "weakest classes" in out and "most confused" in out and "worst mistake           val/" in out
    assert f"next: stam figures {home / 'a'}" in err
    found = load_evaluation(home / "a" / "evaluation.json")
    assert found.name == "a" and found.settings["recipe"] == "test" and found.data.classes == CLASSES
    assert found.whole_image is not None and (home / "a" / "examples.npz").is_file()
    kept = load_examples(mistakes_path(home / "a" / "evaluation.json"))
    assert [each.label for each in kept] == [each.label for each in found.answers.mistakes]


def test_evaluate_prints_json(home, capsys):
    out, _ = stam_says(capsys, "evaluate", home / "a", *QUICK, "--json", "--out", home / "other.json")
    printed = json.loads(out)
    assert printed == json.loads((home / "other.json").read_text())
    assert printed["format"] == "stam-evaluation"


def test_another_policy_has_a_result_of_its_own(home, capsys):
    _, err = stam_says(capsys, "evaluate", home / "a", *QUICK, "--policy", "spiral", "--examples", "0")
    assert load_evaluation(home / "a" / "evaluation-spiral.json").policy == "spiral"
    assert f"--evaluation {home / 'a' / 'evaluation-spiral.json'}" in err
    assert examples_path(home / "evaluation-spiral.json").name == "examples-spiral.npz"
    assert examples_path(home / "x.json").name == "x-examples.npz"
    names = {"evaluation": "figures", "evaluation-spiral": "figures-spiral", "x": "figures-x"}
    for result, folder in names.items():
        assert figures_folder(home / "elsewhere" / f"{result}.json", home) == home / folder


def test_an_earlier_result_of_something_else_is_moved_aside(home, capsys, tmp_path):
    run = shutil.copytree(home / "a", tmp_path / "run")
    before = load_evaluation(run / "evaluation.json")
    for number, name in enumerate(("evaluation-earlier", "evaluation-earlier-2")):
        limit = ("--limit", 8 - number, "--glimpses", 3)
        _, err = stam_says(capsys, "evaluate", run, *QUICK, *limit, "--examples", "1")
        assert f"the result that was there is now {run / name}.json" in err
    assert load_evaluation(run / "evaluation-earlier.json") == before
    assert (run / "examples-earlier.npz").is_file() and (run / "examples.npz").is_file()
    assert load_evaluation(run / "evaluation.json").data.num_scenes == 7
    _, err = stam_says(capsys, "evaluate", run, *QUICK, *limit, "--examples", "1")  # the same question again
    assert "is now" not in err


def test_what_could_not_hold_for_the_agent_is_refused(home, capsys):
    run = home / "a"
    assert "no other policy takes a number" in stam_refuses(capsys, "evaluate", run, "--policy", "plus:3")
    assert "leave out --policy plus" in stam_refuses(capsys, "evaluate", run, "--policy", "plus", "--store")
    assert "is a folder: name a file" in stam_refuses(capsys, "evaluate", run, "--out", run)


def test_a_fitted_threshold_is_stored_with_the_weights(home, capsys, tmp_path):
    run = shutil.copytree(home / "a", tmp_path / "run")
    before = stam.load(run)
    assert (before.threshold, before.config.temperature) == (0.9, 1.0)
    stam_says(capsys, "evaluate", run, *QUICK, "--budget", "4", "--store")
    found, after = load_evaluation(run / "evaluation.json"), stam.load(run)
    assert found.early_exit.fit.goal == "budget"
    assert after.threshold == found.early_exit.fit.threshold != 0.9
    assert after.config.temperature == found.calibration.temperature != 1.0
    assert after.session().threshold == after.threshold


def test_a_policy_of_two_parts_has_a_result_of_its_own_and_can_be_stored(home, capsys, tmp_path):
    run = shutil.copytree(home / "a", tmp_path / "run")
    plain = load_evaluation(run / "evaluation.json")
    out, _ = stam_says(capsys, "evaluate", run, *QUICK, "--policy", "learned:2", "--examples", "0", "--store")
    assert "learned policy until 2 glimpses, then centre-out" in out
    composed = load_evaluation(run / "evaluation-learned-2.json")
    assert composed.policy == "learned:2"
    assert composed.locations.counts[:2] == plain.locations.counts[:2]
    assert composed.locations.counts[2:] != plain.locations.counts[2:]
    assert stam.load(run).config.policy == "learned:2"
    stam_says(capsys, "evaluate", run, *QUICK, "--policy", "learned", "--examples", "0")
    assert load_evaluation(run / "evaluation-learned.json").locations == plain.locations
    assert "'learned:0' is unknown" in stam_refuses(capsys, "evaluate", run, "--policy", "learned:0")
    stam_says(capsys, "evaluate", run, *QUICK, "--policy", "learned:2", "--examples", "0", "--no-fast")
    assert load_evaluation(run / "evaluation.json").locations == composed.locations


def test_a_weights_folder_needs_data(home, capsys, tmp_path):
    save_agent(make_agent(), tmp_path / "weights")
    assert "say what to evaluate on: --data FOLDER" in stam_refuses(capsys, "evaluate", tmp_path / "weights")
    out, err = stam_says(
        capsys, "evaluate", tmp_path / "weights", "--data", home / "data", *QUICK, "--limit", "6"
    )
    assert "6 scenes of data" in out and "no teacher: name one with --teacher" in err
    assert load_evaluation(tmp_path / "weights" / "evaluation.json").whole_image is None


@pytest.mark.parametrize("name", ["digits", "package:digits"])
def test_an_agent_that_ships_is_evaluated_by_name_and_stays_as_it_is(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    quick = [*QUICK, "--limit", "4", "--glimpses", "3", "--examples", "0"]
    _, err = stam_says(capsys, "evaluate", name, "--data", "digits", *quick)
    assert f"next: stam figures {name}" in err and "--evaluation" not in err
    assert load_evaluation(tmp_path / "digits-results" / "evaluation.json").name == "digits"
    refused = stam_refuses(capsys, "evaluate", name, "--data", "digits", *quick, "--store")
    assert "'digits' is not changed" in refused and "leave out --store" in refused
    assert stam.load("digits").labels  # which checks its hash


@pytest.fixture
def sketched(monkeypatch):
    """Pictures are drawn in other tests; here they are only asked for."""
    for place in ("stam.show.figures.to_bytes", "stam.show.report.page.to_bytes"):
        monkeypatch.setattr(place, lambda figure, *arguments, **settings: b"<svg/>")
    for place in ("stam.show.animations.animation_bytes", "stam.show.report.strips.animation_bytes"):
        monkeypatch.setattr(place, lambda stories: b"GIF89a")


def test_figures_draws_everything(home, capsys, sketched):
    out, err = stam_says(capsys, "figures", home / "a", "--kinds", "png", "--json")
    printed = json.loads(out)
    assert (home / "a" / "report.html").read_text().startswith("<!doctype html>")
    names = {path.name for path in (home / "a" / "figures").iterdir()}
    assert {"accuracy.png", "locations.png", "trajectory-1.png", "trajectory-1.gif", "policy-1.png"} <= names
    assert {"confusion.png", "mistakes.png"} <= names
    assert len(printed["figures"]) == len(names) and printed["report"].endswith("report.html")
    assert "next: stam compare" in err


def test_an_old_evaluation_is_pointed_out(home, capsys):
    weights = home / "a" / "best" / "model.safetensors"
    before = weights.stat().st_mtime
    os.utime(weights, (before + 1e6, before + 1e6))
    _, err = stam_says(capsys, "compare", home / "a")
    os.utime(weights, (before, before))
    assert "was trained on since it was evaluated" in err
    assert "was trained on" not in stam_says(capsys, "compare", home / "a")[1]


def test_compare_evaluates_what_was_not(home, capsys, monkeypatch, sketched):
    def quick(run, plan, device, measure=runs.evaluate_run):
        return measure(run, dataclasses.replace(plan, num_seeds=2, cost=False, batch_size=8), device)

    monkeypatch.setattr(runs, "evaluate_run", quick)
    outs = [home / f"c.{kind}" for kind in ("html", "md", "csv", "json")]
    out, err = stam_says(capsys, "compare", home / "a", home / "b", "--out", *outs)
    assert "b was not evaluated yet" in err and "next: stam serve" in err
    assert out.startswith("| Method |") and out.strip() == outs[1].read_text().strip()
    _, err = stam_says(capsys, "compare", home / "a" / "evaluation.json", "--out", home / "one.md")
    assert "next:" not in err  # a result cannot be served
    assert "sign-flip test" in out and "| Random policy, seed 1 | Learned policy, seed 0 | " in out
    assert outs[0].read_text().startswith("<!doctype html>") and "Random policy" in out
    assert json.loads(outs[3].read_text())["format"] == "stam-comparison"
    out, _ = stam_says(
        capsys,
        "compare",
        home / "a",
        home / "b",
        "--json",
        "--baseline",
        home / "b",
        "--figures",
        home / "pictures",
    )
    assert (home / "pictures" / "differences.svg").is_file()
    assert json.loads(out)["differences"][0]["baseline"].startswith("Random")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "nowhere"], "no agent at 'nowhere'"),
        (["evaluate", "{home}"], "holds no agent"),
        (["evaluate", "{home}/a", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["evaluate", "{home}/a", "--glimpses", "13"], "num_glimpses must be 1 to 12 on a 3x4 grid, got 13"),
        (["evaluate", "{home}/a", "--policy", "rndom"], "did you mean 'random'"),
        (["evaluate", "{home}/a", "--teacher", "nowhere"], "nowhere"),
        (["evaluate", "{home}/a", "--data", "{home}/nothing"], "no such data"),
        (["evaluate", "{home}/a", "{home}/nothing"], "no such data"),
        (["evaluate", "{home}/nothing", "{home}/a"], "no such data"),
        (["evaluate", "{home}/a", "digits", "--data", "digits"], "data is named twice"),
        (["evaluate", "{home}/a", "--data", "digits"], "does not know the class '0' of this data"),
        (["evaluate", "{home}/a", "--target-accuracy", "90"], "90 % is 0.9"),
        (["evaluate", "{home}/a", "--device", "tpu"], "device 'tpu'"),
        (["evaluate", "{home}/a", "--limit", "0"], "limit must be at least 1"),
        (["evaluate", "{home}/a", "--out", "{home}/no/e.json"], "does not exist; make it first"),
        (["evaluate", "{home}/b", "--policy", "learned"], "without an actor"),
        (["figures", "nowhere"], "no agent at 'nowhere'"),
        (["figures", "{home}/a", "--kinds", "jpg"], "kind 'jpg' is unknown"),
        (["figures", "{home}/a", "--evaluation", "x.json"], "no evaluation at 'x.json'"),
        (["compare", "{home}/a", "--out", "{home}/c.htm"], "did you mean '.html'"),
        (["compare", "{home}/a", "--baseline", "{home}/b"], "is not among the runs"),
        (["compare", "{home}/a", "--published", "imagenett"], "did you mean 'imagenet'"),
        (["compare", "{home}/a/best/config.json"], "is not a stam-evaluation"),
        (["compare", "{home}/a", "--accuracy", "76"], "76 % is 0.76"),
        (["compare", "{home}/a", "--pixels", "0"], "--pixels must be at least 1, got 0"),
        (["compare", "{home}/a", "--out", "{home}/c.html", "--out", "{home}/d.html"], "--out is given twice"),
        (["evaluate", "{home}/a", "--resize-size", "0"], "resize_size must be at least 1, got 0"),
    ],
)
def test_mistakes_end_in_one_line(home, capsys, arguments, message):
    line = stam_refuses(capsys, *(argument.replace("{home}", str(home)) for argument in arguments))
    assert line.startswith("stam: ") and message in line


def test_an_interrupted_evaluation_leaves_the_old_result(home, capsys, monkeypatch):
    before = (home / "a" / "evaluation.json").read_bytes()

    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "evaluate", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", str(home / "a"), *QUICK])
    assert stopped.value.code == 130 and "interrupted" in capsys.readouterr().err
    assert (home / "a" / "evaluation.json").read_bytes() == before
    assert not list((home / "a").glob(".*"))


def test_training_images_are_never_evaluated_on_however_the_folder_is_written(tmp_path, capsys, monkeypatch):
    data = make_image_folder(tmp_path / "images", train=8, split=False)
    monkeypatch.chdir(tmp_path)
    stam_says(capsys, "train", "tiny", "images", "--out", "run", "--no-fit", *TINY)
    num_val = json.loads(Path("run/split.json").read_text())["num_val"]
    shutil.copytree(data, tmp_path / "copy")
    (tmp_path / "link").symlink_to(data)
    there = f"../{tmp_path.name}/images"
    for written in ("images", "./images", "images/", str(data), there, "copy", "link"):
        for agent in ("run", "run/best"):
            assert len(open_run(agent, written).scenes) == num_val, (agent, written)
    out = tmp_path / "found.json"
    stam_says(capsys, "evaluate", "run/best", "--data", "copy", *QUICK, "--examples", "0", "--out", out)
    assert load_evaluation(out).data.num_scenes == num_val
    Path("run/split.json").unlink()  # without it, all images would be evaluated
    for command in (["evaluate", "run", *QUICK], ["train", "--resume", "--out", "run"]):
        with pytest.raises(SystemExit):
            main([str(word) for word in command])
        assert "split.json' is missing" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["evaluate"], ["predict", "digits"], ["train", "tiny"], ["train"]])
def test_names_that_are_too_long_for_a_file(command, capsys, tmp_path):
    more = ["--out", str(tmp_path / "run")] if command[0] == "train" else []
    with pytest.raises(SystemExit) as left:
        main([*command, "x" * 300, *more])
    assert left.value.code == 2 and "xxx" in capsys.readouterr().err


def test_data_that_shares_images_with_the_training_is_said_to(tmp_path, capsys, monkeypatch):
    make_image_folder(tmp_path / "images", train=8)
    monkeypatch.chdir(tmp_path)
    stam_says(capsys, "train", "tiny", "images", "--out", "run", "--no-fit", *TINY)
    shutil.copytree("images/train/class0", "elsewhere/class0")
    shutil.copytree("images/val/class1", "elsewhere/class1")
    num_val = len(list(Path("images/val/class1").iterdir()))
    said = {
        "images/train": "24 of the 24 images in 'images/train' are among those it was trained on",
        "elsewhere": f"8 of the {8 + num_val} images in 'elsewhere' are among those it was trained on",
        "images/val": "",  # held out, though it lies in the same folder
    }
    for data, expected in said.items():
        for agent in ("run", "run/best"):
            note = open_run(agent, data).note
            assert expected in note and ("too good" in note) == bool(expected), (agent, data)
    assert "chose the checkpoint 'best'" in open_run("run").note
    assert "chose the checkpoint" not in open_run("run/last").note
    out = tmp_path / "found.json"
    named = ("--data", "elsewhere", *QUICK, "--examples", "0", "--out", out)
    assert said["elsewhere"] in stam_says(capsys, "evaluate", "run", *named)[1]
