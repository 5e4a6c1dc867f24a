"""Files of tensors: read without running code, and copied by name."""

import os
import pickle

import pytest
import torch
from deits import CLASSES, deit_state, write

import stam
from stam import weights
from stam.errors import WeightsError


def test_half_precision_is_read_as_float32(tmp_path):
    agent = weights.load_deit(
        write(tmp_path, deit_state(True), "half"), CLASSES, image_size=64, actor_width=8
    )
    assert all(parameter.dtype == torch.float32 for parameter in agent.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.bias": torch.zeros(9)}, r"does not fit at 'norm.bias': expected shape \(64,\), found \(9,\)"),
        ({"blocks.0.norm1.bias": None}, r"lacks 'blocks.0.norm1.bias': expected shape \(64,\)"),
        ({"surprise": torch.zeros(2, 3)}, r"has 'surprise' of shape \(2, 3\), which the model lacks"),
        ({"pos_embed": torch.zeros(1, 19, 64)}, "has 17 patch positions, not a square grid"),
        ({"cls_token": None}, "is not a DeiT: it lacks 'cls_token'"),
    ],
)
def test_a_file_that_does_not_fit_names_the_first_mismatch(change, message):
    state = deit_state(True) | change
    state = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(WeightsError, match=message):
        weights.load_deit(state, CLASSES, image_size=64)


def test_files_that_are_not_weights_are_refused(tmp_path):
    with pytest.raises(WeightsError, match="no weights file"):
        weights.load_deit(tmp_path / "missing.pth", 3)
    with pytest.raises(WeightsError, match="is a folder"):
        weights.load_deit(tmp_path, 3)
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    for name in ("text.pth", "text.safetensors"):
        with pytest.raises(WeightsError, match="damaged|not opened"):
            weights.load_deit(tmp_path / name, 3)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(WeightsError, match="holds a list"):
        weights.load_deit(tmp_path / "list.pth", 3)
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    with pytest.raises(WeightsError, match="holds no tensors"):
        weights.load_deit(tmp_path / "empty.pth", 3)
    whole = write(tmp_path, deit_state(True), "safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match="damaged"):
        weights.load_deit(tmp_path / "cut.safetensors", CLASSES)


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB_PATH"],)


def test_code_is_never_unpickled(tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB_PATH", str(tmp_path / "exploded"))
    torch.save({"model": deit_state(True), "extra": Bomb()}, tmp_path / "zip.pth")
    with (tmp_path / "old.pth").open("wb") as file:
        pickle.dump({"model": Bomb()}, file, protocol=2)
    for name in ("zip.pth", "old.pth"):
        with pytest.raises(WeightsError):
            weights.load_deit(tmp_path / name, CLASSES)
    assert not (tmp_path / "exploded").exists()


def test_weights_that_are_not_finite_are_refused(agent, tmp_path):
    for value in (float("nan"), float("inf")):
        folder = tmp_path / str(value)
        with torch.no_grad():
            agent.core.head.bias[1] = value
        weights.save_agent(agent, folder)
        with pytest.raises(WeightsError, match=r"values in 'core.head.bias' that are not finite"):
            stam.load(folder)
