"""`stam figures`: every picture of a run, and its report."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from stam.cli.evaluate import Arguments as EvaluateArguments
from stam.cli.evaluate import examples_path, measure
from stam.cli.parsing import next_command, parse
from stam.cli.processes import processes
from stam.errors import StamError, require_choice, require_package
from stam.evaluation import load_evaluation, load_examples
from stam.evaluation.opening import EVALUATION_FILE, REPORT_FILE
from stam.files import save_content
from stam.weights import MODEL_FILE, find_agent
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
    from stam.show.figures import evaluation_figures, example_figures, save_figures, scenes
    from stam.show.report import run_report

    path, home = evaluated(given.run, given.evaluation), find_home(given.run)
    evaluation = load_evaluation(path)
    examples = load_examples(examples_path(path)) if examples_path(path).is_file() else []
    metrics = read_metrics(home / "metrics.jsonl")
    suffix = path.stem.removeprefix(Path(EVALUATION_FILE).stem)
    folder = home / f"figures{suffix}"
    pictures = evaluation_figures(evaluation, metrics) | example_figures(examples)
    paths = save_figures(pictures, folder, given.kinds, progress=True)
    for number, example in enumerate(examples[:3], start=1):
        paths.append(folder / f"trajectory-{number}.gif")
        save_content(paths[-1], animation_bytes([scenes.story_of(example, 20)]))
    report = home / f"{Path(REPORT_FILE).stem}{suffix}.html"
    save_content(report, run_report(evaluation, examples, metrics))
    if given.json:
        print(json.dumps({"figures": [str(each) for each in paths], "report": str(report)}, indent=1))
    else:
        print(f"{len(paths)} pictures in {folder}\nreport: {report}")
    next_command(f"stam compare {given.run} OTHER_RUN --out comparison.html")


def evaluated(run: str | Path, given: Path | None = None) -> Path:
    """Returns the path of a run's evaluation, or the one given; a run that has none is evaluated now."""
    if given is not None:
        if not given.is_file():
            raise StamError(f"no evaluation at '{given}': stam evaluate makes one")
        return given
    if Path(run).is_file():
        return Path(run)
    agent = find_agent(run)
    path = agent.home / EVALUATION_FILE
    if path.is_file() and not agent.is_borrowed:
        if (agent.folder / MODEL_FILE).stat().st_mtime > path.stat().st_mtime:
            print(
                f"{run} was trained on since it was evaluated: stam evaluate {run} measures it anew",
                file=sys.stderr,
            )
    elif not path.is_file():
        print(f"{run} was not evaluated yet: doing that first", file=sys.stderr)
        with processes("auto") as device:
            measure(EvaluateArguments(str(run)), device)
    return path


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the metrics a training logged; none where it logged none."""
    if not path.is_file():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StamError(f"'{path}' is damaged: {error}") from error
