"""Several runs side by side: differences, names, counterparts, and the paper's Table 1."""

import csv
import io
from dataclasses import replace

import numpy as np
import pytest
from made_up import made_up

from stam.data import Subset, open_scenes
from stam.errors import ConfigError, StamError
from stam.evaluation import Comparison, compare
from stam.evaluation.comparison import PUBLISHED, names_of, table_rows
from stam.evaluation.evaluate import scenes_digest
from stam.scene.grid import Grid


def test_differences_are_paired_by_seed():
    found = compare([made_up("a", 0.01), made_up("b", 0.015)])
    (difference,) = found.differences
    assert (difference.name, difference.baseline) == ("b", "a")
    assert difference.mean == pytest.approx([0.005 * n for n in range(1, 50)])
    assert max(difference.std) < 1e-12  # both move alike from seed to seed
    unpaired = compare([made_up("a", 0.01), made_up("b", 0.015, num_seeds=2)]).differences[0]
    assert min(unpaired.std) > 0


def test_glimpse_sizes_are_compared_by_area():
    coarse = made_up("coarse", 0.012, grid=Grid(64, 16, 8))
    found = compare([made_up("fine", 0.01), coarse])
    assert not found.same_grid
    difference = found.differences[0]
    assert difference.share[0] >= 1 / 16 and difference.share[-1] == 1
    assert difference.mean == pytest.approx([0.002 * 49 * share for share in difference.share])
    assert found.names == ("8 px glimpses", "16 px glimpses")


def test_runs_are_named_by_what_tells_them_apart():
    runs = [made_up(policy=policy) for policy in ("learned", "random", "spiral")]
    assert names_of(runs) == ("Learned policy", "Random policy", "Spiral policy")
    runs = [made_up(consistency=kind) for kind in ("soft", "hard", "none")]
    assert names_of(runs) == ("Soft consistency", "Hard consistency", "No consistency")
    composed = made_up(policy="learned:8")
    assert names_of([made_up(), composed]) == ("Learned policy", "Learned:8 policy")
    assert composed.way_of_looking == "learned policy until 8 glimpses, then centre-out"
    found = compare([composed, made_up(policy="plus")], against="policy=plus")
    assert len(found.differences) == 1
    assert names_of([made_up("a"), made_up("b")]) == ("a", "b")
    assert names_of([made_up("a"), made_up("a")]) == ("a (1)", "a (2)")
    assert names_of([made_up(epochs=200), made_up(epochs=400)]) == ("200 epochs", "400 epochs")
    assert compare([made_up("a"), made_up("b")], ["x", "y"]).names == ("x", "y")


def test_each_run_is_compared_with_its_counterpart():
    runs = [
        made_up(policy=policy, consistency=consistency, slope=slope)
        for policy, consistency, slope in (
            ("learned", "soft", 0.02),
            ("learned", "none", 0.015),
            ("spiral", "soft", 0.012),
            ("spiral", "none", 0.011),
        )
    ]
    found = compare(runs, against="consistency=none")
    gains = {(each.name, each.baseline): each.mean[0] for each in found.differences}
    assert gains == {
        ("Learned policy, soft consistency", "Learned policy, no consistency"): pytest.approx(0.005),
        ("Spiral policy, soft consistency", "Spiral policy, no consistency"): pytest.approx(0.001),
    }
    with pytest.raises(StamError, match="no run has a counterpart"):
        compare(runs, against="consistency=hard")
    with pytest.raises(StamError, match="did you mean 'consistency'"):
        compare(runs, against="consistncy=none")


def test_table_one_of_the_paper():
    """Accuracy 2 % a glimpse: 38 glimpses equal PatchDrop's 76 %; 27 glimpses of 32 x 32 its pixels."""
    ours = made_up("ours", 0.02, grid=Grid(224, 32, 16), num_seeds=1)
    rows = table_rows([ours], ["STAM"], published="imagenet")
    assert [row.method for row in rows[:6]] == ["DRAM", "GFNet", "Saccader", "TNet", "STN", "PatchDrop"]
    equal_accuracy, equal_sensing = rows[-2:]
    assert equal_accuracy.note == "equal accuracy to PatchDrop" and equal_accuracy.num_glimpses == 38
    assert (equal_sensing.num_glimpses, equal_sensing.pixels) == (27, 27_648)
    assert equal_sensing.attention is False and equal_sensing.classification is False
    assert all(row.attention for row in PUBLISHED["imagenet"])
    ours = table_rows([ours], ["STAM"], published="fmow")[-1]
    assert (ours.num_glimpses, ours.pixels) == (19, 19_456)


def test_the_first_run_is_the_reference_of_the_table():
    found = compare([made_up("a", 0.01, num_glimpses=10), made_up("b", 0.02)])
    methods = [(row.method, row.note, row.num_glimpses) for row in found.table]
    first, second = found.names
    assert methods[0] == ("Teacher", "whole image", None)
    assert methods[1] == ("Teacher", "whole image shrunk to 8x40", None)  # the most that 640 pixels allow
    assert methods[2] == (first, "reference", 10)
    assert methods[3] == (second, f"equal accuracy to {first}", 5)
    assert methods[4] == (second, f"equal sensing to {first}", 10)
    given = compare([made_up("a", 0.01), made_up("b", 0.02)], accuracy=0.3, pixels=64)
    assert [row.num_glimpses for row in given.table if row.method == "b"] == [15, 1]


def test_the_table_as_markdown_and_csv():
    found = compare([made_up("a", 0.01), made_up("b", 0.02)], published="imagenet")
    lines = found.to_markdown().splitlines()
    assert lines[0].startswith("| Method | Note | Whole image for attention? |")
    assert "| PatchDrop | as published | yes | yes | 27.9K | 76.00 |" in lines
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert len(rows) == len(lines) - 2
    assert rows[5]["pixels"] == "27900" and rows[5]["accuracy_percent"] == "76.000"
    assert rows[-1]["whole_image_for_classification"] == "no" and rows[-1]["num_glimpses"] == "49"


def test_a_comparison_round_trips_through_json():
    found = compare([made_up("a"), made_up("b", policy="random")])
    assert Comparison.from_json(found.to_json()) == found


def test_runs_on_other_data_are_refused():
    with pytest.raises(StamError, match="'a' was evaluated on 100 scenes of noise, 'b' on 7 of noise"):
        compare([made_up("a"), made_up("b", num_scenes=7)])
    with pytest.raises(ConfigError, match="one name for each of the 2 runs, got 1"):
        compare([made_up("a"), made_up("b")], ["x"])
    with pytest.raises(ConfigError, match="baseline must be 0 to 1"):
        compare([made_up("a"), made_up("b")], baseline=2)
    with pytest.raises(ConfigError, match="did you mean 'imagenet'"):
        compare([made_up("a")], published="imagenett")


def test_other_scenes_of_the_same_name_are_refused():
    one, other = made_up("a"), made_up("b")
    ours = replace(one, data=replace(one.data, digest="1"))
    with pytest.raises(StamError, match="'a' and 'b' were evaluated on other scenes of noise"):
        compare([ours, replace(other, data=replace(other.data, digest="2"))])
    compare([ours, replace(other, data=replace(other.data, digest="1"))])
    compare([ours, other])  # an earlier version did not say


def test_scenes_are_told_apart_whatever_size_they_are_seen_at():
    found = [scenes_digest(open_scenes("digits", seed=seed).val) for seed in (0, 1, 0)]
    assert found[0] == found[2] != found[1]
    part = Subset(open_scenes("digits").val, np.arange(10))
    assert scenes_digest(part) != found[0]
