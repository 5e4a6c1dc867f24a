"""Every recipe builds its configuration, and takes one step at toy size."""

import dataclasses

import numpy as np
import pytest
import torch

import stam
from stam.config import from_plain, to_plain
from stam.data import ClutteredDigits, RawBatch, SplitRecord
from stam.errors import ConfigError
from stam.learning.loop import Place
from stam.learning.recipes import RECIPES, get_recipe
from stam.learning.runs import RunFolder
from stam.learning.training import AgentLearner, plan
from stam.model.teacher import Teacher
from stam.model.vit import VisionTransformer
from stam.settings import RunConfig


def toy(config: RunConfig) -> RunConfig:
    """The same experiment with a tiny core, images and batch; what makes it that experiment stays."""
    grid = config.agent.grid
    patches = grid.glimpse_patches[0]
    agent = dataclasses.replace(
        config.agent,
        image_size=grid.rows * patches * 2,
        glimpse_size=patches * 2,
        patch_size=2,
        width=12,
        depth=2,
        num_heads=2,
        actor_width=8,
        critic_width=8,
        num_classes=3,
    )
    training = dataclasses.replace(config.training, batch_size=2, device="cpu")
    return dataclasses.replace(config, agent=agent, training=training)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_takes_one_step_at_toy_size(name):
    whole = get_recipe(name)
    assert from_plain(RunConfig, to_plain(whole)) == whole
    config = toy(whole)
    agent = stam.Agent(config.agent)
    grid = config.agent.grid
    model = VisionTransformer(
        num_classes=3,
        patch_size=grid.patch_size,
        image_patches=grid.image_patches,
        width=12,
        depth=1,
        num_heads=2,
    )
    scenes = ClutteredDigits("test", num_scenes=2)
    learner = AgentLearner(config, agent, Teacher(model, 3), scenes)
    before = {key: value.clone() for key, value in agent.state_dict().items()}
    pixels = torch.randint(0, 256, (2, 3, 40, 50), dtype=torch.uint8)
    raw = RawBatch(pixels, torch.tensor([[40, 50], [30, 50]]), torch.tensor([0, 2]), torch.tensor([0, 1]))
    learner.train_batch(Place(0, 0, True), raw)
    after = agent.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values() if value.is_floating_point())
    assert not after["core.blocks.0.attn.qkv.weight"].equal(before["core.blocks.0.attn.qkv.weight"])
    assert any("actor" in names for names in learner.meter.sums) == (config.agent.policy == "learned")


def test_the_papers_settings():
    small = get_recipe("imagenet-small")
    assert (small.agent.width, small.training.batch_size, small.training.epochs) == (384, 4096, 200)
    assert small.training.learning_rate(small.training.base_lr, 0) == pytest.approx(8e-6)
    assert small.training.learning_rate(small.training.critic_lr, 0) == pytest.approx(8e-3)
    assert small.training.learning_rate(small.training.critic_lr, 200) == pytest.approx(1e-6)
    assert [small.training.tau(epoch) for epoch in (0, 50, 100, 150)] == [1, 2.5, 4, 4]
    fmow = get_recipe("fmow-small")
    assert (fmow.agent.num_classes, fmow.training.batch_size, fmow.training.epochs) == (62, 600, 400)
    assert fmow.training.base_lr == 1e-5 and fmow.data.augment.vertical_flip == 0.5
    assert fmow.data.resize_size is None and fmow.teacher_training.epochs == 100
    for name, size, grid, glimpses in (("48", 240, 5, 16), ("64", 256, 4, 7)):
        recipe = get_recipe(f"imagenet-small-glimpse{name}")
        assert (recipe.agent.image_size, recipe.agent.grid.rows, recipe.training.num_glimpses) == (
            size,
            grid,
            glimpses,
        )
    assert get_recipe("imagenet-base").training.batch_size == 512
    assert get_recipe("imagenet-small-400-epochs").training.epochs == 400
    assert get_recipe("fmow-small-plus-no-consistency").training.consistency == "none"
    with pytest.raises(ConfigError, match="did you mean 'imagenet-small-hard'"):
        get_recipe("imagenet-small-hrd")


def test_a_teacher_without_features_is_refused_before_it_is_fine_tuned():
    aid = get_recipe("aid")
    other = dataclasses.replace(aid.teacher_training, model="timm:resnet18")
    with pytest.raises(ConfigError, match="a DeiT as teacher, not timm:resnet18: pass --feature-weight 0"):
        dataclasses.replace(aid, teacher_training=other)
    training = dataclasses.replace(aid.training, feature_weight=0)
    assert dataclasses.replace(aid, teacher_training=other, training=training).teacher is None


def test_an_epoch_shows_one_in_t_of_the_data_and_another_part_each_time():
    config = get_recipe("digits-paper")
    training = dataclasses.replace(config.training, batch_size=10, num_glimpses=5, epochs=3)
    config = dataclasses.replace(config, training=training)
    made = plan(200, config)
    epochs = [np.concatenate(made.batches_of(epoch)) for epoch in range(3)]
    assert [len(epoch) for epoch in epochs] == [40, 40, 40]
    assert set(epochs[0]) != set(epochs[1])
    whole = [(place, part.tolist()) for place, part in made.batches_from((0, 0))]
    rest = [(place, part.tolist()) for place, part in made.batches_from((1, 2))]
    assert whole[-len(rest) :] == rest and rest[0][0] == Place(1, 2, False)
    causal = dataclasses.replace(config, agent=dataclasses.replace(config.agent, core="causal"))
    assert sorted(np.concatenate(plan(200, causal).batches_of(0))) == list(range(200))


def test_the_run_folder_keeps_the_configuration(tmp_path):
    config = get_recipe("digits-spiral-no-consistency")
    run = RunFolder.create(tmp_path / "run")
    run.write_record("digits", config, SplitRecord(("a", "b"), 3, 2, "x"))
    assert RunFolder.open(tmp_path / "run").config() == config
