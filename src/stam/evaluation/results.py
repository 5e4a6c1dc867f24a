"""What an evaluation found: frozen dataclasses that round-trip through JSON (see docs/evaluation.md)."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stam.config import from_plain, to_plain
from stam.errors import ConfigError, FileError, StamError, require
from stam.files import parse_json, read_content, save_content
from stam.scene.grid import Grid
from stam.shapes import Bool, Float

FORMAT = "stam-evaluation"
VERSION = "1.4"

Floats = tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """A quantity after each of 1..n glimpses, over seeds of the first location.

    Attributes:
        mean: Mean over the seeds.
        std: Sample standard deviation over the seeds; 0 for a single seed.
        per_seed: The quantity for each seed, seeds x glimpses.
        low: Lower end of the 95 % interval of the mean over images; empty in results before 1.4.
        high: Its upper end.
    """

    mean: Floats
    std: Floats
    per_seed: tuple[Floats, ...]
    low: Floats = ()
    high: Floats = ()

    @classmethod
    def of(
        cls,
        per_seed: Float[np.ndarray, "seeds glimpses"],
        low: Iterable[float] = (),
        high: Iterable[float] = (),
    ) -> "Curve":
        """Summarises what was measured for each seed."""
        spread = per_seed.std(axis=0, ddof=1) if len(per_seed) > 1 else np.zeros(per_seed.shape[1])
        each = tuple(floats(row) for row in per_seed)
        return cls(floats(per_seed.mean(axis=0)), floats(spread), each, floats(low), floats(high))


@dataclass(frozen=True)
class Readout:
    """Accuracy of one way to read the agent's answer, as shares in 0..1."""

    top1: Curve
    top5: Curve


@dataclass(frozen=True)
class Accuracy:
    """Accuracy after each glimpse: of the ensemble (Eq. 1) and of each classifier alone.

    A looker with a single classifier has no others.
    """

    ensemble: Readout
    class_head: Readout | None
    distill_head: Readout | None


@dataclass(frozen=True)
class LowResolution:
    """The whole image, shrunk to at most the pixels of `num_glimpses` glimpses, shown to the teacher."""

    num_glimpses: int
    height: int
    width: int
    top1: float
    top5: float

    @property
    def pixels(self) -> int:
        """Pixels of the shrunk image."""
        return self.height * self.width


@dataclass(frozen=True)
class WholeImage:
    """What sees everything: the teacher's accuracy, and its accuracy at low resolution."""

    top1: float
    top5: float
    low_resolution: tuple[LowResolution, ...]


@dataclass(frozen=True)
class Reliability:
    """Confidence against accuracy, in bins of equal width over 0..1.

    Attributes:
        ece: Expected calibration error: the mean gap between confidence and accuracy, weighted by count.
        nll: Mean negative log-likelihood of the true class, in nats.
        counts: Predictions in each bin.
        confidence: Mean confidence of each bin; 0 where it is empty.
        accuracy: Share of right predictions of each bin; 0 where it is empty.
    """

    ece: float
    nll: float
    counts: tuple[int, ...]
    confidence: Floats
    accuracy: Floats


@dataclass(frozen=True)
class Calibration:
    """A temperature fitted on one half of the scenes, and what it does on the other.

    Attributes:
        temperature: Divides the logits; it minimises the loss (NLL) over all numbers of glimpses.
        num_fitted: Scenes it was fitted on.
        num_reported: Scenes of the other half, which `before` and `after` describe.
        before: At temperature 1.
        after: At the fitted temperature.
    """

    temperature: float
    num_fitted: int
    num_reported: int
    before: Reliability
    after: Reliability


@dataclass(frozen=True)
class Sweep:
    """Early exit at many thresholds (the paper's gamma): how many glimpses, how accurate."""

    thresholds: Floats
    mean_glimpses: Floats
    glimpses_std: Floats
    accuracy: Floats
    accuracy_std: Floats


@dataclass(frozen=True)
class Operation:
    """An agent that stops at a threshold, on some scenes, over all seeds."""

    num_scenes: int
    accuracy: float
    mean_glimpses: float


@dataclass(frozen=True)
class ThresholdFit:
    """A threshold fitted on one half of the scenes and tried on the other.

    Attributes:
        goal: `accuracy` (at least `goal_value`, fewest glimpses) or `budget` (mean glimpses at most that).
        goal_value: The accuracy or the mean number of glimpses asked for.
        threshold: Confidence, at the fitted temperature, above which the agent stops.
        reached: Whether the goal could be met on the fitted half; if not, the nearest is reported.
        fitted: What the threshold does on the half it was fitted on.
        reported: What it does on the other half.
        exits: Of the other half, how many stop after each of 1..n glimpses, over all seeds.
    """

    goal: str
    goal_value: float
    threshold: float
    reached: bool
    fitted: Operation
    reported: Operation
    exits: tuple[int, ...]


@dataclass(frozen=True)
class ExitTiming:
    """Wall-clock time with early exit against taking every glimpse, measured one after the other.

    Attributes:
        num_scenes: Scenes looked at, each once.
        batch_size: Scenes that start together; whoever is sure leaves the batch.
        device: Where it ran.
        threshold: The threshold used.
        all_seconds: Seconds with every glimpse.
        early_seconds: Seconds with early exit.
        all_glimpses: Glimpses a scene with every glimpse.
        early_glimpses: Mean glimpses a scene with early exit.
        all_accuracy: Accuracy with every glimpse.
        early_accuracy: Accuracy with early exit.
    """

    num_scenes: int
    batch_size: int
    device: str
    threshold: float
    all_seconds: float
    early_seconds: float
    all_glimpses: float
    early_glimpses: float
    all_accuracy: float
    early_accuracy: float

    @property
    def time_saved(self) -> float:
        """Share of the wall-clock time saved."""
        return 1 - self.early_seconds / self.all_seconds

    @property
    def glimpses_saved(self) -> float:
        """Share of the glimpses saved."""
        return 1 - self.early_glimpses / self.all_glimpses


@dataclass(frozen=True)
class EarlyExit:
    """Early exit: the sweep of thresholds, one fitted threshold, and the time it saves."""

    uncalibrated: Sweep
    calibrated: Sweep
    fit: ThresholdFit
    timing: ExitTiming | None


@dataclass(frozen=True)
class Locations:
    """How often each location was sensed at each step, over all scenes and seeds: glimpses x locations."""

    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Latency:
    """Measured time of each step, in milliseconds for the whole batch: the median over repeats."""

    batch_size: int
    device: str
    threads: int
    repeats: int
    per_step_ms: Floats
    cumulative_ms: Floats


@dataclass(frozen=True)
class Cost:
    """Multiply-adds of one scene, counted from the architecture, and measured latency.

    Attributes:
        core: Encoding and classifying n glimpses, for each of 1..n.
        actor: Rating the locations not seen after n glimpses; 0 for a policy without an actor.
        per_step: Both together.
        cumulative: All steps so far.
        whole_image: The same core on the whole image at once.
        latency: Measurements, one a batch size.
    """

    core: tuple[int, ...]
    actor: tuple[int, ...]
    per_step: tuple[int, ...]
    cumulative: tuple[int, ...]
    whole_image: int
    latency: tuple[Latency, ...]


@dataclass(frozen=True)
class Data:
    """What an agent was evaluated on.

    Attributes:
        source: What the data is called.
        num_scenes: Scenes.
        classes: Class names.
        digest: Of the labels and of some images, to tell other scenes of the same name; empty in results of
            versions before 1.2.
    """

    source: str
    num_scenes: int
    classes: tuple[str, ...]
    digest: str = ""


@dataclass(frozen=True)
class Confusion:
    """Which classes were taken for which.

    Attributes:
        num_answers: Answers to scenes of each true class: scenes times seeds.
        cells: True class, answered class and how often, for every pair that occurs, in this order.
    """

    num_answers: tuple[int, ...]
    cells: tuple[tuple[int, int, int], ...]

    def mistaken(self, most: int | None = None) -> list[tuple[int, int, int]]:
        """Returns the pairs of different classes that were confused most often, first."""
        wrong = [cell for cell in self.cells if cell[0] != cell[1]]
        return sorted(wrong, key=lambda cell: -cell[2])[:most]

    def shares(self, classes: Sequence[int]) -> Float[np.ndarray, "chosen chosen"]:
        """Returns for some classes how often, of all answers to the true one (row), each was answered."""
        place = {label: position for position, label in enumerate(classes)}
        found = np.zeros((len(place), len(place)))
        for truth, answer, count in self.cells:
            if truth in place and answer in place:
                found[place[truth], place[answer]] = count / self.num_answers[truth]
        return found


@dataclass(frozen=True)
class PerClass:
    """Accuracy of each class.

    Attributes:
        num_scenes: Scenes of the class.
        accuracy: Share of right answers to them, over all seeds; 0 where there are none.
        low: Lower end of its 95 % interval over images.
        high: Upper end.
    """

    num_scenes: tuple[int, ...]
    accuracy: Floats
    low: Floats
    high: Floats

    def weakest(self, most: int) -> list[int]:
        """Returns the classes of least accuracy, first, of those that occur."""
        found = [label for label, count in enumerate(self.num_scenes) if count]
        return sorted(found, key=lambda label: self.accuracy[label])[:most]


@dataclass(frozen=True)
class Mistake:
    """A scene with a wrong answer.

    Attributes:
        scene: Its index among the scenes.
        image: What it is called: its path within the data, where it has one.
        label: The true class.
        prediction: The answer after the last glimpse.
        confidence: Its probability, at temperature 1.
        locations: Where on the grid each glimpse was sensed; empty without a grid.
    """

    scene: int
    image: str
    label: int
    prediction: int
    confidence: float
    locations: tuple[int, ...]


@dataclass(frozen=True)
class Chance:
    """What needs no looking: always to answer the largest class.

    Attributes:
        share: The share of the largest class, which is right that often.
        p_value: How likely a looker that is right as often would have as many right answers, or more, as
            there are after the last glimpse: a binomial test over images.
    """

    share: float
    p_value: float

    @property
    def explains_it(self) -> bool:
        """Whether the accuracy is not above chance, at the level of 5 %."""
        return self.p_value > 0.05


@dataclass(frozen=True)
class Answers:
    """What was answered after the last glimpse, class by class and scene by scene.

    Attributes:
        confusion: Which classes were taken for which, over all scenes and seeds.
        early_exit: The same where the agent stops at the fitted threshold, on the held-out half.
        per_class: Accuracy of each class.
        mistakes: The wrong answers of highest confidence, first, with the first locations of the first seed.
        chance: Whether chance explains the accuracy.
        right: For each number of glimpses one byte a scene, in base64: for how many seeds its answer is
            right. A comparison pairs them; none for more than 255 seeds.
    """

    confusion: Confusion
    early_exit: Confusion
    per_class: PerClass
    mistakes: tuple[Mistake, ...]
    chance: Chance
    right: tuple[str, ...]


@dataclass(frozen=True)
class FirstLocations:
    """Where looking had better begin.

    Attributes:
        num_glimpses: Accuracy is the mean over that after 1..n glimpses, n this number.
        num_chosen: Images on which every location was tried, and the best one chosen.
        num_tested: Other images, on which it was tested against the present one.
        accuracy: Of each location, on the images that chose.
        present: Where predictions and sessions begin now, as a grid index.
        best: The location of highest accuracy.
        gain: Accuracy of the best minus that of the present one, on the other images.
        low: Lower end of its 95 % interval over images, paired.
        high: Upper end.
    """

    num_glimpses: int
    num_chosen: int
    num_tested: int
    accuracy: Floats
    present: int
    best: int
    gain: float
    low: float
    high: float

    @property
    def chosen(self) -> int:
        """Where to begin: at the best location if it is better by more than the noise, else as now."""
        return self.best if self.low > 0 else self.present


def packed_right(correct: Bool[np.ndarray, "scenes seeds glimpses"]) -> tuple[str, ...]:
    """Returns for how many seeds each scene's answer is right, packed for `Answers.right`."""
    if correct.shape[1] > 255:
        return ()
    times = correct.sum(axis=1, dtype=np.uint8)  # (scenes, n)
    return tuple(base64.b64encode(column.tobytes()).decode() for column in times.T)


@dataclass(frozen=True)
class Evaluation:
    """Everything measured about one agent, policy and dataset.

    Attributes:
        format: Always `stam-evaluation`.
        version: Of the schema; the major number changes when a field changes its meaning or goes.
        name: What to call the agent, by default its folder's name.
        policy: Who picked the locations.
        precision: Of the transformer.
        seeds: Seeds of the first location (and of a random policy).
        num_glimpses: Glimpses sensed in each scene.
        data: What it was evaluated on.
        grid: Sizes in pixels: image, glimpse, patch; none for a looker whose glimpses lie on no grid.
        pixels: Pixels used to classify after each of 1..n glimpses; the mean over scenes, rounded.
        share: Those as a share of the scene.
        accuracy: Accuracy after each glimpse.
        whole_image: The ceiling and the low-resolution baseline, where there is a teacher.
        calibration: The fitted temperature.
        early_exit: Early exit.
        locations: Histograms of locations, on a grid.
        cost: Multiply-adds and latency, where they were asked for.
        settings: The run's settings (recipe, seed, agent, data, training), as its `run.json` has them.
        versions: Of stam, torch and Python.
        image_size: Height and width of a scene.
        whole_to_attend: Whether the complete image is used to choose where to look.
        whole_to_classify: Whether the complete image is used to classify.
        answers: What was answered, class by class; none in results before 1.4.
        first_locations: Where looking had better begin, where that was asked for.
    """

    format: str
    version: str
    name: str
    policy: str
    precision: str
    seeds: tuple[int, ...]
    num_glimpses: int
    data: Data
    grid: Grid | None
    pixels: tuple[int, ...]
    share: Floats
    accuracy: Accuracy
    whole_image: WholeImage | None
    calibration: Calibration
    early_exit: EarlyExit
    locations: Locations | None
    cost: Cost | None
    settings: dict[str, Any]
    versions: dict[str, str]
    image_size: tuple[int, int]
    whole_to_attend: bool = False
    whole_to_classify: bool = False
    answers: Answers | None = None
    first_locations: FirstLocations | None = None

    @property
    def is_at_chance(self) -> bool:
        """Whether the accuracy after the last glimpse is not above chance; not known of earlier results."""
        return self.answers is not None and self.answers.chance.explains_it

    def chance_in_words(self) -> str:
        """Says how the accuracy compares with chance; empty for earlier results."""
        if self.answers is None:
            return ""
        chance, right = self.answers.chance, self.accuracy.ensemble.top1.mean[-1]
        above = "not above" if self.is_at_chance else "above"
        p_value = f"= {chance.p_value:.2g}" if chance.p_value >= 1e-4 else "< 0.0001"
        return (
            f"{100 * right:.1f} % right after {self.num_glimpses} glimpses is {above} the "
            f"{100 * chance.share:.1f} % of always answering the largest class (binomial test over "
            f"{self.data.num_scenes:,} images, p {p_value})"
        )

    def scores(self) -> Float[np.ndarray, "scenes glimpses"] | None:
        """Returns the share of seeds with a right answer for each scene; `None` where it was not kept."""
        if self.answers is None or not self.answers.right:
            return None
        columns = [np.frombuffer(_unpacked(text), np.uint8) for text in self.answers.right]
        return np.stack(columns, axis=1) / np.float64(len(self.seeds))

    @property
    def glimpse_name(self) -> str:
        """What a glimpse is, in words."""
        if self.grid is None:
            return f"looks at {self.image_size[0]}x{self.image_size[1]} scenes"
        return f"glimpses of {self.grid.glimpse_size[0]}x{self.grid.glimpse_size[1]} pixels"

    def share_after(self, num_glimpses: Any) -> np.ndarray:
        """Returns the share of the scene after some numbers of glimpses, which may be means."""
        return np.interp(num_glimpses, np.arange(1, self.num_glimpses + 1), self.share)

    def __post_init__(self) -> None:
        """Checks that its parts are of one evaluation: as many glimpses, seeds and locations in each."""
        count = self.num_glimpses
        require(count >= 1, f"num_glimpses must be at least 1, got {count}")
        require(len(self.image_size) == 2, f"image_size must be [height, width], got {self.image_size}")
        require(len(self.seeds) >= 1, "seeds must name at least one")
        _require_length(count, pixels=self.pixels, share=self.share)
        both = (self.grid is None) == (self.locations is None)
        require(both, "locations belong to a grid: a result has both or neither")
        if self.grid is not None and self.locations is not None:
            places = self.grid.num_locations
            require(count <= places, f"num_glimpses must be from 1 to {places}, got {count}")
            _require_length(count, locations=self.locations.counts)
            for step in self.locations.counts:
                _require_length(places, counts=step)
        for readout in vars(self.accuracy).values():
            for curve in vars(readout).values() if readout is not None else ():
                _require_length(count, mean=curve.mean, std=curve.std)
                _require_length(len(self.seeds), per_seed=curve.per_seed)
                if curve.low or curve.high:  # new in 1.4
                    _require_length(count, low=curve.low, high=curve.high)
                for each in curve.per_seed:
                    _require_length(count, per_seed=each)
        for sweep in (self.early_exit.uncalibrated, self.early_exit.calibrated):
            _require_length(len(sweep.thresholds), **vars(sweep))
        _require_length(count, exits=self.early_exit.fit.exits)
        for side in (self.calibration.before, self.calibration.after):
            _require_length(len(side.counts), confidence=side.confidence, accuracy=side.accuracy)
        if self.cost is not None:
            cost = self.cost
            _require_length(count, core=cost.core, actor=cost.actor, per_step=cost.per_step)
            _require_length(count, cumulative=cost.cumulative)
            for each in cost.latency:
                _require_length(count, per_step_ms=each.per_step_ms, cumulative_ms=each.cumulative_ms)
        if self.answers is not None:
            self._require_answers(self.answers)
        if self.first_locations is not None:
            require(self.grid is not None, "first_locations belong to a grid")
            places, starts = self.grid.num_locations if self.grid else 0, self.first_locations
            _require_length(places, accuracy=starts.accuracy)
            for place in (starts.present, starts.best):
                require(0 <= place < places, f"first_locations has a location {place} of {places}")
        _require_settings(self.settings.get("config", {}))

    def _require_answers(self, answers: Answers) -> None:
        """Raises unless answers are of these classes, scenes and glimpses."""
        num_classes, num_scenes = len(self.data.classes), self.data.num_scenes
        _require_length(num_classes, **vars(answers.per_class))
        for confusion in (answers.confusion, answers.early_exit):
            _require_length(num_classes, num_answers=confusion.num_answers)
            for truth, answer, times in confusion.cells:
                sound = 0 <= truth < num_classes and 0 <= answer < num_classes
                require(sound, f"cells has a class {max(truth, answer)} of {num_classes}")
                most = confusion.num_answers[truth]
                require(1 <= times <= most, f"cells counts {times} of {most} answers")
        for mistake in answers.mistakes:
            for label in (mistake.label, mistake.prediction):
                require(0 <= label < num_classes, f"mistakes has a class {label} of {num_classes}")
        if answers.right:
            _require_length(self.num_glimpses, right=answers.right)
            for text in answers.right:
                _require_length(num_scenes, right=_unpacked(text))

    @property
    def way_of_looking(self) -> str:
        """Who picks the locations, in words."""
        base, _, number = self.policy.partition(":")
        return f"{base} policy" + (f" until {number} glimpses, then centre-out" if number else "")

    @staticmethod
    def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
        """Brings an earlier result up to date.

        Version 1.1 had its policy's `handover` beside it; up to 1.2 the grid alone had the image size.
        """
        values = dict(values)
        handover, _ = values.pop("handover", None), values.pop("mirrored", False)
        if handover is not None:
            require(type(handover) is int, "handover must be a whole number or none")
            values["policy"] = f"{values.get('policy')}:{handover}"
        if isinstance(values.get("grid"), dict):
            values.setdefault("image_size", values["grid"].get("image_size"))
        return values

    def to_json(self) -> str:
        """Returns the result as JSON."""
        return json.dumps(to_plain(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, where: str = "the evaluation") -> "Evaluation":
        """Reads a result back; `where` names it in an error."""
        return from_plain(cls, read_format(text, FORMAT, VERSION, where))


# of a run's settings, those by which comparisons tell runs apart
_COMPARED: dict[str, dict[str, type]] = {
    "agent": {"width": int, "depth": int, "num_heads": int},
    "data": {},
    "training": {"consistency": str, "num_glimpses": int, "epochs": int},
}


def _require_settings(config: Any) -> None:
    """Raises unless the settings of a run that are used are of their kind, where they are there."""
    require(isinstance(config, dict), "settings.config must be an object")
    for part, kinds in _COMPARED.items():
        values = config.get(part, {})
        require(isinstance(values, dict), f"settings.config.{part} must be an object")
        for name, kind in kinds.items():
            value = values.get(name)
            sound = value is None or type(value) is kind
            counts = not isinstance(value, int) or 1 <= value < 2**31
            require(sound and counts, f"settings.config.{part}.{name} cannot be {value!r:.40}")


def _require_length(count: int, **lists: Sized) -> None:
    """Raises unless each list has so many entries."""
    for name, entries in lists.items():
        require(len(entries) == count, f"{name} must have {count} entries, got {len(entries)}")


def _unpacked(text: str) -> bytes:
    """Returns the bytes of a base64 text."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ConfigError(f"right is not base64: {error}") from error


def floats(values: Any) -> Floats:
    """Turns an array into plain numbers."""
    return tuple(float(value) for value in values)


def read_format(text: str, name: str, version: str, where: str) -> Mapping[str, Any]:
    """Parses JSON of a named format and refuses another major version."""
    values = parse_json(text, where)
    if not isinstance(values, dict) or values.get("format") != name:
        raise StamError(f'{where} is not a {name}: expected an object with "format": "{name}"')
    found = str(values.get("version"))[:40]
    if found.split(".")[0] != version.split(".")[0]:
        raise StamError(f"{where} has version {found} of {name}, this one reads {version}: evaluate again")
    return values


def save_evaluation(evaluation: Evaluation, path: str | Path) -> None:
    """Writes a result as JSON; the file appears whole or not at all."""
    save_content(Path(path), evaluation.to_json() + "\n")


def load_evaluation(path: str | Path) -> Evaluation:
    """Reads a result that `save_evaluation` wrote."""
    try:
        text = read_content(path).decode()
    except FileError as error:
        raise StamError(f"{error}; evaluate again") from error
    except UnicodeDecodeError as error:
        raise StamError(f"cannot read the evaluation '{path}': {error}") from error
    try:
        return Evaluation.from_json(text, f"'{path}'")
    except ConfigError as error:
        raise StamError(f"'{path}' is damaged: {error}; evaluate again") from error
