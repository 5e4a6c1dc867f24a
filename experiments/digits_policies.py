"""Trains agents with learned and fixed policies from the same start on cluttered digits, over several seeds.

    python experiments/digits_policies.py --out runs/digits-policies --processes 12

The start is a core that has seen random glimpses only, so it favours no order, or another one (`--start`).
All agents see scenes from the same sets and take the same number of updates. `gains` is a learned policy too,
whose actor learns from what every location is worth (`actor_objective`). Accuracy is on 2,000 test scenes
(`--test-set`), over `--eval-seeds` first locations each. Those of actor-critic were chosen on other scenes
(`pretrain_digits_causal.py`), those of gains on `--test-set 0`.
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from pretrain_digits import as_images, load_scenes
from pretrain_digits_causal import EPOCHS, RATES, learn, stage
from torch import Tensor

import stam
from stam.learning.loop import Place
from stam.weights import save_agent, start_agent

SHOWN = (1, 2, 4, 6, 8, 10, 12, 14)
GAINS = "gains"


def run_one(task: dict[str, Any]) -> dict[str, Any]:
    """Trains one agent and returns its curve."""
    torch.set_num_threads(1)
    out = Path(task["out"])
    start, device, size = str(out / "start"), task["device"], task["batch_size"]
    settings = {"num_glimpses": 14, "seed": task["seed"]} | RATES | task["settings"]
    policy, of_agent = task["policy"], {}
    if policy == GAINS:
        policy, of_agent = "learned", {"actor": "joint", "actor_width": 512}
        settings |= {"actor_objective": GAINS} | task["gains_settings"]
    learner, _ = stage(start, device, policy, size, of_agent, **settings)
    scenes = {name: part.to(learner.device) for name, part in torch.load(out / "scenes.pt").items()}
    drawn = torch.Generator(learner.device).manual_seed(task["seed"])
    began = time.monotonic()
    for batch in range(task["batches"]):
        chosen = torch.randint(len(scenes["grey"]), (size,), device=learner.device, generator=drawn)
        images, labels = as_images(scenes["grey"][chosen]), scenes["labels"][chosen]
        learner.learn_from(images, labels, Place(EPOCHS * batch // task["batches"], batch, False))
    seconds = time.monotonic() - began
    agent = learner.agent_to_use.eval()
    curves = [
        accuracy(agent, scenes["test_grey"], scenes["test_labels"], seed)
        for seed in range(task["eval_seeds"])
    ]
    save_agent(agent, out / f"{task['policy']}-{task['seed']}")
    curve = [statistics.mean(values) for values in zip(*curves, strict=True)]
    print(
        f"{task['policy']} {task['seed']}: {100 * curve[7]:.1f} after 8 glimpses, {seconds:.0f} s", flush=True
    )
    return {key: task[key] for key in ("policy", "seed")} | {"curve": curve, "seconds": seconds}


@torch.no_grad()
def accuracy(agent: stam.Agent, grey: Tensor, labels: Tensor, seed: int) -> list[float]:
    """Returns the accuracy after each glimpse, from first locations drawn by a seed."""
    generator = torch.Generator().manual_seed(seed)
    traces = [agent.look(as_images(part), 14, generator=generator) for part in grey.split(1000)]
    right = torch.cat([trace.predictions for trace in traces]) == labels[:, None]
    return right.float().mean(dim=0).tolist()


def prepare_start(given: argparse.Namespace) -> None:
    """Paints the scenes and trains the core that all agents start from."""
    torch.manual_seed(0)
    size = given.batch_size
    learner, config = stage(
        "package:digits-core", given.device, "random", size, num_glimpses=16, base_lr=6e-4
    )
    # other training scenes than those of seed 0
    grey, labels = load_scenes("train", range(100, 100 + given.num_sets), given.num_scenes, learner.device)
    test_grey, test_labels = load_scenes(
        "test", range(given.test_set, given.test_set + 1), min(2000, given.num_scenes), learner.device
    )
    if given.start is None:
        core = learn(learner, grey, labels, size, given.random_seconds)
    else:
        core = start_agent(given.start, config.agent).eval()
    save_agent(core, given.out / "start")
    scenes = {"grey": grey, "labels": labels, "test_grey": test_grey, "test_labels": test_labels}
    torch.save({name: part.cpu() for name, part in scenes.items()}, given.out / "scenes.pt")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policies", nargs="+", default=["learned", GAINS, "random", "plus", "spiral"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--eval-seeds", type=int, default=10)
    parser.add_argument("--start", help="a core to start from, such as package:digits-causal-core")
    parser.add_argument("--random-seconds", type=float, default=60)
    parser.add_argument("--settings", type=json.loads, default={}, help="of the training, as JSON")
    parser.add_argument(
        "--gains-settings",
        type=json.loads,
        default={"actor_steps": 64, "actor_lr": 5e-3},
        help="settings that `gains` has instead, as JSON",
    )
    parser.add_argument("--batches", type=int, default=1500, help="updates of each agent")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--num-sets", type=int, default=32, help="sets of training scenes")
    parser.add_argument("--num-scenes", type=int, default=5000, help="scenes of each")
    parser.add_argument("--test-set", type=int, default=0, help="scenes to test on")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    prepare_start(given)
    shared = ("device", "batch_size", "batches", "eval_seeds", "settings", "gains_settings")
    same = {key: getattr(given, key) for key in shared}
    tasks = [
        {"out": str(given.out), "policy": policy, "seed": seed} | same
        for policy in given.policies
        for seed in range(given.seeds)
    ]
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(run_one, tasks))
    (given.out / "results.json").write_text(json.dumps(results, indent=1))
    print(f"{'accuracy % after':<18}" + "".join(f"{n:>13}" for n in SHOWN))
    for policy in given.policies:
        curves = [result["curve"] for result in results if result["policy"] == policy]
        cells = []
        for n in SHOWN:
            values = [100 * curve[n - 1] for curve in curves]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):>7.1f} ± {spread:.1f}")
        print(f"{policy:<18}" + "".join(f"{cell:>13}" for cell in cells))


if __name__ == "__main__":
    main()
