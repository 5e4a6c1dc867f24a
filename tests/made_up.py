"""An evaluation that nobody measured, for tests of what is made of evaluations."""

import numpy as np
from evaluating import CLASSES

from stam.evaluation import Evaluation
from stam.evaluation.results import (
    Accuracy,
    Calibration,
    Curve,
    Data,
    EarlyExit,
    Locations,
    LowResolution,
    Operation,
    Readout,
    Reliability,
    Sweep,
    ThresholdFit,
    WholeImage,
)
from stam.scene.grid import Grid


def made_up(
    name: str = "run",
    slope: float = 0.05,
    *,
    policy: str = "learned",
    consistency: str = "soft",
    grid: Grid | None = None,
    num_seeds: int = 3,
    num_scenes: int = 100,
    **settings,
) -> Evaluation:
    """An evaluation whose accuracy after n glimpses is slope * n, give or take the seed."""
    grid = grid or Grid(56, 8, 4)
    count = grid.num_locations
    steps = np.arange(1, count + 1)
    curve = Curve.of(
        np.stack([np.minimum(slope * steps * 49 / count + 0.001 * seed, 1) for seed in range(num_seeds)])
    )
    readout = Readout(curve, curve)
    sweep = Sweep((0.0, 1.0), (1.0, float(count)), (0.0, 0.0), (0.1, 0.9), (0.0, 0.0))
    side = Reliability(0.1, 1.0, (1,) * 15, (0.5,) * 15, (0.5,) * 15)
    work = Operation(50, 0.8, 3.0)
    config = {"agent": {"width": 384, "depth": 12, "num_heads": 6}, "training": {"consistency": consistency}}
    config["training"] |= settings
    low = tuple(LowResolution(n, 8, n * 8, 0.01 * n, 0.5) for n in (1, 5, 20))
    return Evaluation(
        format="stam-evaluation",
        version="1.0",
        name=name,
        policy=policy,
        precision="float32",
        seeds=tuple(range(num_seeds)),
        num_glimpses=count,
        data=Data("noise", num_scenes, CLASSES),
        grid=grid,
        pixels=tuple(int(n) * grid.glimpse_area for n in steps),
        share=tuple(float(n) / count for n in steps),
        accuracy=Accuracy(readout, readout, readout),
        whole_image=WholeImage(0.95, 0.99, low),
        calibration=Calibration(1.0, 50, 50, side, side),
        early_exit=EarlyExit(
            sweep, sweep, ThresholdFit("accuracy", 0.8, 0.5, True, work, work, (1,) * count), None
        ),
        locations=Locations(((100,) * count,) * count),
        cost=None,
        settings={"seed": 0, "config": config},
        versions={"stam": "0"},
        image_size=grid.image_size,
    )
