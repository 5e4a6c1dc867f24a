"""The one call: an agent, scenes and a plan in, an `Evaluation` out."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stam.data.randomness import random_order
from stam.data.scenes import Scenes
from stam.errors import DataError, StamError, did_you_mean, require, require_choice
from stam.evaluation import starts
from stam.evaluation.answers import NUM_MISTAKES, describe_answers
from stam.evaluation.calibration import TemperatureSearch, describe_calibration
from stam.evaluation.cost import measure_cost
from stam.evaluation.early_exit import TimedBatch, fit_threshold, sweep, time_early_exit
from stam.evaluation.outcomes import Outcomes, gather_scenes, join, outcomes_of
from stam.evaluation.results import (
    FORMAT,
    VERSION,
    Data,
    EarlyExit,
    Evaluation,
    ExitTiming,
    FirstLocations,
    WholeImage,
    floats,
)
from stam.evaluation.scenes import (
    SceneBatch,
    SceneOrders,
    SceneRandomness,
    SceneReader,
    first_locations,
    policy_for,
)
from stam.evaluation.whole_image import describe_whole_image, whole_image_ranks
from stam.fast.cuda_graph import GraphedLook
from stam.learning import distributed
from stam.learning.optimisation import autocast
from stam.learning.runs import versions
from stam.model.agent import Looker, evaluating
from stam.model.looker import LookTrace, SceneLooker
from stam.model.policy import Policy, require_policy
from stam.model.teacher import Teacher
from stam.settings import PRECISIONS
from stam.shapes import Float, Int


@dataclass(frozen=True)
class EvaluationPlan:
    """What to measure and how.

    Attributes:
        num_seeds: Seeds of the first location; the paper uses ten.
        num_glimpses: Glimpses to sense in each scene; by default all of them.
        policy: Who picks the locations; by default the agent's own policy.
        resize_size: The shorter side before the centre crop; by default as the agent was trained, or where
            it does not know, straight to the image size.
        batch_size: Scenes at once.
        num_workers: Processes that load images.
        target_accuracy: Fit the threshold for this accuracy.
        budget: Fit the threshold for this mean number of glimpses, instead.
        low_resolution: Whether to show the teacher shrunk images too.
        cost: Whether to count multiply-adds and measure latency.
        most_calibration: The most scenes the temperature is fitted on.
        most_timed: The most scenes early exit is timed on; 0 to leave it out.
        num_mistakes: The most wrong answers to name.
        first_locations: Whether to find the best first location.
        split_seed: Seed of the halves that thresholds and temperature are fitted and reported on.
        precision: Of the transformer: `float32`, `bfloat16`, or `auto`: bfloat16 for an agent on a GPU,
            float32 elsewhere and for other lookers.
        fast: Whether to use packed weights, fused kernels and CUDA graphs; otherwise plain modules compute.
    """

    num_seeds: int = 10
    num_glimpses: int | None = None
    policy: str | None = None
    resize_size: int | None = None
    batch_size: int = 64
    num_workers: int = 0
    target_accuracy: float | None = None
    budget: float | None = None
    low_resolution: bool = True
    cost: bool = True
    most_calibration: int = 5_000
    most_timed: int = 512
    num_mistakes: int = NUM_MISTAKES
    first_locations: bool = False
    split_seed: int = 0
    precision: str = "float32"
    fast: bool = True

    def __post_init__(self) -> None:
        """Checks every setting before anything is measured."""
        require(self.num_seeds >= 1, f"seeds must be at least 1, got {self.num_seeds}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")
        require(
            self.resize_size is None or self.resize_size >= 1,
            f"resize_size must be at least 1, got {self.resize_size}",
        )
        require(
            self.most_calibration >= 1,
            f"most_calibration must be at least 1, got {self.most_calibration}: the temperature is fitted",
        )
        require(self.num_workers >= 0, f"num_workers must be 0 or more, got {self.num_workers}")
        require_choice("precision", self.precision, PRECISIONS)
        if self.policy is not None:
            require_policy(self.policy)
        require(
            self.target_accuracy is None or self.budget is None,
            "give a target accuracy or a budget, not both",
        )
        accuracy = self.target_accuracy
        require(
            accuracy is None or 0 < accuracy <= 1,
            f"target accuracy is a share above 0 and at most 1, got {accuracy}: 90 % is 0.9",
        )


def evaluate(
    agent: SceneLooker,
    scenes: Scenes,
    plan: EvaluationPlan | None = None,
    teacher: Teacher | None = None,
    *,
    source: str = "scenes",
    name: str = "agent",
    settings: dict[str, Any] | None = None,
    progress: bool = True,
) -> Evaluation:
    """Measures an agent on labelled scenes.

    Under several processes each looks at its share, each scene is counted exactly once, and all return the
    same result.

    Args:
        agent: An agent, or any other looker (`stam.model.looker.SceneLooker`), of which less is measured.
        scenes: Labelled images, with the agent's classes.
        plan: What to measure; by default everything.
        teacher: Whole-image teacher for the ceiling and the low-resolution baseline.
        source: What to call the scenes in the result.
        name: What to call the agent in the result.
        settings: The run's settings, to be kept with the result.
        progress: Whether to show progress bars, on a terminal.
    """
    plan = plan or EvaluationPlan()
    with looking(agent, plan) as looker:
        return _Measurement(looker, scenes, plan, teacher, progress).run(source, name, settings or {})


@contextmanager
def looking(agent: SceneLooker, plan: EvaluationPlan) -> Iterator[SceneLooker]:
    """Yields an agent ready to look as a plan says; within it, it computes in the plan's precision."""
    mode = evaluating(agent) if isinstance(agent, nn.Module) else nullcontext()
    precision = plan.precision
    if precision == "auto" and agent.episodic is None:
        precision = "float32"  # some have no transformer, and were made for single precision
    with mode, autocast(agent.device, precision):
        yield agent.ready(plan.fast)


class _Measurement:
    """One evaluation in progress: what it is of, and the halves of the scenes."""

    def __init__(
        self,
        looker: SceneLooker,
        scenes: Scenes,
        plan: EvaluationPlan,
        teacher: Teacher | None,
        progress: bool,
    ) -> None:
        self.looker, self.scenes, self.plan, self.teacher = looker, scenes, plan, teacher
        self.facts = facts = looker.facts
        self.agent: Looker | None = looker.episodic
        _require_scenes(scenes, facts.labels)
        if teacher is not None and teacher.num_classes != len(facts.labels):
            raise StamError(
                f"the teacher tells {teacher.num_classes} classes apart, the agent {len(facts.labels)}: "
                "give the teacher the agent was trained with"
            )
        self.num_glimpses = facts.most_glimpses if plan.num_glimpses is None else plan.num_glimpses
        facts.require_num_glimpses(self.num_glimpses)
        require(
            plan.budget is None or 1 <= plan.budget <= self.num_glimpses,
            f"budget must be 1 to {self.num_glimpses} glimpses, got {plan.budget}",
        )
        self.policy = plan.policy or facts.policy
        facts.require_policy(self.policy)
        if self.agent is not None:
            self.agent.policy(self.policy)  # raises for a learned policy without an actor
        require(
            self.agent is not None or not plan.first_locations,
            "first locations are of agents: this system begins in its own way",
        )
        self.device = looker.device
        self.reader = reader_for(looker, scenes, plan, progress)
        self._graphed: GraphedLook | None = None
        self.fit_half, self.report_half = halves(len(scenes), plan.split_seed)

    def run(self, source: str, name: str, settings: dict[str, Any]) -> Evaluation:
        temperature, num_calibrated = self._fit_temperature()
        outcomes, whole_image = self._look(temperature)
        fitted, reported = outcomes.select(self.fit_half), outcomes.select(self.report_half)
        fit = fit_threshold(
            fitted.confidences[..., 1],
            fitted.calibrated_correct,
            reported.confidences[..., 1],
            reported.calibrated_correct,
            self.plan.target_accuracy,
            self.plan.budget,
        )
        begins = None
        if self.plan.first_locations and self.agent is not None:
            begins = self._first_locations(self.agent)
        timing = cost = None
        if distributed.rank() == 0:  # a clock is read where nobody has to wait for another
            timing = self._time_early_exit(fit.threshold, temperature)
            if self.plan.cost and self.agent is not None:
                cost = measure_cost(self.agent, self.num_glimpses, self.policy)
        pixels, (height, width) = outcomes.mean_pixels(), self.facts.image_size
        evaluation = Evaluation(
            format=FORMAT,
            version=VERSION,
            name=name,
            policy=self.policy,
            precision="bfloat16" if torch.is_autocast_enabled(self.device.type) else "float32",
            seeds=tuple(range(self.plan.num_seeds)),
            num_glimpses=self.num_glimpses,
            data=Data(source, len(self.scenes), tuple(self.facts.labels), scenes_digest(self.scenes)),
            grid=self.facts.grid,
            image_size=self.facts.image_size,
            whole_to_attend=self.facts.whole_to_attend,
            whole_to_classify=self.facts.whole_to_classify,
            pixels=tuple(round(count) for count in pixels),
            share=floats(count / (height * width) for count in pixels),
            accuracy=outcomes.accuracy(),
            whole_image=whole_image,
            calibration=describe_calibration(temperature, num_calibrated, reported),
            early_exit=EarlyExit(
                uncalibrated=sweep(outcomes.confidences[..., 0], outcomes.correct),
                calibrated=sweep(outcomes.confidences[..., 1], outcomes.calibrated_correct),
                fit=fit,
                timing=timing,
            ),
            locations=outcomes.location_counts(self.facts.grid),
            cost=cost,
            settings=json.loads(json.dumps(settings)),
            versions=versions(),
            answers=describe_answers(
                outcomes, reported, fit.threshold, self.scenes, self.facts.grid, self.plan.num_mistakes
            ),
            first_locations=begins,
        )
        return distributed.of_first(evaluation)

    def _trace(self, batch: SceneBatch, seed: int) -> LookTrace:
        if self.agent is None:
            drawn = SceneRandomness(batch.indices, seed)
            return self.looker.look(batch.images, self.num_glimpses, policy=self.policy, generator=drawn)
        first = first_locations(self.agent.grid, batch.indices, seed)
        return self._trace_from(self.agent, batch, first, seed)

    def _trace_from(
        self, agent: Looker, batch: SceneBatch, first: Tensor, seed: int, num_glimpses: int | None = None
    ) -> LookTrace:
        """Looks from some first locations, all glimpses or only the first few."""
        policy = policy_for(self.policy, agent.grid, batch.indices, seed)
        if num_glimpses is None and self.device.type == "cuda" and self.plan.fast:
            return self._graphed_trace(agent, batch, first.to(self.device), policy)
        generator = torch.Generator().manual_seed(seed)
        return agent.look(batch.images, num_glimpses or self.num_glimpses, first, policy, generator)

    def _graphed_trace(
        self, agent: Looker, batch: SceneBatch, first: Tensor, policy: Policy | str
    ) -> LookTrace:
        """Looks by a CUDA graph that is captured once for all batches."""
        if isinstance(policy, SceneOrders):
            if self._graphed is None:
                self._graphed = GraphedLook(agent, self.num_glimpses, SceneOrders)
            return self._graphed(batch.images, first, policy.priorities.to(self.device))
        if self._graphed is None:
            fixed = agent.policy(policy)
            self._graphed = GraphedLook(agent, self.num_glimpses, lambda: fixed)
        return self._graphed(batch.images, first)

    def _fit_temperature(self) -> tuple[float, int]:
        """Fits the temperature on the first half; looks at it once, since one number needs no more."""
        chosen = some_of(self.fit_half, self.plan.most_calibration)
        own = np.intersect1d(chosen, self.reader.own_share())
        search = TemperatureSearch()
        for batch in self.reader.batches(own, "calibrating"):
            search.add(self._trace(batch, 0), batch.labels)
        return search.best(), len(chosen)

    def _look(self, temperature: float) -> tuple[Outcomes, WholeImage | None]:
        """Looks at every scene with every seed; shows it to the teacher too, while it is at hand."""
        parts, indices, ranks = [], [], []
        grid = self.facts.grid  # without one, looks differ in pixels: nothing to shrink the image to
        shrunk = self.num_glimpses if self.plan.low_resolution and grid is not None else 0
        for batch in self.reader.batches(self.reader.own_share(), "looking"):
            traces = (self._trace(batch, seed) for seed in range(self.plan.num_seeds))
            parts.append(outcomes_of(traces, batch.labels, temperature))
            indices.append(batch.indices)
            if self.teacher is not None:
                ranks.append(whole_image_ranks(self.teacher, batch.images, batch.labels, grid, shrunk))
        outcomes = join(parts, indices, len(self.scenes))
        if self.teacher is None:
            return outcomes, None
        gathered = gather_scenes([{"ranks": part} for part in ranks], indices, len(self.scenes))["ranks"]
        return outcomes, describe_whole_image(gathered, grid)

    def _first_locations(self, agent: Looker) -> FirstLocations:
        """Chooses the best first location on one half and tests it on the other."""
        everywhere, present = list(range(agent.grid.num_locations)), agent.first_location
        count = min(self.num_glimpses, starts.NUM_GLIMPSES)
        choosing = some_of(self.fit_half, starts.NUM_CHOOSING)
        scores = self._scores_from(agent, choosing, everywhere, count)
        best = starts.best_location(scores, present)
        testing = some_of(self.report_half, starts.NUM_TESTING)
        pairs = self._scores_from(agent, testing, [present, best], count)
        return starts.describe_first_locations(scores, pairs, present, best, count)

    def _scores_from(
        self, agent: Looker, chosen: Int[np.ndarray, " chosen"], locations: list[int], num_glimpses: int
    ) -> Float[np.ndarray, "chosen locations"]:
        """Returns the share of right answers after 1..n glimpses, for scenes looked at from each location."""
        parts, indices = [], []
        for batch in self.reader.batches(np.intersect1d(chosen, self.reader.own_share()), "first locations"):
            columns = []
            for location in locations:
                first = torch.full((len(batch.labels),), location)
                trace = self._trace_from(agent, batch, first, 0, num_glimpses)
                right = (trace.predictions == batch.labels[:, None]).float()
                columns.append(right.mean(dim=1).cpu().numpy())
            parts.append({"scores": np.stack(columns, axis=1)})
            indices.append(np.searchsorted(chosen, batch.indices))
        return gather_scenes(parts, indices, len(chosen))["scores"]

    def _time_early_exit(self, threshold: float, temperature: float) -> ExitTiming | None:
        agent, chosen = self.agent, some_of(self.report_half, self.plan.most_timed)
        if self.plan.most_timed == 0 or agent is None:
            return None

        def batches() -> Iterator[TimedBatch]:
            for batch in self.reader.batches(chosen, "timing"):
                first = first_locations(agent.grid, batch.indices, 0).to(agent.device)
                policy = policy_for(self.policy, agent.grid, batch.indices, 0)
                yield TimedBatch(batch.images, batch.labels, first, agent.policy(policy))

        return time_early_exit(agent, batches(), threshold, self.num_glimpses, temperature)


def reader_for(
    agent: SceneLooker, scenes: Scenes, plan: EvaluationPlan, progress: bool = True
) -> SceneReader:
    """Returns a reader of scenes as the agent needs them."""
    facts = agent.facts
    return SceneReader(
        scenes,
        facts.image_size,
        facts.resize_size if plan.resize_size is None else plan.resize_size,
        plan.batch_size,
        plan.num_workers,
        agent.device,
        facts.mean,
        facts.std,
        progress,
    )


def _require_scenes(scenes: Scenes, labels: tuple[str, ...]) -> None:
    if len(scenes) == 0:
        raise DataError("there are no scenes to evaluate on: give data with at least one image")
    if tuple(scenes.classes) != tuple(labels):
        unknown = [name for name in scenes.classes if name not in labels]
        if unknown:
            hint = did_you_mean(unknown[0], labels)
            raise DataError(f"the agent does not know the class '{unknown[0]}' of this data: {hint}")
        raise DataError(
            "the data's classes are in another order than the agent's: open it with "
            "stam.data.open_for_evaluation(source, agent.labels)"
        )


def scenes_digest(scenes: Scenes, most_images: int = 16) -> str:
    """Returns a digest of scenes: of all labels, and of some images as they are before any resizing."""
    digest = hashlib.blake2b(np.ascontiguousarray(scenes.labels).tobytes(), digest_size=8)
    for index in some_of(np.arange(len(scenes)), most_images):
        digest.update(np.ascontiguousarray(scenes.load(int(index))).tobytes())
    return digest.hexdigest()


def some_of(indices: Int[np.ndarray, " all"], most: int) -> Int[np.ndarray, " some"]:
    """Returns at most so many of the indices, evenly spread: neighbours are often of one class."""
    if len(indices) <= most:
        return indices
    return indices[np.linspace(0, len(indices) - 1, most).round().astype(np.int64)]


def halves(num_scenes: int, seed: int) -> tuple[Int[np.ndarray, " fit"], Int[np.ndarray, " report"]]:
    """Splits scenes at random into the half that is fitted on and the half that is reported on.

    A single scene is both.
    """
    order = random_order(num_scenes, "evaluation halves", seed)
    middle = num_scenes // 2
    return np.sort(order[: middle or 1]), np.sort(order[middle:])
