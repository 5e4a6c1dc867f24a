"""The page of one run."""

from collections.abc import Mapping, Sequence
from typing import Any

from stam.evaluation.examples import Example
from stam.evaluation.results import Evaluation, Reliability
from stam.show.figures import DARK, LIGHT, answer_figures, evaluation_figures
from stam.show.report.page import (
    BAND,
    Charts,
    Section,
    cards,
    count_of,
    download,
    folded,
    number,
    page,
    paragraph,
    percent,
    table,
    tile,
)
from stam.show.report.strips import example_strip

_MOST_PAIRS = 100  # pairs of confused classes in the table


def run_report(
    evaluation: Evaluation,
    examples: Sequence[Example] = (),
    metrics: Sequence[Mapping[str, Any]] = (),
    mistakes: Sequence[Example] = (),
) -> str:
    """Returns the page of one run.

    Args:
        evaluation: What was measured.
        examples: Scenes to show glimpse by glimpse.
        metrics: The lines of the run's `metrics.jsonl`.
        mistakes: The scenes of its worst mistakes.
    """
    light, dark = (
        evaluation_figures(evaluation, metrics, theme) | answer_figures(evaluation, (), theme)
        for theme in (LIGHT, DARK)
    )
    charts = Charts(light, dark)
    sections = [
        Section("accuracy", "Accuracy", _accuracy(evaluation, charts)),
        Section("answers", "Classes and mistakes", _answers(evaluation, mistakes, charts)),
        Section("early", "Early exit", _early_exit(evaluation, charts)),
        Section("calibration", "Calibration", _calibration(evaluation, charts)),
        Section("looking", "Where it looks", _looking(evaluation, examples, charts)),
        Section("cost", "Cost", _cost(evaluation, charts)),
        Section("training", "Training", _training(metrics, charts)),
        Section("settings", "Settings", _settings(evaluation)),
    ]
    everything = download("evaluation.json", evaluation.to_json(), "application/json", "all numbers as JSON")
    return page(evaluation.name, _lead(evaluation), _tiles(evaluation), sections, everything)


def _lead(evaluation: Evaluation) -> str:
    data, grid = evaluation.data, evaluation.grid
    cut = "" if grid is None else f"{grid.rows}x{grid.columns} "
    return (
        f"{count_of(data.num_scenes, 'scene')} of {data.source}, {len(data.classes)} classes; "
        f"{cut}{evaluation.glimpse_name}; {evaluation.way_of_looking}; "
        f"{count_of(len(evaluation.seeds), 'seed')} of the first location."
    )


def _tiles(evaluation: Evaluation) -> str:
    curve = evaluation.accuracy.ensemble.top1
    length = evaluation.settings.get("config", {}).get("training", {}).get("num_glimpses")
    at = min(length or evaluation.num_glimpses, evaluation.num_glimpses)
    share = percent(evaluation.share[at - 1], 0)
    tiles = [tile(percent(curve.mean[at - 1]), f"right after {at} glimpses, {share} of the scene")]
    if at != evaluation.num_glimpses:
        tiles.append(tile(percent(curve.mean[-1]), f"right after all {evaluation.num_glimpses} glimpses"))
    if evaluation.whole_image is not None:
        tiles.append(tile(percent(evaluation.whole_image.top1), "teacher, whole image: the ceiling"))
    if evaluation.is_at_chance:
        tiles.append(tile("at chance", evaluation.chance_in_words()))
        return f'<div class="tiles">{"".join(tiles)}</div>'
    fit = evaluation.early_exit.fit.reported
    meaning = f"right with {fit.mean_glimpses:.1f} glimpses on average, with early exit"
    tiles.append(tile(percent(fit.accuracy), meaning))
    timing = evaluation.early_exit.timing
    if timing is not None:
        meaning = f"of the time saved by early exit, and {percent(timing.glimpses_saved, 0)} of the glimpses"
        tiles.append(tile(percent(timing.time_saved, 0), meaning))
    found = evaluation.calibration
    errors = f"{100 * found.before.ece:.1f} → {100 * found.after.ece:.1f} %"
    tiles.append(tile(errors, "calibration error, before and after"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _accuracy(evaluation: Evaluation, charts: Charts) -> str:
    caption = (
        "Accuracy after each glimpse, the mean over "
        f"{count_of(len(evaluation.seeds), 'seed')} of the first location. {BAND}"
    )
    if evaluation.whole_image is not None and evaluation.whole_image.low_resolution:
        caption += (
            " The competitor sees the whole image, shrunk to the same number of pixels; it was not trained "
            "on shrunk images."
        )
    classifiers = (
        "The ensemble is the mean of two classifiers' probabilities: one on the class token, trained on "
        "labels, one on the distillation token, trained to agree with the teacher."
    )
    return cards(
        charts.card("accuracy", caption, _accuracy_table(evaluation)),
        charts.card("classifiers", classifiers, _readout_table(evaluation)),
        charts.card("accuracy-pixels", "The same accuracy against the pixels sensed."),
        charts.card("accuracy-share", "The same accuracy against the share of the scene sensed."),
    )


def _accuracy_table(evaluation: Evaluation) -> str:
    top1, top5 = evaluation.accuracy.ensemble.top1, evaluation.accuracy.ensemble.top5
    shrunk = evaluation.whole_image.low_resolution if evaluation.whole_image else ()
    low = {each.num_glimpses: each for each in shrunk}
    head = ["glimpses", "pixels", "scene %", "top-1 %", "from %", "to %", "std of seeds", "top-5 %"]
    head += ["low-res size", "low-res top-1 %", "low-res top-5 %"] if low else []
    rows = []
    for n in range(evaluation.num_glimpses):
        row = [n + 1, evaluation.pixels[n], f"{100 * evaluation.share[n]:.1f}"]
        ends = [number(end[n]) if end else "" for end in (top1.low, top1.high)]
        row += [number(top1.mean[n]), *ends, number(top1.std[n]), number(top5.mean[n])]
        if n + 1 in low:
            each = low[n + 1]
            row += [f"{each.height}x{each.width}", number(each.top1), number(each.top5)]
        rows.append(row)
    return table(head, rows)


def _readout_table(evaluation: Evaluation) -> str:
    each = evaluation.accuracy
    named = {"ensemble": each.ensemble, "class": each.class_head, "distillation": each.distill_head}
    names = [name for name, side in named.items() if side is not None]
    sides = [named[name] for name in names]
    head = ["glimpses", *(f"{name} {top} %" for top in ("top-1", "top-5") for name in names)]
    rows = [
        [n + 1, *(number(getattr(side, top).mean[n]) for top in ("top1", "top5") for side in sides)]
        for n in range(evaluation.num_glimpses)
    ]
    return table(head, rows)


def _answers(evaluation: Evaluation, mistakes: Sequence[Example], charts: Charts) -> str:
    answers, classes = evaluation.answers, evaluation.data.classes
    if answers is None:
        return ""
    found, counts = answers.per_class, answers.confusion
    weakest = found.weakest(len(classes))
    rows = [
        [classes[label], f"{found.num_scenes[label]:,}"]
        + [number(part[label]) for part in (found.accuracy, found.low, found.high)]
        for label in weakest
    ]
    each = table(["class", "scenes", "accuracy %", "from %", "to %"], rows, text_columns=(0,))
    confused = table(
        ["true class", "answer", "answers", "% of the true class"],
        [
            [classes[truth], classes[answer], f"{times:,}", number(times / counts.num_answers[truth])]
            for truth, answer, times in counts.mistaken(_MOST_PAIRS)
        ],
        text_columns=(0, 1),
    )
    named = ", ".join(f"{classes[label]} ({percent(found.accuracy[label])})" for label in weakest[:5])
    text = f"{evaluation.chance_in_words()}. The weakest classes are {named}."
    caption = (
        f"How often the answer after {count_of(evaluation.num_glimpses, 'glimpse')} was each class, in % of "
        "the true class."
    )
    shown = ""
    if mistakes:
        shown = paragraph(
            "The worst mistakes: the wrong answers of highest confidence, with the first locations of the "
            "first seed."
        )
        titles = [
            f"{each.image}: {classes[each.label]} taken for {classes[each.prediction]}"
            for each in answers.mistakes
        ]
        pairs = zip(mistakes, titles, strict=False)
        shown += "".join(example_strip(example, None, title) for example, title in pairs)
    return (
        paragraph(text)
        + cards(charts.card("confusion", caption, confused))
        + folded("Accuracy of every class", each)
        + shown
    )


def _early_exit(evaluation: Evaluation, charts: Charts) -> str:
    found = evaluation.early_exit
    if evaluation.is_at_chance:
        return paragraph("Not reported: the answers are at chance, and a guess needs no glimpse at all.")
    fit, timing = found.fit, found.timing
    goal = f"at most {fit.goal_value:g} glimpses on average"
    if fit.goal == "accuracy":
        goal = f"at least {percent(fit.goal_value)} accuracy"
    missed = "" if fit.reached else " (which could not be reached)"
    text = (
        "The agent stops at the first glimpse whose answer is surer than a threshold. Fitted on "
        f"{fit.fitted.num_scenes:,} scenes for {goal}{missed}, the threshold is {fit.threshold:.4f}. On the "
        f"other {fit.reported.num_scenes:,} scenes it gives {percent(fit.reported.accuracy)} with "
        f"{fit.reported.mean_glimpses:.2f} glimpses on average."
    )
    if timing is not None:
        text += (
            f" Measured on {timing.num_scenes:,} scenes ({timing.device}, batch {timing.batch_size}): "
            f"{timing.all_seconds:.2f} s with all {timing.all_glimpses:g} glimpses, "
            f"{timing.early_seconds:.2f} s with early exit: {percent(timing.time_saved, 0)} of the "
            f"time and {percent(timing.glimpses_saved, 0)} of the glimpses saved. "
            "Scenes that are done leave the batch."
        )
    plain, calibrated = found.uncalibrated, found.calibrated
    columns = (plain.mean_glimpses, plain.accuracy, calibrated.mean_glimpses, calibrated.accuracy)
    sweep = table(
        ["threshold", "glimpses", "accuracy %", "calibrated glimpses", "calibrated accuracy %"],
        [
            [f"{threshold:g}", f"{a:.2f}", number(b), f"{c:.2f}", number(d)]
            for threshold, a, b, c, d in zip(plain.thresholds, *columns, strict=True)
        ],
    )
    exits = table(["glimpses", "scenes that stop"], list(enumerate(fit.exits, start=1)))
    return paragraph(text) + cards(
        charts.card(
            "early-exit", "Accuracy against mean glimpses as the threshold rises from 0 to 1.", sweep
        ),
        charts.card("exits", "When the agent stops at the fitted threshold, on the held-out half.", exits),
    )


def _calibration(evaluation: Evaluation, charts: Charts) -> str:
    found = evaluation.calibration
    text = (
        f"A temperature of {found.temperature:.3f}, fitted on {found.num_fitted:,} scenes, divides the "
        f"logits. On {found.num_reported:,} other scenes the expected calibration error (ECE) goes from "
        f"{percent(found.before.ece, 2)} to {percent(found.after.ece, 2)}, the loss from "
        f"{found.before.nll:.4f} to {found.after.nll:.4f} nats."
    )
    head = ["confidence %", "answers", "mean confidence %", "accuracy %"]
    data = "".join(
        f"<p>{title}</p>{table(head, _bins(side))}"
        for title, side in (("Before", found.before), ("After", found.after))
    )
    caption = (
        "Of the answers given with some confidence, how many are right, over all numbers of glimpses. Dots "
        "are at a bin's mean confidence."
    )
    return paragraph(text) + cards(charts.card("reliability", caption, data))


def _bins(side: Reliability) -> list[list[str]]:
    count = len(side.counts)
    found = zip(side.counts, side.confidence, side.accuracy, strict=True)
    return [
        [f"{100 * k / count:.0f} to {100 * (k + 1) / count:.0f}", f"{answers:,}", number(sure), number(right)]
        for k, (answers, sure, right) in enumerate(found)
    ]


def _looking(evaluation: Evaluation, examples: Sequence[Example], charts: Charts) -> str:
    found = ""
    if evaluation.grid is not None and evaluation.locations is not None:
        head = ["glimpse", *(str(location) for location in range(evaluation.grid.num_locations))]
        rows = [[step, *row] for step, row in enumerate(evaluation.locations.counts, start=1)]
        caption = "How often each location is sensed at each glimpse; the first one is random."
        found = cards(
            charts.card("locations", caption, table(head, rows)),
            charts.card(
                "first-locations",
                "Accuracy by where looking begins. Orange frame: where it should; blue: where it does now.",
            ),
        )
    if not examples:
        return found
    text = (
        "Examples, chosen without regard to how the agent does. What is covered was not seen; the frame is "
        "the newest glimpse. Under each: the answer, and how sure of it the agent is."
    )
    strips = "".join(example_strip(example, position) for position, example in enumerate(examples, start=1))
    return found + paragraph(text) + strips


def _cost(evaluation: Evaluation, charts: Charts) -> str:
    cost = evaluation.cost
    if cost is None:
        return ""
    steps = range(evaluation.num_glimpses)
    parts = (cost.core, cost.actor, cost.per_step, cost.cumulative)
    counted = table(
        ["glimpses", "core", "actor", "this step", "so far"],
        [[n + 1, *(f"{values[n]:,}" for values in parts)] for n in steps],
    )
    head = ["glimpses"]
    for each in cost.latency:
        head += [f"batch {each.batch_size}: step, ms", "so far, ms"]
    times = [values for each in cost.latency for values in (each.per_step_ms, each.cumulative_ms)]
    measured = table(head, [[n + 1, *(f"{values[n]:.2f}" for values in times)] for n in steps])
    multiply_adds = (
        "Multiply-adds of one scene, counted from the architecture. Every step encodes all glimpses so far."
    )
    latency = (
        "Median time of a step: sensing, encoding, classifying, deciding. In the table, for the whole batch."
    )
    return cards(
        charts.card("multiply-adds", multiply_adds, counted), charts.card("latency", latency, measured)
    )


def _training(metrics: Sequence[Mapping[str, Any]], charts: Charts) -> str:
    keys = list(dict.fromkeys(key for line in metrics for key in line))
    rows = [
        [f"{line[key]:.5g}" if isinstance(line.get(key), float) else line.get(key, "") for key in keys]
        for line in metrics
    ]
    return cards(charts.card("training", "Losses and validation accuracy while training.", table(keys, rows)))


def _settings(evaluation: Evaluation) -> str:
    classes = evaluation.data.classes
    rows = [
        ["looking", evaluation.way_of_looking],
        ["precision", evaluation.precision],
        ["seeds", ", ".join(map(str, evaluation.seeds))],
        ["classes", ", ".join(classes[:40]) + (" ..." if len(classes) > 40 else "")],
        *([f"{name} version", version] for name, version in evaluation.versions.items()),
        *_flatten(evaluation.settings),
    ]
    return folded("All settings", table(["setting", "value"], rows, text_columns=(0, 1)))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    rows = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += _flatten(value, f"{prefix}{key}.")
        elif key not in ("labels", "classes"):
            rows.append([f"{prefix}{key}", str(value)])
    return rows
