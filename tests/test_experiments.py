"""Every experiment still starts: toy size, on a CPU, from the command line as its docstring shows it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from images import make_image_folder

import stam
from stam.evaluation import load_evaluation

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
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / folder / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return make_image_folder(tmp_path_factory.mktemp("data") / "images")


@pytest.mark.parametrize("hold_out", [False, True])
def test_real_images(images, tmp_path, hold_out):
    trials = json.dumps({"a": {}, "b": {"training": {"base_lr": 1e-3}, "core": {"frozen": "mlp"}}})
    shown = run(
        *("real_images.py", "aid", "--data", images, "--init", "none", "--out", tmp_path / "out"),
        *("--set", SETTINGS, "--agents", "learned", "spiral", "--trials", trials, "--seeds", 2),
        *("--glimpses", 3, "--workers", 0, *(["--hold-out", "--results", tmp_path] if hold_out else [])),
        *("--teacher", "fine-tune", "--views", '{"handed": {"handover": 1}}'),
    )
    assert all(name in shown for name in ("teacher:", "learned-a", "learned-b", "spiral-a", "spiral-b"))
    numbers = tmp_path if hold_out else tmp_path / "out"
    results = json.loads((numbers / "results.json").read_text())
    handed = [result for result in results if result["name"].endswith("-handed")]
    results = [result for result in results if result not in handed]
    assert [len(result["mean"]) for result in results] == [3] * 4
    record = json.loads((tmp_path / "out/learned-a/run.json").read_text())["config"]
    assert (record["data"]["path"], record["init"]) == (str(images), "none")
    # an order has nothing to hand over
    assert [result["name"] for result in handed] == ["learned-a-handed", "learned-b-handed"]
    assert (tmp_path / "out" / "learned-a" / "half" / "model.safetensors").exists()
    rates = [result["settings"]["training"]["base_lr"] for result in results]
    assert rates[0] == rates[1] != rates[2] == rates[3] == 1e-3


def test_members_are_averaged(images, tmp_path):
    settings = json.dumps({"agent": AGENT, "training": TRAINING | {"epochs": 2}, "teacher": TEACHER})
    run(
        *("real_images.py", "aid", "--data", images, "--init", "none", "--out", tmp_path),
        *("--set", settings, "--seeds", 1, "--glimpses", 3, "--workers", 0, "--members", 2),
        *("--views", '{"twice": {"mirrored": true}, "handed": {"handover": 1}}'),
    )
    cores = [
        stam.load(tmp_path / folder).core.head.weight
        for folder in ("learned-0/half", "learned-1/half", "learned/half")
    ]
    assert not cores[0].equal(cores[1])
    torch.testing.assert_close(cores[2], (cores[0] + cores[1]) / 2, atol=1e-4, rtol=1e-3)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [result["name"] for result in results] == ["learned", "learned-twice", "learned-handed"]
    found = [load_evaluation(tmp_path / f"{result['name']}.json") for result in results]
    assert [(one.mirrored, one.handover) for one in found] == [(False, None), (True, None), (False, 1)]
    result = results[0]
    seeds = [
        json.loads((tmp_path / f"learned-{member}" / "run.json").read_text())["config"]["training"]["seed"]
        for member in (0, 1)
    ]
    assert result["members"] == 2 and seeds == [0, 1]


def test_only_policy(images, tmp_path):
    out = tmp_path / "out"
    run(
        *("real_images.py", "aid", "--data", images, "--init", "none", "--out", out),
        *("--set", SETTINGS, "--seeds", 1, "--glimpses", 2, "--workers", 0),
    )
    trials = {
        "fresh": {},
        "on": {"reward": "gain", "discount": 0.0, "tau": 16.0, "fresh": False},
        "compared": {"compared": 3, "by": "match"},
        "differences": {"compared": 3, "differences": True},
    }
    run(
        *("only_policy.py", out / "learned", "--recipe", "aid", "--data", images, "--device", "cpu"),
        *("--batch", 4, "--updates", 2, "--seeds", 1, "--glimpses", 3, "--shown", 3),
        *("--trials", json.dumps(trials), "--out", tmp_path / "found.json"),
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {"as it is", "plus", "spiral", "random", *trials}
    assert all(len(curve) == 3 for curve in found.values())


def test_digits_policies(tmp_path):
    out = tmp_path / "out"
    run(
        *(
            "digits_policies.py",
            "--out",
            out,
            "--seeds",
            1,
            "--epochs",
            1,
            "--batch-size",
            8,
            "--device",
            "cpu",
        ),
        *("--eval-seeds", 1, "--policies", "plus", "--threads", 1, "--scenes", 16),
    )
    assert len(json.loads((out / "results.json").read_text())) == 1


def test_pretrain_digits(tmp_path):
    run(
        *("pretrain_digits.py", "--out", tmp_path, "--seconds", 0.2, "--width", 12, "--depth", 1),
        *("--num-heads", 2, "--batch-size", 8, "--num-sets", 1, "--num-scenes", 16, "--device", "cpu"),
    )
    assert (tmp_path / "digits-core" / "model.safetensors").exists()


def test_shipping_and_drawing(images, tmp_path):
    out, assets = tmp_path / "out", tmp_path / "assets"
    run(
        *("real_images.py", "aid", "--data", images, "--init", "none", "--out", out, "--set", SETTINGS),
        *("--seeds", 2, "--glimpses", 3, "--workers", 0),
    )
    (out / "results.json").rename(out / "aid.json")
    (out / "learned.json").rename(out / "aid-learned.json")
    assert "aid-curves.png" in run("draw_real_images.py", out, "--out", tmp_path / "images")
    shown = run(
        *("ship.py", out / "learned", "--name", "toy", "--evaluation", out / "aid-learned.json"),
        *("--assets", assets),
    )
    assert "toy" in shown
    assert json.loads((assets / "hashes.json").read_text()).keys() == {"toy"}


def test_the_training_benchmark(tmp_path):
    shown = run(
        *("training.py", "table", "scaling", "profile", "agreement", "first-batch", "--device", "cpu"),
        *("--sizes", "tiny", "--batches", 1, "--glimpses", 2, "--look-batch", 1, "--out", tmp_path),
        folder="benchmarks",
    )
    assert "first three batches" in shown
    found = json.loads((tmp_path / "training.json").read_text())
    assert found["profile"]["tiny"] and len(found["agreement"]) == 2 and len(found["scaling"]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it measures")
def test_the_kernel_benchmark_needs_a_gpu():
    with pytest.raises(AssertionError, match="measures kernels for a GPU"):
        run("kernels.py", folder="benchmarks")


def test_who_chooses(images, tmp_path):
    out = tmp_path / "out"
    run(
        *("real_images.py", "aid", "--data", images, "--init", "none", "--out", out),
        *("--set", SETTINGS, "--seeds", 1, "--glimpses", 2, "--workers", 0),
    )
    shown = run(
        *("who_chooses.py", out / "learned", "--data", images, "--glimpses", 3, "--paths", 2),
        *("--out", tmp_path / "aid-choosers.json"),
    )
    assert all(policy in shown for policy in ("learned", "plus", "spiral", "random"))
    found = json.loads((tmp_path / "aid-choosers.json").read_text())
    assert all(len(curve) == 3 for curve in found["accuracy"].values()) and len(found["paths"]) == 2
    assert "aid-paths.png" in run("draw_real_images.py", tmp_path, "--out", tmp_path / "images")


def test_teacher_says(images, tmp_path):
    run(
        *("real_images.py", "aid", "--data", images, "--init", "none", "--out", tmp_path),
        *("--set", SETTINGS, "--seeds", 1, "--glimpses", 1, "--workers", 0),
    )
    shown = run(
        *("teacher_says.py", "aid", "--data", images, "--teacher", tmp_path / "teacher", "--images", 5),
        *("--set", SETTINGS),
    )
    assert "5 training images of aid" in shown and "of at most 1.10" in shown


def test_reward_signal(images, tmp_path):
    out = tmp_path / "out"
    run(
        *("real_images.py", "aid", "--data", images, "--init", "none", "--out", out),
        *("--set", SETTINGS, "--seeds", 1, "--glimpses", 2, "--workers", 0),
    )
    shown = run(
        *("reward_signal.py", out / "learned", "--data", images, "--glimpses", 3, "--passes", 3),
        *("--out", tmp_path / "signal.json"),
    )
    assert "by chance alone" in shown
    found = json.loads((tmp_path / "signal.json").read_text())
    rows, policy = found["rows"], found["policy"]
    assert 0 < policy["entropy"] <= policy["most"] + 1e-5 and 1 / 3 <= policy["largest"] <= 1
    assert len(rows) == 10 and all(0 <= row["r2"] <= 1 and 0 <= row["r2_ideal_critic"] <= 1 for row in rows)
