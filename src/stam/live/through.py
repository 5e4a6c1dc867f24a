"""Looking through many sensors side by side, and at images of any size."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from stam.config import AgentConfig
from stam.errors import SensorError
from stam.live.session import ALL_SEEN, LiveStep, Session, has_reached, observe_all, require_some
from stam.scene.pixels import prepare_for_evaluation
from stam.scene.sensor import Sensor
from stam.shapes import UInt8


def look_through(
    sensors: Sequence[Sensor],
    sessions: Sequence[Session],
    max_glimpses: int | None = None,
    on_step: Callable[[int, LiveStep], None] | None = None,
) -> list[LiveStep]:
    """Looks through many sensors side by side until each agent is sure; the thinking is batched.

    It serves the windows of one large scene, several cameras, or a folder of images.

    Args:
        sensors: One for each scene or window.
        sessions: One for each sensor, all of one agent.
        max_glimpses: When to stop though unsure; by default when everything has been seen.
        on_step: Called with the sensor's index and the step after every glimpse.
    """
    require_some(max_glimpses)
    steps = [session.step for session in sessions]
    going = [i for i, step in enumerate(steps) if step is None or not has_reached(step, max_glimpses)]
    while going:
        glimpses = [_sense(sensors[index], sessions[index]) for index in going]
        latest = observe_all([sessions[index] for index in going], glimpses)
        for index, step in zip(going, latest, strict=True):
            steps[index] = step
            if on_step is not None:
                on_step(index, step)
        going = [i for i in going if not _is_done(steps[i], max_glimpses)]
    return [step for step in steps if step is not None]


def _sense(sensor: Sensor, session: Session) -> Tensor:
    if session.location is None:
        raise SensorError(ALL_SEEN)
    return sensor.sense(session.location)


def _is_done(step: LiveStep | None, max_glimpses: int | None) -> bool:
    return step is None or step.stop or has_reached(step, max_glimpses)


def scene_view(
    image: UInt8[np.ndarray, "height width 3"], config: AgentConfig, resize_size: int | None = None
) -> UInt8[np.ndarray, "image_height image_width 3"]:
    """Brings an image of any size to the agent's, as evaluation does.

    Args:
        image: The decoded image.
        config: The agent's configuration.
        resize_size: What the shorter side becomes before the centre is cropped; by default as the agent was
            trained (`preprocess_size`), which may be straight to its size.
    """
    return prepare_for_evaluation(image, resize_size or config.preprocess_size, config.grid.image_size)
