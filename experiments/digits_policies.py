"""Trains Learned, Random, Plus and Spiral agents from the same start on cluttered digits, over several seeds.

    python experiments/digits_policies.py --out runs/digits-policies --seeds 3 --epochs 36

All agents start from the package's digits core, see the same scenes in the same order and take the same
number of updates. Accuracy is on the 2,000 test scenes, over `--eval-seeds` first locations each.
"""

import argparse
import dataclasses
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stam.data import Splits, Subset, open_scenes
from stam.learning.recipes import get_recipe, vary
from stam.learning.runs import RunFolder
from stam.learning.training import train
from stam.learning.validation import validate
from stam.weights import open_teacher, start_agent


def run_one(task: dict[str, Any]) -> dict[str, Any]:
    """Trains one agent and returns its curve."""
    torch.set_num_threads(task["threads"])
    base = vary(get_recipe("digits"), policy=task["policy"])
    training = dataclasses.replace(
        base.training, **task["settings"], seed=task["seed"], validation_images=2000
    )
    splits = open_scenes("digits")
    if task["scenes"] is not None:
        some = np.arange(task["scenes"])
        splits = Splits(Subset(splits.train, some), Subset(splits.val, some), splits.record)
    classes = splits.train.classes
    agent_config = dataclasses.replace(base.agent, labels=classes, actor_width=256)
    data = dataclasses.replace(base.data, num_workers=1)  # many runs share the CPU cores
    config = dataclasses.replace(base, training=training, agent=agent_config, data=data)
    torch.manual_seed(task["seed"])
    agent = start_agent(config.init, config.agent)
    assert config.teacher is not None
    teacher = open_teacher(config.teacher, classes, config.agent)
    run = RunFolder.create(Path(task["out"]) / f"digits-{task['policy']}-{task['seed']}")
    run.write_record("digits", config, splits.record)
    began = time.monotonic()
    agent = train(run, config, agent, teacher, splits.train, splits.val)
    seconds = time.monotonic() - began
    curves = [validate(agent, config, splits.val, seed=seed) for seed in range(task["eval_seeds"])]
    curve = [statistics.mean(values) for values in zip(*curves, strict=True)]
    return {key: task[key] for key in ("policy", "seed")} | {"curve": curve, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policies", nargs="+", default=["learned", "random", "plus", "spiral"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--eval-seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=36)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--scenes", type=int, help="number of training and test scenes; all by default")
    arguments = parser.parse_args()
    settings = {
        "epochs": arguments.epochs,
        "batch_size": arguments.batch_size,
        "device": arguments.device,
        "validate_every": 10_000,
        "tau_epochs": max(1, arguments.epochs // 2),
        "num_glimpses": 14,
        "base_lr": 3e-4,
        "actor_lr": 2e-3,
        "critic_lr": 1e-3,
    }
    tasks = [
        {
            "out": str(arguments.out),
            "policy": policy,
            "seed": seed,
            "settings": settings,
            "eval_seeds": arguments.eval_seeds,
            "threads": arguments.threads,
            "scenes": arguments.scenes,
        }
        for policy in arguments.policies
        for seed in range(arguments.seeds)
    ]
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(run_one, tasks))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
    shown = [n for n in (1, 2, 4, 6, 8, 10, 12, 14, 16) if n <= len(results[0]["curve"])]
    print(f"{'accuracy % after':<28}" + "".join(f"{n:>7}" for n in shown) + "   seconds")
    for policy in arguments.policies:
        chosen = [result for result in results if result["policy"] == policy]
        means = [100 * statistics.mean(result["curve"][n - 1] for result in chosen) for n in shown]
        last = [100 * result["curve"][-1] for result in chosen]
        spread = statistics.stdev(last) if len(last) > 1 else 0.0
        seconds = statistics.mean(result["seconds"] for result in chosen)
        row = "".join(f"{mean:>7.1f}" for mean in means)
        print(f"{policy:<28}{row}   {seconds:>7.0f}   (std at the last {spread:.2f})")


if __name__ == "__main__":
    main()
