"""The learner: the weights a step uses, what changes in place, and the fast paths where they run."""

import dataclasses
import gc

import numpy as np
import pytest
import torch
from learners import AGENT, learner
from zooing import glyph_scenes, small

from stam.config import AgentConfig
from stam.data import RawBatch
from stam.errors import ConfigError
from stam.evaluation import core_multiply_adds
from stam.evaluation.scenes import SceneOrders, random_orders
from stam.evaluation.speed import (
    NoScenes,
    batches_from,
    look_speed,
    loss_agreement,
    make_learner,
    make_teacher,
    plain_look,
    training_flops,
    training_speed,
)
from stam.fast import cuda_graph
from stam.fast.cuda_graph import Pipeline
from stam.learning.finetuning import whole_image_accuracy
from stam.learning.loop import Meter, Place
from stam.learning.optimisation import make_optimiser, restore_optimiser
from stam.learning.training import AgentLearner
from stam.learning.validation import compare_policies, num_rounds, policies_to_try, validate
from stam.model.agent import Agent
from stam.model.teacher import Teacher
from stam.model.vit import VisionTransformer
from stam.settings import DataConfig, RunConfig, TrainingConfig
from stam.weights import load_agent
from stam.zoo.training import ZooConfig, ZooTraining, accuracy


def losses_of_a_batch(**training) -> dict[str, float]:
    made = learner(**training)
    for _ in batches_from(made, None, 1):
        pass
    return made.meter.means()


def test_every_update_uses_the_weights_of_the_one_before_in_half_precision_too():
    """Autocast keeps the weights it has rounded: one context over a whole batch would update in vain."""
    for precision in ("float32", "bfloat16"):
        standing, moving = (
            losses_of_a_batch(base_lr=rate, min_lr=rate, num_glimpses=6, precision=precision)["supervised"]
            for rate in (0.0, 3.0)
        )
        # with the weights of the first update all along, both would be the same to the last bit
        assert abs(moving - standing) > 0.1, precision


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_needs_no_gradient_is_not_trained(precision):
    torch.manual_seed(0)
    training = TrainingConfig(num_glimpses=3, batch_size=8, device="cpu", base_lr=1e-2, precision=precision)
    agent = Agent(AGENT)
    frozen = {name for name, _ in agent.named_parameters() if ".mlp." in name}
    for name in frozen:
        agent.get_parameter(name).requires_grad_(False)
    made = make_learner(RunConfig(agent=AGENT, training=training), agent)
    before = {name: value.clone() for name, value in agent.named_parameters()}
    for _ in batches_from(made, None, 1):
        pass
    same = {name for name, value in agent.named_parameters() if torch.equal(value, before[name])}
    assert frozen <= same and all(".mlp." in name or ".bias" in name for name in same)


def test_the_teachers_features_are_followed_if_they_have_a_weight():
    fast = {"base_lr": 2e-2, "min_lr": 2e-2}
    means = losses_of_a_batch(feature_weight=5.0, **fast)
    assert "features" not in losses_of_a_batch(**fast)
    made = learner(feature_weight=5.0, **fast)
    for _ in batches_from(made, None, 12):
        pass
    assert made.meter.means()["features"] < 0.8 * means["features"]


def test_a_teacher_whose_features_cannot_be_followed_is_refused():
    config = RunConfig(agent=AGENT, training=TrainingConfig(num_glimpses=4, feature_weight=1.0, device="cpu"))
    wider = make_teacher(dataclasses.replace(AGENT, width=64))
    other = Teacher(torch.nn.Flatten(), AGENT.num_classes)
    for teacher, message in ((wider, "this one is 64 wide"), (other, "this one has no such features")):
        with pytest.raises(ConfigError, match=f"needs a DeiT of width 32 as teacher, {message}: use"):
            AgentLearner(config, Agent(AGENT), teacher, NoScenes())
    plain = dataclasses.replace(config, training=TrainingConfig(num_glimpses=4, device="cpu"))
    AgentLearner(plain, Agent(AGENT), other, NoScenes())


def test_the_last_epochs_have_larger_crops(monkeypatch):
    made = learner(epochs=8, large_crop_fraction=0.25)
    used = []
    for name in ("augment", "augment_large"):
        monkeypatch.setattr(made, name, lambda images, *given, name=name: used.append(name) or images.float())
    monkeypatch.setattr(made, "learn_from", lambda *given: None)
    raw = RawBatch(
        torch.zeros(16, 3, 32, 32, dtype=torch.uint8),
        torch.full((16, 2), 32),
        torch.zeros(16, dtype=torch.long),
        torch.arange(16),
    )
    for epoch in range(8):
        made.train_batch(Place(epoch, 0, False), raw)
    assert used == ["augment"] * 6 + ["augment_large"] * 2
    assert not any(TrainingConfig(epochs=8).has_large_crops(epoch) for epoch in range(8))
    assert (
        sum(TrainingConfig(epochs=10, large_crop_fraction=0.7).has_large_crops(epoch) for epoch in range(10))
        == 7
    )


def test_rates_tau_and_means_change_in_place():
    made = learner()
    before = {name: id(rate) for name, rate in made.rates.items()} | {"tau": id(made.tau)}
    images, labels = torch.randn(16, 3, 32, 32), torch.zeros(16, dtype=torch.long)
    made.learn_from(images, labels, Place(0, 0, False))
    sums = {name: id(value) for name, value in made.meter.sums.items()}
    first = made.meter.means()
    made.learn_from(images, labels, Place(100, 0, False))
    assert {name: id(rate) for name, rate in made.rates.items()} | {"tau": id(made.tau)} == before
    assert {name: id(value) for name, value in made.meter.sums.items()} == sums
    assert made.tau == 4.0
    assert first.keys() == made.meter.means().keys()
    assert all(group["lr"] is made.rates[group["part"]] for group in made.optimiser.param_groups)


@pytest.mark.parametrize(("short_episode_glimpses", "taken"), [(3, 3), (5, 4)])
def test_short_episodes_are_more_updates_for_the_first_glimpses(short_episode_glimpses, taken):
    made = learner(short_episodes=2, short_episode_glimpses=short_episode_glimpses, base_lr=1e-3)
    plain = learner(base_lr=1e-3)
    for one in (made, plain):
        for _ in batches_from(one, None, 1):
            pass
    steps = [next(iter(one.optimiser.state.values()))["step"].item() for one in (made, plain)]
    assert steps == [4 + 2 * taken, 4]
    assert not made.agent.core.head.weight.equal(plain.agent.core.head.weight)
    assert made.meter.means().keys() == plain.meter.means().keys()


def test_a_meter_starts_over_and_leaves_out_what_was_not_added():
    meter = Meter()
    meter.add({"a": torch.tensor(1.0), "b": torch.tensor(5.0)})
    meter.add({"a": torch.tensor(3.0)})
    assert meter.means() == {"a": 2.0, "b": 5.0}
    meter.add({"a": torch.tensor(7.0)})
    assert meter.means() == {"a": 7.0}


def test_a_restored_optimiser_keeps_the_rates_that_are_changed_in_place():
    layer = torch.nn.Linear(2, 2)
    rates = {"all": torch.zeros(())}
    optimiser = make_optimiser({"all": layer.named_parameters()}, 0.05, rates)
    state = optimiser.state_dict()
    state["param_groups"][0]["capturable"] = True  # as saved on a GPU
    rates["all"].fill_(0.5)
    restore_optimiser(optimiser, state, rates)
    assert all(group["lr"] is rates["all"] and not group["capturable"] for group in optimiser.param_groups)


def test_no_garbage_is_collected_while_a_batch_is_captured():
    """What is freed then on a GPU ends the capture."""
    assert gc.isenabled()
    with pytest.raises(ValueError, match="stop"), cuda_graph._no_garbage_collection():
        assert not gc.isenabled()
        raise ValueError("stop")
    assert gc.isenabled()


def test_a_pipeline_without_a_gpu_changes_nothing():
    pipeline = Pipeline(torch.device("cpu"))
    with pipeline.preparing():
        prepared = torch.ones(2)
    with pipeline.using(prepared):
        assert prepared.sum() == 2


def test_losses_in_half_precision_agree_with_single():
    single, half = loss_agreement(AGENT, "cpu", num_glimpses=4)
    assert max(single.differences) == 0
    assert max(half.differences) < 0.05


def test_benchmarks_measure_training_and_looking():
    for from_files in (False, True):
        speed = training_speed(
            agent=AGENT, batch_size=8, num_glimpses=3, device="cpu", num_batches=2, from_files=from_files
        )
        assert speed.images_per_second > 0 and speed.tera_flops > 0
        assert speed.source == ("files" if from_files else "device")
        assert not speed.compiled and speed.memory_gib is None
    looking = look_speed("tiny", batch_size=1, num_glimpses=2, rounds=1)
    assert looking.images_per_second > 0 and looking.plain_images_per_second > 0


def test_the_plain_loop_looks_where_the_agent_looks():
    torch.manual_seed(1)
    agent = Agent(AGENT).eval()
    images, first = torch.randn(3, 3, 32, 32), torch.tensor([0, 5, 9])
    with torch.no_grad():
        assert torch.equal(plain_look(agent, images, 6, first), agent.look(images, 6, first).locations)


def test_operations_are_counted_as_the_paper_counts_them():
    """DeiT-Tiny takes 1.25 G multiply-adds for an image; ours leaves out most of the last block."""
    config = AgentConfig.of_size("tiny", 1000)
    assert 1.14e9 < core_multiply_adds(config, 196) < 1.25e9
    without = dataclasses.replace(config, policy="random")
    assert training_flops(config, 21) > 1.5 * training_flops(without, 21)


@pytest.mark.parametrize("policy", ["learned", "spiral", "random"])
def test_graphed_looks_are_looks(policy, monkeypatch):
    """Without a GPU nothing is captured, but what would be is the same."""
    monkeypatch.setattr(cuda_graph, "GraphedFunction", lambda function: function)
    torch.manual_seed(0)
    agent, grid = Agent(AGENT).eval(), AGENT.grid
    images, first = torch.randn(3, 3, 32, 32), torch.tensor([0, 5, 9])
    if policy == "random":
        orders = random_orders(grid, np.arange(3), seed=1)
        given, more = orders, (orders.priorities,)
        recorded = cuda_graph.GraphedLook(agent, 6, SceneOrders)
    else:
        given, more = agent.policy(policy), ()
        recorded = cuda_graph.GraphedLook(agent, 6, lambda: given)
    trace, wanted = recorded(images, first, *more), agent.look(images, 6, first, given)
    assert torch.equal(trace.locations, wanted.locations)
    torch.testing.assert_close(trace.probabilities, wanted.probabilities, atol=1e-5, rtol=1e-4)


def test_what_is_not_a_number_is_never_right_in_a_validation():
    """The largest of scores that are no numbers is the first class: here the true one, always."""
    scenes, agent = glyph_scenes(9), learner().agent
    scenes.labels[:] = 0
    data = DataConfig(num_workers=0)
    config = RunConfig(agent=AGENT, data=data, training=TrainingConfig(num_glimpses=2, batch_size=4))
    vit = VisionTransformer(
        num_classes=5, patch_size=(4, 4), image_patches=(8, 8), width=16, depth=1, num_heads=2
    )
    system, teacher = small("ram"), Teacher(vit.eval(), 5)
    with torch.no_grad():
        agent.core.head.bias.fill_(float("nan"))
        vit.head.bias.fill_(float("nan"))
        system.classifier.bias.fill_(float("nan"))
        system.early.bias.fill_(float("nan"))
    assert validate(agent.eval(), config, scenes) == [0, 0]
    assert whole_image_accuracy(teacher, AGENT, data, scenes) == 0
    looks = ZooConfig("ram", system.config, data, ZooTraining(batch_size=4))
    assert accuracy(system, scenes, looks, 9) == [0, 0, 0]


def accuracies(monkeypatch, means: dict[str, float]) -> None:
    """Lets a validation find the same accuracy after every glimpse, by the policy."""

    def known(agent, config, scenes, policy=None, seed=None):
        return [means[policy]] * config.training.num_glimpses

    monkeypatch.setattr("stam.learning.validation.validate", known)


def test_a_validation_chooses_when_an_order_takes_over(tmp_path, monkeypatch):
    made = learner(num_glimpses=4, epochs=2, validate_every=1, choose_policy=True, ema_batches=3)
    accuracies(monkeypatch, {"learned": 0.4, "learned:1": 0.6})  # of 4 glimpses none is left after 8
    assert made.end_epoch(0)["val/score"] == pytest.approx(0.4), "not before the last validation"
    metrics = made.end_epoch(1)
    assert (metrics["val/score"], metrics["val/actor_glimpses"]) == (pytest.approx(0.6), 1.0)
    made.save(tmp_path / "agent")
    images = torch.rand(3, 3, 32, 32)
    saved, first = load_agent(tmp_path / "agent"), torch.tensor([0, 5, 9])
    assert saved.config.policy == "learned:1"
    assert saved.look(images, 4, first).locations.equal(saved.look(images, 4, first, "centre-out").locations)
    resumed = learner(num_glimpses=4, epochs=2, validate_every=1, choose_policy=True, ema_batches=3)
    resumed.load_state_dict(made.state_dict())
    assert resumed.agent_to_use.config.policy == "learned:1"
    accuracies(monkeypatch, {"learned": 0.7, "learned:1": 0.6})
    assert resumed.end_epoch(1)["val/actor_glimpses"] == 4
    assert resumed.agent_to_use.config.policy == "learned"


def test_policies_are_compared_from_several_first_locations_where_scenes_are_few(monkeypatch):
    scenes, agent = glyph_scenes(60), learner().agent
    training = TrainingConfig(num_glimpses=2, batch_size=60, seed=5)
    config = RunConfig(agent=AGENT, data=DataConfig(num_workers=0), training=training)
    asked = []

    def noisy(agent, config, scenes, policy=None, seed=None):
        asked.append((policy, seed))
        return [0.1 * seed] * 2

    monkeypatch.setattr("stam.learning.validation.validate", noisy)
    found = compare_policies(agent, config, scenes, ["learned", "random"])
    seeds = range(5, 12)  # 7 looks at each of 60 scenes are just more than 400
    assert asked == [(policy, seed) for policy in ("learned", "random") for seed in seeds]
    assert found == {policy: pytest.approx([0.8, 0.8]) for policy in ("learned", "random")}
    assert num_rounds(2, 1000) == num_rounds(1, 60) == 1
    assert num_rounds(2, 3) == 8, "more tell little: they are the same scenes"


@pytest.mark.parametrize("given", [{"choose_policy": False}, {}])
def test_a_policy_that_was_named_stays(monkeypatch, given):
    policy = "learned" if given else "learned:3"
    agent = dataclasses.replace(AGENT, policy=policy)
    training = TrainingConfig(**({"choose_policy": True} | given))
    assert policies_to_try(agent, training) == [policy]
    assert policies_to_try(AGENT, TrainingConfig(choose_policy=True)) == ["learned", "learned:8", "learned:1"]
