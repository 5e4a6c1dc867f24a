import numpy as np
import pytest
from PIL import Image

from stam.data import ClutteredDigits, Relabelled, Scenes, Subset, prepare_for_evaluation
from stam.errors import ConfigError, DataError
from stam.scene import pixels


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("height", "width", "resize_size", "image_size", "expected"),
    [
        (300, 400, 256, 224, (224, 224)),
        (50, 30, 256, 224, (224, 224)),
        (300, 400, 256, (224, 448), (224, 448)),
        (400, 300, 64, (128, 32), (128, 32)),
        (7, 500, 56, 56, (56, 56)),
        (300, 400, None, 224, (224, 224)),
        (300, 400, None, (64, 32), (64, 32)),
    ],
)
def test_evaluation_view_has_the_size_asked_for(
    height: int, width: int, resize_size: int | None, image_size: int | tuple[int, int], expected: tuple
) -> None:
    assert prepare_for_evaluation(picture(height, width), resize_size, image_size).shape == (*expected, 3)


def test_evaluation_view_is_the_usual_resize_and_centre_crop() -> None:
    image = picture(300, 401)
    resized = np.asarray(Image.fromarray(image).resize((342, 256), Image.Resampling.BICUBIC))
    assert np.array_equal(prepare_for_evaluation(image, 256, 224), resized[16:240, 59:283])


def test_evaluation_view_without_a_crop_squeezes_the_whole_image() -> None:
    image = picture(300, 400)
    squeezed = np.asarray(Image.fromarray(image).resize((224, 224), Image.Resampling.BICUBIC))
    assert np.array_equal(prepare_for_evaluation(image, None, 224), squeezed)


def test_evaluation_view_of_the_right_size_is_the_image() -> None:
    image = picture(56, 56)
    assert np.array_equal(prepare_for_evaluation(image, 56, 56), image)


def test_evaluation_view_refuses_a_size_that_is_none() -> None:
    with pytest.raises(ConfigError, match="image_size must be"):
        prepare_for_evaluation(picture(8, 8), None, 0)


def test_subset_selects_and_orders() -> None:
    digits = ClutteredDigits("test", num_scenes=10)
    subset = Subset(digits, np.array([7, 2]))
    assert isinstance(subset, Scenes)
    assert len(subset) == 2
    assert subset.labels.tolist() == digits.labels[[7, 2]].tolist()
    assert np.array_equal(subset.load(1), digits.load(2))


def test_relabelled_scenes_index_the_agents_classes() -> None:
    digits = ClutteredDigits("test", num_scenes=10)
    classes = tuple(reversed(("ten", *digits.classes)))
    relabelled = Relabelled(digits, classes)
    assert isinstance(relabelled, Scenes)
    assert [classes[label] for label in relabelled.labels] == [str(label) for label in digits.labels]
    assert np.array_equal(relabelled.load(3), digits.load(3))


def test_relabelling_needs_known_classes() -> None:
    digits = ClutteredDigits("test", num_scenes=10)
    with pytest.raises(
        DataError, match="the agent does not know the class '1' of this data: allowed: 0, cat"
    ):
        Relabelled(digits, ("0", "cat"))


@pytest.mark.parametrize(("height", "width", "resize_size"), [(3, 700, 30), (500, 7, 41), (40, 50, 30)])
def test_a_long_strip_is_enlarged_in_the_middle_alone(height, width, resize_size, monkeypatch):
    image = picture(height, width)
    whole = prepare_for_evaluation(image, resize_size, (24, 32)).astype(int)
    monkeypatch.setattr(pixels, "_MOST_PIXELS", 0)
    # PIL rounds a little otherwise within a box
    assert np.abs(prepare_for_evaluation(image, resize_size, (24, 32)) - whole).mean() < 0.5


def test_the_thinnest_image_needs_no_gigabytes():
    """Enlarged whole it would have 46 of them."""
    assert prepare_for_evaluation(picture(1, 60_000), 256, 224).shape == (224, 224, 3)
