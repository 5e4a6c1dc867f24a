"""Evaluation by several processes: every image is counted exactly once, and the result is the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from evaluating import NoiseScenes, fast_plan, make_agent, make_data, make_run, make_teacher

from stam.evaluation import evaluate, load_evaluation

NUM_SCENES = 11  # not a multiple of the processes: nobody may pad

# Three processes; all three evaluate, then the first two of them alone.
WORKER = """
import sys
import jaxtyping
import torch
import torch.distributed as dist

jaxtyping.install_import_hook = lambda *names: None  # types are checked elsewhere; this starts faster
torch.set_num_threads(1)
folder, rank = sys.argv[1], int(sys.argv[2])
from evaluating import NoiseScenes, fast_plan, make_agent, make_teacher
from stam.evaluation import evaluate, save_evaluation

class Counting(NoiseScenes):
    loaded = []

    def load(self, index, decode_size=None):
        self.loaded.append(index)
        return super().load(index, decode_size)

for world in (3, 2):
    if rank >= world:
        break
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{world}", rank=rank, world_size=world)
    found = evaluate(make_agent(), Counting({num}), fast_plan(policy="random"), make_teacher())
    save_evaluation(found, f"{folder}/{world}-{rank}.json")
    dist.barrier()
    dist.destroy_process_group()
print(len(Counting.loaded))
"""


def wait_for(workers: list[subprocess.Popen]) -> None:
    """Waits for processes that run together; one that fails, or takes too long, ends all."""
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=120)
            assert worker.returncode == 0, errors.decode()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    script = folder / "worker.py"
    script.write_text(WORKER.replace("{num}", str(NUM_SCENES)))
    here = Path(__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": f"{here.parent / 'src'}{os.pathsep}{here}",
        "OMP_NUM_THREADS": "1",
    }
    workers = [
        subprocess.Popen([sys.executable, script, folder, str(rank)], env=environment, stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    wait_for(workers)
    return folder


@pytest.mark.parametrize("world", [2, 3])
def test_processes_find_what_one_finds(folder, world):
    alone = evaluate(make_agent(), NoiseScenes(NUM_SCENES), fast_plan(policy="random"), make_teacher())
    for rank in range(world):
        found = load_evaluation(folder / f"{world}-{rank}.json")
        assert found.data.num_scenes == NUM_SCENES
        assert found.accuracy == alone.accuracy and found.locations == alone.locations
        assert found.whole_image == alone.whole_image
        assert sum(found.locations.counts[0]) == 2 * NUM_SCENES  # each scene once for each of two seeds
        assert found.calibration.temperature == pytest.approx(alone.calibration.temperature, rel=1e-4)
        assert found.early_exit.fit.exits == alone.early_exit.fit.exits


# Two processes ask for a run's evaluation; the second is late, the first takes its time to write.
ASKING_WORKER = """
import sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
folder, run, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
from stam.evaluation import evaluated, load_evaluation, runs

def slowly(*given, save=runs.save_evaluation):
    time.sleep(2)
    save(*given)

def quick(run, plan, device, measure=runs.evaluate_run):
    return measure(run, runs.EvaluationPlan(num_seeds=2, cost=False, most_timed=0), device, num_examples=1)

runs.save_evaluation, runs.evaluate_run = slowly, quick
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
path = evaluated(run, torch.device("cpu"))
load_evaluation(path)  # it must be there
dist.barrier()
dist.destroy_process_group()
"""


def test_all_find_the_result_that_the_first_writes(tmp_path):
    make_run(tmp_path / "run", make_data(tmp_path / "data"), with_teacher=False)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", ASKING_WORKER, tmp_path, tmp_path / "run", str(rank)],
            env=environment,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    wait_for(workers)
