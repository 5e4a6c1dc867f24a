"""A Gymnasium environment, `stam/Glimpse-v0`: find out what a scene shows, one glimpse at a time.

    import gymnasium, stam.integrations.gym
    env = gymnasium.make("stam/Glimpse-v0", data="path/to/images", image_size=224, glimpse_size=32)

**Observation**, a dictionary: `canvas`, uint8 (height, width, 3), the scene with 0 wherever nothing has been
seen; `seen`, one 0 or 1 for each location. At `reset` one glimpse at a random place has been seen, as in the
paper.

**Action**, one number: below `num_locations` it is a location to look at; from there on it is an answer,
`num_locations + class`, which ends the episode.

**Reward**: every look costs `glimpse_cost` (default 0.01), also one at a place seen before, which shows
nothing new; a right answer gives 1, a wrong one 0. So the return is the accuracy less the price of looking,
and an agent that stops early is worth more than an equally good one that does not. An episode is truncated,
without an answer and so without a reward, when it has taken `max_glimpses` glimpses and looks again.
"""

from pathlib import Path
from typing import Any

import numpy as np

from stam.data import Scenes, open_scenes, prepare_for_evaluation
from stam.errors import require, require_choice, require_package
from stam.scene.grid import Grid, Location, Size
from stam.shapes import UInt8

gymnasium: Any = require_package("gymnasium", extra="gym")

ID = "stam/Glimpse-v0"
_UNSEEN_SHADE = 64  # of the cover in a rendered frame


class GlimpseEnv(gymnasium.Env):
    """See the module's description for what is observed, done and rewarded."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 2}  # noqa: RUF012  Gymnasium's own convention

    def __init__(
        self,
        data: str | Path | Scenes = "digits",
        split: str = "train",
        image_size: Size = 56,
        glimpse_size: Size = 8,
        resize_size: int | None = None,
        max_glimpses: int | None = None,
        glimpse_cost: float = 0.01,
        render_mode: str | None = None,
    ) -> None:
        """Opens the data.

        Args:
            data: `digits`, a folder of class folders, tar files, or any `Scenes`.
            split: `train` or `val`; the validation scenes are for measuring, not for learning.
            image_size: Pixels of a scene.
            glimpse_size: Pixels of a glimpse.
            resize_size: The shorter side before the centre is cropped; `None` resizes straight to size.
            max_glimpses: The most glimpses an episode may take; by default every location once.
            glimpse_cost: What a look costs.
            render_mode: `rgb_array` or none.
        """
        require_choice("split", split, ("train", "val"))
        require(0 <= glimpse_cost <= 1, f"glimpse_cost must be in [0, 1], got {glimpse_cost}")
        if isinstance(data, (str, Path)):
            splits = open_scenes(data)
            data = splits.train if split == "train" else splits.val
        self.scenes = data
        self.grid = Grid(image_size, glimpse_size, glimpse_size)
        self.max_glimpses = self.grid.num_locations if max_glimpses is None else max_glimpses
        require(self.max_glimpses >= 1, f"max_glimpses must be at least 1, got {self.max_glimpses}")
        self.glimpse_cost, self.render_mode = glimpse_cost, render_mode
        self._resize_size = resize_size
        spaces = gymnasium.spaces
        self.observation_space = spaces.Dict(
            {
                "canvas": spaces.Box(0, 255, (*self.grid.image_size, 3), np.uint8),
                "seen": spaces.MultiBinary(self.grid.num_locations),
            }
        )
        self.action_space = spaces.Discrete(self.grid.num_locations + len(self.scenes.classes))
        self._scene: np.ndarray | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Covers a new scene and shows one glimpse of it.

        Args:
            seed: Seed of the scenes and first locations from here on.
            options: `{"scene": index}` and `{"location": (row, column)}` fix what is drawn otherwise.
        """
        super().reset(seed=seed)
        options = options or {}
        drawn = (
            int(self.np_random.integers(len(self.scenes))),
            int(self.np_random.integers(self.grid.num_locations)),
        )
        index = int(options.get("scene", drawn[0]))
        location = self.grid.index(options.get("location", drawn[1]))
        image = self.scenes.load(index)
        self._scene = prepare_for_evaluation(image, self._resize_size, self.grid.image_size)
        self._label = int(self.scenes.labels[index])
        self._canvas = np.zeros_like(self._scene)
        self._seen = np.zeros(self.grid.num_locations, dtype=np.int8)
        self._num_glimpses = 0
        self._look(location)
        return self._observation(), self._info(index=index)

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Looks somewhere, or answers."""
        if self._scene is None:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        action = int(action)
        if not self.action_space.contains(action):
            raise gymnasium.error.InvalidAction(f"action {action} is not below {self.action_space.n}")
        answer = action - self.grid.num_locations
        if answer >= 0:
            right = answer == self._label
            return self._observation(), float(right), True, False, self._info(answer=answer, right=right)
        if self._num_glimpses >= self.max_glimpses:
            return self._observation(), -self.glimpse_cost, False, True, self._info()
        self._look(action)
        return self._observation(), -self.glimpse_cost, False, False, self._info()

    def glimpse(self, location: Location) -> UInt8[np.ndarray, "height width 3"]:
        """Returns the pixels of a location that has been seen, as the next `Session.observe` wants them."""
        index = self.grid.index(location)
        require(bool(self._seen[index]), f"location {self.grid.row_column(index)} has not been seen")
        top, left, bottom, right = self.grid.pixel_box(index)
        return self._canvas[top:bottom, left:right].copy()

    def render(self) -> UInt8[np.ndarray, "height width 3"] | None:
        """Returns the canvas with a grey cover over what has not been seen."""
        if self.render_mode != "rgb_array" or self._scene is None:
            return None
        height, width = self.grid.glimpse_size
        seen = self._seen.reshape(self.grid.rows, self.grid.columns).astype(bool)
        mask = seen.repeat(height, axis=0).repeat(width, axis=1)
        return np.where(mask[..., None], self._canvas, np.uint8(_UNSEEN_SHADE))

    def _look(self, location: int) -> None:
        assert self._scene is not None
        top, left, bottom, right = self.grid.pixel_box(location)
        self._canvas[top:bottom, left:right] = self._scene[top:bottom, left:right]
        self._seen[location] = 1
        self._num_glimpses += 1

    def _observation(self) -> dict[str, np.ndarray]:
        return {"canvas": self._canvas.copy(), "seen": self._seen.copy()}

    def _info(self, **more: Any) -> dict[str, Any]:
        return {"num_glimpses": self._num_glimpses, **more}


def play(env: Any, agent: Any, options: dict[str, Any] | None = None) -> float:
    """Lets a STAM agent play one episode and returns what it earned: what other players compete with.

    Args:
        env: A `stam/Glimpse-v0` of the agent's sizes, wrapped or not.
        agent: An agent whose classes are those of the environment.
        options: See `GlimpseEnv.reset`.
    """
    bare = env.unwrapped
    require(
        tuple(agent.labels) == tuple(bare.scenes.classes),
        "the agent's labels are not the classes of the environment: play an agent trained on this data",
    )
    observation, _ = env.reset(options=options)
    session = agent.session()
    location, earned = int(observation["seen"].argmax()), 0.0
    while True:
        step = session.observe(bare.glimpse(location), location)
        done = step.stop or step.num_glimpses >= bare.max_glimpses
        answer = bare.grid.num_locations + int(step.probabilities.argmax())
        action = answer if done else bare.grid.index(step.location)
        _, reward, terminated, truncated, _ = env.step(action)
        earned += float(reward)
        if terminated or truncated:
            return earned
        location = action


if ID not in gymnasium.registry:
    gymnasium.register(ID, entry_point=GlimpseEnv)
