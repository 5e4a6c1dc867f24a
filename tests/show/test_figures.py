"""Every picture draws, says what its axes are, and fits a light and a dark page."""

from dataclasses import replace
from pathlib import Path

import pytest
from evaluating import NoiseScenes, fast_plan, full_evaluation, make_agent, some_examples
from made_up import made_up

import stam
from stam.evaluation import collect_examples, compare, reader_for
from stam.evaluation.results import Confusion, PerClass
from stam.scene.grid import Grid
from stam.show.figures import (
    DARK,
    LIGHT,
    answer_figures,
    answers,
    comparison_figures,
    comparisons,
    curves,
    evaluation_figures,
    example_figures,
    save_figures,
    scenes,
    to_bytes,
)
from stam.show.figures.style import colour_and_line

METRICS = [{"epoch": n, "loss/actor": 1.0 / (n + 1), "val/accuracy@3": 0.1 * n} for n in range(4)]


@pytest.fixture
def evaluation():
    return full_evaluation()


@pytest.fixture
def examples():
    return some_examples()


def labelled(figure) -> bool:
    charts = [axes for axes in figure.axes if axes.get_visible() and axes.lines]
    return all(axes.get_ylabel() or axes.get_shared_y_axes().get_siblings(axes) for axes in charts)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_every_chart_of_a_run(evaluation, theme):
    drawn = evaluation_figures(evaluation, METRICS, theme)
    assert list(drawn) == [
        *("accuracy", "accuracy-pixels", "accuracy-share", "classifiers", "early-exit", "exits"),
        *("reliability", "locations", "multiply-adds", "latency", "training"),
    ]
    for name, figure in drawn.items():
        assert labelled(figure), name
        if theme is DARK:
            figure.draw_without_rendering()


def test_a_chart_without_data_is_left_out():
    drawn = evaluation_figures(made_up())
    assert "latency" not in drawn and "multiply-adds" not in drawn and "training" not in drawn
    assert curves.training(METRICS[:1]) is None


def test_what_the_accuracy_chart_shows(evaluation):
    figure = curves.accuracy(evaluation)
    axes = figure.axes[0]
    agent, low, ceiling = axes.lines
    assert list(agent.get_xdata()) == list(range(1, 13))
    assert list(agent.get_ydata()) == pytest.approx([100 * x for x in evaluation.accuracy.ensemble.top1.mean])
    assert ceiling.get_ydata()[0] == pytest.approx(100 * evaluation.whole_image.top1)
    assert low.get_ydata()[-1] == pytest.approx(100 * evaluation.whole_image.top1)
    assert axes.get_xlabel() == "glimpses sensed" and axes.get_ylabel() == "top-1 accuracy (%)"
    assert curves.accuracy(evaluation, "pixels").axes[0].lines[0].get_xdata()[-1] == 768
    assert curves.accuracy(evaluation, "share").axes[0].lines[0].get_xdata()[-1] == pytest.approx(100)


def test_top_5_is_left_out_among_five_classes(evaluation, monkeypatch):
    assert [axes.get_ylabel() for axes in curves.readouts(evaluation).axes] == ["top-1 accuracy (%)"]
    monkeypatch.setattr(curves, "TOP", 4)  # as with more classes than that
    assert [axes.get_ylabel()[:5] for axes in curves.readouts(evaluation).axes] == ["top-1", "top-5"]


def test_the_legend_never_lies_on_the_curves(evaluation):
    for figure in (curves.accuracy(evaluation), curves.early_exit(evaluation), curves.readouts(evaluation)):
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)


def test_pictures_of_scenes(evaluation, examples):
    drawn = example_figures(examples[:2])
    assert list(drawn) == ["trajectory-1", "policy-1", "trajectory-2", "policy-2"]
    strip = drawn["trajectory-1"]
    captions = [axes.get_xlabel() for axes in strip.axes if axes.get_visible()]
    assert captions[0].startswith("true class") and len(captions) == 13
    assert all("%" in caption and caption[0] in "✓✗" for caption in captions[1:])
    histogram = scenes.location_histograms(evaluation, num_steps=5)
    assert len(histogram.axes[0].images) == 5
    assert [text.get_text() for text in histogram.axes[0].texts] == ["glimpse 1", "2", "3", "4", "5"]
    without = collect_examples(
        agent := make_agent(policy="plus"), reader_for(agent, NoiseScenes(5), fast_plan()), 1, 3, "plus"
    )
    assert scenes.policy_maps(without[0]) is None
    assert scenes.map_counts(without[0]) == [] and scenes.map_counts(examples[0]) == [1, 2, 3, 5, 8]


def test_the_confusion_matrix_shows_all_classes_or_the_most_confused(evaluation):
    figure = answer_figures(evaluation)["confusion"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(evaluation.data.classes)
    assert answers.confusion(made_up()) is None  # an earlier result
    many = tuple(f"class {number}" for number in range(200))
    cells = [(number, number, 5) for number in range(200)] + [(150, 7, 3), (151, 8, 2), (152, 9, 1)]
    counts = Confusion((8,) * 200, tuple(sorted(cells)))
    per_class = PerClass((8,) * 200, *((0.5,) * 200,) * 3)
    large = replace(
        evaluation,
        data=replace(evaluation.data, classes=many),
        answers=replace(
            evaluation.answers, confusion=counts, early_exit=counts, per_class=per_class, mistakes=()
        ),
    )
    assert answers.shown_classes(large, most=4) == [7, 8, 150, 151]
    figure = answers.confusion(large)
    assert "the 6 most confused of 200 classes" in figure.axes[0].get_title()
    assert figure.axes[0].images[0].get_array()[3, 0] == pytest.approx(100 * 3 / 8)


def test_mistakes_are_drawn_with_their_glimpses(evaluation, examples):
    figure = answer_figures(evaluation, examples[:2])["mistakes"]
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["the scene", "1", "2", "3", "5", "8", "12"] * 2
    path = figure.axes[0].lines[0]
    assert len(path.get_xdata()) == 8  # the first eight looks


def test_long_names_are_cut():
    assert scenes.shorten("english springer") == "english spri…"
    assert scenes.shorten("tench") == "tench"


def test_every_chart_of_a_comparison():
    found = compare([made_up("a", 0.01), made_up("b", 0.015), made_up("c", 0.012, grid=Grid(64, 16, 8))])
    drawn = comparison_figures(found, DARK)
    assert list(drawn) == ["accuracy", "accuracy-pixels", "accuracy-share", "differences", "early-exit"]
    assert drawn["accuracy"].axes[0].get_xlabel() == "share of the scene sensed (%)"
    assert len(drawn["differences"].axes[0].lines) == 3  # two runs and the zero line
    same = compare([made_up("a", 0.01), made_up("b", 0.015)])
    assert comparisons.curves(same).axes[0].get_xlabel() == "glimpses sensed"
    assert comparisons.differences(compare([made_up("a")])) is None


def test_names_of_runs_are_shown_to_the_letter():
    found = compare([made_up("_a", 0.01), made_up(r"$\x$", 0.015), made_up("c", 0.012)])
    for figure in comparison_figures(found).values():
        figure.draw_without_rendering()
    labels = [text.get_text().strip() for text in comparisons.curves(found).legends[0].get_texts()]
    assert labels == ["_a", r"\$\x\$", "c"]


def test_saving_gives_the_same_bytes_again(evaluation, tmp_path):
    paths = save_figures({"exits": curves.exits(evaluation)}, tmp_path / "figures")
    assert [path.name for path in paths] == ["exits.png", "exits.svg"]
    assert paths[0].read_bytes()[:4] == b"\x89PNG" and b"<svg" in paths[1].read_bytes()
    for kind in ("png", "svg"):
        assert to_bytes(curves.exits(evaluation), kind) == to_bytes(curves.exits(evaluation), kind)


def test_evaluation_needs_no_matplotlib():
    folder = Path(stam.evaluation.__file__).parent
    assert not any("matplotlib" in path.read_text() for path in folder.glob("*.py"))


def test_a_missing_matplotlib_names_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    from stam.errors import MissingPackageError, require_package

    with pytest.raises(MissingPackageError, match=r"pip install .*\[figures\]'"):
        require_package("matplotlib", extra="figures")


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_more_runs_than_colours_are_told_apart(theme):
    drawn = [colour_and_line(theme, position) for position in range(2 * len(theme.colours))]
    assert len(set(drawn)) == len(drawn)
