"""Shared by all tests: shapes in annotations are checked, and every test is seeded."""

import gc
import signal

import pytest
import typecheck

typecheck.install("stam")

import torch  # noqa: E402
from agents import randomise, tiny_config  # noqa: E402

import stam  # noqa: E402
from stam.config import CORE_SIZES  # noqa: E402

# in the background a process ignores Ctrl-C, and so would all it starts: tests interrupt some of them
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def _swept() -> None:
    """What was imported so far stays, so no collection needs to look through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _alike() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch) -> None:
    """Nothing is remembered from an earlier test, or left in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def shallow(monkeypatch) -> None:
    """DeiT-Tiny has one block: whatever is timed is timed in the same way."""
    width, _, num_heads = CORE_SIZES["tiny"]
    monkeypatch.setitem(CORE_SIZES, "tiny", (width, 1, num_heads))


@pytest.fixture
def agent() -> stam.Agent:
    built = stam.Agent(tiny_config())
    randomise(built)
    return built.eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(4, 3, 24, 32, generator=torch.Generator().manual_seed(1))
