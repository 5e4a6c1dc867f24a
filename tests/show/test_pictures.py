"""Frames show what was seen and nothing else; strips and animations place them."""

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from stam.scene.grid import Grid
from stam.show.animations import animation_bytes, draw_animation
from stam.show.pictures import (
    ACCENT,
    COVER,
    GAP,
    INK,
    NEWEST,
    NEXT,
    PAPER,
    RIGHT,
    WRONG,
    Story,
    draw_frame,
    draw_strip,
    readable,
    strip_counts,
)

GRID = Grid((24, 32), 8, 4)
SCALE = 7  # pixels of a frame for each pixel of the scene


@pytest.fixture
def story() -> Story:
    image = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    return Story("scene", image, GRID, [5, 0, 11], ["a", "b", "a long name"], [0.2, 0.5, 0.9])


def test_names_are_written_as_people_write_them():
    names = {
        "english_springer": "english springer",
        "StorageTanks": "Storage tanks",
        "BareLand": "Bare land",
        "red-circle": "red-circle",
        "TV": "TV",
    }
    assert {name: readable(name) for name in names} == names


def test_a_strip_says_that_the_agent_is_unsure(story):
    unsure = dataclasses.replace(story, unsure=True)
    assert story.colour(3) == ACCENT and unsure.colour(3) == INK
    assert (np.asarray(draw_strip([unsure])) != np.asarray(draw_strip([story])))[:30].any()  # the headline
    *before, last = (
        (np.asarray(one) != np.asarray(other)).any()
        for one, other in zip(draw_animation(unsure), draw_animation(story), strict=True)
    )
    assert last and not any(before)


def cell(frame: Image.Image, location: int, margin: int = 7) -> np.ndarray:
    """The pixels of a location, without those its own frame and its neighbours' can reach."""
    top, left, bottom, right = (SCALE * side for side in GRID.pixel_box(location))
    return np.asarray(frame)[top + margin : bottom - margin, left + margin : right - margin]


def test_a_frame_shows_the_glimpses_and_nothing_else(story):
    frame = draw_frame(story, 2, 32 * SCALE)
    assert frame.size == (32 * SCALE, 24 * SCALE) and frame.mode == "RGBA"
    scene = Image.fromarray(story.image).resize(frame.size, Image.Resampling.NEAREST).convert("RGBA")
    for location in range(GRID.num_locations):
        if location in (5, 0):
            assert np.array_equal(cell(frame, location), cell(scene, location))
        else:
            assert not cell(frame, location).any()


def test_the_newest_glimpse_is_framed_with_a_dark_edge(story):
    white = dataclasses.replace(story, image=np.full((24, 32, 3), 255, np.uint8))
    row = np.asarray(draw_frame(white, 1, 32 * SCALE))[12 * SCALE, :, :3].astype(int)  # across location 5
    framed = np.flatnonzero((row == NEWEST).all(axis=1))
    assert framed.min() < 8 * SCALE <= framed.max() and framed.max() < 16 * SCALE + 5
    assert row[framed.min() - 1].sum() < 100 and row[framed.max() + 1].sum() < 100
    assert not (np.asarray(draw_frame(story, 0))[..., :3] == NEWEST).all(axis=2).any()


def test_a_policy_map_colours_what_was_not_seen_and_frames_the_next_glimpse(story):
    colours = np.arange(36, dtype=np.uint8).reshape(12, 3)
    frame = draw_frame(story, 1, 32 * SCALE, colours)
    assert (cell(frame, 3) == [*colours[3], 255]).all() and (cell(frame, 0) == [*colours[0], 255]).all()
    top_left = np.asarray(frame)[: 8 * SCALE, : 8 * SCALE, :3]  # location 0, the next
    assert (top_left == NEXT).all(axis=2).any()
    assert not (cell(frame, 5)[..., :3] == colours[5]).all()


@pytest.mark.parametrize("num_glimpses", [1, 2, 3])
def test_words_above_a_short_strip_are_not_cut(story, num_glimpses):
    few = {key: getattr(story, key)[:num_glimpses] for key in ("locations", "labels", "confidences")}
    strip = np.asarray(draw_strip([dataclasses.replace(story, **few)]))
    words = (strip[:30] != PAPER).any(axis=2).any(axis=0)
    assert words[-200:].any() and not words[-GAP:].any()


def test_a_strip_shows_the_first_glimpses_and_the_last():
    assert strip_counts(5) == [1, 2, 3, 4, 5]
    for total in (9, 20, 49):
        counts = strip_counts(total)
        assert len(counts) == 8 and counts[0] == 1 and counts[-1] == total and counts == sorted(set(counts))


def test_a_strip_covers_what_was_not_seen(story):
    strip = draw_strip([story, story])
    assert strip.mode == "RGB" and strip.height > 2 * 126
    assert strip.getpixel((14 + 168 - 20, 34 + 126 - 20)) == COVER


def test_answers_are_coloured_by_truth_where_it_is_known(story):
    known = dataclasses.replace(story, right=[False, True, True])
    assert [known.colour(count) for count in (1, 2, 3)] == [WRONG, RIGHT, RIGHT]
    assert story.colour(1) == story.colour(2) != story.colour(3)
    assert all(
        (np.asarray(draw_animation(known)[-1]) == colour).all(axis=2).any() for colour in (RIGHT, WRONG)
    )


def test_an_animation_may_have_many_glimpses():
    image = np.zeros((64, 64, 3), np.uint8)
    count = 256
    story = Story("scene", image, Grid(64, 4, 2), list(range(count)), ["a"] * count, [0.5] * count)
    assert len(draw_animation(story)) >= count


def test_an_animation_has_the_cover_and_a_frame_for_every_glimpse(story):
    square = dataclasses.replace(story, image=np.zeros((8, 8, 3), np.uint8), grid=Grid(8, 2, 1))
    with Image.open(io.BytesIO(animation_bytes([story, square]))) as gif:
        assert gif.format == "GIF" and gif.n_frames == 2 * 4 and gif.info["loop"] == 0
