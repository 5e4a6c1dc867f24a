import numpy as np
import pytest
import torch
from agents import randomise, tiny_config
from PIL import Image

import stam
from stam.errors import StamError

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install '.[gym]'")

import stam.integrations.gym  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for label in ("cat", "dog", "eel"):
        (root / label).mkdir()
        for index in range(10):
            pixels = random.integers(0, 256, (30, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / label / f"{index}.png")
    return root


@pytest.fixture
def env(folder):
    made = gymnasium.make("stam/Glimpse-v0", data=folder, image_size=(24, 32), render_mode="rgb_array")
    yield made
    made.close()


@pytest.mark.parametrize("data", ["digits", "folder"])
def test_it_passes_gymnasiums_own_checker(data, folder):
    from gymnasium.utils.env_checker import check_env

    settings = dict(data=folder, image_size=(24, 32)) if data == "folder" else {}
    env = gymnasium.make("stam/Glimpse-v0", render_mode="rgb_array", **settings)
    check_env(env.unwrapped)
    env.close()


def test_looking_uncovers_and_costs(env):
    observation, info = env.reset(seed=3)
    assert observation["seen"].sum() == 1 and info["num_glimpses"] == 1
    where = int(observation["seen"][0])  # 0 or 1, whichever is covered
    after, reward, terminated, truncated, info = env.step(where)
    assert reward == pytest.approx(-0.01) and not terminated and not truncated and info["num_glimpses"] == 2
    assert after["seen"].sum() == 2 and after["seen"][where] == 1
    top, left, bottom, right = env.unwrapped.grid.pixel_box(where)
    covered = np.ones((24, 32), bool)
    covered[top:bottom, left:right] = False
    assert after["canvas"][top:bottom, left:right].any()
    assert (after["canvas"][covered] == observation["canvas"][covered]).all()
    again, reward, *_ = env.step(where)
    assert reward == pytest.approx(-0.01) and again["seen"].sum() == 2


def test_an_answer_ends_it_and_only_the_right_one_pays(env):
    scenes = env.unwrapped.scenes
    for right in (True, False):
        _, info = env.reset(seed=1, options={"scene": 4})
        label = int(scenes.labels[info["index"]])
        answer = label if right else (label + 1) % 3
        _, reward, terminated, truncated, info = env.step(12 + answer)
        assert (reward, terminated, truncated, info["right"]) == (float(right), True, False, right)


def test_it_is_truncated_after_the_most_glimpses(folder):
    env = gymnasium.make("stam/Glimpse-v0", data=folder, image_size=(24, 32), max_glimpses=3)
    env.reset(seed=0)
    ends = [env.step(action)[2:4] for action in (0, 1, 2)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_a_seed_repeats_everything_and_options_fix_it(env):
    first, second = env.reset(seed=9), env.reset(seed=9)
    assert first[1]["index"] == second[1]["index"] and (first[0]["canvas"] == second[0]["canvas"]).all()
    observation, info = env.reset(options={"scene": 2, "location": (1, 3)})
    assert info["index"] == 2 and observation["seen"].argmax() == 7


def test_frames_show_the_cover(env):
    env.reset(options={"location": 0})
    frame = env.render()
    assert frame.shape == (24, 32, 3) and (frame[8:, 8:] == 64).all() and not (frame[:8, :8] == 64).all()


def test_the_validation_scenes_are_others(folder):
    parts = [
        gymnasium.make("stam/Glimpse-v0", data=folder, image_size=(24, 32), split=split).unwrapped.scenes
        for split in ("train", "val")
    ]
    assert not set(parts[0].names) & set(parts[1].names)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "tset"}, "split 'tset' is unknown"),
        ({"glimpse_cost": 2}, "glimpse_cost"),
        ({"max_glimpses": 0}, "max_glimpses"),
        ({"image_size": 50}, "does not divide"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(StamError, match=message):
        gymnasium.make("stam/Glimpse-v0", **wrong)


def test_wrong_actions_are_refused(env):
    bare = env.unwrapped
    fresh = stam.integrations.gym.GlimpseEnv(bare.scenes, image_size=(24, 32))
    with pytest.raises(gymnasium.error.ResetNeeded):
        fresh.step(0)
    fresh.reset(seed=0)
    with pytest.raises(gymnasium.error.InvalidAction):
        fresh.step(15)
    with pytest.raises(StamError, match="has not been seen"):
        fresh.glimpse(int(fresh._seen[0]))


def test_a_stam_agent_plays_and_earns_what_the_rules_say(env):
    agent = stam.Agent(tiny_config(num_classes=3, labels=("cat", "dog", "eel")))
    randomise(agent)
    agent.eval().configure(threshold=0.7)
    for scene in range(5):
        options = {"scene": scene, "location": 3}
        earned = stam.integrations.gym.play(env, agent, options)
        looks = round((1 - earned) * 100) % 100
        env.reset(options=options)
        image = torch.from_numpy(env.unwrapped._scene.copy()).permute(2, 0, 1)
        sensor = stam.scene.sensor.ImageSensor(image, agent.grid)
        step = agent.session(first_location=3).run(sensor)
        right = step.label == ("cat", "dog", "eel")[env.unwrapped.scenes.labels[scene]]
        assert earned == pytest.approx(right - 0.01 * (step.num_glimpses - 1)) and looks >= 0
    with pytest.raises(StamError, match="labels are not the classes"):
        stam.integrations.gym.play(env, stam.Agent(tiny_config()).eval())
