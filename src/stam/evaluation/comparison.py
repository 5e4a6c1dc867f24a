"""Several evaluations side by side: curves, differences, and the paper's Table 1."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stam.config import CORE_SIZES, from_plain, to_plain
from stam.errors import StamError, did_you_mean, require, require_choice
from stam.evaluation.intervals import bootstrap_interval, sign_flip_test
from stam.evaluation.results import Evaluation, Floats, floats, read_format
from stam.shapes import Float
from stam.zoo import TITLES

FORMAT = "stam-comparison"
VERSION = "1.1"


@dataclass(frozen=True)
class Difference:
    """Accuracy of one run minus that of another, as shares, at equal parts of the scene.

    Attributes:
        name: The run.
        baseline: The run it is compared with.
        share: Share of the scene sensed; where the grids are equal, that of 1..n glimpses.
        mean: Mean difference.
        std: Its standard deviation over seeds; paired where both have the same seeds.
        low: Lower end of its 95 % interval over images, paired; empty where it is not known.
        high: Upper end.
    """

    name: str
    baseline: str
    share: Floats
    mean: Floats
    std: Floats
    low: Floats = ()
    high: Floats = ()


@dataclass(frozen=True)
class PairedTest:
    """Two runs on the same images, each with all of its glimpses.

    Attributes:
        name: The run.
        baseline: The run it is compared with.
        num_images: Images both have answered.
        difference: Accuracy of the run minus that of the baseline, as a share.
        low: Lower end of the 95 % interval: percentile bootstrap over pairs of answers to the same image.
        high: Upper end.
        p_value: Of no difference: sign-flip test over images, two-sided; McNemar's test where both have one
            seed.
        num_better: Images that the run answers rightly more often than the baseline.
        num_worse: Images that it answers rightly less often.
    """

    name: str
    baseline: str
    num_images: int
    difference: float
    low: float
    high: float
    p_value: float
    num_better: int
    num_worse: int


@dataclass(frozen=True)
class TableRow:
    """One row of the paper's Table 1.

    Attributes:
        method: What it is.
        note: Why this point of it is shown.
        attention: Whether the whole image is used to choose where to look; `None` where nothing is chosen.
        classification: Whether the whole image is used to classify.
        num_glimpses: Glimpses sensed, if it senses any.
        pixels: Pixels used to classify.
        accuracy: Share of images classified rightly; the mean over seeds.
        std: Its spread over seeds, where it has any.
    """

    method: str
    note: str
    attention: bool | None
    classification: bool
    num_glimpses: int | None
    pixels: int
    accuracy: float
    std: float | None = None


AS_PUBLISHED = "as published"
TABLE_HEAD = (
    "Method",
    "Note",
    "Whole image for attention?",
    "Whole image for classification?",
    "Pixels",
    "Accuracy (%)",
)


def _published(method: str, attention: bool, classification: bool, pixels: int, accuracy: float) -> TableRow:
    return TableRow(method, AS_PUBLISHED, attention, classification, None, pixels, accuracy)


PUBLISHED: dict[str, tuple[TableRow, ...]] = {  # the numbers of the paper's Table 1
    "imagenet": (
        _published("DRAM", True, False, 47_400, 0.6750),
        _published("GFNet", True, True, 46_100, 0.7593),
        _published("Saccader", True, False, 35_600, 0.7031),
        _published("TNet", True, True, 35_600, 0.7462),
        _published("STN", True, True, 28_200, 0.7140),
        _published("PatchDrop", True, True, 27_900, 0.7600),
    ),
    "fmow": (
        _published("STN", True, True, 22_000, 0.648),
        _published("PatchDrop", True, True, 19_400, 0.683),
    ),
}


@dataclass(frozen=True)
class Comparison:
    """Several evaluations on the same data.

    Attributes:
        format: Always `stam-comparison`.
        version: Of the schema.
        names: What to call each evaluation.
        evaluations: The evaluations, in the order given.
        differences: Differences in accuracy against a baseline.
        table: The paper's Table 1.
        tests: Paired tests of the same pairs of runs; none for results before 1.4.
    """

    format: str
    version: str
    names: tuple[str, ...]
    evaluations: tuple[Evaluation, ...]
    differences: tuple[Difference, ...]
    table: tuple[TableRow, ...]
    tests: tuple[PairedTest, ...] = ()

    @property
    def same_grid(self) -> bool:
        """Whether all runs cut scenes alike, so that glimpses can be counted against each other."""
        grids = {evaluation.grid for evaluation in self.evaluations}
        return len(grids) == 1 and (grids != {None} or len(self.evaluations) == 1)

    def to_json(self) -> str:
        """Returns the result as JSON."""
        return json.dumps(to_plain(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, where: str = "the comparison") -> "Comparison":
        """Reads a result back."""
        return from_plain(cls, read_format(text, FORMAT, VERSION, where))

    def to_markdown(self) -> str:
        """Returns the table as Markdown, in the paper's layout, and below it the paired tests."""
        rows = [TABLE_HEAD, (":--", ":--", ":-:", ":-:", "--:", "--:"), *map(cells, self.table)]
        text = _markdown(rows)
        if self.tests:
            tests = [TEST_HEAD, (":--", ":--", "--:", "--:", "--:", "--:"), *map(cells_of_test, self.tests)]
            text += f"\n{TEST_MEANING}\n\n" + _markdown(tests)
        return text

    def to_csv(self) -> str:
        """Returns the table as CSV."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(
            [
                "method",
                "note",
                "whole_image_for_attention",
                "whole_image_for_classification",
                "num_glimpses",
                "pixels",
                "accuracy_percent",
                "std_percent",
            ]
        )
        for row in self.table:
            answers = [_yes_no(row.attention), _yes_no(row.classification)]
            spread = "" if row.std is None else f"{100 * row.std:.3f}"
            writer.writerow(
                [
                    row.method,
                    row.note,
                    *answers,
                    row.num_glimpses,
                    row.pixels,
                    f"{100 * row.accuracy:.3f}",
                    spread,
                ]
            )
        return text.getvalue()


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


TEST_HEAD = ("Run", "Baseline", "Difference (points)", "95% interval", "p", "Images better, worse")
TEST_MEANING = (
    "Accuracy with all glimpses on the same images: paired bootstrap interval, and the p-value of a "
    "sign-flip test (McNemar's test where each run has one seed)."
)


def cells_of_test(test: PairedTest) -> tuple[str, ...]:
    """Returns a paired test as words."""
    interval = f"{100 * test.low:+.2f} to {100 * test.high:+.2f}"
    p_value = f"{test.p_value:.4f}" if test.p_value > 1e-4 else "< 0.0002"
    better = f"{test.num_better:,}, {test.num_worse:,}"
    return (test.name, test.baseline, f"{100 * test.difference:+.2f}", interval, p_value, better)


def cells(row: TableRow) -> tuple[str, ...]:
    """Returns a table row as words."""
    pixels = f"{row.pixels / 1000:.1f}K" if row.pixels >= 10_000 else f"{row.pixels:,}"
    if row.num_glimpses is not None:
        pixels += f" (n = {row.num_glimpses})"
    answers = [_yes_no(row.attention) or "-", _yes_no(row.classification)]
    return (row.method, row.note, *answers, pixels, f"{100 * row.accuracy:.2f}")


def _yes_no(value: bool | None) -> str:
    return "" if value is None else ("yes" if value else "no")


def aspects(evaluation: Evaluation) -> dict[str, str]:
    """Returns the settings by which runs are told apart, each as one word."""
    config = evaluation.settings.get("config", {})
    agent, training = config.get("agent", {}), config.get("training", {})
    found = {"policy": evaluation.policy}
    if "system" in config:
        found["system"] = system_of(evaluation)
    if evaluation.grid is not None:
        height, width = evaluation.grid.glimpse_size
        found["glimpse"] = str(height) if height == width else f"{height}x{width}"
    if "consistency" in training:
        found["consistency"] = training["consistency"]
    if "width" in agent:
        size = tuple(agent.get(key) for key in ("width", "depth", "num_heads"))
        named = [name for name, known in CORE_SIZES.items() if known == size]
        found["capacity"] = named[0] if named else f"{size[0]}x{size[1]}"
    for name, value in (
        ("epochs", training.get("epochs")),
        ("seed", evaluation.settings.get("seed")),
        ("precision", evaluation.precision),
    ):
        if value is not None:
            found[name] = str(value)
    return found


_WORDS = {
    "policy": "{} policy",
    "system": "{}",
    "consistency": "{} consistency",
    "glimpse": "{} px glimpses",
    "capacity": "{} core",
    "epochs": "{} epochs",
    "seed": "seed {}",
    "precision": "{}",
}
_SPECIAL = {("consistency", "none"): "no consistency"}


def system_of(evaluation: Evaluation) -> str:
    """Returns which system was evaluated, as its paper writes it."""
    config = evaluation.settings.get("config", {})
    return TITLES.get(config.get("name", ""), config.get("name", "")) if "system" in config else "STAM"


def names_of(evaluations: Sequence[Evaluation]) -> tuple[str, ...]:
    """Names runs by their systems or the settings in which they differ, or else by their folders."""
    systems = tuple(system_of(evaluation) for evaluation in evaluations)
    if len(set(systems)) == len(systems) > 1:
        return systems
    found = [aspects(evaluation) for evaluation in evaluations]
    keys = [key for key in found[0] if len({each.get(key) for each in found}) > 1]
    if keys and all(key in each for key in keys for each in found):
        named = tuple(", ".join(_word(key, each[key]) for key in keys) for each in found)
        if len(set(named)) == len(named):
            return tuple(name[0].upper() + name[1:] for name in named)
    folders = [evaluation.name for evaluation in evaluations]
    times = Counter(folders)
    return tuple(
        name if times[name] == 1 else f"{name} ({position + 1})" for position, name in enumerate(folders)
    )


def _word(key: str, value: str) -> str:
    return _SPECIAL.get((key, value)) or _WORDS[key].format(value)


def difference(evaluation: Evaluation, baseline: Evaluation, name: str, baseline_name: str) -> Difference:
    """Subtracts the ensemble's top-1 accuracy of a baseline, at each share of the scene both have sensed."""
    ours, theirs = evaluation.accuracy.ensemble.top1, baseline.accuracy.ensemble.top1
    at = np.array(baseline.share)
    at = at[(at >= evaluation.share[0] - 1e-9) & (at <= evaluation.share[-1] + 1e-9)]

    def values(of: Evaluation, curve: Sequence[float]) -> np.ndarray:
        return np.interp(at, of.share, curve)

    if evaluation.seeds == baseline.seeds:
        each = np.stack(
            [
                values(evaluation, own) - values(baseline, other)
                for own, other in zip(ours.per_seed, theirs.per_seed, strict=True)
            ]
        )
        mean = each.mean(axis=0)
        std = each.std(axis=0, ddof=1) if len(each) > 1 else np.zeros(len(at))
    else:
        mean = values(evaluation, ours.mean) - values(baseline, theirs.mean)
        std = np.hypot(values(evaluation, ours.std), values(baseline, theirs.std))
    low, high = _paired_interval(evaluation, baseline, at)
    return Difference(name, baseline_name, floats(at), floats(mean), floats(std), floats(low), floats(high))


def _paired_scores(
    evaluation: Evaluation, baseline: Evaluation
) -> tuple[Float[np.ndarray, "scenes own"], Float[np.ndarray, "scenes other"]] | None:
    """Returns the scores of both for each scene, in the same order; `None` where that cannot be known."""
    own, other = evaluation.scores(), baseline.scores()
    same = evaluation.data.digest == baseline.data.digest != ""
    return (own, other) if own is not None and other is not None and same else None


def _paired_interval(
    evaluation: Evaluation, baseline: Evaluation, at: np.ndarray
) -> tuple[Iterable[float], Iterable[float]]:
    """Returns the interval of the difference over images, at some shares of the scene."""
    scores = _paired_scores(evaluation, baseline)
    if scores is None or not len(at):
        return (), ()
    own, other = (
        each @ np.stack([np.interp(at, of.share, unit) for unit in np.eye(len(of.share))])
        for each, of in zip(scores, (evaluation, baseline), strict=True)
    )
    return bootstrap_interval(own - other)


def paired_test(
    evaluation: Evaluation, baseline: Evaluation, name: str, baseline_name: str
) -> PairedTest | None:
    """Tests whether two runs differ in accuracy, each with all of its glimpses.

    Returns `None` where it is not certain that both saw the same images in the same order.
    """
    scores = _paired_scores(evaluation, baseline)
    if scores is None:
        return None
    differences = scores[0][:, -1] - scores[1][:, -1]
    low, high = bootstrap_interval(differences[:, None])
    return PairedTest(
        name=name,
        baseline=baseline_name,
        num_images=len(differences),
        difference=float(differences.mean()),
        low=float(low[0]),
        high=float(high[0]),
        p_value=sign_flip_test(differences),
        num_better=int((differences > 0).sum()),
        num_worse=int((differences < 0).sum()),
    )


def _pairs(evaluations: Sequence[Evaluation], baseline: int, against: str | None) -> list[tuple[int, int]]:
    """Returns which run is compared with which: all with one, or each with its counterpart."""
    if against is None:
        return [(position, baseline) for position in range(len(evaluations)) if position != baseline]
    key, _, value = against.partition("=")
    found = [aspects(evaluation) for evaluation in evaluations]
    known = sorted({name for each in found for name in each})
    if not value or key not in known:
        raise StamError(
            f"--against is SETTING=VALUE, such as consistency=none; got '{against}': "
            f"{did_you_mean(key, known)}"
        )
    pairs = []
    for position, own in enumerate(found):
        if own.get(key) == value:
            continue
        wanted = own | {key: value}
        others = [other for other, theirs in enumerate(found) if theirs == wanted]
        if len(others) == 1:
            pairs.append((position, others[0]))
    if not pairs:
        raise StamError(f"no run has a counterpart with {against} and all else equal: add the runs that do")
    return pairs


def _nearest_accuracy(evaluation: Evaluation, accuracy: float) -> int | None:
    mean = evaluation.accuracy.ensemble.top1.mean
    return next((n for n, value in enumerate(mean) if value >= accuracy), None)


def _row(evaluation: Evaluation, name: str, position: int, note: str) -> TableRow:
    curve = evaluation.accuracy.ensemble.top1
    return TableRow(
        name,
        note,
        evaluation.whole_to_attend,
        evaluation.whole_to_classify,
        position + 1,
        evaluation.pixels[position],
        curve.mean[position],
        curve.std[position],
    )


def table_rows(
    evaluations: Sequence[Evaluation],
    names: Sequence[str],
    baseline: int = 0,
    published: str | None = None,
    accuracy: float | None = None,
    pixels: int | None = None,
) -> list[TableRow]:
    """Returns the paper's Table 1: every run where it equals a reference in accuracy, and in pixels.

    Args:
        evaluations: The runs.
        names: What to call them.
        baseline: Which run is the reference, at its training's number of glimpses or else half the scene.
        published: `imagenet` or `fmow` adds the published methods; PatchDrop is then the reference.
        accuracy: Another reference accuracy.
        pixels: Another reference number of pixels.
    """
    rows: list[TableRow] = []
    reference = evaluations[baseline]
    length = reference.settings.get("config", {}).get("training", {}).get("num_glimpses")
    half = reference.num_glimpses if reference.grid is None else -(-reference.grid.num_locations // 2)
    home = min(length or half, reference.num_glimpses) - 1
    goal_pixels, goal_accuracy = reference.pixels[home], reference.accuracy.ensemble.top1.mean[home]
    source = names[baseline]
    if published is not None:
        require_choice("published", published, tuple(PUBLISHED))
        rows += PUBLISHED[published]
        goal_pixels, goal_accuracy, source = rows[-1].pixels, rows[-1].accuracy, rows[-1].method
    if accuracy is not None or pixels is not None:
        source = "the reference"
    goal_accuracy = goal_accuracy if accuracy is None else accuracy
    goal_pixels = goal_pixels if pixels is None else pixels
    seeing = next((each for each in evaluations if each.whole_image is not None), None)
    if seeing is not None and seeing.whole_image is not None:
        height, width = seeing.image_size
        whole = seeing.whole_image
        rows.append(TableRow("Teacher", "whole image", None, True, None, height * width, whole.top1))
        fitting = [low for low in whole.low_resolution if low.pixels <= goal_pixels]
        if fitting:
            low = fitting[-1]
            note = f"whole image shrunk to {low.height}x{low.width}"
            rows.append(TableRow("Teacher", note, None, True, None, low.pixels, low.top1))
    is_reference = published is None and accuracy is None and pixels is None
    for position, (evaluation, name) in enumerate(zip(evaluations, names, strict=True)):
        if evaluation.grid is None:  # another system: as it is, with all of its looks
            rows.append(_row(evaluation, name, evaluation.num_glimpses - 1, "all looks"))
            continue
        if position == baseline and is_reference:
            rows.append(_row(evaluation, name, home, "reference"))
            continue
        reached = _nearest_accuracy(evaluation, goal_accuracy)
        if reached is not None:
            rows.append(_row(evaluation, name, reached, f"equal accuracy to {source}"))
        equal = int(np.abs(np.array(evaluation.pixels) - goal_pixels).argmin())
        rows.append(_row(evaluation, name, equal, f"equal sensing to {source}"))
    return rows


def compare(
    evaluations: Sequence[Evaluation],
    names: Sequence[str] | None = None,
    *,
    baseline: int = 0,
    against: str | None = None,
    **table_settings: Any,
) -> Comparison:
    """Compares evaluations made on the same data.

    Args:
        evaluations: Two or more; one will do for the table.
        names: What to call them; by default the settings in which they differ.
        baseline: Which one the others are compared with.
        against: `SETTING=VALUE` compares each run with its counterpart that differs in this setting alone,
            such as `consistency=none` for the gain by consistency of several policies.
        table_settings: See `table_rows`.
    """
    require(len(evaluations) >= 1, "give at least one run to compare")
    first = evaluations[0]
    for other in evaluations[1:]:
        if (other.data.source, other.data.num_scenes) != (first.data.source, first.data.num_scenes):
            raise StamError(
                f"'{first.name}' was evaluated on {first.data.num_scenes} scenes of {first.data.source}, "
                f"'{other.name}' on {other.data.num_scenes} of {other.data.source}: evaluate both on the same"
            )
        if first.data.digest and other.data.digest and first.data.digest != other.data.digest:
            raise StamError(
                f"'{first.name}' and '{other.name}' were evaluated on other scenes of {first.data.source} "
                "(another split or other images): evaluate both on the same, with --data"
            )
    require(0 <= baseline < len(evaluations), f"baseline must be 0 to {len(evaluations) - 1}, got {baseline}")
    require(
        names is None or len(names) == len(evaluations),
        f"give one name for each of the {len(evaluations)} runs, got {len(names or ())}",
    )
    called = tuple(names) if names else names_of(evaluations)
    pairs = _pairs(evaluations, baseline, against)
    compared = [(evaluations[own], evaluations[other], called[own], called[other]) for own, other in pairs]
    tests = (paired_test(*pair) for pair in compared)
    return Comparison(
        format=FORMAT,
        version=VERSION,
        names=called,
        evaluations=tuple(evaluations),
        differences=tuple(difference(*pair) for pair in compared),
        table=tuple(table_rows(evaluations, called, baseline, **table_settings)),
        tests=tuple(test for test in tests if test is not None),
    )
