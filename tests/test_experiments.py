"""Every experiment runs at toy size on a CPU, from the command line as its docstring shows it."""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from images import make_image_folder
from PIL import Image
from zooing import glyph_file

import stam
from stam.config import AgentConfig
from stam.evaluation import load_evaluation
from stam.learning import experiment
from stam.settings import DataConfig, RunConfig, TeacherConfig, TrainingConfig

ROOT = Path(__file__).parent.parent
AGENT = {
    "image_size": 32,
    "glimpse_size": 16,
    "patch_size": 8,
    "width": 12,
    "depth": 1,
    "num_heads": 2,
    "actor_width": 8,
    "critic_width": 8,
}
TRAINING = {"num_glimpses": 2, "epochs": 1, "batch_size": 4, "device": "cpu"}
TEACHER = {"epochs": 1, "batch_size": 4, "warmup_epochs": 0, "device": "cpu"}
SETTINGS = json.dumps({"agent": AGENT, "training": TRAINING, "teacher": TEACHER})


def run(script: str, *arguments: object, folder: str = "experiments") -> str:
    """Runs a script as `python FOLDER/SCRIPT` does, but here: importing torch takes longer than most."""
    path, said = ROOT / folder / script, io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        patch.setattr(sys, "path", [str(path.parent), *sys.path])
        runpy.run_path(str(path), run_name="__main__")
    return said.getvalue()


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return make_image_folder(tmp_path_factory.mktemp("data") / "images")


def test_real_images(images, tmp_path):
    out, numbers = tmp_path / "out", tmp_path / "numbers"
    shown = run(
        *("real_images.py", "aid", "--data", images, "--init", "none", "--out", out, "--results", numbers),
        *("--set", SETTINGS, "--agents", "learned", "spiral", "--seeds", 2, "--glimpses", 3),
        *("--workers", 0, "--teacher", "fine-tune", "--actor-glimpses", 1),
    )
    assert all(name in shown for name in ("teacher:", "learned", "learned:1", "spiral"))
    results = json.loads((numbers / "results.json").read_text())
    # a fixed order has no actor, so only the learned agent is evaluated with actor glimpses
    assert [result["name"] for result in results] == ["learned", "learned:1", "spiral"]
    assert [len(result["mean"]) for result in results] == [3] * 3
    found = [load_evaluation(numbers / name) for name in ("learned.json", "learned-1.json")]
    assert [one.policy for one in found] == ["learned", "learned:1"]
    record = json.loads((out / "learned/run.json").read_text())["config"]
    assert (record["data"]["path"], record["init"]) == (str(images), "none")
    assert (out / "learned" / "half" / "model.safetensors").exists()


def test_digits_policies(tmp_path):
    out = tmp_path / "out"
    run(
        *("digits_policies.py", "--out", out, "--seeds", 1, "--eval-seeds", 1, "--policies", "gains"),
        *("--start", "package:digits-causal-core", "--settings", '{"ema_batches": 2}', "--batches", 1),
        *("--batch-size", 8, "--num-sets", 1, "--num-scenes", 16, "--device", "cpu"),
    )
    assert len(json.loads((out / "results.json").read_text())) == 1


def test_pretrain_digits(tmp_path):
    run(
        *("pretrain_digits.py", "--out", tmp_path, "--seconds", 0.2, "--width", 12, "--depth", 1),
        *("--num-heads", 2, "--batch-size", 8, "--num-sets", 1, "--num-scenes", 16, "--device", "cpu"),
    )
    assert (tmp_path / "digits-core" / "model.safetensors").exists()


def test_pretrain_digits_causal(tmp_path):
    shown = run(
        *("pretrain_digits_causal.py", "--out", tmp_path, "--random-seconds", 0, "--seconds", 0),
        *("--batch-size", 4, "--num-sets", 1, "--num-scenes", 8, "--device", "cpu"),
    )
    assert "learned" in shown
    agent, core = stam.load(tmp_path / "digits"), stam.load(tmp_path / "digits-causal-core")
    assert agent.config.core == core.config.core == "causal"
    assert agent.actor is not None and core.actor is None
    assert core.core.head.weight.equal(agent.core.head.weight)


def test_subsets(images, tmp_path):
    before = {"agent": AGENT, "training": TRAINING, "teacher_training": {"device": "cpu"}}
    trial = {"data": "toy", "images": 10, "classes": 2, "before": before, "teach": TEACHER, "workers": 0}
    trial["set"] = {"agent": AGENT, "training": TRAINING}
    trials = [trial | {"name": "chosen", "core": "causal"}, trial | {"name": "aid", "recipe": "aid"}]
    (tmp_path / "trials.json").write_text(json.dumps(trials))
    shown = run(
        *("subsets.py", "--data", f"toy={images / 'train'}", "--init", "none", "--work", tmp_path / "work"),
        *("--trials", tmp_path / "trials.json", "--out", tmp_path / "out.json"),
    )
    assert "toy 10 of 2" in shown
    results = json.loads((tmp_path / "out.json").read_text())
    assert [len(result["accuracy"]["learned"]) for result in results] == [2, 2]


def test_an_actor_alone(images, tmp_path):
    agent = AgentConfig(3, core="causal", actor="joint", **AGENT)
    data, training = DataConfig(str(images), num_workers=0), TrainingConfig(**TRAINING)
    config = RunConfig(agent, data, training, teacher_training=TeacherConfig(**TEACHER))
    experiment.begin(config, tmp_path / "run")
    shown = run("actor_alone.py", tmp_path / "run", "--out", tmp_path / "found.json", "--scenes", 64)
    assert "64 scenes in" in shown and "| centre-out |" in shown
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found) == {"learned", "plus", "spiral", "centre-out"}
    assert len(found["learned"]) == 2 and found["learned"][0] == found["plus"][0]


def test_oracle(tmp_path):
    out = tmp_path / "oracle.json"
    run("oracle.py", "digits", "--data", "digits", "--scenes", 6, "--glimpses", 3, "--out", out)
    found = json.loads(out.read_text())["accuracy"]
    assert all(len(curve) == 3 for curve in found.values())
    assert found["greedy oracle"][0] == found["learned"][0]  # both begin at the same locations
    assert found["greedy oracle"][2] >= found["random"][2]


def test_glimpse_sizes(tmp_path):
    shown = run("glimpse_sizes.py", "--out", tmp_path)
    assert "| 64 px of 256 |" in shown
    assert {path.name for path in tmp_path.iterdir()} == {
        "aid-glimpse-sizes.png",
        "imagenette-glimpse-sizes.png",
    }


def test_shipping_and_drawing(images, tmp_path):
    out, assets = tmp_path / "out", tmp_path / "assets"
    run(
        *("real_images.py", "aid", "--data", images, "--init", "none", "--out", out, "--set", SETTINGS),
        *("--seeds", 2, "--glimpses", 3, "--workers", 0),
    )
    (out / "results.json").rename(out / "aid-same-start.json")
    (out / "learned.json").rename(out / "aid-learned.json")
    assert "aid-same-start.png" in run("draw_real_images.py", out, "--out", tmp_path / "images")
    shown = run(
        *("ship.py", out / "learned", "--name", "toy", "--evaluation", out / "aid-learned.json"),
        *("--assets", assets),
    )
    assert "toy" in shown
    assert json.loads((assets / "hashes.json").read_text()).keys() == {"toy"}


def test_the_training_benchmark(tmp_path, shallow):
    shown = run(
        *("training.py", "table", "scaling", "profile", "agreement", "first-batch", "--device", "cpu"),
        *("--sizes", "tiny", "--batches", 1, "--glimpses", 2, "--look-batch", 1, "--out", tmp_path),
        folder="benchmarks",
    )
    assert "first three batches" in shown
    found = json.loads((tmp_path / "training.json").read_text())
    assert found["profile"]["tiny"] and len(found["agreement"]) == 2 and len(found["scaling"]) == 2


def test_the_precision_benchmark(shallow):
    few = ("--batch-size", 2, "--num-glimpses", 2, "--rounds", 1, "--threads", torch.get_num_threads())
    assert "times as fast in bfloat16" in run("cpu_precision.py", *few, folder="benchmarks")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it measures")
def test_the_kernel_benchmark_needs_a_gpu():
    with pytest.raises(SystemExit, match="measures kernels for a GPU"):
        run("kernels.py", folder="benchmarks")


def test_who_chooses(images, tmp_path):
    out = tmp_path / "out"
    run(
        *("real_images.py", "aid", "--data", images, "--init", "none", "--out", out),
        *("--set", SETTINGS, "--seeds", 1, "--glimpses", 2, "--workers", 0),
    )
    shown = run(
        *("who_chooses.py", out / "learned", "--data", images, "--glimpses", 3, "--paths", 2),
        *("--actor-glimpses", 2),
        *("--out", tmp_path / "aid-choosers.json"),
    )
    assert all(policy in shown for policy in ("learned", "plus", "spiral", "random", "learned:2"))
    found = json.loads((tmp_path / "aid-choosers.json").read_text())
    assert all(len(curve) == 3 for curve in found["accuracy"].values()) and len(found["paths"]) == 2
    assert "aid-paths.png" in run("draw_real_images.py", tmp_path, "--out", tmp_path / "images")


def test_zoo(images, tmp_path):
    digits = glyph_file(tmp_path)
    quick = ("--epochs", 1, "--batch-size", 4, "--device", "cpu", "--workers", 0)
    out, packed = tmp_path / "clutter", tmp_path / "packed.tar.gz"
    pack = ("--pack", packed)
    shown = run("zoo.py", digits, "--out", out, "--systems", "ram", "stn", "stn-even", *quick, *pack)
    assert [line.split(" | ")[0] for line in shown.splitlines()[-3:]] == ["| ram", "| stn", "| stn-even"]
    assert {file.name for file in out.glob("*.json")} == {
        *("ram.json", "ram-random.json", "stn.json", "stn-even.json")
    }
    with tarfile.open(packed) as archive:
        assert {"clutter/ram.json", "clutter/stn-even.json", "clutter/ram.png"} <= set(archive.getnames())
    again = run("zoo.py", digits, "--out", out, "--systems", "ram", "stn", *quick)
    assert "ms a batch" not in again and "| ram |" in again  # what has a result is not trained again
    small = json.dumps({"image_size": 32, "glimpse_size": 16, "num_glimpses": 2, "backbone": "conv"})
    photos = tmp_path / "photos"
    looks_at = ("--pictures", next(images.rglob("*.png")))
    shown = run("zoo.py", images, "--out", photos, "--systems", "gfnet", "--set", small, *quick, *looks_at)
    assert (photos / "gfnet.png").is_file()
    bends = {"image_size": 32, "sampled_size": 16, "saliency_size": 16, "num_points": 9, "backbone": "conv"}
    run("zoo.py", images, "--out", photos, "--systems", "stn", "--set", json.dumps(bends), *quick, *looks_at)
    with Image.open(photos / "stn.png") as picture:
        assert picture.size == (2 * 32 + 14, 32)  # the scene, and what is made of it
    assert "| gfnet | yes | yes | 512 |" in shown
    found = load_evaluation(photos / "gfnet.json")
    assert found.settings["config"]["name"] == "gfnet" and found.num_glimpses == 2


def test_the_classifier_without_a_sampler_has_as_many_updates(tmp_path):
    digits, out = glyph_file(tmp_path), tmp_path / "out"
    quick = ("--batch-size", 12, "--device", "cpu", "--workers", 0)
    run("zoo.py", digits, "--out", out, "--systems", "stn", "--epochs", 3, *quick)
    run("zoo.py", digits, "--out", out, "--systems", "stn-even:0.001", *quick)
    one, other = (load_evaluation(out / f"{name}.json").settings["measured"] for name in ("stn", "stn-even"))
    assert one["epochs"] == other["epochs"] == 3 and one["updates"] == other["updates"] == 6


def test_all_runs_of_the_zoo_in_parts(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    glyph_file(data).rename(data / "mnist.npz")
    options = "--epochs 1 --batch-size 4 --device cpu --workers 0"
    places = {"DATA": data, "RUNS": tmp_path / "runs", "RESULTS": tmp_path / "results"}
    environment = os.environ | {key: str(path) for key, path in places.items()}
    environment |= {"PYTHON": sys.executable, "ZOO_OPTIONS": options, "OMP_NUM_THREADS": "1"}
    command = ["sh", str(ROOT / "experiments/gpu_zoo.sh")]
    done = subprocess.run([*command, "ram"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "results/clutter.tar.gz") as archive:
        names = archive.getnames()
    assert names == ["clutter/ram-random.json", "clutter/ram.json", "clutter/ram.png"]
    done = subprocess.run([*command, "rom"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "unknown part 'rom'" in done.stderr


def test_zoo_tables(tmp_path):
    """The page is what the results say, and writing it twice changes nothing."""
    results, page = ROOT / "experiments/results/zoo", tmp_path / "zoo.md"
    page.write_text((ROOT / "docs/zoo.md").read_text())
    for name in ("images", "looking"):
        (tmp_path / name).mkdir()
    (tmp_path / "looking/gfnet.png").write_bytes(b"picture")
    write = ("--page", page, "--images", tmp_path / "images", "--looking", tmp_path / "looking", "--write")
    shown = run("zoo_tables.py", "--results", results, *write)
    assert "| DRAM | yes | no | 2,592 |" in shown and "better than random crops" in shown
    text = page.read_text()
    for row in shown.splitlines():
        assert not row.startswith("|") or row in text
    assert "![GFNet looking](images/zoo-gfnet.png)" in text
    assert (tmp_path / "images/zoo-gfnet.png").read_bytes() == b"picture"
    assert (tmp_path / "images/zoo-clutter.png").is_file()
    run("zoo_tables.py", "--results", results, *write)
    assert page.read_text() == text
    (tmp_path / "empty.md").write_text("# A page without marks\n")
    given = ("--page", tmp_path / "empty.md", "--images", tmp_path / "images", "--write")
    with pytest.raises(SystemExit, match="has no place for"):
        run("zoo_tables.py", "--results", results, *given)
