"""The page of a comparison."""

from html import escape

from stam.evaluation.comparison import TABLE_HEAD, TEST_HEAD, TEST_MEANING, Comparison, cells, cells_of_test
from stam.show.figures import DARK, LIGHT, comparison_figures
from stam.show.report.page import (
    BAND,
    Charts,
    Section,
    cards,
    count_of,
    download,
    number,
    page,
    paragraph,
    percent,
    table,
    wide_table,
)


def comparison_report(comparison: Comparison, title: str = "Comparison") -> str:
    """Returns the page of a comparison."""
    light, dark = (comparison_figures(comparison, theme) for theme in (LIGHT, DARK))
    first = comparison.evaluations[0].data
    runs, seen = count_of(len(comparison.names), "run"), count_of(first.num_scenes, "scene")
    lead = f"{runs} on {seen} of {first.source}."
    found = wide_table(TABLE_HEAD, map(cells, comparison.table), text_columns=(0, 1))
    tests = ""
    if comparison.tests:
        tests = paragraph(TEST_MEANING)
        tests += wide_table(TEST_HEAD, map(cells_of_test, comparison.tests), text_columns=(0, 1))
    sections = [
        Section("table", "Pixels and accuracy", found),
        Section("tests", "Paired tests", tests),
        Section("curves", "Curves", _curves(comparison, Charts(light, dark))),
        Section("runs", "Runs", _runs(comparison)),
    ]
    downloads = (
        download("table.md", comparison.to_markdown(), "text/markdown", "table as Markdown"),
        download("table.csv", comparison.to_csv(), "text/csv", "table as CSV"),
        download("comparison.json", comparison.to_json(), "application/json", "all numbers as JSON"),
    )
    return page(title, lead, "", sections, ", ".join(downloads))


def _curves(comparison: Comparison, charts: Charts) -> str:
    return cards(
        charts.card(
            "accuracy",
            f"Accuracy after each glimpse. {BAND}",
            _accuracy_table(comparison),
        ),
        charts.card(
            "differences",
            f"What each run gains over its baseline on the same images. {BAND}",
            _difference_tables(comparison),
        ),
        charts.card("accuracy-pixels", "The same accuracy against the pixels sensed."),
        charts.card("accuracy-share", "The same accuracy against the share of the scene sensed."),
        charts.card(
            "early-exit",
            "Each run stops looking when it is sure; the threshold rises along the curve.",
            _sweep_table(comparison),
        ),
    )


def _accuracy_table(comparison: Comparison) -> str:
    head = ["glimpses"]
    for name in comparison.names:
        head += [f"{name}, %", "from %", "to %"]
    rows = []
    for n in range(max(evaluation.num_glimpses for evaluation in comparison.evaluations)):
        row = [str(n + 1)]
        for evaluation in comparison.evaluations:
            curve = evaluation.accuracy.ensemble.top1
            within = n < evaluation.num_glimpses
            row += [
                number(values[n]) if within and values else ""
                for values in (curve.mean, curve.low, curve.high)
            ]
        rows.append(row)
    return table(head, rows)


def _difference_tables(comparison: Comparison) -> str:
    tables = []
    for each in comparison.differences:
        rows = []
        for n, share in enumerate(each.share):
            values = [f"{100 * part[n]:+.2f}" if part else "" for part in (each.mean, each.low, each.high)]
            rows.append([f"{100 * share:.1f}", *values, number(each.std[n])])
        title = escape(f"{each.name} minus {each.baseline}")
        head = ["scene %", "points", "from", "to", "std of seeds"]
        tables.append(f"<p>{title}</p>{table(head, rows)}")
    return "".join(tables)


def _sweep_table(comparison: Comparison) -> str:
    head = ["threshold"]
    for name in comparison.names:
        head += [f"{name}: glimpses", "accuracy %"]
    sweeps = [evaluation.early_exit.calibrated for evaluation in comparison.evaluations]
    rows = []
    for k, threshold in enumerate(sweeps[0].thresholds):
        row = [f"{threshold:g}"]
        for sweep in sweeps:
            row += [f"{sweep.mean_glimpses[k]:.2f}", number(sweep.accuracy[k])]
        rows.append(row)
    return table(head, rows)


def _runs(comparison: Comparison) -> str:
    rows = []
    for name, evaluation in zip(comparison.names, comparison.evaluations, strict=True):
        fit, timing = evaluation.early_exit.fit.reported, evaluation.early_exit.timing
        guesses = evaluation.is_at_chance
        whole, cost, found = evaluation.whole_image, evaluation.cost, evaluation.calibration
        rows.append(
            [
                name,
                evaluation.name,
                evaluation.way_of_looking,
                percent(evaluation.accuracy.ensemble.top1.mean[-1]),
                "" if whole is None else percent(whole.top1),
                "at chance" if guesses else f"{percent(fit.accuracy)} at {fit.mean_glimpses:.1f}",
                "" if timing is None or guesses else percent(timing.time_saved, 0),
                f"{100 * found.before.ece:.1f} → {100 * found.after.ece:.1f} %",
                "" if cost is None else f"{cost.cumulative[-1] / 1e9:.3g} G",
            ]
        )
    head = [
        "run",
        "folder",
        "looking",
        "all glimpses",
        "teacher",
        "with early exit",
        "time saved",
        "calibration error",
        "multiply-adds, all steps",
    ]
    return wide_table(head, rows, text_columns=(0, 1, 2))
