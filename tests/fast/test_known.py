"""Whatever is changed in the modules takes effect on every path: hooks fire, wrapped layers are used."""

import copy

import pytest
import torch
from agents import randomise, tiny_config
from torch import nn

import stam
from stam.fast import prepare
from stam.fast.cuda import FusedLooker, fuse, fuse_teacher
from stam.fast.known import unknown_part
from stam.model.agent import PlainLooker
from stam.model.teacher import Teacher


class LowRank(nn.Module):
    """A linear layer with a low-rank addition, as LoRA has it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def wrap(agent: stam.Agent) -> stam.Agent:
    for block in agent.core.blocks:
        block.attn.qkv = LowRank(block.attn.qkv)
    return agent.eval()


def by_look(agent, images):
    return agent.look(images, 3, 0).class_logits[:, -1]


def by_session(agent, images):
    said = []
    for image in images:
        session = agent.session(first_location=0, threshold=1.0)
        for location in agent.look(images, 3, 0).locations[len(said)].tolist():
            top, left, bottom, right = agent.grid.pixel_box(location)
            step = session.observe(image[:, top:bottom, left:right], location)
        said.append(step.probabilities)
    return torch.stack(said)


def by_training(agent, images):
    agent = copy.deepcopy(agent)
    looker = fuse(agent)
    memory = looker.remember(None, images[:, :, :8, :8], torch.zeros(len(images), dtype=torch.long))
    return looker.believe(memory).class_logits


@pytest.mark.parametrize("path", [by_look, by_session, by_training])
def test_a_low_rank_wrapper_around_qkv_takes_effect(agent, images, path):
    plain = path(agent, images)
    wrapped = wrap(copy.deepcopy(agent))
    for part in wrapped.modules():
        if isinstance(part, LowRank):
            nn.init.zeros_(part.up.weight)
    torch.testing.assert_close(path(wrapped, images), plain)
    randomise(wrapped.core.blocks[0].attn.qkv.up)
    assert not torch.allclose(path(wrapped, images), plain, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["core", "core.blocks.1", "core.blocks.0.attn", "core.blocks.0.mlp.fc2", "actor.fc0"]
)
def test_forward_hooks_fire_in_looks_and_sessions(agent, images, name):
    agent.look(images, 2, 0)  # before it is hooked
    fired = []
    handle = agent.get_submodule(name).register_forward_hook(lambda *_: fired.append(name))
    agent.look(images, 2, 0)
    assert fired
    fired.clear()
    agent.session(first_location=0).observe(images[0, :, :8, :8])
    assert fired
    handle.remove()
    fired.clear()
    agent.look(images, 2, 0)
    assert not fired


def test_what_was_changed_is_named(agent):
    assert unknown_part(agent) is None
    agent.core.blocks[0].mlp.act = nn.GELU(approximate="tanh")
    assert unknown_part(agent) == "core.blocks.0.mlp.act (GELU)"
    agent.core.blocks[0].mlp.act = nn.ReLU()
    assert unknown_part(agent) == "core.blocks.0.mlp.act (ReLU)"
    assert isinstance(prepare(agent), PlainLooker) and fuse(agent) is agent
    agent.core.blocks[0].mlp.act = nn.GELU()
    agent.core.blocks[1].attn.forward = lambda *_: None
    assert unknown_part(agent) == "core.blocks.1.attn (Attention)"


def test_an_agent_of_ones_own_is_not_second_guessed(images):
    class Sceptic(stam.Agent):
        def believe(self, memory, drop_masks=None):
            belief = super().believe(memory, drop_masks)
            return type(belief)(belief.state, 0 * belief.class_logits, 0 * belief.distill_logits)

    sceptic = Sceptic(tiny_config()).eval()
    assert unknown_part(sceptic) == "the model (Sceptic)"
    torch.testing.assert_close(sceptic.look(images, 2).probabilities, torch.full((4, 2, 5), 0.2))


def test_fused_forms_share_the_parameters_and_compute_the_same_without_a_gpu(agent, images):
    agent.add_critic()
    fused = fuse(agent)
    assert isinstance(fused, FusedLooker)
    torch.testing.assert_close(
        fused.look(images, 4, 0).class_logits, PlainLooker(agent).look(images, 4, 0).class_logits
    )
    state = torch.randn(4, 48)
    assert fused.critic(state).equal(agent.critic(state))
    teacher = Teacher(agent.core, 5)
    assert fuse_teacher(teacher).predict(images).log_q.equal(teacher(images))
