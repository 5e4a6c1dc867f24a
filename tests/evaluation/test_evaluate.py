"""Accuracy after each glimpse, over seeds: against a naive loop, whatever the batches, for any agent."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluating import (
    CLASSES,
    NoiseScenes,
    WholeThenCrops,
    fast_plan,
    full_evaluation,
    make_agent,
    make_teacher,
)
from hypothesis import given
from hypothesis import strategies as st
from made_up import made_up

import stam
import stam.evaluation
from stam.config import to_plain
from stam.errors import ConfigError, DataError, StamError
from stam.evaluation import Evaluation, EvaluationPlan, evaluate, load_evaluation, save_evaluation
from stam.evaluation.evaluate import halves, some_of
from stam.evaluation.outcomes import gather_scenes, true_rank
from stam.evaluation.results import Curve
from stam.evaluation.scenes import first_locations, random_orders
from stam.evaluation.whole_image import low_resolution, low_resolution_size
from stam.model.looker import LookTrace, SceneLooker
from stam.scene.grid import Grid
from stam.scene.pixels import normalise


def images_of(scenes: NoiseScenes) -> torch.Tensor:
    pixels = torch.stack([torch.from_numpy(scenes.load(index)) for index in range(len(scenes))])
    return normalise(pixels.permute(0, 3, 1, 2))


def test_accuracy_is_what_a_naive_loop_finds():
    agent, scenes = (
        make_agent(num_classes=12, labels=tuple("abcdefghijkl")),
        NoiseScenes(30, tuple("abcdefghijkl")),
    )
    found = evaluate(agent, scenes, fast_plan(num_seeds=3, num_glimpses=5))
    labels = torch.from_numpy(scenes.labels)
    for seed in range(3):
        trace = agent.look(images_of(scenes), 5, first_locations(agent.grid, np.arange(30), seed))
        for name, scores in (
            ("ensemble", trace.probabilities),
            ("class_head", trace.class_logits),
            ("distill_head", trace.distill_logits),
        ):
            best = scores.topk(5, dim=-1).indices
            readout = getattr(found.accuracy, name)
            right = best == labels[:, None, None]
            assert readout.top1.per_seed[seed] == pytest.approx(right[..., 0].double().mean(0).tolist())
            assert readout.top5.per_seed[seed] == pytest.approx(right.any(-1).double().mean(0).tolist())
    each = np.array(found.accuracy.ensemble.top1.per_seed)
    assert found.accuracy.ensemble.top1.mean == pytest.approx(each.mean(0))
    assert found.accuracy.ensemble.top1.std == pytest.approx(each.std(0, ddof=1))
    assert found.pixels == (64, 128, 192, 256, 320)
    assert found.share == pytest.approx([n / 12 for n in range(1, 6)])
    assert found.seeds == (0, 1, 2) and found.policy == "learned" and found.data.num_scenes == 30


@pytest.mark.parametrize("policy", ["learned", "random", "plus"])
def test_the_batch_size_changes_nothing(policy):
    agent, scenes = make_agent(), NoiseScenes(13)
    one, other = (
        evaluate(agent, scenes, fast_plan(policy=policy, batch_size=size), make_teacher()) for size in (13, 4)
    )
    assert one.locations == other.locations
    assert one.accuracy == other.accuracy and one.whole_image == other.whole_image
    assert one.calibration.temperature == pytest.approx(other.calibration.temperature, rel=1e-4)


def test_locations_are_counted_at_every_step():
    found = evaluate(make_agent(), NoiseScenes(20), fast_plan(num_seeds=3))
    counts = np.array(found.locations.counts)
    assert counts.shape == (12, 12)
    assert (counts.sum(axis=1) == 60).all()  # a glimpse a step
    assert (counts.sum(axis=0) == 60).all()  # and after twelve, every location once


def test_first_locations_are_uniform_and_belong_to_the_scene():
    grid = Grid(24, 8, 4)
    whole = first_locations(grid, np.arange(3000), 7)
    assert whole[[5, 2999]].equal(first_locations(grid, np.array([5, 2999]), 7))
    assert not whole.equal(first_locations(grid, np.arange(3000), 8))
    torch.testing.assert_close(
        torch.bincount(whole, minlength=9) / 3000, torch.full((9,), 1 / 9), atol=0.02, rtol=0
    )


def test_random_orders_belong_to_the_scene_and_reach_everything():
    grid = Grid(24, 8, 4)
    state, seen = torch.zeros(4, 1), torch.zeros(4, 9, dtype=torch.bool)
    orders = random_orders(grid, np.array([3, 8, 1, 0]), 0)
    part = orders.select(torch.tensor([1, 3]))
    assert part.choose(state[:2], seen[:2]).equal(orders.choose(state, seen)[[1, 3]])
    path = []
    for _ in range(9):
        path.append(orders.choose(state, seen))
        seen = seen.scatter(1, path[-1][:, None], True)
    assert torch.stack(path, 1).sort().values.equal(torch.arange(9).expand(4, -1))
    assert not path[0].eq(path[0][0]).all()


def test_the_true_rank_breaks_ties_as_argmax_does():
    scores = torch.tensor([[0.2, 0.5, 0.5], [0.5, 0.5, 0.0], [1.0, 1.0, 1.0]])
    assert true_rank(scores, torch.tensor([2, 0, 1])).tolist() == [1, 0, 1]


def test_a_single_seed_has_no_spread():
    assert Curve.of(np.array([[0.5, 0.75]])).std == (0.0, 0.0)


def test_the_teacher_is_the_ceiling_and_its_low_resolution_ends_there():
    scenes, teacher = NoiseScenes(20), make_teacher()
    found = evaluate(make_agent(), scenes, fast_plan(), teacher).whole_image
    right = teacher(images_of(scenes)).argmax(1) == torch.from_numpy(scenes.labels)
    assert found.top1 == pytest.approx(float(right.float().mean()))
    assert [low.num_glimpses for low in found.low_resolution] == list(range(1, 13))
    assert found.low_resolution[-1].top1 == found.top1 and found.low_resolution[-1].pixels == 24 * 32
    assert (
        evaluate(make_agent(), scenes, fast_plan(low_resolution=False), teacher).whole_image.low_resolution
        == ()
    )


@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9), glimpse=st.integers(1, 40), share=st.floats(0.001, 1)
)
def test_low_resolution_never_has_more_pixels_than_the_glimpses(rows, columns, glimpse, share):
    grid = Grid((rows * glimpse, columns * glimpse), glimpse, glimpse)
    count = max(1, round(share * grid.num_locations))
    height, width = low_resolution_size(grid, count)
    budget = count * grid.glimpse_area
    assert 1 <= height <= rows * glimpse and 1 <= width <= columns * glimpse
    assert height * width <= budget
    assert height * width > budget - height or width == columns * glimpse


def test_low_resolution_keeps_the_size_and_loses_detail():
    image = torch.randn(1, 3, 24, 32)
    assert low_resolution(image, (24, 32)) is image
    blurred = low_resolution(image, (6, 8))
    assert blurred.shape == image.shape and blurred.std() < 0.5 * image.std()


def test_halves_share_no_scene():
    fit, report = halves(101, 0)
    assert sorted([*fit, *report]) == list(range(101)) and len(fit) == 50
    assert not np.array_equal(fit, halves(101, 1)[0])
    assert [part.tolist() for part in halves(1, 0)] == [[0], [0]]


def test_a_part_is_spread_over_the_whole():
    assert some_of(np.arange(10), 20).tolist() == list(range(10))
    assert some_of(np.arange(0, 1000, 2), 5).tolist() == [0, 250, 500, 748, 998]


def test_a_scene_counted_twice_or_never_is_an_error():
    part = {"values": np.arange(3)}
    assert gather_scenes([part], [np.array([2, 0, 1])], 3)["values"].tolist() == [1, 2, 0]
    with pytest.raises(StamError, match="2 of 3 scenes were not counted exactly once"):
        gather_scenes([part], [np.array([0, 1, 1])], 3)


def test_anything_that_looks_can_be_evaluated():
    scenes = NoiseScenes(10)
    found = evaluate(WholeThenCrops(), scenes, EvaluationPlan(num_seeds=2), make_teacher())
    assert found.accuracy.ensemble.top1.mean == (0.2,) * 3
    assert (found.accuracy.class_head, found.locations, found.grid) == (None,) * 3
    assert found.policy == "own" and found.cost is None and found.early_exit.timing is None
    assert found.whole_to_attend and found.whole_to_classify and found.image_size == (24, 32)
    assert found.whole_image is not None and found.whole_image.low_resolution == ()
    seconds = float((images_of(scenes).sum(dim=(1, 2, 3)) > 0).float().mean())
    assert found.pixels == tuple(round(20 + n * (48 + 12 * seconds)) for n in range(3))
    assert found.share == pytest.approx([pixels / 768 for pixels in found.pixels], abs=1e-3)
    assert Evaluation.from_json(found.to_json()) == found


def test_what_a_looker_draws_belongs_to_the_scene():
    one, other = WholeThenCrops(), WholeThenCrops()
    for stub, size in ((one, 10), (other, 3)):
        evaluate(stub, NoiseScenes(10), fast_plan(batch_size=size, num_seeds=1, most_calibration=1))
    assert torch.cat(one.drawn[1:]).equal(torch.cat(other.drawn[1:]))
    assert len(torch.cat(one.drawn[1:]).unique()) == 20


def test_a_looker_says_which_policies_and_how_many_looks_it_has():
    with pytest.raises(StamError, match="num_glimpses must be 1 to 3, got 4"):
        evaluate(WholeThenCrops(), NoiseScenes(10), fast_plan(num_glimpses=4))
    with pytest.raises(ConfigError, match="policy 'learned' is unknown: allowed: own"):
        evaluate(WholeThenCrops(), NoiseScenes(10), fast_plan(policy="learned"))


def test_no_class_is_asked_for():
    folders = [Path(stam.evaluation.__file__).parent.parent / room for room in ("evaluation", "show", "cli")]
    text = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    assert not re.findall(r"isinstance\([^()]*(?:Agent|Looker|Trace)\b", text)


def test_a_trace_of_an_agent_says_what_was_sensed():
    agent, images = make_agent(), images_of(NoiseScenes(4))
    trace = agent.look(images, 3, first_location=6)
    top, left, bottom, right = agent.grid.pixel_box(int(trace.locations[1, 2]))
    box = trace.boxes[1, 2, 0] * torch.tensor([24, 32, 24, 32])
    torch.testing.assert_close(box, torch.tensor([top, left, bottom, right]).float())
    assert trace.pixels.tolist() == [[64, 128, 192]] * 4 and trace.sizes.tolist() == [[[8, 8]]] * 3
    assert isinstance(trace, LookTrace) and isinstance(agent, SceneLooker)


def test_an_agent_in_training_stays_in_training():
    agent = make_agent().train()
    plain = evaluate(make_agent(), NoiseScenes(6), fast_plan())
    assert evaluate(agent, NoiseScenes(6), fast_plan()).accuracy == plain.accuracy
    assert agent.training


def test_the_precision_that_was_used_is_recorded():
    assert evaluate(make_agent(), NoiseScenes(4), fast_plan(precision="auto")).precision == "float32"
    found = evaluate(make_agent(), NoiseScenes(4), fast_plan(precision="bfloat16", num_glimpses=2))
    assert found.precision == "bfloat16"


def test_a_single_scene_can_be_evaluated():
    found = evaluate(make_agent(), NoiseScenes(1), fast_plan(num_glimpses=1))
    assert found.num_glimpses == 1 and found.early_exit.fit.reported.mean_glimpses == 1


def test_a_result_round_trips_through_json(tmp_path):
    evaluation = full_evaluation()
    assert Evaluation.from_json(evaluation.to_json()) == evaluation
    save_evaluation(evaluation, tmp_path / "e.json")
    assert load_evaluation(tmp_path / "e.json") == evaluation
    assert [path.name for path in tmp_path.iterdir()] == ["e.json"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        evaluation.name = "other"


def test_the_schema_is_stable():
    """Programs read these names; a change needs a new version and a word in docs/evaluation.md."""
    values = json.loads(full_evaluation().to_json())
    assert (values["format"], values["version"]) == ("stam-evaluation", "1.4")
    assert sorted(values) == [
        *("accuracy", "answers", "calibration", "cost", "data", "early_exit"),
        *("first_locations", "format", "grid", "image_size", "locations", "name"),
        *(
            "num_glimpses",
            "pixels",
            "policy",
            "precision",
            "seeds",
            "settings",
            "share",
            "version",
            "versions",
        ),
        *("whole_image", "whole_to_attend", "whole_to_classify"),
    ]
    assert sorted(values["accuracy"]) == ["class_head", "distill_head", "ensemble"]
    assert sorted(values["accuracy"]["ensemble"]["top5"]) == ["high", "low", "mean", "per_seed", "std"]
    assert sorted(values["answers"]) == [
        *("chance", "confusion", "early_exit", "mistakes", "per_class", "right")
    ]
    assert sorted(values["early_exit"]) == ["calibrated", "fit", "timing", "uncalibrated"]
    assert sorted(values["cost"]["latency"][0]) == [
        *("batch_size", "cumulative_ms", "device", "per_step_ms", "repeats", "threads")
    ]


def test_results_of_earlier_versions_are_read():
    values = json.loads(full_evaluation().to_json())
    del values["image_size"], values["whole_to_attend"], values["whole_to_classify"]  # new in 1.3
    del values["answers"]  # new in 1.4
    assert Evaluation.from_json(json.dumps(values | {"version": "1.0"})).policy == "learned"
    assert Evaluation.from_json(json.dumps(values | {"version": "1.2"})) == dataclasses.replace(
        full_evaluation(), version="1.2", answers=None
    )
    older = values | {"version": "1.1", "handover": 8, "mirrored": False}
    assert Evaluation.from_json(json.dumps(older)).policy == "learned:8"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("num_glimpses", 99, "pixels must have 99 entries, got 4"),
        ("seeds", [], "seeds must name at least one"),
        ("pixels", [1], "pixels must have 4 entries, got 1"),
        ("accuracy.ensemble.top1.mean", [0.5], "mean must have 4 entries, got 1"),
        ("accuracy.ensemble.top1.mean", [0, 0, "x", 0], r"ensemble.top1.mean\[2\] must be a finite"),
        ("locations.counts", [[1]] * 4, "counts must have 4 entries, got 1"),
        ("calibration.temperature", None, "calibration.temperature must be a finite number, got None"),
        ("early_exit.fit.exits", [1], "exits must have 4 entries"),
        ("settings.config", [], "settings.config must be an object"),
        ("settings.config.training", 3, "settings.config.training must be an object"),
        ("settings.config.training.consistency", ["soft"], "training.consistency cannot be"),
        ("settings.config.training.num_glimpses", -3, "training.num_glimpses cannot be -3"),
        ("versions", {"stam": 1}, "versions.stam must be text, got 1"),
        ("grid.image_size", [0, 32], "image_size must be one positive number"),
    ],
)
def test_a_result_that_cannot_be_is_refused(tmp_path, path, value, message):
    document = to_plain(made_up(grid=Grid(32, 16, 8)))
    *parts, last = path.split(".")
    inner = document
    for part in parts:
        inner = inner[part]
    inner[last] = value
    (tmp_path / "e.json").write_text(json.dumps(document))
    with pytest.raises(StamError, match=f"e.json' is damaged: .*{message}.*; evaluate again"):
        load_evaluation(tmp_path / "e.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged: Expecting property name"),
        ("[]", "is not a stam-evaluation"),
        ('{"format": "stam-evaluation", "version": "2.0"}', "has version 2.0"),
        ('{"format": "stam-evaluation", "version": "1.0"}', "is damaged"),
        ('{"format": "stam-evaluation", "version": "1.0", "accurcy": 1}', "did you mean 'accuracy'"),
    ],
)
def test_a_bad_result_file_is_refused(tmp_path, text, message):
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(StamError, match=message):
        load_evaluation(tmp_path / "e.json")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_seeds": 0}, "seeds must be at least 1, got 0"),
        ({"most_calibration": 0}, "most_calibration must be at least 1, got 0"),
        ({"policy": "spirl"}, "did you mean 'spiral'"),
        ({"budget": 3, "target_accuracy": 0.5}, "not both"),
        ({"target_accuracy": 76.0}, "90 % is 0.9"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"precision": "float8"}, "precision 'float8' is unknown"),
    ],
)
def test_a_bad_plan_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EvaluationPlan(**settings)


@pytest.mark.parametrize(
    ("scenes", "plan", "message"),
    [
        (NoiseScenes(4), {"num_glimpses": 13}, "num_glimpses must be 1 to 12"),
        (NoiseScenes(4), {"budget": 13}, "budget must be 1 to 12"),
        (NoiseScenes(0), {}, "no scenes to evaluate on"),
        (
            NoiseScenes(4, ("ash", "brch")),
            {},
            "does not know the class 'brch' of this data: did you mean 'birch'",
        ),
        (NoiseScenes(4, CLASSES[::-1]), {}, "in another order"),
    ],
)
def test_scenes_that_do_not_fit_are_refused(scenes, plan, message):
    with pytest.raises(StamError, match=message):
        evaluate(make_agent(), scenes, fast_plan(**plan))


def test_an_agent_without_an_actor_has_no_learned_policy():
    agent = make_agent(policy="spiral")
    assert evaluate(agent, NoiseScenes(4), fast_plan()).policy == "spiral"
    with pytest.raises(StamError, match="without an actor"):
        evaluate(agent, NoiseScenes(4), fast_plan(policy="learned"))


def test_a_teacher_of_other_classes_is_refused():
    teacher = make_teacher()
    teacher.num_classes = 7
    with pytest.raises(StamError, match="tells 7 classes apart, the agent 5"):
        evaluate(make_agent(), NoiseScenes(4), fast_plan(), teacher)


def test_unreadable_images_say_so():
    class Broken(NoiseScenes):
        def load(self, index, decode_size=None):
            raise DataError("cannot read 3.png")

    with pytest.raises(DataError, match="cannot read 3.png"):
        evaluate(make_agent(), Broken(4), fast_plan())


def test_what_is_not_a_number_is_never_scored():
    agent, teacher = make_agent(), make_teacher()
    with torch.no_grad():
        agent.core.head.bias[0] = float("nan")
        teacher.model.head.bias[0] = float("nan")
    for broken, with_teacher in ((agent, None), (make_agent(), teacher)):
        with pytest.raises(StamError, match="not numbers"):
            evaluate(broken, NoiseScenes(6), fast_plan(), with_teacher)
