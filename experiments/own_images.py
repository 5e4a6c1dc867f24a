"""Trains on a folder as `stam train FOLDER` does, as if nothing were known of it, beside results of a recipe.

    python experiments/own_images.py aid.tar --init deit_tiny.safetensors --out runs/own-aid \
        --beside experiments/results/aid-240s.json

Settings are chosen by the images and the machine, a teacher is fine-tuned first. Accuracy is on the
validation images, which choose nothing here: the weights after the last update are evaluated.

`--set '{"training": {"core_fraction": 0.6}}'` overrides what was chosen. `--policies learned learned:8`
evaluates the agent with each; the row of the first names the run.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from stam.config import from_plain, to_plain
from stam.evaluation import EvaluationPlan, evaluate, save_evaluation
from stam.learning import experiment
from stam.learning.fitting import default_core, fit, with_core
from stam.learning.recipes import GLIMPSE_SIZES, get_recipe
from stam.settings import RunConfig

SHOWN = (1, 2, 3, 5, 8, 12, 16, 21)


def row(name: str, accuracy: list[float], seconds: float) -> str:
    cells = [f"{100 * accuracy[n - 1]:.1f}" for n in SHOWN if n <= len(accuracy)]
    return f"| {' | '.join((name, *cells, f'{100 * sum(accuracy) / len(accuracy):.1f}', f'{seconds:.0f}'))} |"


def with_changes(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    plain = to_plain(config)
    for part, values in changes.items():
        plain[part] |= values
    return from_plain(RunConfig, plain)


def memory() -> str:
    if not torch.cuda.is_available():
        return ""
    return f"; {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of the GPU's memory at most"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="a folder of class folders, or tar shards")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", default="none", help="a DeiT's weights")
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--core", help="reencoding or causal; by default what `stam train` takes")
    parser.add_argument(
        "--actor-objective", help="actor-critic or gains; by default what `stam train` takes with the core"
    )
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seeds", type=int, default=2, help="first locations of each image in the evaluation"
    )
    parser.add_argument(
        "--glimpse-size", type=int, default=32, choices=GLIMPSE_SIZES, help="pixels of a glimpse's side"
    )
    parser.add_argument("--glimpses", type=int, help="by default those of the paper for this size: 21, 16, 7")
    parser.add_argument("--teacher-model", default="deit", help="deit, or timm:NAME")
    parser.add_argument("--policies", nargs="+", default=["learned"])
    parser.add_argument("--set", type=json.loads, default={}, help="settings instead of those chosen")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="results of experiments")
    given = parser.parse_args()
    core = given.core or default_core(given.device)
    config = with_core(get_recipe(given.recipe), core, actor_objective=given.actor_objective)
    image_size, most, _ = GLIMPSE_SIZES[given.glimpse_size]
    given.glimpses = given.glimpses or most
    agent_config = dataclasses.replace(config.agent, image_size=image_size, glimpse_size=given.glimpse_size)
    config = dataclasses.replace(
        config,
        init=given.init,
        start_from_teacher=given.teacher_model == "deit",
        agent=agent_config,
        data=dataclasses.replace(config.data, path=given.data, num_workers=given.workers),
        training=dataclasses.replace(
            config.training,
            device=given.device,
            seed=given.seed,
            num_glimpses=given.glimpses,
            feature_weight=config.training.feature_weight if given.teacher_model == "deit" else 0.0,
        ),
        teacher_training=dataclasses.replace(
            config.teacher_training, device=given.device, model=given.teacher_model
        ),
    )
    began = time.monotonic()
    fitted = fit(config, given.minutes)
    chosen = with_changes(fitted.choice.config, given.set)
    expected = fitted.expected(chosen)
    for line in (*fitted.choice.reasons, fitted.note):
        print(f"  {line}", flush=True)
    print(f"looked and timed in {time.monotonic() - began:.0f} s; {chosen.agent.core} core, {given.device}")
    print(
        f"expected: {expected.agent:.0f} s for the agent, {expected.teacher:.0f} s for the teacher",
        flush=True,
    )
    begun = time.monotonic()
    agent = experiment.begin(
        chosen, given.out, given.recipe, splits=fitted.splits, fit_to_time=fitted.fit_to_time(chosen)
    )
    seconds, trained = time.monotonic() - began, time.monotonic() - begun
    print(f"trained in {trained:.0f} s, {seconds:.0f} s in all{memory()}", flush=True)
    settings = {"seconds": seconds, "minutes": given.minutes, "core": chosen.agent.core, "set": given.set}
    # as experiments/zoo.py has it, whose tables take such results: without looking at the data and timing
    settings |= {"recipe": "stam", "measured": {"seconds": trained}}
    head = ("", *map(str, (n for n in SHOWN if n <= given.glimpses)), "mean", "s")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for policy in given.policies:
        plan = EvaluationPlan(
            num_seeds=given.seeds,
            num_glimpses=given.glimpses,
            num_workers=given.workers,
            policy=policy,
            cost=False,
            most_timed=0,
        )
        found = evaluate(
            agent, fitted.splits.val, plan, source=Path(given.data).name, name=policy, settings=settings
        )
        save_evaluation(found, given.out / f"own-images-{policy.replace(':', '-')}.json")
        accuracy = list(found.accuracy.ensemble.top1.mean)
        print(row(f"{given.out.name}: {chosen.agent.core}, {policy}", accuracy, seconds), flush=True)
    for file in given.beside:
        for result in json.loads(file.read_text()):
            print(row(f"{file.stem}: {result['name']}", result["mean"], result["seconds"]))


if __name__ == "__main__":
    main()
