"""Evaluation by several processes: every image is counted exactly once, and the result is the same."""

from pathlib import Path

import pytest
from evaluating import NoiseScenes, fast_plan, make_agent, make_data, make_run, make_teacher
from processes import run_together

from stam.evaluation import evaluate, load_evaluation

NUM_SCENES = 11  # not a multiple of the processes: nobody may pad

# Three processes; all three evaluate, then the first two of them alone.
WORKER = """
import os, sys
import torch
import torch.distributed as dist

torch.set_num_threads(1)
folder, rank = sys.argv[1], int(os.environ["RANK"])
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    worker = WORKER.replace("{num}", str(NUM_SCENES))
    for ended in run_together(worker, [folder], [{"RANK": str(rank)} for rank in range(3)], folder):
        assert ended.code == 0, ended.said
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
import os, sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
folder, run, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
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
    for ended in run_together(
        ASKING_WORKER, [tmp_path, tmp_path / "run"], [{"RANK": str(rank)} for rank in range(2)], tmp_path
    ):
        assert ended.code == 0, ended.said
