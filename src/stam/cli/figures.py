"""`stam figures`: every picture of a run, and its report."""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from stam.cli.parsing import next_command, parse
from stam.cli.processes import processes
from stam.errors import require_choice, require_package
from stam.evaluation import (
    evaluated,
    examples_path,
    figures_folder,
    load_evaluation,
    load_examples,
    mistakes_path,
    result_suffix,
)
from stam.evaluation.opening import REPORT_FILE
from stam.files import save_content
from stam.learning.runs import read_metrics
from stam.weights.locate import find_home

KINDS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Arguments:
    """What to draw.

    Attributes:
        run: A run folder, or another agent as stam evaluate takes it; it is evaluated first if that was not
            done yet.
        evaluation: Another result of `stam evaluate` than the run's own.
        kinds: Kinds of files: png, svg, pdf.
        json: Print the paths as JSON.
    """

    run: tyro.conf.Positional[str]
    evaluation: Path | None = None
    kinds: tuple[str, ...] = ("png", "svg")
    json: bool = False


def run(arguments: list[str]) -> None:
    """Runs the command."""
    given = parse(Arguments, "figures", arguments)
    for kind in given.kinds:
        require_choice("kind", kind, KINDS)
    require_package("matplotlib", extra="figures")
    from stam.show.animations import animation_bytes
    from stam.show.figures import answer_figures, evaluation_figures, example_figures, save_figures, scenes
    from stam.show.report import run_report

    with processes("auto") as device:
        path = evaluated(given.run, device, given.evaluation)
    home = find_home(given.run)
    evaluation = load_evaluation(path)
    examples, mistakes = (
        load_examples(beside(path)) if beside(path).is_file() else []
        for beside in (examples_path, mistakes_path)
    )
    metrics = read_metrics(home / "metrics.jsonl")
    folder = figures_folder(path, home)
    pictures = evaluation_figures(evaluation, metrics) | answer_figures(evaluation, mistakes)
    pictures |= example_figures(examples)
    paths = save_figures(pictures, folder, given.kinds, progress=True)
    for number, example in enumerate(examples[:3], start=1):
        paths.append(folder / f"trajectory-{number}.gif")
        save_content(paths[-1], animation_bytes([scenes.story_of(example, 20)]))
    report = home / f"{Path(REPORT_FILE).stem}{result_suffix(path)}.html"
    save_content(report, run_report(evaluation, examples, metrics, mistakes))
    if given.json:
        print(json.dumps({"figures": [str(each) for each in paths], "report": str(report)}, indent=1))
    else:
        print(f"{len(paths)} pictures in {folder}\nreport: {report}")
    next_command(f"stam compare {given.run} OTHER_RUN --out comparison.html")
