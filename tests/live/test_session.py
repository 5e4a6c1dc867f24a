import itertools
import json

import numpy as np
import pytest
import torch
from agents import randomise, tiny_config
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from sessions import feed, sensor_of

import stam
from stam.errors import SensorError, StamError, WeightsError
from stam.live import (
    Window,
    WindowSensor,
    load_session,
    look_through,
    observe_all,
    save_session,
    scene_view,
    windows,
)
from stam.model.policy import RandomPolicy
from stam.scene.grid import LocationError
from stam.scene.pixels import normalise
from stam.scene.sensor import CallbackSensor, ImageSensor, check_sensor


def test_a_session_never_reads_more_than_it_asks_for(agent, images):
    read = []

    def camera(row, column):
        read.append((row, column))
        return images[0, :, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8]

    session = agent.session(threshold=1.0)
    session.run(CallbackSensor(camera, agent.grid), max_glimpses=5)
    assert read == list(session.seen) and session.num_glimpses == 5


def test_sessions_at_different_counts_in_one_call_say_what_each_says_alone(agent, images):
    sensors = [sensor_of(agent, image) for image in images]
    alone = [agent.session(first_location=3) for _ in images]
    together = [agent.session(first_location=3) for _ in images]
    for count, (one, other, sensor) in enumerate(zip(alone, together, sensors, strict=True)):
        feed(one, sensor, 2 * count)
        feed(other, sensor, 2 * count)
    for _ in range(4):
        want = [feed(session, sensor, 1)[0] for session, sensor in zip(alone, sensors, strict=True)]
        glimpses = [sensor.sense(session.location) for session, sensor in zip(together, sensors, strict=True)]
        got = observe_all(together, glimpses)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.probabilities, other.probabilities, atol=1e-6, rtol=0)
            assert (one.location, one.num_glimpses) == (other.location, other.num_glimpses)


def test_a_core_that_encodes_each_glimpse_once_takes_all_counts_in_one_pass(agent, images, monkeypatch):
    sensors = [sensor_of(agent, image) for image in images]
    sessions = [agent.session(first_location=3) for _ in images]
    for count, (session, sensor) in enumerate(zip(sessions, sensors, strict=True)):
        feed(session, sensor, 1 + 2 * count)
    looker, sizes = sessions[0].agent, []
    believe = looker.believe
    monkeypatch.setattr(looker, "believe", lambda memory: sizes.append(1) or believe(memory))
    observe_all(
        sessions, [sensor.sense(session.location) for session, sensor in zip(sessions, sensors, strict=True)]
    )
    assert len(sizes) == (1 if agent.config.core == "causal" else len(images))


def test_observe_all_changes_nothing_when_one_glimpse_is_bad(agent, images):
    sessions = [agent.session(first_location=0), agent.session(first_location=1)]
    good = sensor_of(agent, images[0]).sense(0)
    with pytest.raises(SensorError):
        observe_all(sessions, [good, torch.zeros(3, 7, 8)])
    assert [session.num_glimpses for session in sessions] == [0, 0]
    with pytest.raises(StamError, match="given twice"):
        observe_all([sessions[0], sessions[0]], [good, good])


@pytest.mark.parametrize(
    ("glimpse", "message"),
    [
        (torch.zeros(3, 8, 7), r"must be \(channels, height, width\) = \(3, 8, 8\), got \(3, 8, 7\)"),
        (torch.zeros(1, 8, 8), "must be"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), "uint8 in 0..255 or normalised floats, got torch.int64"),
        (torch.full((3, 8, 8), torch.nan), "NaN or infinity"),
        (torch.rand(3, 8, 8) * 255, "must be normalised, so about -2.1 to 2.6, got .* pass pixels of 0..255"),
        ("a picture", "must be a tensor, an array or a PIL image, got str"),
        (Image.new("RGB", (9, 8)), "must be"),
    ],
)
def test_a_bad_glimpse_is_refused_and_leaves_the_session_as_it_was(agent, images, glimpse, message):
    session = agent.session(first_location=(1, 2))
    feed(session, sensor_of(agent, images[0]), 2)
    before = session.snapshot
    with pytest.raises(SensorError, match=message):
        session.observe(glimpse)
    assert session.snapshot is before


def test_every_form_of_a_good_glimpse_means_the_same(agent):
    pixels = torch.randint(256, (8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    forms = [
        pixels.numpy(),
        pixels,
        pixels.permute(2, 0, 1),
        Image.fromarray(pixels.numpy()),
        normalise(pixels.permute(2, 0, 1)),
        normalise(pixels.permute(2, 0, 1)).double().numpy(),
    ]
    said = [agent.session(first_location=4).observe(form).probabilities for form in forms]
    for probabilities in said[1:]:
        torch.testing.assert_close(probabilities, said[0], atol=1e-6, rtol=0)


def test_a_sensor_may_be_off_target(agent, images):
    sensor = sensor_of(agent, images[0])
    session = agent.session(first_location=0)
    step = session.observe(sensor.sense(5), location=(1, 1))
    assert session.seen == ((1, 1),) and step.num_glimpses == 1
    want = agent.session(first_location=5).observe(sensor.sense(5))
    assert step.probabilities.equal(want.probabilities) and step.location == want.location
    with pytest.raises(LocationError, match="not on the grid"):
        session.observe(sensor.sense(5), location=(3, 0))


def test_a_repeated_location_takes_the_place_of_the_old_glimpse(agent, images):
    old, new = sensor_of(agent, images[0]), sensor_of(agent, images[1])
    session = agent.session(first_location=0)
    for location in (0, 7, 4):
        session.observe(old.sense(location), location)
    step = session.observe(new.sense(7), location=7)
    assert step.num_glimpses == 3 and session.seen == ((0, 0), (1, 3), (1, 0))
    fresh = agent.session(first_location=0)
    for location, sensor in ((0, old), (7, new), (4, old)):
        want = fresh.observe(sensor.sense(location), location)
    assert step.probabilities.equal(want.probabilities) and step.location == want.location


def test_a_session_begins_at_the_centre_unless_it_is_told_or_seeded(agent):
    assert {agent.session().location for _ in range(5)} == {(1, 2)}
    assert agent.session(first_location=(0, 3)).location == (0, 3)
    drawn = [agent.session(generator=torch.Generator().manual_seed(seed)).location for seed in range(8)]
    again = [agent.session(generator=torch.Generator().manual_seed(seed)).location for seed in range(8)]
    assert drawn == again and len(set(drawn)) > 2


def test_when_all_is_seen_only_a_named_location_is_taken(agent, images):
    session = agent.session()
    feed(session, sensor_of(agent, images[0]), 12)
    glimpse = sensor_of(agent, images[1]).sense(2)
    with pytest.raises(SensorError, match="every location has been seen"):
        session.observe(glimpse)
    assert session.observe(glimpse, location=2).num_glimpses == 12
    assert not session.policy_map().any()


def test_a_missed_glimpse_makes_it_look_elsewhere_and_come_back_last(agent, images):
    sensor = sensor_of(agent, images[0])
    session = agent.session(first_location=6)
    other = session.missed()
    assert other != (1, 2) and session.location == other and session.missed_locations == ((1, 2),)
    feed(session, sensor, 2)
    unwanted = session.location
    session.missed()
    assert session.location not in (unwanted, (1, 2))
    asked = []
    while session.num_glimpses < 12:
        asked.append(session.location)
        feed(session, sensor, 1)
    assert set(asked[-2:]) == {unwanted, (1, 2)} and len(set(asked)) == 10
    assert session.step.stop and session.missed_locations == ()


def test_missing_everything_goes_round_and_never_ends(agent):
    session = agent.session(first_location=0)
    asked = [session.location]
    for _ in range(40):
        asked.append(session.missed())
    assert all(one != other for one, other in itertools.pairwise(asked))
    assert set(asked) == {(row, column) for row in range(3) for column in range(4)}


def test_missed_glimpses_do_not_count_for_who_decides(agent, images):
    sensor = sensor_of(agent, images[0])
    paths = []
    for policy in ("learned", "learned:3"):
        session = agent.session(first_location=3, policy=policy)
        feed(session, sensor, 1)
        path = [session.missed(), session.missed(), *session.missed_locations]
        assert session.policy_map().max() < 1  # an order would be certain
        path.append(session.observe(sensor.sense(session.location)).location)
        paths.append(path)
    assert paths[0] == paths[1]


def test_a_missed_location_that_was_not_asked_for_is_left_out_too(agent, images):
    session = agent.session(first_location=0)
    asked = session.location
    avoided = agent.session(first_location=0)
    favourite = feed(avoided, sensor_of(agent, images[0]), 1)[0].location
    assert session.missed(favourite) == asked
    assert feed(session, sensor_of(agent, images[0]), 1)[0].location != favourite
    with pytest.raises(SensorError, match="has been seen"):
        session.missed(0)


def test_run_looks_elsewhere_when_a_sensor_fails_a_few_times(agent, images):
    sensor = sensor_of(agent, images[0])
    failures = iter([TimeoutError("slow"), None, ConnectionError("gone"), None, SensorError("dark")])

    def flaky(row, column):
        failure = next(failures, None)
        if failure:
            raise failure
        return sensor.sense((row, column))

    session = agent.session(threshold=1.0)
    step = session.run(CallbackSensor(flaky, agent.grid), max_glimpses=4, max_missed=3)
    assert step.num_glimpses == 4 and len(session.missed_locations) == 3

    def dead(row, column):
        raise TimeoutError("no answer")

    with pytest.raises(TimeoutError):
        agent.session().run(CallbackSensor(dead, agent.grid), max_missed=5)


def test_no_glimpse_is_taken_where_enough_have_been_seen(agent, images):
    for most in (3, 5):
        session = agent.session(threshold=1.0)
        feed(session, sensor_of(agent, images[0]), 5)
        said = session.step
        assert session.run(sensor_of(agent, images[0]), max_glimpses=most) is said
        assert look_through([sensor_of(agent, images[0])], [session], max_glimpses=most) == [said]
        assert session.num_glimpses == 5


def test_a_sensor_may_use_its_buffer_again(agent, images):
    sensor, buffer = sensor_of(agent, images[0]), torch.zeros(3, 8, 8)
    session, careful = agent.session(first_location=0), agent.session(first_location=0)
    for location in (0, 5, 7):
        buffer.copy_(sensor.sense(location))
        session.observe(buffer, location)
        careful.observe(sensor.sense(location), location)
    buffer.zero_()
    assert session.rewind(2).probabilities.equal(careful.rewind(2).probabilities)


def test_a_finished_session_cannot_look_through_a_sensor(agent, images):
    session = agent.session()
    feed(session, sensor_of(agent, images[0]), 12)
    with pytest.raises(SensorError, match="every location has been seen"):
        look_through([sensor_of(agent, images[0])], [session])
    with pytest.raises(SensorError, match="every location has been seen"):
        session.run(sensor_of(agent, images[0]))


def test_rewind_gives_back_what_was_said_then(agent, images):
    sensor = sensor_of(agent, images[0])
    session = agent.session(first_location=2)
    steps = feed(session, sensor, 6)
    again = session.rewind(3)
    assert again.probabilities.equal(steps[2].probabilities) and again.location == steps[2].location
    assert feed(session, sensor, 1)[0].probabilities.equal(steps[3].probabilities)
    assert session.rewind(0) is None and session.location == (0, 2) and session.step is None
    with pytest.raises(StamError, match="cannot rewind to 1 glimpses: 0 have been seen"):
        session.rewind(1)


def test_the_policy_map_is_a_distribution_over_what_is_left_and_its_peak_is_next(agent, images):
    session = agent.session(first_location=2)
    assert session.policy_map().tolist() == [[pytest.approx(1 / 12)] * 4] * 3
    feed(session, sensor_of(agent, images[0]), 5)
    likely = session.policy_map()
    assert likely.sum() == pytest.approx(1) and all(likely[place] == 0 for place in session.seen)
    assert divmod(int(likely.argmax()), 4) == session.location
    for policy, peak in (("random", 1 / 11), ("spiral", 1.0)):
        session = agent.session(first_location=0, policy=policy)
        feed(session, sensor_of(agent, images[0]), 1)
        assert session.policy_map().max() == pytest.approx(peak)
    assert divmod(int(session.policy_map().argmax()), 4) == session.location

    class Odd(RandomPolicy):
        pass

    class Other(type(agent.policy("spiral")).__mro__[1]):
        def decide(self, state, seen, generator=None, num_seen=None):
            return agent.policy("random").decide(state, seen, generator)

    assert agent.session(policy=Odd()).policy_map().sum() == pytest.approx(1)
    session = agent.session(policy=Other())
    feed(session, sensor_of(agent, images[0]), 1)
    with pytest.raises(StamError, match="Other does not say how likely"):
        session.policy_map()


def test_threshold_comes_from_the_agent_or_is_given(agent):
    assert agent.configure(threshold=0.3).session().threshold == 0.3
    assert agent.session(threshold=0.7).threshold == 0.7
    with pytest.raises(StamError, match=r"threshold must be in \[0, 1\], got 1.5"):
        agent.session(threshold=1.5)


@pytest.mark.parametrize("policy", ["learned", "random", "spiral"])
def test_a_saved_session_goes_on_exactly(agent, images, tmp_path, policy):
    sensor = sensor_of(agent, images[0])
    session = agent.session(policy=policy, generator=torch.Generator().manual_seed(5), threshold=0.77)
    feed(session, sensor, 3)
    session.missed()
    save_session(session, tmp_path / "session")
    restored = load_session(tmp_path / "session", agent)
    assert restored.location == session.location and restored.seen == session.seen
    assert restored.missed_locations == session.missed_locations and restored.threshold == 0.77
    for one, other in zip(feed(session, sensor, 9), feed(restored, sensor, 9), strict=True):
        assert one.probabilities.equal(other.probabilities) and one.location == other.location
        assert one.stop == other.stop


def test_a_session_of_another_precision_goes_on(agent, images, tmp_path):
    session = agent.session()
    feed(session, sensor_of(agent, images[0]), 2)
    save_session(session, tmp_path / "session")
    with safe_open(tmp_path / "session", framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors | {"glimpses": tensors["glimpses"].double()}, tmp_path / "double", metadata=metadata)
    assert load_session(tmp_path / "double", agent).step.label == session.step.label


def test_an_unbegun_session_can_be_saved(agent, images, tmp_path):
    session = agent.session(policy="random")
    save_session(session, tmp_path / "session")
    restored = load_session(tmp_path / "session", agent)
    sensor = sensor_of(agent, images[0])
    assert [s.location for s in feed(restored, sensor, 5)] == [s.location for s in feed(session, sensor, 5)]


def test_a_session_from_before_a_setting_was_made_goes_on(agent, images, tmp_path):
    session = agent.session()
    feed(session, sensor_of(agent, images[0]), 2)
    save_session(session, tmp_path / "session")
    with safe_open(tmp_path / "session", framework="pt") as file:
        record = json.loads(file.metadata()["stam-session"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    record["agent"] |= {"handover": None, "mirrored": False}  # as version 0.1 wrote them
    save_file(tensors, tmp_path / "old", metadata={"stam-session": json.dumps(record)})
    assert load_session(tmp_path / "old", agent).seen == session.seen


def test_a_session_of_another_agent_or_a_broken_file_is_refused(agent, images, tmp_path):
    path = tmp_path / "session"
    session = agent.session()
    feed(session, sensor_of(agent, images[0]), 2)
    save_session(session, path)
    other = stam.Agent(agent.config).eval()
    randomise(other, seed=8)
    with pytest.raises(WeightsError, match="other weights"):
        load_session(path, other)
    with pytest.raises(WeightsError, match="another agent"):
        load_session(path, stam.Agent(tiny_config(depth=1)).eval())
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(StamError, match="not a saved session, or is damaged"):
        load_session(path, agent)
    with pytest.raises(StamError, match="no session at"):
        load_session(tmp_path / "none", agent)
    with pytest.raises(StamError, match="could not write"):
        save_session(session, tmp_path / "no" / "folder")


def test_a_session_with_a_policy_of_ones_own_needs_it_again(agent, tmp_path):
    save_session(agent.session(policy=RandomPolicy()), tmp_path / "session")
    with pytest.raises(StamError, match="pass it as policy="):
        load_session(tmp_path / "session", agent)
    assert load_session(tmp_path / "session", agent, policy=RandomPolicy()).num_glimpses == 0


def test_a_window_of_the_agents_size_is_the_image_itself(agent):
    scene = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    window = Window(10, 20, 24, 32)
    sensor = WindowSensor(lambda t, x, h, w: scene[t : t + h, x : x + w], window, agent.grid)
    check_sensor(sensor)
    want = ImageSensor(torch.from_numpy(scene[10:34, 20:52]).permute(2, 0, 1), agent.grid)
    for location in range(12):
        assert sensor.sense(location).equal(want.sense(location))


def test_a_larger_window_is_resampled_and_only_its_cells_are_read(agent):
    scene = np.random.default_rng(0).integers(0, 256, (1000, 700, 3), dtype=np.uint8)
    read = []

    def camera(top, left, height, width):
        read.append((top, left, height, width))
        return Image.fromarray(scene[top : top + height, left : left + width])

    sensor = WindowSensor(camera, Window(0, 0, 1000, 700), agent.grid)
    assert sensor.sense((2, 3)).shape == (3, 8, 8) and read == [(666, 525, 334, 175)]
    boxes = [sensor.scene_box(location) for location in range(12)]
    assert sum(box.height * box.width for box in boxes) == 700_000


def test_a_window_of_a_palette_is_resampled_as_what_it_shows(agent):
    scene = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
    palette = scene.quantize(200)

    def sensor(image):
        box = Window(0, 0, 48, 64)
        return WindowSensor(lambda t, x, h, w: image.crop((x, t, x + w, t + h)), box, agent.grid)

    assert sensor(palette).sense(3).equal(sensor(palette.convert("RGB")).sense(3))


def test_a_window_sensor_says_what_is_wrong(agent):
    with pytest.raises(StamError, match="takes 4 channels: write a sensor of your own"):
        WindowSensor(lambda *box: None, Window(0, 0, 24, 32), agent.grid, (0.5,) * 4, (0.5,) * 4)
    with pytest.raises(StamError, match="cannot be cut into 3x4 glimpses"):
        WindowSensor(lambda *box: None, Window(0, 0, 2, 100), agent.grid)
    for pixels, message in (
        (np.zeros((3, 3, 3), np.uint8), "asked for 8x8 pixels, got 3x3"),
        (np.zeros((8, 8, 3)), "got float64"),
    ):
        sensor = WindowSensor(lambda *box, pixels=pixels: pixels, Window(0, 0, 24, 32), agent.grid)
        with pytest.raises(SensorError, match=message):
            sensor.sense(0)


def test_windows_cover_a_scene():
    assert windows((24, 32), (24, 32)) == [Window(0, 0, 24, 32)]
    assert windows((10, 10), (24, 32)) == [Window(0, 0, 10, 10)]
    covered = np.zeros((100, 130), dtype=int)
    for top, left, height, width in windows((100, 130), (40, 40), overlap=0.25):
        covered[top : top + height, left : left + width] += 1
        assert (height, width) == (40, 40)
    assert covered.min() >= 1
    with pytest.raises(StamError, match="overlap"):
        windows((10, 10), (5, 5), overlap=1)


def test_looking_through_many_windows_is_what_each_alone_gives(agent):
    scene = np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8)

    def sensors():
        def read(top, left, height, width):
            return scene[top : top + height, left : left + width]

        return [WindowSensor(read, window, agent.grid) for window in windows((48, 64), (24, 32))]

    def sessions():
        return [agent.session(first_location=index, threshold=0.8) for index in range(4)]

    heard = []
    steps = look_through(sensors(), sessions(), max_glimpses=9, on_step=lambda i, s: heard.append((i, s)))
    alone = [session.run(sensor, 9) for session, sensor in zip(sessions(), sensors(), strict=True)]
    for step, want in zip(steps, alone, strict=True):
        assert (step.num_glimpses, step.label) == (want.num_glimpses, want.label)
    assert len(heard) == sum(step.num_glimpses for step in steps)


def test_an_image_is_brought_to_size_as_evaluation_does():
    config = tiny_config()
    image = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    assert (scene_view(image, config) == image).all()
    large = np.random.default_rng(0).integers(0, 256, (270, 480, 3), dtype=np.uint8)
    for resize_size in (None, 40):
        assert scene_view(large, config, resize_size).shape == (24, 32, 3)
    assert (scene_view(large, config) != scene_view(large, config, 27)).any()
    cropped = tiny_config(preprocess_size=27)
    assert (scene_view(large, cropped) == scene_view(large, config, 27)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"locations": torch.tensor([3, 3, 1])}, "its locations cannot be"),
        ({"locations": torch.tensor([3, 99, 1])}, "its locations cannot be"),
        ({"locations": torch.zeros(10**6, dtype=torch.long)}, "more glimpses than the 12 of a scene"),
        ({"missed": torch.tensor([-1])}, "its locations cannot be"),
        ({"glimpses": torch.zeros(3, 3, 8, 9)}, "'glimpses' has the shape"),
        (
            {"glimpses": torch.full((3, 3, 8, 8), float("nan"))},
            "'glimpses' holds numbers that are",
        ),
        ({"glimpses": torch.zeros(3, 3, 8, 8, dtype=torch.long)}, "'glimpses' holds torch.int64"),
        ({"generator": torch.zeros(3, dtype=torch.uint8)}, "'generator' has the shape"),
        ({"probabilities": torch.zeros(4)}, "'probabilities' has the shape"),
        ({"more": torch.zeros(4)}, "it holds generator, glimpses, locations, missed, more"),
        ({"location": "there"}, "location must be a whole number, got 'there'"),
        ({"location": 50}, "its locations cannot be"),
        ({"location": None}, "its locations cannot be"),
        ({"policy": 5}, "policy must be text, got 5"),
        ({"threshold": float("inf")}, "Infinity is not a finite number"),
        ({"agent": []}, r"agent must be an object, got \[\]"),
        ({"first_location": None}, "first_location must be a whole number"),
        ({"script": "x"}, "unknown setting 'script'"),
    ],
)
def test_what_a_session_cannot_be_is_named(agent, images, tmp_path, change, message):
    session = agent.session()
    feed(session, sensor_of(agent, images[0]), 3)
    save_session(session, tmp_path / "session")
    with safe_open(tmp_path / "session", framework="pt") as file:
        record = json.loads(file.metadata()["stam-session"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    record |= {name: value for name, value in change.items() if not isinstance(value, torch.Tensor)}
    tensors |= {name: value for name, value in change.items() if isinstance(value, torch.Tensor)}
    save_file(tensors, tmp_path / "odd", metadata={"stam-session": json.dumps(record)})
    with pytest.raises(StamError, match=f"odd' is not a saved session, or is damaged: .*{message}"):
        load_session(tmp_path / "odd", agent)
