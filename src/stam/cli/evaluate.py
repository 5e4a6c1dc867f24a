"""`stam evaluate`: accuracy after each glimpse, early termination, calibration, cost."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from stam.cli.parsing import next_command, parse
from stam.cli.processes import processes
from stam.errors import StamError, require
from stam.evaluation import (
    Evaluation,
    EvaluationPlan,
    Opened,
    collect_examples,
    evaluate,
    load_evaluation,
    open_run,
    reader_for,
    save_evaluation,
    save_examples,
)
from stam.evaluation.opening import EVALUATION_FILE, EXAMPLES_FILE
from stam.files import make_folder
from stam.learning import distributed
from stam.model.policy import require_policy
from stam.weights.locate import find_home


@dataclass(frozen=True)
class Arguments:
    """What to evaluate, and how.

    Attributes:
        run: A run folder, a weights folder, an agent that ships (such as digits), or hub:NAME.
        data: What to evaluate on: digits, a folder of class folders, or tar shards. A run has its own.
        seeds: Seeds of the first location.
        glimpses: Glimpses to sense in each scene; all of them by default.
        policy: Who picks the locations: learned, random, plus, spiral or centre-out; by default its own.
            learned:8 lets the actor choose until 8 glimpses have been seen, then centre-out.
        teacher: A teacher's folder, a DeiT file, package:NAME or hub:NAME; the run's own by default.
        target_accuracy: Fit the threshold of early termination for this accuracy, as a share: 0.9 is 90 %.
        budget: Fit it for this mean number of glimpses instead.
        store: Keep the fitted threshold and temperature, and the policy they hold for, with the weights, for
            predict and live use.
        limit: Evaluate on so many scenes only, drawn at random, always the same.
        resize_size: The shorter side before the centre crop; by default as the agent's run says.
        batch_size: Scenes at once.
        workers: Processes that load images.
        device: auto, cpu, cuda or cuda:1.
        precision: Of the transformer: float32, bfloat16, or auto (bfloat16 on a GPU).
        fast: Use packed weights, fused kernels and CUDA graphs; --no-fast runs the plain modules.
        low_resolution: Show the teacher the whole image at low resolution too, as a competitor.
        cost: Count multiply-adds and measure latency.
        examples: Scenes to keep for pictures, glimpse by glimpse.
        out: Where the result goes; into the run folder by default, or into NAME-results for an agent that
            ships or comes from the hub.
        json: Print the whole result as JSON (docs/evaluation.md).
    """

    run: tyro.conf.Positional[str]
    data: str | None = None
    seeds: int = 10
    glimpses: int | None = None
    policy: str | None = None
    teacher: str | None = None
    target_accuracy: float | None = None
    budget: float | None = None
    store: bool = False
    limit: int | None = None
    resize_size: int | None = None
    batch_size: int = 64
    workers: int = 0
    device: str = "auto"
    precision: str = "auto"
    fast: bool = True
    low_resolution: bool = True
    cost: bool = True
    examples: int = 6
    out: Path | None = None
    json: bool = False


def run(arguments: list[str]) -> None:
    """Runs the command."""
    given = parse(Arguments, "evaluate", arguments)
    with processes(given.device) as device:
        evaluation, path = measure(given, device)
        if distributed.rank() != 0:
            return
        print(evaluation.to_json() if given.json else summary(evaluation))
        print(f"\nwrote {path}", file=sys.stderr)
        if path.name == EVALUATION_FILE and path.parent == find_home(given.run):
            next_command(f"stam figures {given.run}")
        else:
            next_command(f"stam figures {given.run} --evaluation {path}")


def measure(given: Arguments, device: torch.device) -> tuple[Evaluation, Path]:
    """Evaluates a run and writes the result; returns it with its path."""
    require(given.seeds >= 1, f"--seeds must be at least 1, got {given.seeds}")
    require(given.examples >= 0, f"--examples must be 0 or more, got {given.examples}")
    opened = open_run(given.run, given.data, given.teacher, given.limit, given.resize_size)
    if opened.note and distributed.rank() == 0:
        print(opened.note, file=sys.stderr)
    agent, own = opened.agent.to(device), opened.agent.config
    policy = given.policy or own.policy
    require_policy(policy)
    require(
        not given.store or policy == own.policy or (own.has_actor and policy.startswith("learned")),
        f"--store keeps what is fitted for the agent's own policy, {own.policy}: leave out --policy {policy}",
    )
    plan = EvaluationPlan(
        num_seeds=given.seeds,
        num_glimpses=given.glimpses,
        policy=given.policy,
        resize_size=opened.resize_size,
        batch_size=given.batch_size,
        num_workers=given.workers,
        target_accuracy=given.target_accuracy,
        budget=given.budget,
        low_resolution=given.low_resolution,
        cost=given.cost,
        precision=given.precision,
        fast=given.fast,
    )
    if given.store:
        opened.require_own()
    path = given.out or opened.path / result_name(opened, plan)
    if given.out is None and distributed.rank() == 0:
        make_folder(opened.path)
    require(not path.is_dir(), f"--out '{path}' is a folder: name a file, such as {path / EVALUATION_FILE}")
    if given.out is not None and not path.parent.is_dir():
        raise StamError(f"--out '{path}': the folder '{path.parent}' does not exist; make it first")
    evaluation = evaluate(
        agent,
        opened.scenes,
        plan,
        opened.teacher.to(device) if opened.teacher is not None else None,
        source=opened.source,
        name=opened.name,
        settings=opened.settings,
    )
    if distributed.rank() == 0:
        reader = reader_for(agent, opened.scenes, plan, progress=False)
        shown = collect_examples(agent, reader, given.examples, evaluation.num_glimpses, evaluation.policy)
        if given.store:
            fitted = evaluation.early_exit.fit.threshold, evaluation.calibration.temperature
            opened.store(*fitted, policy)
            print(f"stored threshold, temperature and policy in {opened.agent_path}", file=sys.stderr)
        if given.out is None:
            keep_earlier(path, evaluation)
        save_examples(shown, examples_path(path))
        save_evaluation(evaluation, path)
    return evaluation, path


def keep_earlier(path: Path, evaluation: Evaluation) -> None:
    """Moves a result aside that this one would replace, unless it answers the same question."""

    def question(found: Evaluation) -> tuple[object, ...]:
        return found.data, found.num_glimpses, found.seeds, found.precision

    if not path.is_file():
        return
    try:
        if question(load_evaluation(path)) == question(evaluation):
            return
    except StamError:
        pass  # nobody knows what it is
    number, aside = 1, path.with_name(f"{path.stem}-earlier.json")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.stem}-earlier-{number}.json")
    if examples_path(path).is_file():
        examples_path(path).replace(examples_path(aside))
    path.replace(aside)
    print(f"the result that was there is now {aside}", file=sys.stderr)


def result_name(opened: Opened, plan: EvaluationPlan) -> str:
    """Returns the result's file name: what is otherwise than the run's own is part of it."""
    parts = [Path(EVALUATION_FILE).stem]
    if plan.policy not in (None, opened.agent.config.policy):
        parts.append(str(plan.policy).replace(":", "-"))
    if not opened.own_data:
        parts.append(Path(opened.source).stem)
    return "-".join(parts) + ".json"


def examples_path(path: Path) -> Path:
    """Returns where the examples that belong to a result lie."""
    stem = path.stem.replace(Path(EVALUATION_FILE).stem, Path(EXAMPLES_FILE).stem, 1)
    return path.with_name((stem if stem != path.stem else f"{path.stem}-examples") + ".npz")


def summary(evaluation: Evaluation) -> str:
    """Returns the result as a short text."""
    data, grid = evaluation.data, evaluation.grid
    height, width = grid.glimpse_size
    top1, top5 = evaluation.accuracy.ensemble.top1, evaluation.accuracy.ensemble.top5
    low = evaluation.whole_image.low_resolution if evaluation.whole_image else ()
    lines = [
        f"{evaluation.name}: {data.num_scenes:,} scenes of {data.source}, {evaluation.way_of_looking}, "
        f"{len(evaluation.seeds)} seeds, glimpses of {height}x{width} pixels",
        "",
        "glimpses   pixels  scene %     top-1 %   (std)   top-5 %" + ("   low-res top-1 %" if low else ""),
    ]
    for n in _few(evaluation.num_glimpses):
        line = f"{n:8d} {evaluation.pixels[n - 1]:8,d} {100 * evaluation.share[n - 1]:8.1f}  "
        line += f"{100 * top1.mean[n - 1]:10.2f} {100 * top1.std[n - 1]:7.2f} {100 * top5.mean[n - 1]:9.2f}"
        lines.append(line + (f" {100 * low[n - 1].top1:17.2f}" if low else ""))
    lines.append("")
    if evaluation.whole_image is not None:
        lines.append(f"teacher, whole image    {100 * evaluation.whole_image.top1:.2f} %")
    fit, timing = evaluation.early_exit.fit, evaluation.early_exit.timing
    reached = "" if fit.reached else f" (the {fit.goal} asked for could not be reached)"
    lines.append(
        f"stopping when sure      {100 * fit.reported.accuracy:.2f} % with {fit.reported.mean_glimpses:.2f} "
        f"glimpses on average, threshold {fit.threshold:.4f}{reached}"
    )
    if timing is not None:
        lines.append(
            f"time that saves         {100 * timing.time_saved:.0f} % ({timing.all_seconds:.2f} s to "
            f"{timing.early_seconds:.2f} s for {timing.num_scenes} scenes on {timing.device}); "
            f"glimpses saved {100 * timing.glimpses_saved:.0f} %"
        )
    found = evaluation.calibration
    lines.append(
        f"calibration             temperature {found.temperature:.3f}, error {100 * found.before.ece:.2f} % "
        f"to {100 * found.after.ece:.2f} %"
    )
    if evaluation.cost is not None:
        cost = evaluation.cost
        each = ", ".join(
            f"{c.cumulative_ms[-1] / c.batch_size:.1f} ms at batch {c.batch_size}" for c in cost.latency
        )
        lines.append(
            f"cost of all glimpses    {cost.cumulative[-1] / 1e9:.3g} G multiply-adds a scene, {each} "
            f"({cost.latency[0].device})"
        )
    return "\n".join(lines)


def _few(most: int) -> list[int]:
    """Returns the few numbers of glimpses that a terminal shows."""
    return [n for n in (1, 2, 3, 5, 8, 12, 16, 21, 27, 35) if n < most] + [most]
