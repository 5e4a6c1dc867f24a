import jaxtyping
import numpy as np
import pytest
import torch
from agents import randomise, tiny_config
from PIL import Image
from zooing import small

import stam
from stam.errors import DataError, SensorError
from stam.prediction import Looking, Prediction, predict, read_image
from stam.scene.pixels import normalise, prepare_for_evaluation

LABELS = ("ant", "bee", "cat", "dog", "eel")


def make_agent(**settings):
    agent = stam.Agent(tiny_config(labels=LABELS, threshold=0.6, **settings))
    randomise(agent)
    return agent.eval()


@pytest.fixture
def agent():
    return make_agent()


@pytest.fixture
def pixels():
    return np.random.default_rng(3).integers(0, 256, (50, 90, 3), dtype=np.uint8)


def test_every_form_of_an_image_gives_the_same_prediction(agent, pixels, tmp_path):
    path = tmp_path / "scene.png"
    Image.fromarray(pixels).save(path)
    planes = np.moveaxis(pixels, -1, 0)
    forms = [str(path), path, Image.open(path), pixels, planes, torch.tensor(pixels), torch.tensor(planes)]
    want = agent.predict(path)
    for form in forms:
        got = agent.predict(form)
        assert isinstance(got, Prediction)
        assert (got.label, got.path, got.probabilities) == (want.label, want.path, want.probabilities)


def test_a_prediction_is_what_look_says_with_early_exit(agent, pixels):
    found = agent.predict(pixels)
    view = torch.tensor(prepare_for_evaluation(pixels, None, agent.grid.image_size)).permute(2, 0, 1)
    trace = agent.look(normalise(view)[None], 12, first_location=agent.grid.centre)
    sure = next(n for n in range(1, 13) if trace.confidences[0, n - 1] > agent.threshold or n == 12)
    assert found.glimpses == sure == len(found.path)
    assert [agent.grid.index(place) for place in found.path] == trace.locations[0, :sure].tolist()
    assert found.label == LABELS[int(trace.predictions[0, sure - 1])]
    assert found.confidence == pytest.approx(float(trace.confidences[0, sure - 1]), abs=1e-5)
    assert list(found.probabilities) == list(LABELS)
    assert found.probabilities[found.label] == pytest.approx(found.confidence)
    assert found.seen == sure / 12 and found.stopped_early == (sure < 12)
    assert found.unsure == found.story.unsure == (found.confidence <= agent.threshold)


def test_it_preprocesses_as_the_weights_say(pixels):
    cropping = make_agent(preprocess_size=40)
    image = cropping.predict(pixels).story.image
    assert (image == prepare_for_evaluation(pixels, 40, cropping.grid.image_size)).all()
    assert (image != prepare_for_evaluation(pixels, None, cropping.grid.image_size)).any()


def test_a_list_gives_a_list_and_a_copy_the_same_answer(agent, pixels):
    others = [np.roll(pixels, shift, axis=1) for shift in range(1, 40)]
    found = agent.predict([pixels, *others, pixels])
    assert len(found) == 41 and found[0].path[0] == found[40].path[0] == (1, 2)
    assert found[0].path == found[40].path and found[0].label == found[40].label
    assert agent.predict([]) == [] and [one.path for one in agent.predict((pixels,))] == [found[0].path]


def test_the_first_location_is_given_or_drawn_from_the_seed(agent, pixels):
    assert agent.predict(pixels, first_location=(2, 0)).path[0] == (2, 0)
    drawn = [agent.predict([pixels, pixels], seed=seed) for seed in range(8)]
    assert all(one.path == other.path for one, other in drawn)
    assert len({one.path[0] for one, _ in drawn}) > 2
    orders = [agent.predict(pixels, policy="random", threshold=1.0, seed=seed).path for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_how_to_look_can_be_said(agent, pixels):
    found = agent.predict(pixels, threshold=1.0, max_glimpses=4, policy="spiral")
    assert found.glimpses == 4 and not found.stopped_early and found.path[0] == (1, 2)
    assert found.unsure and not agent.predict(pixels, threshold=0.0).unsure
    with pytest.raises(TypeError, match="treshold"):
        agent.predict(pixels, treshold=1.0)


def test_the_picture_is_drawn_shown_and_saved(agent, pixels, tmp_path, monkeypatch):
    found = agent.predict(pixels, threshold=1.0)
    picture = found.picture()
    assert picture.width > 8 * 168 and len(picture.getcolors(2**24)) > 100
    found.save(tmp_path / "strip.png")
    assert (np.asarray(Image.open(tmp_path / "strip.png")) == np.asarray(picture)).all()
    found.save(str(tmp_path / "look.gif"))
    with Image.open(tmp_path / "look.gif") as animation:
        assert animation.n_frames >= 12
    shown = []
    monkeypatch.setattr(Image.Image, "show", lambda image: shown.append(image.size))
    found.show()
    assert shown == [picture.size]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("no/such.jpg", "no image at 'no/such.jpg': check the path"),
        (17, "predict takes a path, a PIL image, or uint8 pixels .* got a int"),
        (np.zeros((8, 8), np.uint8), r"got uint8 of shape \(8, 8\)"),
        (np.zeros((8, 8, 3)), r"got float64 of shape .*agent.look takes batches of normalised floats"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "give a batch as a list"),
    ],
)
def test_what_predict_does_not_take(agent, image, message):
    with pytest.raises(DataError, match=message) as raised:
        agent.predict(image)
    assert "\n" not in str(raised.value)


def test_an_image_is_turned_as_its_camera_says(pixels, tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=turned)
    with Image.open(tmp_path / "turned.png") as opened:
        assert (read_image(opened) == read_image(tmp_path / "turned.png")).all()
    assert read_image(tmp_path / "turned.png").shape == (90, 50, 3)


def test_a_broken_image_that_was_opened_is_one_line(agent, pixels, tmp_path):
    path = tmp_path / "cut.jpg"
    Image.fromarray(np.tile(pixels, (9, 9, 1))).save(path)
    path.write_bytes(path.read_bytes()[:9000])
    with Image.open(path) as opened, pytest.raises(DataError, match="cannot read the image"):
        agent.predict(opened)


@pytest.fixture
def unchecked():
    """Without the type checker of the tests, which users do not have."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda pixels: "a.jpg", "got a str: agent.predict takes paths, PIL images and uint8 pixels"),
        (Image.fromarray, "got a Image"),
        (lambda pixels: pixels, "got a ndarray"),
        (lambda pixels: torch.zeros(1, 3, 24, 32, dtype=torch.uint8), "got torch.uint8"),
        (lambda pixels: torch.full((1, 3, 24, 32), 200.0), "got 200.0 to 200.0: .*agent.predict"),
    ],
)
def test_look_says_what_it_wants_and_names_predict(agent, pixels, make, message):
    with pytest.raises(SensorError, match=message) as raised:
        agent.look(make(pixels), 3)
    assert "\n" not in str(raised.value) and "predict" in str(raised.value)


@pytest.mark.parametrize("name", ["ram", "saccader"])
def test_a_system_without_a_grid_answers_a_copy_alike(name, pixels):
    system = small(name)
    found = predict(system, [pixels, pixels[::-1].copy(), pixels], Looking(seed=5))
    assert found[0].boxes == found[2].boxes and found[0].label == found[2].label
    assert found[0].path == [] and len(found[0].boxes) == found[0].glimpses
    with pytest.raises(stam.StamError, match="first_location is for agents"):
        predict(system, pixels, Looking(first_location=0))
    assert predict(system, [pixels], Looking(threshold=0.0))[0].glimpses == 1, "sure at once"
