"""Writes the tables and pictures of docs/zoo.md from the results of experiments/zoo.py.

    python experiments/zoo_tables.py            # prints the tables
    python experiments/zoo_tables.py --write    # puts them into docs/zoo.md, pictures into docs/images

Results are files NAME.json and NAME-random.json in experiments/results/zoo/DATASET, as experiments/zoo.py
leaves them: clutter (cluttered translated MNIST), imagenette and aid.
"""

import argparse
from pathlib import Path

from stam.evaluation import Evaluation, compare, load_evaluation
from stam.files import save_content
from stam.show.figures import comparisons, to_bytes
from stam.zoo import TITLES

ROOT = Path(__file__).parent.parent
RESULTS, PAGE, PICTURES = ROOT / "experiments/results/zoo", ROOT / "docs/zoo.md", ROOT / "docs/images"
RANDOM = "-random"
EVEN = "stn-even"
PUBLISHED = {  # error in per cent on cluttered translated MNIST of 60 pixels, and whose
    "ram": "4.08 (paper); 3.3 (re-implementation)",
    "dram": "2.75 (re-implementation)",
}


def results_in(folder: Path) -> dict[str, Evaluation]:
    """Returns the results of a data set by name: the zoo's in its own order, then others."""
    found = {path.stem: load_evaluation(path) for path in sorted(folder.glob("*.json"))}
    order = [*TITLES, EVEN]
    known = [name for system in order for name in (system, system + RANDOM) if name in found]
    return {name: found[name] for name in (*known, *(each for each in found if each not in known))}


def title(name: str) -> str:
    return TITLES.get(name, "STN without its sampler" if name == EVEN else name)


def accuracy(evaluation: Evaluation) -> float:
    return 100 * evaluation.accuracy.ensemble.top1.mean[-1]


def table(dataset: str, results: dict[str, Evaluation]) -> str:
    """Returns one row for each system: the paper's columns, and the random policy beside its own."""
    error = dataset == "clutter"
    measure = "error" if error else "accuracy"
    head = [
        "system",
        "whole image to attend?",
        "to classify?",
        "pixels",
        f"{measure} (%)",
        "random places (%)",
    ]
    rows = [head + (["published error (%)"] if error else []) + ["trained (s)"]]
    rows.append([":--", ":-:", ":-:", *["--:"] * (len(rows[0]) - 3)])
    for name, found in results.items():
        if name.endswith(RANDOM):
            continue
        other = results.get(name + RANDOM)
        shown = [f"{100 - value if error else value:.2f}" for value in (accuracy(found),)]
        shown.append("" if other is None else f"{100 - accuracy(other) if error else accuracy(other):.2f}")
        if error:
            shown.append(PUBLISHED.get(name, ""))
        seconds = found.settings.get("measured", {}).get("seconds")
        answers = ["yes" if each else "no" for each in (found.whole_to_attend, found.whole_to_classify)]
        row = [title(name), *answers, f"{found.pixels[-1]:,}", *shown]
        rows.append([*row, "" if seconds is None else f"{seconds:.0f}"])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def picture(dataset: str, results: dict[str, Evaluation], folder: Path) -> Path:
    """Draws accuracy over pixels, every system as a curve or a point."""
    shown = {name: found for name, found in results.items() if not name.endswith(RANDOM)}
    comparison = compare(list(shown.values()), [title(name) for name in shown])
    path = folder / f"zoo-{dataset}.png"
    save_content(path, to_bytes(comparisons.curves(comparison, "pixels"), "png"))
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
    parser.add_argument("--write", action="store_true", help="into docs/zoo.md and docs/images")
    given = parser.parse_args()
    datasets = sorted(path.name for path in given.results.glob("*") if any(path.glob("*.json")))
    if not datasets:
        parser.error(f"no results in {given.results}: experiments/zoo.py makes them")
    page = PAGE.read_text()
    for dataset in datasets:
        results = results_in(given.results / dataset)
        written = table(dataset, results)
        print(f"{dataset}\n\n{written}")
        if given.write:
            path = picture(dataset, results, PICTURES)
            shown = f"\n![Accuracy over pixels on {dataset}](images/{path.name})\n"
            page = put(page, f"results: {dataset}", written + shown)
    if given.write:
        save_content(PAGE, page)


if __name__ == "__main__":
    main()
