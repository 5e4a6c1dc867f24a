import argparse
import json
import os
import pickle

import pytest
import torch
from agents import randomise, tiny_config
from safetensors.torch import save_file

import stam
from stam import weights
from stam.errors import WeightsError
from stam.model.vit import VisionTransformer

WIDTH, CLASSES = 64, 6


def deit_state(distilled: bool, side: int = 4) -> dict[str, torch.Tensor]:
    """A pretrained DeiT in timm's naming: 16 px patches, `side` x `side` of them, one head of width 64."""
    vit = VisionTransformer(
        num_classes=CLASSES,
        patch_size=(16, 16),
        image_patches=(side, side),
        width=WIDTH,
        depth=2,
        num_heads=1,
        distilled=distilled,
    )
    randomise(vit, seed=7)
    return {name: value.clone() for name, value in vit.state_dict().items()}


def to_hugging_face(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    distilled, renamed = "dist_token" in state, {}
    plain = {
        "cls_token": "embeddings.cls_token",
        "dist_token": "embeddings.distillation_token",
        "pos_embed": "embeddings.position_embeddings",
    }
    for name, value in state.items():
        if name in plain:
            renamed[prefix + plain[name]] = value
        elif name.startswith("patch_embed.proj."):
            renamed[name.replace("patch_embed.proj", prefix + "embeddings.patch_embeddings.projection")] = (
                value
            )
        elif name.startswith("norm."):
            renamed[prefix + name.replace("norm", "layernorm")] = value
        elif name.startswith("head_dist."):
            renamed[name.replace("head_dist", "distillation_classifier")] = value
        elif name.startswith("head."):
            renamed[name.replace("head", "cls_classifier" if distilled else "classifier")] = value
        else:
            _, layer, module, *rest = name.split(".")
            base = f"{prefix}encoder.layer.{layer}."
            if module in ("norm1", "norm2"):
                which = "layernorm_before" if module == "norm1" else "layernorm_after"
                renamed[f"{base}{which}.{rest[0]}"] = value
            elif rest[0] == "qkv":
                for part, rows in zip(("query", "key", "value"), value.chunk(3), strict=True):
                    renamed[f"{base}attention.attention.{part}.{rest[1]}"] = rows
            else:
                to = {"proj": "attention.output.dense", "fc1": "intermediate.dense", "fc2": "output.dense"}
                renamed[f"{base}{to[rest[0]]}.{rest[1]}"] = value
    return renamed


def write(tmp_path, state, kind):
    path = tmp_path / {"safetensors": "w.safetensors"}.get(kind, "w.pth")
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "pth":
        torch.save({"model": state, "epoch": 3, "args": argparse.Namespace(lr=0.1)}, path)
    elif kind == "ddp":
        torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, path)
    elif kind == "deit":
        torch.save(to_hugging_face(state, "deit."), path)
    elif kind == "vit":
        torch.save(to_hugging_face(state, "vit."), path)
    elif kind == "half":
        torch.save({name: value.half() for name, value in state.items()}, path)
    return path


@pytest.mark.parametrize("kind", ["safetensors", "pth", "ddp", "deit", "vit"])
@pytest.mark.parametrize("distilled", [True, False])
def test_every_dialect_of_deit_gives_the_same_agent(tmp_path, kind, distilled):
    state = deit_state(distilled)
    agent = weights.load_deit(write(tmp_path, state, kind), CLASSES, image_size=64, actor_width=8)
    assert not agent.training
    core = agent.core.state_dict()
    for name, value in state.items():
        if name != "pos_embed":
            assert core[name].equal(value), name
    assert core["pos_embed"][:, 2:].equal(state["pos_embed"][:, 2 if distilled else 1 :])
    if not distilled:  # filled from the class token's
        assert core["dist_token"].equal(state["cls_token"])
        assert core["pos_embed"][:, 1].equal(state["pos_embed"][:, 0])
        assert core["head_dist.weight"].equal(state["head.weight"])
        image = torch.randn(1, 3, 64, 64)
        logits, distill_logits = agent.core.classify_images(image)
        assert logits.shape == distill_logits.shape == (1, CLASSES)
    teacher = weights.load_teacher(write(tmp_path, state, kind), CLASSES, image_size=64)
    assert teacher.model.distilled == distilled
    assert teacher(torch.randn(2, 3, 64, 64)).exp().sum(1).tolist() == pytest.approx([1, 1], abs=1e-5)


def test_half_precision_is_read_as_float32(tmp_path):
    agent = weights.load_deit(
        write(tmp_path, deit_state(True), "half"), CLASSES, image_size=64, actor_width=8
    )
    assert all(parameter.dtype == torch.float32 for parameter in agent.parameters())


def test_positions_are_interpolated_to_another_grid():
    state = deit_state(False)
    agent = weights.load_deit(state, CLASSES, image_size=(96, 64), glimpse_size=32, actor_width=8)
    grid = state["pos_embed"][:, 1:].reshape(1, 4, 4, WIDTH).permute(0, 3, 1, 2)
    want = torch.nn.functional.interpolate(grid, size=(6, 4), mode="bicubic", align_corners=False)
    torch.testing.assert_close(agent.core.pos_embed[0, 2:], want.flatten(2)[0].T)
    assert agent.grid.num_locations == 6
    assert agent.actor.location_embedding.shape == (6, WIDTH)
    assert agent.actor.location_embedding.abs().sum() > 0


def test_another_number_of_classes_starts_afresh_or_takes_rows():
    state = deit_state(True)
    fresh = weights.load_deit(state, 3, image_size=64, actor_width=8)
    assert fresh.core.head.weight.shape == (3, WIDTH)
    rows = weights.load_deit(state, 3, class_indices=[5, 0, 2], image_size=64, actor_width=8)
    assert rows.core.head.weight.equal(state["head.weight"][[5, 0, 2]])
    assert rows.core.head_dist.bias.equal(state["head_dist.bias"][[5, 0, 2]])
    with pytest.raises(WeightsError, match="class_indices must be below 6"):
        weights.load_deit(state, 2, class_indices=[6, 0], image_size=64)
    with pytest.raises(WeightsError, match="class_indices names 2 classes, num_classes is 3"):
        weights.load_deit(state, 3, class_indices=[1, 0], image_size=64)
    with pytest.raises(WeightsError, match="tells 6 classes apart, the data has 3"):
        weights.load_teacher(state, 3, image_size=64)


def test_a_plain_deit_gives_two_equal_read_outs_only_in_its_classifier():
    agent = weights.load_deit(deit_state(False), CLASSES, image_size=64, actor_width=8)
    with torch.no_grad():
        first, second = agent.core.classify_images(torch.randn(2, 3, 64, 64))
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)  # two copies of one token see the same


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


def test_save_and_load_keep_everything_but_the_critic(tmp_path, agent, images):
    agent.configure(threshold=0.7, labels=tuple("abcde"))
    agent.add_critic()
    weights.save_agent(agent, tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert json.loads((tmp_path / "saved/config.json").read_text())["format_version"] == "1.0"
    again = stam.load(tmp_path / "saved")
    assert again.config == agent.config and again.critic is None and not again.training
    assert not any(
        name.startswith("critic") for name in weights.read_state_dict(tmp_path / "saved/model.safetensors")
    )
    assert again.look(images, 5, 0).probabilities.equal(agent.look(images, 5, 0).probabilities)


def test_half_precision_save_is_close(tmp_path, agent, images):
    weights.save_agent(agent, tmp_path / "saved", half=True)
    again = stam.load(tmp_path / "saved")
    torch.testing.assert_close(
        again.look(images, 1, 0).probabilities, agent.look(images, 1, 0).probabilities, atol=1e-2, rtol=0
    )


def test_a_run_folder_gives_its_best_checkpoint(tmp_path, agent):
    weights.save_agent(stam.Agent(tiny_config(num_classes=2)), tmp_path / "last")
    assert stam.load(tmp_path).config.num_classes == 2
    weights.save_agent(agent, tmp_path / "best")
    assert stam.load(tmp_path).config.num_classes == 5


def test_an_interrupted_save_leaves_the_old_agent(tmp_path, agent, monkeypatch):
    folder = tmp_path / "saved"
    weights.save_agent(agent, folder)
    before = (folder / "model.safetensors").read_bytes()

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(stam.StamError, match="could not write .*No space left on device"):
        weights.save_agent(stam.Agent(tiny_config(width=48)), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert stam.load(folder).config == agent.config


def test_a_folder_with_other_things_is_not_overwritten(tmp_path, agent):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(stam.StamError, match="is not empty and holds no agent"):
        weights.save_agent(agent, tmp_path)


def test_loading_nothing_says_what_is_missing(tmp_path, agent):
    with pytest.raises(WeightsError, match="no agent at"):
        stam.load(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="holds no agent"):
        stam.load(tmp_path)
    weights.save_agent(agent, tmp_path / "a")
    config = tmp_path / "a/config.json"
    config.write_text(config.read_text().replace('"1.0"', '"2.0"'))
    with pytest.raises(WeightsError, match=r"has format 2.0, this version reads 1.0"):
        stam.load(tmp_path / "a")
    config.write_text("{")
    with pytest.raises(WeightsError, match="is not a configuration of ours"):
        stam.load(tmp_path / "a")


def test_a_later_minor_format_is_read(tmp_path, agent):
    weights.save_agent(agent, tmp_path / "a")
    config = tmp_path / "a/config.json"
    config.write_text(config.read_text().replace('"1.0"', '"1.3"'))
    assert stam.load(tmp_path / "a").config == agent.config


def test_the_authors_checkpoint_needs_all_its_parts():
    with pytest.raises(WeightsError, match="not a STAM checkpoint of the authors: it lacks 'loc_pos_embed'"):
        weights.load_authors(deit_state(True))
