import pytest
from agents import randomise, tiny_config

import stam


@pytest.fixture(scope="module")
def web_agent():
    built = stam.Agent(tiny_config(labels=tuple("abcde")))
    randomise(built)
    return built.eval()
