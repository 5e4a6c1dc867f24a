"""A compiled agent says what the agent says, alone and among others, and is compiled once."""

import os
import shutil

import pytest
import torch
from fast.test_cpu import CAUSAL, make_agent

from stam.errors import FileError, StamError
from stam.fast import cpu_compiled
from stam.fast.cpu_compiled import CompiledLooker
from stam.files import cache_folder
from stam.live import Session
from stam.live.session import observe_all

FIRST = torch.tensor([0, 5, 9, 3])


class CompiledAgainError(Exception):
    """Something was compiled that should have been found."""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_agent_says_what_the_plain_modules_say_and_is_compiled_once(monkeypatch):
    agent = make_agent(**CAUSAL)
    looker = agent.compiled()
    assert isinstance(looker, CompiledLooker)
    images = torch.randn(4, 3, 32, 32)
    for batch in (1, 2, 4):  # four are too many for the compiled step
        got = looker.look(images[:batch], 16, FIRST[:batch])
        want = agent.ready(fast=False).look(images[:batch], 16, FIRST[:batch])
        assert got.locations.equal(want.locations)
        torch.testing.assert_close(got.class_logits, want.class_logits, atol=1e-4, rtol=1e-4)
    assert looker.look(images[:0], 3, first_location=0).locations.shape[0] == 0

    glimpses = torch.randn(6, 3, 8, 8)
    steps = []
    for who in (looker, agent):
        sessions = [Session(who, first_location=0) for _ in range(3)]
        for session, count in zip(sessions, (1, 3, 5), strict=True):
            for place in range(count):
                session.observe(glimpses[place], place)
        steps.append(observe_all(sessions, [glimpses[5]] * 3, [9] * 3))
        sessions[2].rewind(2)
        steps[-1].append(sessions[2].observe(glimpses[5], 9))
    for step, wanted in zip(*steps, strict=True):
        assert step.location == wanted.location
        torch.testing.assert_close(step.probabilities, wanted.probabilities, atol=1e-5, rtol=1e-4)

    def refuse(*_: object) -> None:
        raise CompiledAgainError

    monkeypatch.setattr(cpu_compiled, "_compile", refuse)
    again = agent.compiled().look(images[:1], 3, 0)
    assert again.class_logits.equal(looker.look(images[:1], 3, 0).class_logits)
    (kept,) = (cache_folder() / "compiled").glob("*.pt2")
    kept.write_bytes(kept.read_bytes()[:1000])
    with pytest.raises(StamError, match="CompiledAgainError"):  # a damaged one is made again
        agent.compiled()


def test_other_weights_or_threads_are_not_what_was_compiled():
    digests = set()
    for change in ("nothing", "weight", "threads"):
        torch.manual_seed(0)
        agent = make_agent(**CAUSAL)
        if change == "weight":
            agent.core.norm.bias.data[0] += 1
        torch.set_num_threads(2 if change == "threads" else 1)
        digests.add(cpu_compiled._digest(cpu_compiled._Step(agent.core, 4)))
    assert len(digests) == 3


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    with pytest.raises(StamError, match="--core causal"):
        make_agent().compiled()
    hooked = make_agent(**CAUSAL)
    hooked.core.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(StamError, match=r"core\.norm"):
        hooked.compiled()
    with pytest.raises(StamError, match="float32"):
        make_agent(**CAUSAL).double().compiled()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(StamError, match="no-such-compiler"):
        make_agent(**CAUSAL | {"depth": 1}).compiled()


def test_a_compiler_that_fails_is_named_in_one_line(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("it broke\nin many lines")

    monkeypatch.setattr(cpu_compiled, "_compile", fail)
    monkeypatch.setenv("CXX", "sh")
    agent = make_agent(**CAUSAL | {"depth": 1}).train()
    with pytest.raises(StamError, match=r"could not be compiled \(it broke\): look without compiling"):
        agent.compiled()
    assert agent.core.training  # as it was


@pytest.mark.parametrize("folder", ["cannot be written", "is not there", "has no home"])
def test_what_cannot_be_kept_is_used_all_the_same(monkeypatch, tmp_path, folder):
    core = make_agent(**CAUSAL | {"depth": 1}).core
    step = cpu_compiled._Step(core, 4)

    def refuse(*_: object) -> None:
        raise RuntimeError if folder == "has no home" else FileError("the disk is full")

    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr(cpu_compiled, "_compile", lambda *_: None)
    monkeypatch.setattr(cpu_compiled, "_load", lambda _: step)
    if folder == "is not there":
        (tmp_path / "file").write_text("no folder can be made in here")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        place = "cache_folder" if folder == "has no home" else "write_atomically"
        monkeypatch.setattr(cpu_compiled, place, refuse)
    assert cpu_compiled.compile_step(core, 4) is step
    monkeypatch.setattr(cpu_compiled, "_load", lambda _: lambda *given: [2 * part for part in step(*given)])
    with pytest.raises(StamError, match="other numbers"):
        cpu_compiled.compile_step(core, 4)


def test_what_was_used_longest_ago_is_removed(tmp_path):
    for age in range(10):
        path = tmp_path / f"{age}.pt2"
        path.write_bytes(b"")
        os.utime(path, (1000 - age, 1000 - age))
    cpu_compiled._forget_old(tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == [str(age) for age in range(8)]
