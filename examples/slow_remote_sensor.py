"""A sensor that takes its time: how much of it an agent saves by stopping when it is sure.

    python examples/slow_remote_sensor.py RUN [--latency 0.25] [--scenes 10] [--threshold 0.8]

The sensor stands for anything slow: a telescope to be pointed, a stage to be moved, an image on a thin link.
"""

import argparse
import time

import numpy as np

import stam
from stam.data import ClutteredDigits
from stam.scene.sensor import CallbackSensor


def main() -> None:
    """Looks at scenes through a slow sensor, stopping early, and counts the seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("agent", help="a run folder or a weights folder of a digits agent")
    parser.add_argument("--latency", type=float, default=0.25, help="seconds a glimpse takes to arrive")
    parser.add_argument("--scenes", type=int, default=10)
    parser.add_argument("--threshold", type=float, default=None, help="confidence above which to stop")
    given = parser.parse_args()

    agent = stam.load(given.agent)
    grid, config = agent.grid, agent.config
    digits = ClutteredDigits("test", scene_size=grid.image_size[0], num_scenes=given.scenes)
    waited, thought, right, glimpses = 0.0, 0.0, 0, 0
    for index in range(given.scenes):
        scene = digits.load(index)

        def sense_slowly(row: int, column: int, scene: np.ndarray = scene) -> np.ndarray:
            time.sleep(given.latency)  # the stage moves, the shutter opens, the bytes travel
            top, left, bottom, right = grid.pixel_box((row, column))
            return scene[top:bottom, left:right].copy()

        sensor = CallbackSensor(sense_slowly, grid, config.mean, config.std)
        started = time.perf_counter()
        step = agent.session(threshold=given.threshold).run(sensor)
        seconds = time.perf_counter() - started
        truth = digits.classes[digits.labels[index]]
        waited += step.num_glimpses * given.latency
        thought += seconds - step.num_glimpses * given.latency
        right += step.label == truth
        glimpses += step.num_glimpses
        print(
            f"scene {index}: {step.label} ({step.confidence:.0%} sure; it is {truth}) "
            f"after {step.num_glimpses} glimpses, {seconds:.1f} s"
        )
    everything = given.scenes * grid.num_locations * given.latency
    print(
        f"\n{right} of {given.scenes} right with {glimpses / given.scenes:.1f} glimpses a scene of "
        f"{grid.num_locations}\nwaited {waited:.1f} s for the sensor instead of {everything:.1f} s for whole "
        f"scenes: {1 - waited / everything:.0%} saved; the agent itself thought for {thought:.1f} s"
    )


if __name__ == "__main__":
    main()
