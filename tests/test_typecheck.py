"""The checker that all other tests run under: what it lets pass, nobody would notice."""

import importlib
import sys

import jaxtyping
import pytest
import torch

from stam import cli
from stam.scene.grid import Grid

SOURCE = """
from collections.abc import Iterator
from dataclasses import dataclass
from jaxtyping import Float
from torch import Tensor

@dataclass(frozen=True)
class Pair:
    one: Float[Tensor, "size"]
    other: Float[Tensor, "size"]

    @property
    def first(self) -> str:
        return self.one

    @classmethod
    def of(cls, one: Float[Tensor, "size"]) -> "Pair":
        return cls(one, one)

    @staticmethod
    def double(number: float) -> float:
        return 2 * number

def product(one: Float[Tensor, "n k"], other: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    return one @ other

def wrong(one: Float[Tensor, "n k"]) -> Float[Tensor, "k n"]:
    inner(one[:, :1])
    return one

def inner(one: Float[Tensor, "n k"] | None = None) -> int:
    return 1

def quoted(one: "Float[Tensor, 'n n']") -> None:
    pass

def counted(one: Float[Tensor, "n n"]) -> Iterator[int]:
    yield from range(len(one))

def text() -> str:
    return 1
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "shaped_for_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    with jaxtyping.install_import_hook("shaped_for_a_test", "typecheck.checked"):
        yield importlib.import_module("shaped_for_a_test")
    del sys.modules["shaped_for_a_test"]


def test_what_fits_passes(module):
    assert module.product(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    assert module.product(torch.ones(5, 1), torch.ones(1, 5)).shape == (5, 5)  # sizes of another call
    assert module.Pair.of(torch.ones(3)).other.shape == (3,)
    assert module.Pair.double(2) == 4  # an int for a float
    assert module.wrong(torch.ones(2, 2)).shape == (2, 2)
    assert module.inner() == 1
    module.quoted(torch.ones(2, 2))
    several = [module.counted(torch.ones(size, size)) for size in (2, 3)]
    assert [list(each) for each in several] == [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize(
    "call",
    [
        lambda module: module.product(torch.ones(2, 3), torch.ones(4, 3)),
        lambda module: module.product(torch.ones(2, 3), torch.ones(3)),
        lambda module: module.product(torch.ones(2, 3), torch.ones(3, 3).long()),
        lambda module: module.product(torch.ones(2, 3), None),
        lambda module: module.wrong(torch.ones(2, 3)),
        lambda module: module.inner("text"),
        lambda module: module.quoted(torch.ones(2, 3)),
        lambda module: module.counted(torch.ones(2, 3)),
        lambda module: module.text(),
        lambda module: module.Pair(torch.ones(2), torch.ones(3)),
        lambda module: module.Pair.of(torch.ones(2, 2)),
        lambda module: module.Pair.of(torch.ones(2)).first,
        lambda module: module.Pair.double("text"),
    ],
)
def test_what_does_not_is_refused(module, call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call(module)


def test_it_can_be_switched_off(module, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert module.text() == 1 and module.Pair("one", 2).first == "one"


def test_the_package_is_checked(agent, images):
    with pytest.raises(jaxtyping.TypeCheckError):
        agent.look(images[0], 2)  # not a batch
    with pytest.raises(jaxtyping.TypeCheckError):
        Grid((24, 32), (8, 8), (4, 4)).row_column("text")
    with pytest.raises(jaxtyping.TypeCheckError):
        cli.main([3])
