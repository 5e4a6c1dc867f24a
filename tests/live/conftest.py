import pytest
from agents import randomise, tiny_config

import stam


@pytest.fixture(params=["reencoding", "causal"])
def agent(request) -> stam.Agent:
    """Sessions are the same whatever the core is."""
    built = stam.Agent(tiny_config(core=request.param))
    randomise(built)
    return built.eval()
