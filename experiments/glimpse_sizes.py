r"""Accuracy against the area seen, for glimpses of 32, 48 and 64 px, from the results of own_images.py.

    for size in 32 48 64; do
        python experiments/own_images.py aid --init deit_tiny.safetensors --core causal --glimpse-size $size \
            --actor-objective actor-critic --out runs/aid-$size \
            --set '{"training": {"epochs": 30, "tau_epochs": 15, "ema_batches": 300, "batch_size": 200}}'
        cp runs/aid-$size/own-images-learned.json experiments/results/glimpse-sizes/aid-$size.json
    done
    python experiments/glimpse_sizes.py --out docs/images

Prints a table for each data set, interpolated between glimpses, and draws the curves.
"""

import argparse
from pathlib import Path

import numpy as np

from stam.evaluation import Evaluation, compare, load_evaluation
from stam.files import save_content
from stam.learning.recipes import GLIMPSE_SIZES
from stam.show.figures import comparisons, to_bytes

RESULTS = Path(__file__).parent / "results/glimpse-sizes"
SHARES = (0.02, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4286)  # the last: 21 glimpses of 32 px


def row(size: int, found: Evaluation) -> str:
    share, accuracy = np.array(found.share), 100 * np.array(found.accuracy.ensemble.top1.mean)
    cells = [
        f"{np.interp(at, share, accuracy):.1f}" if at >= share[0] - 1e-3 and at <= share[-1] + 1e-3 else ""
        for at in SHARES
    ]
    return f"| {size} px of {GLIMPSE_SIZES[size][0]} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the pictures")
    given = parser.parse_args()
    for dataset in sorted({path.stem.rpartition("-")[0] for path in given.results.glob("*-*.json")}):
        found = {
            size: load_evaluation(given.results / f"{dataset}-{size}.json")
            for size in GLIMPSE_SIZES
            if (given.results / f"{dataset}-{size}.json").is_file()
        }
        print(f"| {dataset}: area seen | {' | '.join(f'{100 * at:.3g}%' for at in SHARES)} |")
        print("|---" * (1 + len(SHARES)) + "|")
        for size, evaluation in found.items():
            print(row(size, evaluation))
        drawn = comparisons.curves(compare(list(found.values()), [f"{size} px" for size in found]), "share")
        save_content(given.out / f"{dataset}-glimpse-sizes.png", to_bytes(drawn, "png"))


if __name__ == "__main__":
    main()
