"""The agent reproduces the reference figures, and on other sizes the method written out naively."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from agents import randomise
from episodes import training_episode
from naive import NaiveStam

import stam
from stam.learning.objective import Objective, ValueNormaliser
from stam.model.policy import SampledPolicy

LOSSES = ("supervised", "actor", "critic", "consistency")


@cache
def figures() -> dict[str, np.ndarray]:
    return dict(np.load(Path(__file__).parent / "reference_small.npz"))


def tensors(prefix: str) -> dict[str, torch.Tensor]:
    return {
        key.removeprefix(prefix): torch.from_numpy(value)
        for key, value in figures().items()
        if key.startswith(prefix)
    }


@pytest.fixture
def reference_agent() -> stam.Agent:
    return stam.weights.load_authors(tensors("sd/"), num_heads=3, with_critic=True, drop_path=0.0)


@pytest.fixture
def reference_images() -> torch.Tensor:
    return torch.from_numpy(figures()["images"]).float()


class Replay(SampledPolicy):
    """Follows a given path, with the probabilities the actor gives it."""

    def __init__(self, actor, tau, path):
        super().__init__(actor, tau)
        self.path = path

    def decide(self, state, seen, generator=None, num_seen=None):
        self.count = num_seen
        return super().decide(state, seen, generator, num_seen)

    def pick(self, log_probabilities, generator):
        return self.path[:, self.count]


def test_greedy_path_and_logits(reference_agent, reference_images):
    expected = figures()
    first = torch.from_numpy(expected["eval/first_location"])
    trace = reference_agent.look(reference_images, 12, first)
    assert trace.locations.tolist() == expected["eval/locations"].tolist()
    for name, got in (("cls", trace.class_logits), ("dist", trace.distill_logits)):
        want = torch.from_numpy(expected[f"eval/logits_{name}"]).transpose(0, 1)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_actor_logits(reference_agent, reference_images):
    expected = figures()
    first = torch.from_numpy(expected["eval/first_location"])
    glimpses = reference_agent.grid.cut(reference_images, first[:, None])[:, 0]
    with torch.no_grad():
        belief = reference_agent.believe(reference_agent.remember(None, glimpses, first))
        got = reference_agent.actor(belief.state, torch.from_numpy(expected["eval/actor_candidates_t1"]))
    torch.testing.assert_close(got, torch.from_numpy(expected["eval/actor_logits_t1"]), atol=1e-4, rtol=0)


def test_teacher(reference_images):
    expected = tensors("teacher_logits_")
    want = (expected["cls"].softmax(1) + expected["dist"].softmax(1)) / 2
    teacher = stam.weights.load_teacher(tensors("teacher/"), 5, num_heads=3)
    torch.testing.assert_close(teacher(reference_images).exp(), want, atol=1e-5, rtol=0)


def gradient_norm(agent: stam.Agent, authors_prefix: str) -> float:
    ours = {
        "location_module": ("actor.fc", "actor.bn"),
        "loc_pos_embed": ("actor.location_embedding",),
        "critic": ("critic.",),
    }.get(authors_prefix, (f"core.{authors_prefix}",))
    gradients = [
        p.grad for name, p in agent.named_parameters() if name.startswith(ours) and p.grad is not None
    ]
    return (
        float(torch.cat([gradient.double().flatten() for gradient in gradients]).norm()) if gradients else 0.0
    )


def test_training_batch(reference_agent, reference_images):
    expected = figures()
    state = tensors("sd/")
    teacher = stam.weights.load_teacher(tensors("teacher/"), 5, num_heads=3)
    values = ValueNormaliser(6)
    values.load_state_dict(
        {"mean": state["running_mean_popart"], "second_moment": state["running_var_popart"]}
    )
    path = torch.from_numpy(expected["train/locations"])
    agent = reference_agent.train()
    policy = Replay(agent.actor, float(expected["train/tau"]), path)
    labels = torch.from_numpy(expected["labels"])
    steps = training_episode(
        agent, Objective(6), values, reference_images, labels, teacher(reference_images), path[:, 0], policy
    )
    for index, step in enumerate(steps):
        agent.zero_grad()
        step.total.backward()
        losses = [step.parts[name].item() if name in step.parts else 0.0 for name in LOSSES]
        np.testing.assert_allclose(
            losses, expected["train/losses_cls_actor_critic_consistency"][index], atol=1e-4
        )
        norms = [gradient_norm(agent, name) for name in expected["train/grad_norm_names"]]
        np.testing.assert_allclose(norms, expected["train/grad_norms"][index], rtol=1e-3)
        np.testing.assert_allclose(values.mean, expected["train/value_mean_after"][index], atol=1e-6)
        np.testing.assert_allclose(
            values.second_moment, expected["train/value_second_moment_after"][index], atol=1e-6
        )
    assert index == 5


OTHER_SIZES = [  # image, glimpse, patch, width, depth, heads, classes, T, batch, tau, drop_path, consistency
    ((64, 64), (8, 8), (4, 4), 24, 2, 3, 7, 4, 3, 1.0, 0.0, "soft"),
    ((24, 48), (8, 12), (4, 6), 20, 3, 2, 3, 6, 5, 4.0, 0.4, "soft"),
    ((30, 20), (10, 10), (5, 5), 16, 1, 4, 2, 6, 4, 2.0, 0.0, "hard"),
    ((60, 48), (12, 16), (12, 8), 12, 2, 1, 10, 5, 2, 3.0, 0.5, "hard"),
    ((16, 32), (8, 8), (8, 8), 32, 4, 8, 4, 8, 6, 2.5, 0.3, "none"),
    ((48, 48), (16, 16), (4, 4), 24, 2, 2, 6, 9, 3, 1.5, 0.2, "none"),
]


@pytest.mark.parametrize("case", OTHER_SIZES, ids=lambda case: f"{case[0]}-{case[1]}-T{case[7]}-{case[-1]}")
@pytest.mark.parametrize("seed", [0, 1])
def test_other_sizes_agree_with_the_method_written_out(case, seed):
    image, glimpse, patch, width, depth, heads, classes, num_glimpses, batch, tau, drop_path, consistency = (
        case
    )
    config = stam.AgentConfig(
        num_classes=classes,
        image_size=image,
        glimpse_size=glimpse,
        patch_size=patch,
        width=width,
        depth=depth,
        num_heads=heads,
        drop_path=drop_path,
        actor_width=16,
        critic_width=8,
    )
    agent = stam.Agent(config)
    agent.add_critic()
    randomise(agent, seed)
    agent = agent.double()  # both sides exact: any difference is a different method
    sd = {}
    for name, value in agent.state_dict(keep_vars=True).items():
        if name == "actor.location_embedding":
            sd["loc_pos_embed"] = value[None]
        else:
            sd[name.removeprefix("core.").replace("actor.", "location_module.")] = value
    naive = NaiveStam(sd, heads, config.grid.columns, glimpse, patch)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, 3, *image, generator=generator, dtype=torch.float64)
    locations = torch.stack(
        [torch.randperm(config.grid.num_locations, generator=generator) for _ in range(batch)]
    )[:, :num_glimpses]

    with torch.no_grad():
        path, logits = naive.greedy(images, locations[:, 0], num_glimpses)
    trace = agent.look(images, num_glimpses, locations[:, 0])
    assert trace.locations.equal(path)
    for n, (class_logits, distill_logits) in enumerate(logits):
        torch.testing.assert_close(trace.class_logits[:, n], class_logits, atol=1e-8, rtol=0)
        torch.testing.assert_close(trace.distill_logits[:, n], distill_logits, atol=1e-8, rtol=0)

    agent.train()
    labels = torch.randint(classes, (batch,), generator=generator)
    q = torch.randn(batch, classes, generator=generator, dtype=torch.float64).mul(2).softmax(1)
    masks = [agent.sample_drop_path(batch, generator) for _ in range(num_glimpses)]
    pending = iter(masks)
    agent.sample_drop_path = lambda *_: next(pending)
    values = ValueNormaliser(num_glimpses)
    mu, nu = torch.zeros(num_glimpses - 1).double(), values.second_moment.clone()
    policy = Replay(agent.actor, tau, locations)
    ours = training_episode(
        agent,
        Objective(num_glimpses, consistency),
        values,
        images,
        labels,
        q.log(),
        locations[:, 0],
        policy,
    )
    naive_steps = naive.training(images, labels, q, locations, tau, mu, nu, masks, consistency)
    for step, (total, parts) in zip(ours, naive_steps, strict=True):
        agent.zero_grad()
        step.total.backward()
        got = {name: p.grad for name, p in agent.named_parameters() if p.grad is not None}
        got = {name: gradient.clone() for name, gradient in got.items()}
        agent.zero_grad()
        total.backward()
        for name, part in parts.items():
            torch.testing.assert_close(step.parts[name].double(), part, atol=1e-4, rtol=0)
        for name, parameter in agent.named_parameters():
            want = parameter.grad
            if want is None or float(want.norm()) < 1e-7:
                continue
            assert float((got[name] - want).norm() / want.norm()) < 1e-3, name
        torch.testing.assert_close(values.mean.double(), mu, atol=1e-5, rtol=0)
        torch.testing.assert_close(values.second_moment, nu, atol=1e-5, rtol=0)
