"""Files of tensors: read without running code, and copied by name."""

import os
import pickle
import resource
import zipfile

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


def test_an_archive_that_unpacks_to_more_is_refused(tmp_path):
    """Torch packs nothing, so whoever did wants to fill the memory."""
    sound = write(tmp_path, deit_state(True), "pth")
    with zipfile.ZipFile(sound) as old, zipfile.ZipFile(tmp_path / "b.pth", "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(
                member.filename, bytes(10**7) if member.filename.endswith("/0") else old.read(member)
            )
    with pytest.raises(WeightsError, match="b.pth' is not a weights file or is damaged: it would unpack to"):
        weights.load_deit(tmp_path / "b.pth", CLASSES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.bias": torch.zeros(1).expand(10**12)}, "something else than plain numbers as 'norm.bias'"),
        ({"norm.bias": torch.zeros(64).to_sparse()}, "something else than plain numbers as 'norm.bias'"),
        ({"norm.bias": torch.zeros(64, dtype=torch.complex64)}, "something else than plain numbers"),
        ({5: torch.zeros(64)}, "something else than plain numbers as '5'"),
        ({"cls_token": torch.zeros(())}, r"is not a DeiT: 'cls_token' has the shape \(\)"),
        ({"cls_token": torch.zeros(1, 1, 0)}, r"'cls_token' has the shape \(1, 1, 0\)"),
        # a file of 3 MB that would make an agent of 100 GB
        (
            {"cls_token": torch.zeros(1, 1, 64 * 1500)},
            "does not fit at 'cls_token'|does not fit at 'dist_token'",
        ),
        ({"blocks.0.mlp.fc1.weight": torch.zeros(10**6, 1)}, "does not fit at 'blocks.0.mlp.fc1.weight'"),
        ({"blocks.1000000000.norm1.bias": torch.zeros(64)}, "the blocks of a DeiT are numbered from 0 on: 2"),
        ({"blocks.x.norm1.bias": torch.zeros(64)}, "numbered from 0 on"),
        ({"head.weight": torch.zeros(6)}, "'head.weight' has 1 dimensions"),
        ({"pos_embed": torch.zeros(1, 2, 64)}, "'pos_embed' has no patch positions"),
    ],
)
def test_sizes_are_compared_before_memory_is_taken(tmp_path, change, message):
    torch.save(deit_state(True) | change, tmp_path / "w.pth")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeightsError, match=message):
        weights.load_deit(tmp_path / "w.pth", CLASSES, image_size=64)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB
