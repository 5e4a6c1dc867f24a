import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stam.errors import ConfigError, StamError
from stam.scene.grid import Grid

sides = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))  # glimpses, patches, pixels


@st.composite
def grids(draw):
    (rows, patch_rows, patch_height), (columns, patch_columns, patch_width) = draw(sides), draw(sides)
    patch = (patch_height, patch_width)
    glimpse = (patch_rows * patch_height, patch_columns * patch_width)
    return Grid((rows * glimpse[0], columns * glimpse[1]), glimpse, patch)


@given(grids())
def test_index_and_row_column_are_inverse(grid):
    for location in range(grid.num_locations):
        assert grid.index(grid.row_column(location)) == location


@given(grids())
def test_every_pixel_lies_in_one_patch_of_one_glimpse(grid):
    height, width = grid.image_size
    image = torch.arange(height * width, dtype=torch.float32).view(1, 1, height, width)
    everywhere = torch.arange(grid.num_locations)[None]
    tokens = grid.patches(grid.cut(image, everywhere))
    assert tokens.flatten().sort().values.equal(image.flatten())
    assert tokens.shape == (1, grid.num_patches, grid.patch_size[0] * grid.patch_size[1])


@given(grids())
def test_boxes_cut_and_location_at_agree(grid):
    height, width = grid.image_size
    image = torch.arange(height * width, dtype=torch.float32).view(1, 1, height, width)
    for location in range(grid.num_locations):
        top, left, bottom, right = grid.pixel_box(location)
        cut = grid.cut(image, torch.tensor([[location]]))[0, 0]
        assert cut.equal(image[0, :, top:bottom, left:right])
        assert {grid.location_at(top, left), grid.location_at(bottom - 1, right - 1)} == {location}


@given(grids())
def test_patch_positions_name_the_patch_each_token_holds(grid):
    positions = grid.patch_positions()
    assert positions.flatten().sort().values.equal(torch.arange(grid.num_patches))
    height, width = grid.image_size
    columns = grid.image_patches[1]
    row_of = torch.arange(height)[:, None] // grid.patch_size[0]
    image = (row_of * columns + torch.arange(width)[None] // grid.patch_size[1]).float()  # its own position
    tokens = grid.patches(grid.cut(image[None, None], torch.arange(grid.num_locations)[None]))
    assert (tokens[0] == positions.flatten()[:, None]).all()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((224, 32, 16), (7, 7, 2)),
        ((240, 48, 16), (5, 5, 3)),
        ((256, 64, 16), (4, 4, 4)),
        ((64, 8, 4), (8, 8, 2)),
    ],
)
def test_the_papers_grids(sizes, expected):
    grid = Grid(*sizes)
    assert (grid.rows, grid.columns, grid.glimpse_patches[0]) == expected


def test_a_batch_cuts_another_glimpse_for_each_sample():
    grid = Grid((4, 6), 2, 1)
    images = torch.arange(48, dtype=torch.float32).view(2, 1, 4, 6)
    cut = grid.cut(images, torch.tensor([[0, 5], [4, 1]]))
    assert cut[0, 1, 0].tolist() == [[16, 17], [22, 23]]
    assert cut[1, 0, 0].tolist() == [[38, 39], [44, 45]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (224, 30, 15),
            "glimpse_size height 30 does not divide image_size height 224: use image_size 210 or 240",
        ),
        ((224, 32, 12), "patch_size height 12 does not divide glimpse_size height 32"),
        (((224, 230), 32, 16), "width 32 does not divide image_size width 230: use image_size 224 or 256"),
        ((16, 32, 16), "use image_size 32, or another glimpse_size"),
        ((0, 32, 16), "image_size must be one positive number"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes, message):
    with pytest.raises(ConfigError) as error:
        Grid(*sizes)
    assert message in str(error.value)


@pytest.mark.parametrize("location", [-1, 49, (7, 0), (0, 7), (-1, 0)])
def test_locations_off_the_grid_are_refused(location):
    with pytest.raises(StamError, match="not on the grid"):
        Grid(224, 32, 16).index(location)


def test_locations_are_whole_numbers_of_any_kind():
    grid, index = Grid(224, 32, 16), inspect.unwrap(Grid.index)  # without the tests' check of types
    number = np.unravel_index(10, (7, 7))
    for location in ([1, 3], (1, 3), 10, number, np.int64(10), tuple(torch.tensor([1, 3]))):
        found = index(grid, location)
        assert type(found) is int and found == 10
    for wrong in (1.9, (1.5, 2), (1, 2, 3), "10", None):
        with pytest.raises(StamError, match="not on the grid"):
            index(grid, wrong)


def test_wrong_images_are_refused():
    with pytest.raises(StamError, match=r"expected images \(batch, 3, 224, 224\), got \(1, 3, 200, 224\)"):
        Grid(224, 32, 16).require_images(torch.zeros(1, 3, 200, 224), 3)
