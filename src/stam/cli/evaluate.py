"""`stam evaluate`: accuracy after each glimpse, early exit, calibration, cost."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import tyro

from stam.cli.agents import names_agent
from stam.cli.parsing import next_command, parse, split_positionals
from stam.cli.processes import processes
from stam.errors import require
from stam.evaluation import (
    Evaluation,
    EvaluationPlan,
    evaluate_run,
    figures_folder,
    load_examples,
    mistakes_path,
)
from stam.evaluation.intervals import LEVEL
from stam.evaluation.opening import EVALUATION_FILE
from stam.evaluation.outcomes import TOP
from stam.learning import distributed
from stam.weights.locate import find_home

_NUM_WEAKEST, _NUM_CONFUSED = 5, 3


@dataclass(frozen=True)
class Arguments:
    """What to evaluate, and how.

    Attributes:
        run: A run folder, a weights folder, an agent that ships (such as digits), or hub:NAME.
        data: What to evaluate on: digits, a folder of class folders, a CSV file of paths and labels, or tar
            shards. A run has its own.
        seeds: Seeds of the first location.
        glimpses: Glimpses to sense in each scene; all of them by default.
        policy: Who picks the locations: learned, random, plus, spiral or centre-out; by default its own.
            learned:8 lets the actor choose until 8 glimpses have been seen, then centre-out.
        teacher: A teacher's folder, a DeiT file, package:NAME or hub:NAME; the run's own by default.
        target_accuracy: Fit the threshold of early exit for this accuracy, as a share: 0.9 is 90 %.
        budget: Fit it for this mean number of glimpses instead.
        store: Keep the fitted threshold and temperature, and the policy they hold for, with the weights, for
            predict and live use.
        first_locations: Measure where looking had better begin; --store keeps it with the weights, for
            predict and live use.
        limit: Evaluate on so many scenes only, drawn at random, always the same.
        resize_size: The shorter side before the centre crop; by default as the agent was trained.
        batch_size: Scenes at once.
        workers: Processes that load images.
        device: auto, cpu, cuda or cuda:1.
        precision: Of the transformer: float32, bfloat16, or auto: bfloat16 for an agent on a GPU, else
            float32.
        fast: Use packed weights, fused kernels and CUDA graphs; --no-fast runs the plain modules.
        low_resolution: Show the teacher the whole image at low resolution too, as a competitor.
        cost: Count multiply-adds and measure latency.
        examples: Scenes to keep for pictures, glimpse by glimpse.
        mistakes: Wrong answers to keep, those of highest confidence.
        figures: Draw confusion.png and mistakes.png into the folder that stam figures fills, where matplotlib
            is installed.
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
    first_locations: bool = False
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
    mistakes: int = 8
    figures: bool = True
    out: Path | None = None
    json: bool = False


def run(arguments: list[str]) -> None:
    """Runs the command."""
    given = parse(Arguments, "evaluate", with_data(arguments))
    with processes(given.device) as device:
        evaluation, path = evaluate_run(
            given.run,
            plan_of(given),
            device,
            data=given.data,
            teacher=given.teacher,
            limit=given.limit,
            num_examples=given.examples,
            store=given.store,
            out=given.out,
        )
        if distributed.rank() != 0:
            return
        print(evaluation.to_json() if given.json else summary(evaluation))
        drawn = draw(evaluation, path, find_home(given.run)) if given.figures else []
        print(f"\nwrote {', '.join(map(str, (path, *drawn)))}", file=sys.stderr)
        if path.name == EVALUATION_FILE and path.parent == find_home(given.run):
            next_command(f"stam figures {given.run}")
        else:
            next_command(f"stam figures {given.run} --evaluation {path}")


def with_data(arguments: list[str]) -> list[str]:
    """Returns the arguments with data that was named beside the run, before it or after it, as --data."""
    words, options = split_positionals(arguments, most=2, cls=Arguments)
    if len(words) < 2:
        return arguments
    require(
        not any(option.split("=")[0] == "--data" for option in options),
        f"data is named twice, '{words[1]}' and --data: leave one out",
    )
    run, data = words[::-1] if not names_agent(words[0]) and names_agent(words[1]) else words
    return [run, "--data", data, *options]


def plan_of(given: Arguments) -> EvaluationPlan:
    """Returns what the arguments say to measure."""
    require(given.seeds >= 1, f"--seeds must be at least 1, got {given.seeds}")
    for name, count in (("examples", given.examples), ("mistakes", given.mistakes)):
        require(count >= 0, f"--{name} must be 0 or more, got {count}")
    return EvaluationPlan(
        num_seeds=given.seeds,
        num_glimpses=given.glimpses,
        policy=given.policy,
        resize_size=given.resize_size,
        batch_size=given.batch_size,
        num_workers=given.workers,
        target_accuracy=given.target_accuracy,
        budget=given.budget,
        low_resolution=given.low_resolution,
        cost=given.cost,
        num_mistakes=given.mistakes,
        first_locations=given.first_locations,
        precision=given.precision,
        fast=given.fast,
    )


def summary(evaluation: Evaluation) -> str:
    """Returns the result as a short text."""
    data = evaluation.data
    top1, top5 = evaluation.accuracy.ensemble.top1, evaluation.accuracy.ensemble.top5
    low = evaluation.whole_image.low_resolution if evaluation.whole_image else ()
    with_top5 = len(data.classes) > TOP  # among five classes each answer is among the first five
    lines = [
        f"{evaluation.name}: {data.num_scenes:,} scenes of {data.source}, {evaluation.way_of_looking}, "
        f"{len(evaluation.seeds)} seeds, {evaluation.glimpse_name}",
        "",
        f"glimpses   pixels  scene %   top-1 %   {LEVEL:.0%} interval"
        + (f"   top-{TOP} %" if with_top5 else "")
        + ("   low-res top-1 %" if low else ""),
    ]
    for n in _few(evaluation.num_glimpses):
        line = f"{n:8d} {evaluation.pixels[n - 1]:8,d} {100 * evaluation.share[n - 1]:8.1f} "
        interval = f"{100 * top1.low[n - 1]:.2f} to {100 * top1.high[n - 1]:.2f}"
        line += f"{100 * top1.mean[n - 1]:9.2f} {interval:>14}"
        line += f" {100 * top5.mean[n - 1]:9.2f}" if with_top5 else ""
        lines.append(line + (f" {100 * low[n - 1].top1:17.2f}" if low else ""))
    lines.append("")
    if evaluation.whole_image is not None:
        lines.append(f"teacher, whole image    {100 * evaluation.whole_image.top1:.2f} %")
    lines += _answers(evaluation) + _early_exit(evaluation) + _first_location(evaluation)
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


def _answers(evaluation: Evaluation) -> list[str]:
    """Returns what a classifier is first asked for: is it above chance, which classes does it confuse."""
    answers, classes = evaluation.answers, evaluation.data.classes
    if answers is None:
        return []
    lines = []
    if evaluation.is_at_chance:
        lines.append(f"AT CHANCE               {evaluation.chance_in_words()}")
    found, counts = answers.per_class, answers.confusion
    weak = [
        f"{classes[label]} {100 * found.accuracy[label]:.1f} % of {found.num_scenes[label]:,}"
        for label in found.weakest(_NUM_WEAKEST)
    ]
    lines.append(f"weakest classes         {', '.join(weak)}")
    confused = [
        f"{classes[truth]} as {classes[answer]} {times:,} of {counts.num_answers[truth]:,}"
        for truth, answer, times in counts.mistaken(_NUM_CONFUSED)
    ]
    if confused:
        lines.append(f"most confused           {', '.join(confused)}")
    if answers.mistakes:
        worst = answers.mistakes[0]
        lines.append(
            f"worst mistake           {worst.image}: {classes[worst.label]} taken for "
            f"{classes[worst.prediction]} with {100 * worst.confidence:.1f} %"
        )
    return lines


def _early_exit(evaluation: Evaluation) -> list[str]:
    """Returns what early exit gives; where the answers are at chance there is nothing to save."""
    if evaluation.is_at_chance:
        return ["with early exit         not reported: a guess needs no glimpse at all"]
    fit, timing = evaluation.early_exit.fit, evaluation.early_exit.timing
    reached = "" if fit.reached else f" (the {fit.goal} asked for could not be reached)"
    lines = [
        f"with early exit         {100 * fit.reported.accuracy:.2f} % with {fit.reported.mean_glimpses:.2f} "
        f"glimpses on average, threshold {fit.threshold:.4f}{reached}"
    ]
    if timing is not None:
        lines.append(
            f"time saved              {100 * timing.time_saved:.0f} % ({timing.all_seconds:.2f} s to "
            f"{timing.early_seconds:.2f} s for {timing.num_scenes} scenes on {timing.device}); "
            f"glimpses saved {100 * timing.glimpses_saved:.0f} %"
        )
    return lines


def _first_location(evaluation: Evaluation) -> list[str]:
    """Returns where looking had better begin, if that was measured."""
    found, grid = evaluation.first_locations, evaluation.grid
    if found is None or grid is None:
        return []
    gain = (
        f"{100 * found.gain:+.1f} points over the first {found.num_glimpses} glimpses ({LEVEL:.0%} interval "
        f"{100 * found.low:+.1f} to {100 * found.high:+.1f}, {found.num_tested:,} other images)"
    )
    present, best = grid.row_column(found.present), grid.row_column(found.best)
    if best == present:
        said = f"{present}, the present one, is the best"
    elif found.chosen == found.best:
        said = f"{best} instead of {present}: {gain}"
    else:
        said = f"{present} as before; the best of {found.num_chosen:,} images, {best}, has {gain}: noise"
    return [f"first location          {said}"]


def draw(evaluation: Evaluation, path: Path, home: Path) -> list[Path]:
    """Draws what is looked at first, where matplotlib is installed; returns the files."""
    if find_spec("matplotlib") is None:
        print("no pictures: pip install 'stam-vision[figures]' draws them", file=sys.stderr)
        return []
    from stam.show.figures import answer_figures, save_figures

    kept = mistakes_path(path)
    mistakes = load_examples(kept) if kept.is_file() else []
    return save_figures(answer_figures(evaluation, mistakes), figures_folder(path, home), ("png",))


def _few(most: int) -> list[int]:
    """Returns the few numbers of glimpses that a terminal shows."""
    return [n for n in (1, 2, 3, 5, 8, 12, 16, 21, 27, 35) if n < most] + [most]
