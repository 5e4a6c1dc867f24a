import numpy as np
import pytest
import torch
from PIL import Image

from stam.errors import SensorError
from stam.scene.grid import Grid
from stam.scene.pixels import normalise
from stam.scene.sensor import CallbackSensor, ImageSensor, Sensor, as_pixels, check_sensor

GRID = Grid((24, 32), 8, 4)


def photo() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)


def test_tensor_and_pil_image_give_the_same_glimpses():
    pixels = photo()
    tensor = normalise(torch.from_numpy(pixels).permute(2, 0, 1))
    from_tensor, from_pil = ImageSensor(tensor, GRID), ImageSensor(Image.fromarray(pixels), GRID)
    for location in range(GRID.num_locations):
        top, left, bottom, right = GRID.pixel_box(location)
        assert from_tensor.sense(location).equal(tensor[:, top:bottom, left:right])
        assert from_pil.sense(GRID.row_column(location)).equal(from_tensor.sense(location))
    assert isinstance(from_pil, Sensor)


def test_callback_gets_row_and_column():
    asked = []

    def callback(row, column):
        asked.append((row, column))
        return np.zeros((8, 8, 3), dtype=np.uint8)

    CallbackSensor(callback, GRID).sense(6)
    assert asked == [(1, 2)]


@pytest.mark.parametrize("kind", ["pil", "hwc", "chw", "float"])
def test_every_form_of_a_glimpse_is_read(kind):
    pixels = photo()[:8, :8]
    chw = torch.from_numpy(pixels).permute(2, 0, 1)
    given = {"pil": Image.fromarray(pixels), "hwc": pixels, "chw": chw, "float": normalise(chw)}[kind]
    torch.testing.assert_close(as_pixels(given, (8, 8)), normalise(chw))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(3, 8, 9), r"must be \(channels, height, width\) = \(3, 8, 8\), got \(3, 8, 9\)"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), "convert it first"),
        (torch.full((3, 8, 8), torch.nan), "NaN or infinity"),
        (np.zeros((8, 8), dtype=np.uint8), "got \\(8, 8\\)"),
        (object(), "must be a tensor, an array or a PIL image"),
    ],
)
def test_bad_glimpses_are_refused(given, message):
    with pytest.raises(SensorError, match=message):
        as_pixels(given, (8, 8))


def test_a_scene_of_another_size_is_refused():
    with pytest.raises(SensorError, match="the image is 24x31, the grid needs 24x32"):
        ImageSensor(Image.new("RGB", (31, 24)), GRID)


def test_good_sensors_pass_the_check():
    sensor = ImageSensor(Image.fromarray(photo()), GRID)
    check_sensor(sensor)
    check_sensor(CallbackSensor(lambda row, column: sensor.sense((row, column)), GRID))


def test_a_camera_with_noise_passes_the_check():
    sensor, drawn = ImageSensor(Image.fromarray(photo()), GRID), torch.Generator().manual_seed(0)

    def camera(row, column):
        glimpse = sensor.sense((row, column))
        return glimpse + 0.035 * torch.randn(glimpse.shape, generator=drawn)  # two grey levels

    check_sensor(CallbackSensor(camera, GRID))
    with pytest.raises(SensorError, match="sensed differently"):
        check_sensor(CallbackSensor(camera, GRID), noise=0.0)


@pytest.mark.parametrize(
    ("image", "grey"),
    [
        (Image.fromarray(np.full((8, 8), 10000, np.uint16)), 39),  # its upper 8 bits
        (Image.new("RGBA", (8, 8), (0, 0, 0, 0)), 255),  # transparent: on white
        (Image.new("L", (8, 8), 7), 7),
    ],
)
def test_glimpses_of_any_mode_are_what_training_sees(image, grey):
    want = as_pixels(np.full((8, 8, 3), grey, np.uint8), (8, 8))
    assert as_pixels(image, (8, 8)).equal(want)
    with pytest.raises(SensorError, match="floating-point"):
        as_pixels(Image.new("F", (8, 8)), (8, 8))


class Broken:
    grid = GRID

    def __init__(self, sense):
        self.sense = sense


def noise(location):
    GRID.index(location)
    return torch.randn(3, 8, 8)


BUFFER = torch.zeros(3, 8, 8)


def shared_buffer(location):
    return BUFFER.fill_(GRID.index(location))


@pytest.mark.parametrize(
    ("sensor", "message"),
    [
        (object(), "attribute `grid`"),
        (Broken(None), "method `sense"),
        (Broken(lambda location: np.zeros((3, 8, 8))), "must be a torch.Tensor"),
        (Broken(lambda location: torch.zeros(3, 8, 8, dtype=torch.uint8)), "must hold normalised floats"),
        (Broken(lambda location: torch.zeros(8, 8, 3)), "must have the shape"),
        (Broken(lambda location: torch.full((3, 8, 8), torch.inf)), "NaN or infinity"),
        (Broken(noise), "sensed differently"),
        (Broken(shared_buffer), "return a copy"),
        (Broken(lambda location: torch.zeros(3, 8, 8)), "not on the grid"),
    ],
)
def test_each_breach_of_the_contract_is_named(sensor, message):
    with pytest.raises(SensorError, match=message):
        check_sensor(sensor)
