"""Training by several processes: together they learn what one would have learned."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from images import make_image_folder
from processes import run_together

from stam.cli import main
from stam.cli.processes import processes
from stam.errors import ConfigError
from stam.learning import distributed
from stam.model.randomness import RandomSource

SETTINGS = (
    *("--no-fit", "--image-size", "32", "--glimpse-size", "8", "--patch-size", "4", "--width", "32"),
    *("--depth", "2"),
    *("--num-heads", "2", "--actor-width", "32", "--critic-width", "16", "--drop-path", "0.2"),
    *("--num-glimpses", "3", "--short-episodes", "1", "--short-episode-glimpses", "2", "--epochs", "2"),
    *("--epoch-share", "1", "--batch-size", "8", "--base-lr", "1e-3", "--actor-lr", "1e-3"),
    "--no-start-from-teacher",  # its rewards are nearly equal, so normalising them would magnify rounding
    *("--resize-size", "None", "--device", "cpu", "--num-workers", "0", "--init", "none", "--no-check"),
    *("--teacher-training.epochs", "1", "--teacher-training.batch-size", "8"),
    *(
        "--teacher-training.warmup-epochs",
        "0",
        "--teacher-training.mixup",
        "0",
        "--teacher-training.cutmix",
        "0",
    ),
    *("--teacher-training.erasing", "0", "--teacher-training.device", "cpu"),
)

# at higher rates the actor magnifies rounding
GAINS = *("--core", "causal", "--actor-objective", "gains"), *("--actor-steps", "4", "--actor-lr", "2e-5")
KINDS = {
    "learned": (),
    "plus": ("--policy", "plus"),
    "causal": ("--core", "causal"),
    "gains": GAINS,
    "stages": (*GAINS, "--actor", "joint", "--core-fraction", "0.5"),
}

# The second process is told to stop in some batch, or nobody is.
WORKER = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from stam.cli import main
from stam.learning.training import AgentLearner

learn, left = AgentLearner.train_batch, [int(os.environ["STOP_AFTER"])]

def train_batch(self, place, raw):
    left[0] -= 1
    if left[0] == 0 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGINT)
    learn(self, place, raw)

AgentLearner.train_batch = train_batch
signal.signal(signal.SIGINT, signal.default_int_handler)
main(sys.argv[1:])
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(world: int, *arguments: object, stop_after: int = 0, worker: str = WORKER) -> list[tuple[int, str]]:
    """Runs the command line in several processes; returns how each ended and what it said."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "STOP_AFTER": str(stop_after),
    }
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    with tempfile.TemporaryDirectory() as folder:
        ended = run_together(worker, arguments, environments, Path(folder))
    return [(process.code, process.said) for process in ended]


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_alike(found: Path, expected: Path) -> None:
    for here, there in zip(metrics(found), metrics(expected), strict=True):
        assert here.keys() == there.keys()
        for name, value in there.items():
            assert here[name] == pytest.approx(value, rel=2e-3, abs=2e-4), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder of images, and a run of each kind that one process trained."""
    home = tmp_path_factory.mktemp("processes")
    make_image_folder(home / "images", train=8)
    for kind, options in KINDS.items():
        ((code, said),) = run(1, "train", "tiny", home / "images", "--out", home / kind, *SETTINGS, *options)
        assert code == 0, said
    return home


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_learn_what_one_learns(runs, kind):
    """Losses, rewards, normalisations and the teacher's training: over the batch of both, not of each."""
    out = runs / f"{kind}-two"
    ended = run(2, "train", "tiny", runs / "images", "--out", out, *SETTINGS, *KINDS[kind])
    assert [code for code, _ in ended] == [0, 0], ended
    assert_alike(out, runs / kind)
    assert_alike(out / "teacher", runs / kind / "teacher")
    assert "next: stam evaluate" in ended[0][1] and "next:" not in ended[1][1]


def test_all_stop_where_one_is_told_to_and_one_can_go_on_alone(runs):
    out = runs / "stopped"
    command = ("train", "tiny", runs / "images", "--out", out, "--policy", "learned", *SETTINGS)
    ended = run(2, *command, stop_after=2)  # of three batches an epoch
    assert [code for code, _ in ended] == [130, 130], ended
    assert f"torchrun --nproc-per-node 2 -m stam train --resume --out {out}" in ended[0][1]
    assert "stam:" not in ended[1][1]
    ((code, said),) = run(1, "train", "--resume", "--out", out)
    assert code == 0, said
    assert_alike(out, runs / "learned")


def torchrun(home: Path, *arguments: object, deaths: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line under torchrun, whose processes die where they are told to."""
    (home / "worker.py").write_text(MORTAL_WORKER)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3")
    launch += ("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--monitor-interval", "0.1")
    return subprocess.run(
        [sys.executable, *launch, str(home / "worker.py"), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "DEATHS": deaths},
        capture_output=True,
        text=True,
        timeout=300,
    )


# A death is named by the restart, the process and the batch of that process's life.
MORTAL_WORKER = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from stam.cli import main
from stam.learning.finetuning import TeacherLearner
from stam.learning.training import AgentLearner

batches = 0
deaths = [tuple(map(int, death.split("."))) for death in os.environ["DEATHS"].split()]

def mortal(learn):
    def train_batch(self, place, raw):
        global batches
        batches += 1
        here = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"]), batches
        if here in deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        learn(self, place, raw)
    return train_batch

for learner in (AgentLearner, TeacherLearner):
    learner.train_batch = mortal(learner.train_batch)
main(sys.argv[1:])
"""


def test_a_job_that_is_started_again_goes_on_with_its_own_run(runs):
    """One dies in the teacher's training, before a state is saved, the other in the agent's, after."""
    out = runs / "restarted"
    command = ("train", "tiny", runs / "images", "--out", out, "--policy", "learned", *SETTINGS)
    # three batches of the teacher, then six of the agent
    ended = torchrun(runs, *command, "--save-minutes", "0", deaths="0.1.2 1.0.6")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("no teacher given") == 2 and ended.stderr.count("its teacher is in") == 1
    assert_alike(out, runs / "learned")
    assert_alike(out / "teacher", runs / "learned" / "teacher")


def test_a_job_that_is_started_again_leaves_the_runs_of_others_alone(runs, monkeypatch, capsys):
    """Also where they were begun with the same settings, by a job whose first start was refused for that."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 1")
    before = (runs / "plus" / "metrics.jsonl").read_text()
    command = ["train", "tiny", str(runs / "images"), "--out", str(runs / "plus"), "--policy", "plus"]

    def refused(*more: str) -> bool:
        with pytest.raises(SystemExit):
            main([*command, *SETTINGS, *more])
        return "is not empty: pass --resume" in capsys.readouterr().err

    assert refused()
    assert not (runs / "plus" / ".job").exists()  # it was begun without torchrun
    (runs / "plus" / ".job").write_text(distributed.job())
    assert refused("--seed", "5")
    main([*command, *SETTINGS])  # nothing is left to do
    assert (runs / "plus" / "metrics.jsonl").read_text() == before
    (runs / "plus" / ".job").unlink()


def test_a_job_is_known_by_its_launcher_and_its_command(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert distributed.job() == ""
    names = set()
    for name, arguments in (("none", ["train"]), ("none", ["train", "a b"]), ("one", ["train"])):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        monkeypatch.setattr("sys.argv", ["stam", *arguments])
        names.add(distributed.job())
    assert len(names) == 3 and any(str(os.getppid()) in name for name in names)


def test_a_fitted_job_that_is_started_again_keeps_what_was_fitted(runs, tmp_path, monkeypatch, capsys):
    out = tmp_path / "fitted"
    fitted = [option for option in SETTINGS if option != "--no-fit"]
    command = ["train", "tiny", str(runs / "images"), "--out", str(out), *fitted]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 1")
    main(command)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    before = (out / "metrics.jsonl").read_text()
    main(command)  # nothing is left to do, and nothing is fitted anew
    assert (out / "metrics.jsonl").read_text() == before
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*command, "--seed", "5"])
    assert "is not empty: pass --resume" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 2")
    with pytest.raises(SystemExit):
        main(command)
    assert "is not empty: pass --resume" in capsys.readouterr().err


# Writes down what each batch exchanges between the processes, and refuses what a CUDA graph cannot hold.
LISTENING_WORKER = """
import json, os, sys
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from stam.cli import main
from stam.learning.training import AgentLearner

run_batch, all_reduce, wanted = AgentLearner.run_batch, dist.all_reduce, []

def listen(tensor, *arguments, **settings):
    wanted.append([list(tensor.shape), str(tensor.dtype)])
    return all_reduce(tensor, *arguments, **settings)

def heard(self, *inputs):
    def refuse(*arguments, **settings):
        raise AssertionError("a graph holds no barrier, and no value for the host")
    wanted.clear()
    kept = dist.barrier, torch.Tensor.item, torch.Tensor.tolist
    dist.all_reduce, dist.barrier, torch.Tensor.item, torch.Tensor.tolist = listen, refuse, refuse, refuse
    run_batch(self, *inputs)
    dist.all_reduce, (dist.barrier, torch.Tensor.item, torch.Tensor.tolist) = all_reduce, kept
    with open(os.environ["LISTEN"] + os.environ["RANK"], "a") as file:
        file.write(json.dumps(wanted) + "\\n")

AgentLearner.run_batch = heard
main(sys.argv[1:])
"""


def test_every_batch_exchanges_the_same_so_that_it_can_be_captured(runs, monkeypatch):
    monkeypatch.setenv("LISTEN", str(runs / "exchanges-"))
    command = ("train", "tiny", runs / "images", "--out", runs / "heard", "--policy", "learned", *SETTINGS)
    ended = run(2, *command, worker=LISTENING_WORKER)
    assert [code for code, _ in ended] == [0, 0], ended
    first, second = ((runs / f"exchanges-{rank}").read_text().splitlines() for rank in range(2))
    assert len(first) == 6 and len(set(first + second)) == 1
    assert len(json.loads(first[0])) > 10


@pytest.mark.parametrize(
    ("backend", "captured"), [(None, True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo,cuda:gloo", False)]
)
def test_only_exchanges_through_nccl_are_captured(monkeypatch, backend, captured):
    monkeypatch.setattr(distributed, "is_distributed", lambda: backend is not None)
    monkeypatch.setattr(distributed.dist, "get_backend_config", lambda: backend)
    assert distributed.can_be_captured() == captured


def test_processes_draw_the_numbers_of_one_and_each_takes_its_own(monkeypatch):
    def draw(source_of, rank: int, world: int, count: int) -> list[torch.Tensor]:
        monkeypatch.setattr(distributed, "world_size", lambda: world)
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        source, cpu = source_of(torch.Generator().manual_seed(0)), torch.device("cpu")
        masks = source.uniform((2, count, 1), cpu, batch_dim=1).transpose(0, 1)
        return [source.uniform((count, 5), cpu), source.integers(49, count, cpu), masks]

    one = draw(RandomSource, 0, 1, 6)
    two = [draw(distributed.SharedRandomSource, rank, 2, 3) for rank in range(2)]
    for whole, *parts in zip(one, *two, strict=True):
        assert torch.cat(parts).equal(whole)


def test_processes_share_no_gpu(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="use --device cuda instead of cuda:0"), processes("cuda:0"):
        pass
    with pytest.raises(ConfigError, match="0 GPUs were found"), processes("cuda"):  # and not a traceback
        pass


def test_a_batch_that_cannot_be_shared_is_refused(runs):
    ended = run(3, "train", "tiny", runs / "images", "--out", runs / "three", *SETTINGS)
    assert [code for code, _ in ended] == [2, 2, 2]
    assert "cannot be shared by 3 processes: use a multiple of 3" in ended[0][1]
    assert not (runs / "three").exists()
