"""Every system of the zoo: its contract, its pixels as the paper's Table 1 counts them, its learning."""

import dataclasses

import numpy as np
import pytest
import torch
from zooing import glyph_scenes, small

from stam.errors import ConfigError, StamError
from stam.evaluation.comparison import PUBLISHED
from stam.learning.loop import Place
from stam.model.randomness import RandomSource
from stam.settings import AugmentConfig, DataConfig
from stam.zoo import SYSTEMS, build, check_looker, load_system, require_system, save_system
from stam.zoo.sensing import crop, crop_boxes, crops, grid_places, inside, pyramid, retina, retina_boxes
from stam.zoo.system import Stage, draw_places
from stam.zoo.template import Template, TemplateConfig
from stam.zoo.training import SystemLearner, ZooConfig, ZooTraining, accuracy, stage_ends


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_keeps_the_contract(name):
    check_looker(small(name))


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_is_saved_and_loaded(name, tmp_path):
    system = small(name)
    save_system(system, tmp_path / "s")
    loaded = load_system(tmp_path / "s")
    images = torch.randn(2, 3, 24, 24)
    count = system.facts.most_glimpses
    first, second = (
        each.look(images, count, generator=torch.Generator().manual_seed(0)) for each in (system, loaded)
    )
    assert first.logits.equal(second.logits) and loaded.config == system.config and not loaded.training


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_stage_trains_what_it_says_and_nothing_else(name):
    system = small(name)
    scenes = glyph_scenes()
    learner = make_learner(system, batches_a_stage=1)
    for number, stage in enumerate(system.stages):
        before = {key: value.clone() for key, value in system.state_dict().items()}
        learner.train_batch(Place(0, number, False), scenes.paint(np.arange(12)))
        changed = {
            key.split(".")[0] for key, value in system.state_dict().items() if not value.equal(before[key])
        }
        assert changed <= set(stage.trains) and changed, (stage.name, changed)
        assert {part for part in stage.trains if part not in changed} <= IDLE.get((name, stage.name), set())


# what gets no gradient in the first batch of a stage, for a reason
IDLE = {
    ("stn", "together"): {"saliency"},  # the last layer of the saliency starts at 0
}


def make_learner(system, batches_a_stage: int, lr: float = 1e-3) -> SystemLearner:
    training = ZooTraining(epochs=1, batch_size=12, lr=lr, device="cpu", validation_images=48)
    config = ZooConfig(
        system.name, system.config, DataConfig("x", resize_size=None, augment=AugmentConfig.off()), training
    )
    learner = SystemLearner(config, system, 48, glyph_scenes())
    learner.batches_an_epoch = 10**6
    learner.ends = [batches_a_stage * (number + 1) for number in range(len(system.stages))]
    return learner


LEARNS = {  # batches of each stage
    "ram": 150,
    "dram": 70,
    "gfnet": 25,
    "saccader": 20,
    "tnet": 50,
    "stn": 60,
    "patchdrop": 15,
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_learns(name):
    """After a few batches it is clearly better than a guess, 1 in 3, on scenes it has not seen."""
    system, scenes = small(name), glyph_scenes()
    learner = make_learner(system, LEARNS[name], lr=2e-3)
    for number in range(learner.ends[-1]):
        learner.train_batch(Place(0, number, False), scenes.paint(np.arange(48), epoch=number))
    assert accuracy(system, glyph_scenes(240), learner.config, 240)[-1] > 0.45


# the counts of the paper's Table 1, for the configurations it names
COUNTS = {
    "dram": ({}, 8 * 77**2),
    "gfnet": ({}, 5 * 96**2),
    "saccader": ({}, 6 * 77**2),
    "tnet": ({}, 6 * 77**2),
    "stn": ({}, 168**2),
}


@pytest.mark.parametrize("name", COUNTS)
def test_pixels_are_those_of_table_1(name):
    settings, expected = COUNTS[name]
    system = build(name, require_system(name).settings(**settings)).eval()
    facts = system.facts
    trace = system.look(torch.randn(1, 3, 224, 224), facts.most_glimpses)
    assert trace.pixels[0, -1] == expected
    (row,) = [row for row in PUBLISHED["imagenet"] if row.method.lower() == name]
    assert round(expected / 100) * 100 == row.pixels
    assert (facts.whole_to_attend, facts.whole_to_classify) == (row.attention, row.classification)


def test_stn_has_the_pixels_of_table_1_on_fmow():
    system = build("stn", require_system("stn").settings(sampled_size=148)).eval()
    assert system.look(torch.randn(1, 3, 224, 224), 1).pixels.item() == 148**2
    (row,) = [row for row in PUBLISHED["fmow"] if row.method == "STN"]
    assert abs(148**2 - row.pixels) < 100


def test_patchdrop_counts_the_low_view_and_the_open_patches(monkeypatch):
    system = build("patchdrop", require_system("patchdrop").settings()).eval()
    gates = torch.zeros(10, 16)
    for scene in range(10):  # 7.9 on average
        gates[scene, : 7 if scene == 0 else 8] = 1
    monkeypatch.setattr(system, "gates", lambda images, policy, random: gates)
    trace = system.look(torch.randn(10, 3, 224, 224), 2)
    assert trace.pixels[:, 0].tolist() == [56**2] * 10
    mean = trace.pixels[:, 1].float().mean().item()
    assert mean == pytest.approx(56**2 + 7.9 * 56**2) and round(mean / 100) * 100 == 27_900
    row = PUBLISHED["imagenet"][-1]
    assert row.pixels == 27_900
    assert (system.facts.whole_to_attend, system.facts.whole_to_classify) == (
        row.attention,
        row.classification,
    )


def test_ram_sees_nothing_but_its_glimpses():
    """Whatever lies outside of the coarsest square of every glimpse changes nothing."""
    system = small("ram", num_scales=1, num_glimpses=2)
    images = torch.rand(1, 3, 24, 24)
    trace = system.look(images, 2, generator=torch.Generator().manual_seed(0))
    hidden = torch.ones(24, 24, dtype=torch.bool)
    for top, left, bottom, right in (trace.boxes[0, :, 0] * 24).tolist():
        hidden[max(0, int(top) - 1) : int(bottom) + 2, max(0, int(left) - 1) : int(right) + 2] = False
    assert hidden.any()
    changed = images.masked_fill(hidden, 9.0)
    other = system.look(changed, 2, generator=torch.Generator().manual_seed(0))
    assert other.logits.equal(trace.logits)
    assert not system.look(images + 1, 2, generator=torch.Generator().manual_seed(0)).logits.equal(
        trace.logits
    )


def test_each_loss_of_ram_trains_what_its_paper_says():
    """REINFORCE moves the locator alone; answers before the last are read off states and change none."""
    system = small("ram")
    images = glyph_scenes().paint(np.arange(12)).images.float().mean(dim=1, keepdim=True) / 255
    losses = system.losses("together", images, torch.arange(12) % 3, RandomSource())
    expected = {
        "classification": {"glimpse", "core", "classifier"},
        "early": {"early"},
        "policy": {"locator"},
        "baseline": {"baseline"},
    }
    assert losses.keys() == expected.keys()
    for name, loss in losses.items():
        system.zero_grad(set_to_none=True)
        loss.backward(retain_graph=True)
        moved = {key.split(".")[0] for key, value in system.named_parameters() if value.grad is not None}
        assert moved == expected[name], name


def test_reinforce_of_ram_follows_the_reward():
    """Where looking further down is rewarded, the mean of the policy moves down."""
    system = small("ram", num_glimpses=2, location_std=0.2)
    images, labels = torch.zeros(512, 1, 24, 24), torch.zeros(512, dtype=torch.long)
    torch.nn.init.zeros_(system.locator.weight)
    torch.nn.init.zeros_(system.locator.bias)
    visited = []
    step = system.step

    def notes_places(levels, places, state):
        visited.append(places)
        return step(levels, places, state)

    system.step = notes_places
    system.classifier = torch.nn.Identity()  # the answer is the state
    system.core["input"].register_forward_hook(lambda *given: _right_below(visited[-1], given[-1]))
    torch.nn.init.zeros_(system.core["state"].weight)
    random = RandomSource(torch.Generator().manual_seed(0))
    system.losses("together", images, labels, random)["policy"].backward()
    down, right = system.locator.bias.grad.tolist()  # minimised: its negative is where the mean goes
    assert down < 0 and abs(right) < abs(down) / 3


def _right_below(places, states):
    """Returns states whose largest entry is the first where a place lies below the middle."""
    made = torch.zeros_like(states)
    made[:, 0], made[:, 1] = (places[:, 0] > 0).float(), (places[:, 0] <= 0).float()
    return made


@pytest.mark.parametrize("name", ["dram", "saccader"])
def test_who_classifies_from_glimpses_alone_does(name):
    """The whole scene may move the looks; with looks held where they are it must change nothing."""
    system = small(name)
    images = torch.rand(1, 3, 24, 24)
    if name == "dram":
        torch.nn.init.zeros_(system.locator.weight)  # it looks at the centre, whatever the context
        torch.nn.init.zeros_(system.locator.bias)
    trace = system.look(images, 2)
    hidden = torch.ones(24, 24, dtype=torch.bool)
    for top, left, bottom, right in (trace.boxes[0, :, 0] * 24).tolist():
        hidden[max(0, int(top) - 1) : int(bottom) + 2, max(0, int(left) - 1) : int(right) + 2] = False
    changed = images.masked_fill(hidden, 0.5)
    if name == "saccader":
        features, _ = system.represent(system.prepared(images))
        picked = system.visit(system.attend(features), 2, "learned", RandomSource())
        system.visit = lambda *given: picked
    torch.testing.assert_close(system.look(changed, 2).logits, trace.logits)
    assert hidden.any()


def test_the_random_policy_of_patchdrop_opens_as_many_gates():
    system = small("patchdrop")
    images, random = torch.randn(20, 1, 24, 24), RandomSource(torch.Generator().manual_seed(0))
    with torch.no_grad():
        system.gate.weight.mul_(30)
        own, others = system.gates(images, "learned", random), system.gates(images, "random", random)
    assert own.sum(1).equal(others.sum(1)) and not own.equal(others)


def test_saccader_and_tnet_never_look_twice():
    for name in ("saccader", "tnet"):
        system = small(name, num_glimpses=9)
        for policy in ("learned", "random"):
            boxes = system.look(torch.randn(2, 3, 24, 24), 9, policy=policy).boxes
            assert len(boxes[0].reshape(-1, 4).unique(dim=0)) == 9


def test_an_even_saliency_samples_evenly_and_a_peak_enlarges():
    system = small("stn")
    even = torch.full((1, 1, 9, 9), 1 / 81)
    line = torch.linspace(-1, 1, 8)
    grid = system.grid(even)
    torch.testing.assert_close(grid[0, 0, :, 0], line, atol=0.02, rtol=0)
    torch.testing.assert_close(grid[0, :, 0, 1], line, atol=0.02, rtol=0)
    peak = even.clone()
    peak[0, 0, 2, 6] = 5.0
    bent = system.grid(peak / peak.sum())
    centre = torch.tensor([0.5, -0.5])  # column 6 and row 2 of 0..8
    near = ((bent - centre).norm(dim=-1) < 0.3).sum()
    assert near > 3 * ((grid - centre).norm(dim=-1) < 0.3).sum()


def test_the_pull_of_the_sampler_is_a_convolution_with_a_gaussian():
    system = small("stn", sampled_size=9)  # as many samples as points: nothing is interpolated
    saliency = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0))
    line = torch.exp(-4 * np.log(2) * (torch.arange(-8, 9) / 5) ** 2)
    kernel = (line[:, None] * line)[None, None]
    padded = torch.nn.functional.pad(saliency, (8,) * 4, mode="replicate")
    places = torch.linspace(-3, 3, 25)
    mass = torch.nn.functional.conv2d(padded, kernel)
    expected = torch.nn.functional.conv2d(padded * places, kernel) / mass
    torch.testing.assert_close(system.grid(saliency)[..., 0], expected[:, 0].clamp(-1, 1))
    expected = torch.nn.functional.conv2d(padded * places[:, None], kernel) / mass
    torch.testing.assert_close(system.grid(saliency)[..., 1], expected[:, 0].clamp(-1, 1))


def test_crops_are_where_their_boxes_say():
    images = torch.arange(24 * 24.0).view(1, 1, 24, 24)
    places = torch.tensor([[0.25, -0.5]])
    box = (crop_boxes(places, 8, (24, 24))[0] * 24).tolist()
    assert box == pytest.approx([11, 2, 19, 10], abs=1e-4)
    torch.testing.assert_close(crop(images, places, 8), images[:, :, 11:19, 2:10], atol=1e-3, rtol=0)
    several = crops(images, torch.stack((places, -places), dim=1), 8)
    torch.testing.assert_close(several[:, 0], crop(images, places, 8))
    corner = inside(torch.tensor([[-1.0, 1.0]]), 8, (24, 24))
    torch.testing.assert_close(crop(images, corner, 8), images[:, :, :8, 16:], atol=1e-3, rtol=0)
    assert grid_places(3, torch.device("cpu")).tolist()[5] == [0, 1]


def test_a_retina_has_coarser_squares_around_the_finest():
    images = torch.randn(2, 1, 24, 24)
    places = torch.zeros(2, 2)
    seen = retina(pyramid(images, 3), places, 4)
    assert seen.shape == (2, 3, 4, 4)
    torch.testing.assert_close(seen[:, :1], images[:, :, 10:14, 10:14])
    torch.testing.assert_close(seen[:, 2:], torch.nn.functional.avg_pool2d(images[:, :, 4:20, 4:20], 4))
    boxes = retina_boxes(places, 4, 3, (24, 24))[0] * 24
    expected = torch.tensor([[10.0, 10, 14, 14], [8, 8, 16, 16], [4, 4, 20, 20]])
    torch.testing.assert_close(boxes, expected)


def test_a_draw_beyond_the_scene_is_sensed_at_its_edge_and_scored_as_drawn():
    means = torch.full((20_000, 2), 0.95)
    places, scores = draw_places(means, 0.2, RandomSource(torch.Generator().manual_seed(0)))
    assert places.max() == 1 and (places == 1).any(dim=1).float().mean() > 0.5
    assert scores.mean().item() == pytest.approx(-1, abs=0.03)  # of two squares of normal numbers, halved


def stage_losses(system, stage: str, labels) -> dict[str, float]:
    images = glyph_scenes().paint(np.arange(12)).images.float().mean(dim=1, keepdim=True) / 255
    random = RandomSource(torch.Generator().manual_seed(0))
    return {name: loss.item() for name, loss in system.losses(stage, images, labels, random).items()}


def test_saccader_learns_the_order_of_the_class_it_predicts():
    system = small("saccader")
    labels = torch.arange(12) % 3
    assert stage_losses(system, "order", labels) == stage_losses(system, "order", labels.flip(0))
    assert stage_losses(system, "together", labels) != stage_losses(system, "together", labels.flip(0))


def test_tnet_rewards_the_cell_that_was_worth_it():
    """With rewards of each look alone, a cell that is always right becomes likelier than others."""
    system = small("tnet", joint_weight=0.0, num_glimpses=3)
    labels = torch.zeros(64, dtype=torch.long)
    rated = torch.zeros(64, 9, requires_grad=True)
    system.begin = lambda images: (torch.zeros(64, 4), rated)

    def classify(images, whole, cells):
        right = torch.nn.functional.one_hot((cells != 4).long(), 3).float()  # class 0 from cell 4 alone
        alone = torch.cat((right[:, :1], right), dim=1)
        return alone, alone

    system.classify = classify
    random = RandomSource(torch.Generator().manual_seed(0))
    system.losses("together", torch.zeros(64, 1, 24, 24), labels, random)["policy"].backward()
    slope = rated.grad.sum(dim=0)
    assert slope[4] < 0 < slope[[0, 1, 2, 3, 5, 6, 7, 8]].sum()


def test_a_wrong_answer_costs_patchdrop_more_when_all_is_trained(monkeypatch):
    system, costs = small("patchdrop"), []
    reward = system.reward
    monkeypatch.setattr(system, "reward", lambda *given: costs.append(given[-1]) or reward(*given))
    labels = torch.arange(12) % 3
    stage_losses(system, "policy", labels)
    stage_losses(system, "together", labels)
    assert costs == [-0.5, -0.5, -10, -10]
    answer, gates = torch.tensor([[3.0, 0], [3, 0]]), torch.tensor([[1.0, 1, 0, 0], [1, 0, 0, 0]])
    assert reward(answer, gates, torch.tensor([0, 1]), -10).tolist() == [1 - 0.5**2, -10]


def test_patchdrop_learns_its_gates_from_the_open_patches_alone(monkeypatch):
    """With the low-resolution view every gate would close while the policy is trained alone."""
    system, calls = small("patchdrop"), []
    low = system.answer_low
    monkeypatch.setattr(system, "answer_low", lambda images: calls.append(1) or low(images))
    labels = torch.arange(12) % 3
    stage_losses(system, "policy", labels)
    assert not calls
    stage_losses(system, "together", labels)
    assert calls


def test_stages_share_the_batches():
    stages = (Stage("a", 0.5, ()), Stage("b", 0.25, ()), Stage("c", 0.25, ()))
    assert stage_ends(stages, 100) == [50, 75, 100] and stage_ends(stages, 3)[-1] == 3


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ram", {"num_scales": 0}, "num_scales must be at least 1"),
        ("dram", {"num_scales": 2, "backbone": "deit-tiny"}, "needs the backbone conv"),
        ("saccader", {"num_glimpses": 10}, "more than the 9 places"),
        ("stn", {"num_glimpses": 2}, "stn looks once: num_glimpses must be 1, got 2"),
        ("tnet", {"num_glimpses": 11}, "more than 10"),
        ("patchdrop", {"num_patches": 5}, "does not divide"),
        ("patchdrop", {"num_glimpses": 3}, "at most 2"),
        ("stn", {"backbone": "cnv"}, "did you mean 'conv'"),
    ],
)
def test_wrong_settings_are_named(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        small(name, **settings)


def test_an_unknown_system_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'gfnet'"):
        require_system("gfnett")


def test_the_checker_finds_what_is_wrong():
    class Ahead:
        """A looker whose first answer knows the last look."""

        facts, device, episodic = small("stn").facts, torch.device("cpu"), None
        facts = dataclasses.replace(facts, most_glimpses=2, policies=())

        def ready(self, fast=True):
            return self

        def look(self, images, num_glimpses, *, policy=None, generator=None):
            self.facts.require_num_glimpses(num_glimpses)
            trace = small("patchdrop").look(images, 2)
            part = trace.boxes[:, :num_glimpses], trace.sizes[:num_glimpses], trace.pixels[:, :num_glimpses]
            return type(trace)(*part, trace.logits.flip(1)[:, :num_glimpses] * num_glimpses)

    with pytest.raises(StamError, match="says otherwise"):
        check_looker(Ahead())
    with pytest.raises(StamError, match="needs facts"):
        check_looker(object())


def test_the_template_is_a_system():
    config = TemplateConfig(
        num_classes=3, image_size=24, grey=True, glimpse_size=8, num_glimpses=3, backbone="conv"
    )
    system = Template(config).eval()
    check_looker(system)
    images, labels = torch.randn(4, 1, 24, 24), torch.tensor([0, 1, 2, 0])
    losses = system.losses("together", images, labels, RandomSource(torch.Generator().manual_seed(0)))
    sum(losses.values()).backward()
    assert system.classifier.weight.grad is not None


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_fewest_glimpses_can_be_learned_from(name):
    """Fewer are refused when a system is built, not in the middle of its training."""
    least = require_system(name).settings.least_glimpses
    system = small(name, num_glimpses=least)
    for stage in system.stages:
        random = RandomSource(torch.Generator())
        losses = system.losses(stage.name, torch.rand(2, 1, 24, 24), torch.tensor([0, 1]), random)
        assert all(loss.isfinite() for loss in losses.values())
    with pytest.raises(ConfigError, match="num_glimpses must be at least"):
        small(name, num_glimpses=least - 1)
