import json

import pytest
from agents import tiny_config

from stam import Agent
from stam.config import AgentConfig, from_plain
from stam.errors import ConfigError, StamError, did_you_mean, require_package
from stam.settings import TrainingConfig


def test_json_round_trip():
    config = tiny_config(labels=("a", "b", "c", "d", "e"), threshold=0.7, policy="spiral")
    assert AgentConfig.from_json(config.to_json()) == config


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown setting 'glimpse_siz': did you mean 'glimpse_size'"):
        AgentConfig.from_json('{"num_classes": 3, "glimpse_siz": 32}')


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="num_classes"):
        AgentConfig.from_json("{}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_classes": 0}, "num_classes must be at least 1"),
        ({"num_heads": 5}, "num_heads 5 does not divide width 24"),
        ({"drop_path": 1.0}, "drop_path must be in"),
        ({"threshold": 1.5}, "threshold must be in"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"mean": (0.5,)}, "mean needs 3 values"),
        ({"std": (0.1, 0.0, 0.1)}, "std must be above 0"),
        ({"labels": ("a",)}, "labels must name all 5 classes or none"),
        ({"labels": ("a", "b", "c", "d", "a")}, "differ"),
        ({"glimpse_size": 7}, "does not divide"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_built(settings, message):
    with pytest.raises(ConfigError, match=message):
        tiny_config(**settings)


def test_an_unknown_policy_is_refused_when_an_agent_is_built():
    with pytest.raises(ConfigError, match="did you mean 'spiral'"):
        Agent(tiny_config(policy="spirl"))


def test_settings_of_version_0_1_are_brought_up_to_date():
    old = json.loads(tiny_config().to_json()) | {"handover": 8, "mirrored": False}
    assert AgentConfig.from_json(json.dumps(old)).policy == "learned:8"
    assert AgentConfig.from_json(json.dumps(old | {"policy": "spiral"})).policy == "spiral"
    assert AgentConfig.from_json(json.dumps(old | {"handover": None})) == tiny_config()
    with pytest.raises(ConfigError, match="mirrored"):
        AgentConfig.from_json(json.dumps(old | {"mirrored": True}))
    training = {
        "extra_looks": 3,
        "averaged_batches": 60,
        "mild_share": 0.25,
        "compile": False,
        "reward": "gain",
    }
    found = from_plain(TrainingConfig, training | {"start_share": 0.1})
    assert (found.short_episodes, found.ema_batches, found.large_crop_fraction) == (3, 60, 0.25)
    assert not found.fast


def test_named_sizes():
    assert AgentConfig.of_size("base", 10).width == 768
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        AgentConfig.of_size("tyni", 10)


def test_hint_lists_what_is_allowed_when_nothing_is_near():
    assert did_you_mean("zzz", ["plus", "spiral"]) == "allowed: plus, spiral"


def test_a_missing_package_names_its_extra():
    with pytest.raises(StamError, match=r"pip install .*\[hub\]'"):
        require_package("no_such_package_anywhere", extra="hub")
