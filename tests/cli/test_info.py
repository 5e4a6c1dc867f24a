"""A run after its training: listed, described, taken as settings for another, extended, logged elsewhere."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from images import make_image_folder

from stam import cli
from stam.cli.extras import EXTRAS
from stam.learning.overview import overview
from stam.learning.runs import RunFolder

TINY = (
    "--no-fit --image-size 32 --glimpse-size 16 --patch-size 8 --width 16 --depth 1 --num-heads 2"
    " --actor-width 8 --num-glimpses 2 --epochs 3 --batch-size 4 --validate-every 2 --resize-size 36"
    " --num-workers 0 --teacher-training.epochs 1 --teacher-training.batch-size 6 --policy random"
    " --teacher-training.warmup-epochs 0 --init none --device cpu --base-lr 1e-3"
).split()


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return make_image_folder(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "trained"
    run("train", "tiny", images, "--out", out, *TINY)
    return out


def run(*arguments) -> None:
    cli.main([str(argument) for argument in arguments])


def fails(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    complaint = capsys.readouterr().err
    assert stopped.value.code == 2 and complaint.count("\n") == 1
    return complaint


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class TestListAndInfo:
    def test_the_list(self, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
        run("list")
        shown = capsys.readouterr().out
        for part in ("imagenette-tiny", "10 classes", "224x224 pixels", "fmow-small", "gfnet", "figures"):
            assert part in shown
        assert "\n  digits-core" not in shown and "imagenette-hard" not in shown  # no agent; a variant
        run("list", "--json")
        found = json.loads(capsys.readouterr().out)
        assert {each["name"] for each in found["agents"]} == {"aid-tiny", "digits", "imagenette-tiny"}
        assert "imagenette-hard" in found["recipes"] and len(found["systems"]) == 7
        assert {each["name"] for each in found["extras"]} == set(EXTRAS)

    def test_the_extras_are_those_of_the_project(self):
        import tomllib

        text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        optional = tomllib.loads(text)["project"]["optional-dependencies"]
        assert set(EXTRAS) == set(optional) - {"dev", "docs"}
        for name, (packages, _) in EXTRAS.items():
            assert all(any(each.startswith(package) for each in optional[name]) for package in packages)

    def test_runs_in_a_folder(self, trained, tmp_path, capsys):
        run("list", trained.parent)
        header, row = capsys.readouterr().out.splitlines()
        assert header.split() == ["run", "recipe", "data", "epochs", "best", "%", "trained"]
        assert row.split()[:2] == [str(trained), "tiny"] and "3/3" in row  # its teacher is no run of its own
        run("list", tmp_path)
        assert "no runs in" in capsys.readouterr().out
        shutil.copytree(trained, tmp_path / "good")
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad/run.json").write_text("{")
        with pytest.raises(SystemExit) as stopped:
            run("list", tmp_path)
        said = capsys.readouterr()
        assert stopped.value.code == 2 and "good" in said.out and "run.json' is damaged" in said.err
        assert "no such folder" in fails(capsys, "list", tmp_path / "nowhere")

    def test_a_run(self, trained, images, capsys):
        run("info", trained)
        said = capsys.readouterr()
        for part in ("an agent, in", "3: class0, class1, class2", "16x16 pixels on a 2x2 grid", "parameters"):
            assert part in said.out
        for part in (f"{images}, 18 train, 9 val", "3 of 3 epochs in", "mean accuracy over the glimpses"):
            assert part in said.out
        assert "training.epochs 3" in said.out and "next: stam evaluate" in said.err
        run("info", trained, "--json")
        found = json.loads(capsys.readouterr().out)
        metrics = lines(trained / "metrics.jsonl")
        assert found["run"]["best"] == max(line["val/score"] for line in metrics if "val/score" in line)
        assert found["run"]["config"]["training"]["epochs"] == 3 and found["model"]["kind"] == "agent"
        run("info", trained / "teacher")
        assert "a whole-image teacher" in capsys.readouterr().out

    def test_names_and_mistakes(self, capsys):
        run("info", "imagenette-tiny")
        shown = capsys.readouterr().out
        for part in ("6,362,389 parameters", "learned:8", "trained on", "Imagenette, 9,469 training"):
            assert part in shown
        assert "no agent at 'imagenett'" in fails(capsys, "info", "imagenett")

    def test_a_run_that_has_saved_nothing(self, trained, tmp_path, capsys):
        begun = tmp_path / "my run"
        begun.mkdir()
        for name in ("run.json", "split.json"):
            shutil.copy(trained / name, begun / name)
        run("info", begun)
        said = capsys.readouterr()
        assert "0 of 3 epochs" in said.out and f"next: stam train --resume --out '{begun}'" in said.err

    def test_time_is_that_of_all_starts(self, trained, tmp_path):
        shutil.copytree(trained, tmp_path / "run")
        timing = [{"epoch": 0, "seconds": 5.0}, {"epoch": 1, "seconds": 9.0}, {"epoch": 1, "seconds": 4.0}]
        (tmp_path / "run/timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timing))
        assert overview(tmp_path / "run").seconds == 13


class TestSettingsOfAnotherRun:
    @pytest.mark.parametrize("what", [".", "run.json"])
    def test_a_run_is_made_again_with_options_over_it(self, trained, tmp_path, what):
        out = tmp_path / "again"
        run("train", "--config", trained / what, "--out", out, "--epochs", "1")
        given, made = (RunFolder.open(folder).record() for folder in (trained, out))
        assert made["recipe"] == "tiny" and made["config"]["training"].pop("epochs") == 1
        assert given["config"]["training"].pop("epochs") == 3 and made["config"] == given["config"]

    def test_a_file_of_ones_own(self, images, tmp_path, capsys):
        settings = tmp_path / "mine.toml"
        settings.write_text(f'recipe = "digits"\n[data]\npath = "{images}"\n[training]\nepochs = 7\n')
        read = cli.recipes.choose_base([], ["--config", str(settings)], "train")
        recipe, path, config = read
        assert (recipe, path, config.training.epochs) == ("digits", str(images), 7)
        assert config.agent.image_size == 56  # the rest is the recipe's
        other = cli.recipes.choose_base(["tiny", "elsewhere"], [f"--config={settings}"], "teacher")
        assert other[:2] == ("tiny", "elsewhere") and other[2].agent.image_size == 224
        settings.write_text("[training]\nepocs = 7\n")
        complaint = fails(capsys, "train", "digits", "--config", settings, "--out", tmp_path / "x")
        assert "mine.toml': unknown setting 'training.epocs': did you mean 'epochs'" in complaint
        settings.write_text("epochs = = 7")
        assert "cannot read" in fails(
            capsys, "train", "digits", "--config", settings, "--out", tmp_path / "x"
        )
        settings.write_text('recipe = "tiny"')
        assert "names no data" in fails(capsys, "train", "--config", settings, "--out", tmp_path / "x")
        assert "no such file" in fails(capsys, "train", "--config", "x.toml", "--out", tmp_path / "x")
        settings.write_text('recipe = "tini"\n')
        complaint = fails(capsys, "train", images, "--config", settings, "--out", tmp_path / "x")
        assert "recipe 'tini' is unknown: did you mean 'tiny'?" in complaint
        settings.write_text("[training]\nepochs = 7\n")
        assert cli.recipes.choose_base([str(images)], ["--config", str(settings)], "train")[0] == "tiny"
        given = ("--config", settings, "--out", tmp_path / "x", "--minutes", "3")
        assert "leave out --config" in fails(capsys, "train", "tiny", images, *given)

    def test_what_is_of_another_kind_is_refused(self, trained, tmp_path, capsys):
        complaint = fails(capsys, "teacher", "--config", trained, "--out", tmp_path / "x")
        assert "is of a run of stam train" in complaint
        complaint = fails(capsys, "train", "aid", trained, "--config", trained, "--out", tmp_path / "x")
        assert "is of a run of 'tiny', whose settings are taken: leave out aid" in complaint
        record = json.loads((trained / "run.json").read_text())
        record["config"]["training"]["discount"] = 0.5
        (tmp_path / "old.json").write_text(json.dumps(record))
        complaint = fails(capsys, "train", "--config", tmp_path / "old.json", "--out", tmp_path / "x")
        assert "has discount 0.5, which this version does not have" in complaint
        complaint = fails(capsys, "train", "gfnet", "--config", trained, "--out", tmp_path / "x")
        assert "needs data" in complaint or "takes a run of it" in complaint


class TestMoreEpochs:
    def test_a_finished_run_goes_on(self, trained, tmp_path, capsys):
        out = tmp_path / "run"
        shutil.copytree(trained, out)
        before = (out / "metrics.jsonl").read_text()
        capsys.readouterr()
        run("train", "--resume", "--out", out, "--epochs", "5")
        said = capsys.readouterr().err
        assert "extended from 3 to 5 epochs, of which 3 are done" in said
        metrics = lines(out / "metrics.jsonl")
        assert (out / "metrics.jsonl").read_text().startswith(before)
        assert [line["epoch"] for line in metrics] == [0, 1, 2, 3, 4]
        # what was said of the learning rate is what happened: it rises, then ends the longer cosine
        rates = [line["lr/core"] for line in metrics]
        assert f"it was {rates[2]:.1e} and is {rates[3]:.1e} next" in said and rates[3] > rates[2] > rates[4]
        record = RunFolder.open(out).record()
        assert record["config"]["training"]["epochs"] == 5 and record["extended_from"] == (3,)
        run("train", "--resume", "--out", out, "--epochs", "5")  # as torchrun starts a job again
        assert "the run has 5 epochs already" in capsys.readouterr().err
        complaint = fails(capsys, "train", "--resume", "--out", out, "--epochs", "4")
        assert "has 5 epochs: give more" in complaint
        assert "leave out --seed" in fails(capsys, "train", "--resume", "--out", out, "--seed", "1")


@pytest.fixture
def trackers(monkeypatch):
    """Weights & Biases and MLflow as far as they are called, and what they were told."""
    told = SimpleNamespace(wandb=[], mlflow=[])

    def init(**given):
        told.wandb.append(given)
        log = lambda metrics, step: told.wandb.append((step, metrics))  # noqa: E731
        return SimpleNamespace(id="abc", log=log)

    def start_run(**given):
        told.mlflow.append(given)
        return SimpleNamespace(info=SimpleNamespace(run_id="xyz"))

    wandb, mlflow = ModuleType("wandb"), ModuleType("mlflow")
    wandb.init = init
    vars(mlflow).update(
        set_experiment=lambda name: told.mlflow.append(name),
        start_run=start_run,
        log_params=lambda params: told.mlflow.append(params),
        log_metrics=lambda metrics, step: told.mlflow.append((step, metrics)),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return told


def test_metrics_go_to_trackers_when_asked_and_a_resumed_run_goes_on_there(
    trained, tmp_path, trackers, capsys
):
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    run("train", "--resume", "--out", out, "--epochs", "4", "--wandb", "--mlflow")
    begun, (step, metrics) = trackers.wandb
    assert begun["project"] == "stam" and begun["name"] == "run" and begun["id"] is None
    assert begun["config"]["training"]["epochs"] == 4
    assert step == 3 and metrics == lines(out / "metrics.jsonl")[-1]
    experiment, started, params, (step, metrics) = trackers.mlflow
    assert (experiment, started) == ("stam", {"run_name": "run"}) and params["training.epochs"] == "4"
    assert step == 3 and "val/accuracy_at_2" in metrics and not any("@" in name for name in metrics)
    run("train", "--resume", "--out", out, "--epochs", "5", "--wandb", "--mlflow")
    assert trackers.wandb[2]["id"] == "abc" and trackers.wandb[2]["resume"] == "allow"
    assert {"run_id": "xyz"} in trackers.mlflow
    (out / "trackers.json").write_text("[1]")
    with pytest.raises(SystemExit):
        run("train", "--resume", "--out", out, "--epochs", "6", "--wandb")
    assert "trackers.json' is damaged: delete it" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_names_its_extra(name, images, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    complaint = fails(capsys, "train", "tiny", images, "--out", tmp_path / "x", *TINY, f"--{name}")
    assert f"needs the package '{name}': pip install" in complaint and f"[{name}]'" in complaint
