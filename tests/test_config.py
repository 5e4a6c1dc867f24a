import pytest
from agents import tiny_config

from stam.config import AgentConfig
from stam.errors import ConfigError, StamError, did_you_mean, require_package


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
        ({"policy": "spirl"}, "did you mean 'spiral'"),
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


def test_named_sizes():
    assert AgentConfig.of_size("base", 10).width == 768
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        AgentConfig.of_size("tyni", 10)


def test_hint_lists_what_is_allowed_when_nothing_is_near():
    assert did_you_mean("zzz", ["plus", "spiral"]) == "allowed: plus, spiral"


def test_a_missing_package_names_its_extra():
    with pytest.raises(StamError, match=r"pip install 'stam-vision\[hub\]'"):
        require_package("no_such_package_anywhere", extra="hub")
