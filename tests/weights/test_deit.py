"""DeiT in every naming becomes the same agent, for other sizes and classes too."""

import pytest
import torch
from deits import CLASSES, WIDTH, deit_state, write

from stam import weights
from stam.errors import WeightsError


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


def test_a_teacher_of_two_tokens_and_one_classifier_uses_it_for_both():
    state = deit_state(True)
    state = {name: value for name, value in state.items() if not name.startswith("head_dist")}
    model = weights.load_teacher(state, CLASSES, image_size=64).model
    assert model.head_dist.weight.equal(state["head.weight"]) and model.head_dist.bias.equal(
        state["head.bias"]
    )


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


@pytest.mark.parametrize("distilled", [True, False])
def test_the_classifiers_of_a_file_can_be_read_alone(tmp_path, distilled):
    state = deit_state(distilled)
    (weight, bias), (distill_weight, _) = weights.read_classifiers(write(tmp_path, state, "half"))
    assert weight.dtype == bias.dtype == torch.float32
    torch.testing.assert_close(weight, state["head.weight"], atol=1e-3, rtol=1e-3)
    assert distill_weight.equal(weight) != distilled
    without = {name: value for name, value in state.items() if not name.startswith("head.")}
    assert weights.read_classifiers(without) == []
    agent = {f"core.{name}": value for name, value in state.items()}
    assert weights.read_classifiers(agent) == []  # its classifiers have learned from glimpses
