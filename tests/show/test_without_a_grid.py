"""Lookers whose looks lie on no grid: compared, drawn and reported like agents."""

import dataclasses

import numpy as np
from evaluating import NoiseScenes, WholeThenCrops, fast_plan, full_evaluation, gridless_evaluation

from stam.evaluation import collect_examples, compare, load_examples, reader_for, save_examples
from stam.show.figures import comparison_figures, evaluation_figures, example_figures
from stam.show.figures.scenes import story_of
from stam.show.pictures import Story, View, draw_frame, draw_strip
from stam.show.report import comparison_report, run_report


def examples():
    looker = WholeThenCrops()
    return collect_examples(looker, reader_for(looker, NoiseScenes(10), fast_plan()), 2, 3, "own")


def test_the_table_says_who_sees_the_whole_image():
    agent = dataclasses.replace(full_evaluation(), data=gridless_evaluation().data, answers=None)
    found = compare([agent, gridless_evaluation()], ["STAM", "crops"])
    rows = {row.method: (row.attention, row.classification) for row in found.table if row.method != "Teacher"}
    assert rows == {"STAM": (False, False), "crops": (True, True)}
    assert not found.same_grid
    assert {row.pixels for row in found.table if row.method == "crops"} <= set(gridless_evaluation().pixels)
    comparison_figures(found)
    assert "crops" in comparison_report(found)


def test_figures_and_the_page_leave_out_what_needs_a_grid():
    drawn = evaluation_figures(gridless_evaluation())
    assert {"accuracy", "accuracy-pixels", "early-exit"} <= set(drawn)
    assert not {"locations", "classifiers", "multiply-adds"} & set(drawn)
    shown = examples()
    assert set(example_figures(shown)) == {"trajectory-1", "trajectory-2"}
    page = run_report(gridless_evaluation(), shown)
    assert "looks at 24x32 scenes" in page and "Where it looks" in page


def test_examples_round_trip(tmp_path):
    shown = examples()
    save_examples(shown, tmp_path / "examples.npz")
    for one, other in zip(shown, load_examples(tmp_path / "examples.npz"), strict=True):
        assert other.grid is None and other.locations.size == 0
        for name in ("boxes", "sizes", "pixels", "image"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
    story = story_of(shown[0])
    assert story.num_glimpses == 3 and len(story.views[0]) == 1
    assert story.share(3) == shown[0].pixels[2] / (24 * 32)


def test_a_frame_shows_what_was_sensed_as_coarse_as_it_was():
    image = np.zeros((8, 8, 3), np.uint8)
    image[:, ::2] = 200  # stripes, which a coarse view cannot tell apart
    whole, part = View((0, 0, 1, 1), (2, 2)), View((0.5, 0.5, 1, 1), (4, 4))
    story = Story(
        "scene", image, None, [], ["a", "a"], [0.5, 0.9], views=[[whole], [part]], shares=[0.1, 0.3]
    )
    coarse = np.asarray(draw_frame(story, 1, 64))
    inner = coarse[8:24, 8:24, 0]
    assert inner.min() == inner.max() == 100 and coarse[..., 3].all()
    sharp = np.asarray(draw_frame(story, 2, 64))[36:60, 36:60, 0]
    assert sharp.min() == 0 and sharp.max() == 200
    assert not np.asarray(draw_frame(story, 0, 64)).any()
    assert draw_strip([dataclasses.replace(story, shares=[0.1, 0.3])]).width > 64
