"""Writes the tables and pictures of docs/zoo.md from the results of experiments/zoo.py.

    python experiments/zoo_tables.py                            # prints the tables
    python experiments/zoo_tables.py --write                    # writes docs/zoo.md and docs/images/zoo-*.png
    python experiments/zoo_tables.py --write --looking FOLDER   # and FOLDER/NAME.png: systems looking

Results are files NAME.json and NAME-random.json in experiments/results/zoo/DATASET, as experiments/zoo.py
leaves them: clutter (cluttered translated MNIST), imagenette and aid. What is written stands between marks
in the page, such as `<!-- results: clutter -->` and `<!-- end of results: clutter -->`.
"""

import argparse
import re
import shutil
from pathlib import Path

from stam.evaluation import Evaluation, compare, load_evaluation
from stam.evaluation.comparison import PUBLISHED, system_of
from stam.files import save_content
from stam.show.figures import comparisons, to_bytes
from stam.zoo import TITLES

ROOT = Path(__file__).parent.parent
RESULTS, PAGE, PICTURES = ROOT / "experiments/results/zoo", ROOT / "docs/zoo.md", ROOT / "docs/images"
CLUTTER, RANDOM, EVEN, STAM = "clutter", "-random", "stn-even", "stam"
DATASETS = {CLUTTER: "cluttered MNIST", "imagenette": "Imagenette", "aid": "AID"}
ERRORS = {  # in per cent on cluttered translated MNIST of 60 pixels with six glimpses, and whose
    "ram": "4.08 (paper), 3.33 (re-implementation)",
    "dram": "2.75 (re-implementation)",
}
ON_IMAGENET = {row.method: row for row in PUBLISHED["imagenet"]}

Results = dict[str, Evaluation]


def results_in(folder: Path) -> Results:
    """Returns the results of a data set by name: the zoo's in its own order, then others."""
    found = {path.stem: load_evaluation(path) for path in sorted(folder.glob("*.json"))}
    order = [name for system in TITLES for name in (system, EVEN if system == "stn" else system)]
    order = [*dict.fromkeys(order), STAM]
    known = [name for each in order for name in (each, each + RANDOM) if name in found]
    return {name: found[name] for name in (*known, *(each for each in found if each not in known))}


def title(name: str, evaluation: Evaluation) -> str:
    """Returns what a result is called: a system as its paper writes it, an agent of ours with its name."""
    if name == EVEN:
        return "STN without its sampler"
    if name == STAM:
        return "STAM"
    return TITLES.get(name) or f"{system_of(evaluation)}, trained longer (`{name}`)"


def accuracy(evaluation: Evaluation) -> float:
    """Returns the accuracy with all looks, in per cent."""
    return 100 * evaluation.accuracy.ensemble.top1.mean[-1]


def measure(dataset: str, evaluation: Evaluation) -> float:
    """Returns what a data set is judged by: the error on digits, the accuracy on photographs."""
    return 100 - accuracy(evaluation) if dataset == CLUTTER else accuracy(evaluation)


def share_of_scene(evaluation: Evaluation) -> str:
    """Returns the pixels with all looks as a share of the scene's; several scales may be more than all."""
    height, width = evaluation.image_size
    return f"{100 * evaluation.pixels[-1] / (height * width):.0f}%"


def published(dataset: str, name: str) -> str:
    """Returns the published figure that stands beside ours."""
    if dataset == CLUTTER:
        return ERRORS.get(name, "")
    row = ON_IMAGENET.get(TITLES.get(name, ""))
    return "" if row is None else f"{100 * row.accuracy:.2f}"


def table(dataset: str, results: Results) -> str:
    """Returns one row for each system: the paper's columns, and the random policy beside its own."""
    error = dataset == CLUTTER
    kind = "error" if error else "accuracy"
    where = "published error (%)" if error else "published on ImageNet (%)"
    head = ["system", "complete image to attend?", "to classify?", "pixels", "of the scene", f"{kind} (%)"]
    rows = [[*head, "random places (%)", where, "trained (s)"]]
    rows.append([":--", ":-:", ":-:", *["--:"] * (len(rows[0]) - 3)])
    for name, found in results.items():
        if name.endswith(RANDOM):
            continue
        answers = ["yes" if each else "no" for each in (found.whole_to_attend, found.whole_to_classify)]
        other = results.get(name + RANDOM)
        random = "" if other is None else f"{measure(dataset, other):.2f}"
        seconds = found.settings.get("measured", {}).get("seconds")
        shown = [f"{found.pixels[-1]:,}", share_of_scene(found), f"{measure(dataset, found):.2f}", random]
        shown.append(published(dataset, name))
        trained = "" if seconds is None else f"{seconds:.0f}"
        rows.append([title(name, found), *answers, *shown, trained])
    return lines(rows)


def lines(rows: list[list[str]]) -> str:
    """Returns rows as Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def checks(results: Results) -> str:
    """Returns what each system had to show on digits, what it showed, and whether that is enough."""
    error = {name: 100 - accuracy(found) for name, found in results.items()}
    rows = [["system", "should", "measured error (%)", "reached?"], [":--", ":--", ":--", ":-:"]]

    def add(name: str, should: str, limit: float | None, beside: str) -> None:
        if name in error and limit is not None:
            reached = "yes" if error[name] <= limit else "no"
            rows.append([TITLES[name], should, f"{error[name]:.2f}{beside}", reached])

    add("ram", "at most 4.1", 4.1, "")
    limit = min(2.8, error.get("ram", 2.8))
    add("dram", "at most 2.8, and better than RAM", limit, "")
    for name, what in (
        ("gfnet", "random crops"),
        ("saccader", "a random order"),
        ("tnet", "random cells"),
        ("patchdrop", "as many random gates"),
    ):
        other = error.get(name + RANDOM)
        below = None if other is None else other - 1e-9
        add(name, f"better than {what}", below, "" if other is None else f"; {what}: {other:.2f}")
    even = error.get(EVEN)
    half, beside = (None, "") if even is None else (even / 2, f"; without the sampler: {even:.2f}")
    add("stn", "at most half of the same network's without its sampler", half, beside)
    return lines(rows)


def figures_of(name: str, every: dict[str, Results]) -> str:
    """Returns a system's figures on all data sets in one line, the published ones beside them."""
    parts = []
    for dataset, results in every.items():
        if name not in results:
            continue
        found, kind = results[name], "error" if dataset == CLUTTER else "accuracy"
        words = f"{measure(dataset, found):.2f}% {kind} on {DATASETS.get(dataset, dataset)}"
        known = ERRORS.get(name) if dataset == CLUTTER else None
        parts.append(f"{words} at {found.pixels[-1]:,} pixels" + (f" (published: {known})" if known else ""))
    row = ON_IMAGENET.get(TITLES[name])
    if row is not None:
        parts.append(f"published on ImageNet: {100 * row.accuracy:.2f}% accuracy at {row.pixels:,} pixels")
    return f"Figures: {'; '.join(parts)}.\n" if parts else ""


def curves(dataset: str, results: Results, folder: Path) -> Path:
    """Draws accuracy over pixels, every system as a curve or a point."""
    shown = {name: found for name, found in results.items() if not name.endswith(RANDOM)}
    names = [title(name, found).replace("`", "") for name, found in shown.items()]
    path = folder / f"zoo-{dataset}.png"
    drawn = comparisons.curves(compare(list(shown.values()), names), "pixels")
    save_content(path, to_bytes(drawn, "png"))
    return path


def put(text: str, name: str, content: str) -> str:
    """Returns a page with other content between the marks of that name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{PAGE} has no place for {name}: put in '{begin.strip()}' and '{end}'")
    return f"{before}{begin}{content}{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--images", type=Path, default=PICTURES, help="the page's folder of pictures")
    parser.add_argument("--looking", type=Path, help="a folder with pictures NAME.png of systems looking")
    parser.add_argument("--write", action="store_true", help="into the page and its pictures")
    given = parser.parse_args()
    datasets = [name for name in DATASETS if any((given.results / name).glob("*.json"))]
    if not datasets:
        parser.error(f"no results in {given.results}: experiments/zoo.py makes them")
    every = {dataset: results_in(given.results / dataset) for dataset in datasets}
    parts = {f"results: {dataset}": table(dataset, results) for dataset, results in every.items()}
    if CLUTTER in every:
        parts["checks"] = checks(every[CLUTTER])
    parts |= {f"figures: {name}": figures_of(name, every) for name in TITLES}
    for name, text in parts.items():
        print(f"{name}\n\n{text}")
    if not given.write:
        return
    for dataset, results in every.items():
        path = curves(dataset, results, given.images)
        parts[f"results: {dataset}"] += (
            f"\n![Accuracy over pixels on {DATASETS[dataset]}](images/{path.name})\n"
        )
    for name in TITLES:
        picture = given.images / f"zoo-{name}.png"
        if given.looking is not None and (given.looking / f"{name}.png").is_file():
            shutil.copyfile(given.looking / f"{name}.png", picture)
        if picture.is_file():
            parts[f"figures: {name}"] += f"\n![{TITLES[name]} looking](images/{picture.name})\n"
    page = given.page.read_text()
    for name, text in parts.items():
        page = put(page, name, text)
    save_content(given.page, re.sub(r"\n{3,}", "\n\n", page))


if __name__ == "__main__":
    main()
