"""`stam compare`: several runs side by side, as a page, a table, or numbers."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from stam.cli.parsing import next_command, parse
from stam.cli.processes import processes
from stam.errors import StamError, did_you_mean, require, require_package
from stam.evaluation import Comparison, compare, evaluated, load_evaluation
from stam.files import save_content

KINDS = (".html", ".md", ".csv", ".json")


@dataclass(frozen=True)
class Arguments:
    """What to compare.

    Attributes:
        runs: Run folders, or results of `stam evaluate`; a run that was not evaluated yet is evaluated first.
        out: Where to: a page (.html), the table (.md, .csv) or all numbers (.json); several are allowed.
        figures: A folder for the pictures of the page as .png and .svg.
        names: What to call the runs; by default what tells them apart.
        baseline: Which run the others are compared with; the first by default.
        against: SETTING=VALUE compares each run with its counterpart, such as consistency=none.
        published: Add the published methods of the paper's Table 1 for imagenet or fmow.
        accuracy: Reference accuracy of the table, as a share: 0.76 is 76 %.
        pixels: Reference number of pixels of the table.
        json: Print the whole result as JSON (docs/evaluation.md).
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    out: tuple[Path, ...] = ()
    figures: Path | None = None
    names: tuple[str, ...] = ()
    baseline: Path | None = None
    against: str | None = None
    published: str | None = None
    accuracy: float | None = None
    pixels: int | None = None
    json: bool = False


def run(arguments: list[str]) -> None:
    """Runs the command."""
    given = parse(Arguments, "compare", arguments)
    require(len(given.runs) >= 1, "give two or more runs: stam compare runs/a runs/b --out comparison.html")
    accuracy, pixels = given.accuracy, given.pixels
    require(
        accuracy is None or 0 < accuracy <= 1,
        f"--accuracy is a share above 0 and at most 1, got {accuracy}: 76 % is 0.76",
    )
    require(pixels is None or pixels >= 1, f"--pixels must be at least 1, got {pixels}")
    for path in given.out:
        if path.suffix not in KINDS:
            raise StamError(
                f"--out '{path}': the suffix says what to write; {did_you_mean(path.suffix, KINDS)}"
            )
        if not path.parent.is_dir():
            raise StamError(f"--out '{path}': the folder '{path.parent}' does not exist; make it first")
    if given.figures is not None or any(path.suffix == ".html" for path in given.out):
        require_package("matplotlib", extra="figures")
    baseline = 0
    if given.baseline is not None:
        if given.baseline not in given.runs:
            raise StamError(f"--baseline '{given.baseline}' is not among the runs: name one of them")
        baseline = given.runs.index(given.baseline)
    with processes("auto") as device:
        evaluations = [load_evaluation(evaluated(path, device)) for path in given.runs]
    comparison = compare(
        evaluations,
        given.names or None,
        baseline=baseline,
        against=given.against,
        published=given.published,
        accuracy=given.accuracy,
        pixels=given.pixels,
    )
    for path in given.out:
        save_content(path, rendered(comparison, path.suffix))
        print(f"wrote {path}", file=sys.stderr)
    if given.figures is not None:
        from stam.show.figures import comparison_figures, save_figures

        save_figures(comparison_figures(comparison), given.figures, progress=True)
        print(f"wrote {given.figures}", file=sys.stderr)
    print(comparison.to_json() if given.json else comparison.to_markdown().rstrip())
    if not given.out:
        next_command(f"stam compare {' '.join(map(str, given.runs))} --out comparison.html")
    else:
        agents = [path for path in given.runs if path.suffix != ".json"]  # a result is no agent
        if agents:
            next_command(f"stam serve {agents[0]}")


def rendered(comparison: Comparison, suffix: str) -> str:
    """Returns a comparison as a page, a table or numbers."""
    if suffix == ".html":
        from stam.show.report import comparison_report

        return comparison_report(comparison)
    if suffix == ".json":
        return comparison.to_json() + "\n"
    return comparison.to_markdown() if suffix == ".md" else comparison.to_csv()
