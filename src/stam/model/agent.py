"""The agent: a core that encodes glimpses, two classifiers, an actor, and a critic while it is trained.

The paper's symbols: core T, classifiers G and D (the core's `head` and `head_dist`), actor A, critic C,
glimpse-location embeddings e (`actor.location_embedding`), state s.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.config import AgentConfig
from stam.errors import SensorError, StamError
from stam.model.actor_critic import Actor, Critic, JointActor
from stam.model.belief import Belief
from stam.model.causal import CausalCore
from stam.model.core import Core, OnePassCore, ReencodingCore
from stam.model.episode import Step, Trace, rollout, sense_images
from stam.model.looker import Facts
from stam.model.orders import centre_out_order
from stam.model.policy import Policy, Scorer, make_policy, random_locations, require_policy
from stam.model.randomness import Randomness
from stam.scene.grid import Grid, Location, LocationError
from stam.scene.pixels import require_normalised
from stam.shapes import Float, Int

if TYPE_CHECKING:
    import stam.live
    import stam.prediction


class Looker:
    """What an agent can do, whatever its parts are made of: remember, believe, look, open a session.

    `Agent` is the one to read, train and change. `stam.fast` has others, which compute the same sooner.

    Attributes:
        config: What the agent is.
        core: Turns glimpses into features, and features into logits.
        actor: Rates locations; `None` where the agent follows a fixed policy.
        critic: Predicts returns; only while the agent is trained.
        positions: For each location, the positions of its patches in the whole image, (locations, patches).
    """

    config: AgentConfig
    core: Core
    actor: Scorer | None
    critic: Callable[[Tensor], Tensor] | None
    positions: Tensor

    @property
    def grid(self) -> Grid:
        """The geometry of a scene."""
        return self.config.grid

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names; the class numbers where none were given."""
        return self.config.labels or tuple(str(index) for index in range(self.config.num_classes))

    @property
    def threshold(self) -> float:
        """Confidence above which a live agent stops looking."""
        return self.config.threshold

    @property
    def first_location(self) -> int:
        """Where predictions and live sessions begin, as a grid index: as configured, or the centre."""
        given = self.config.first_location
        return self.grid.centre if given is None else self.grid.index(given)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.positions.device

    @property
    def facts(self) -> Facts:
        """What a comparison must know."""
        return Facts(
            labels=self.labels,
            image_size=self.grid.image_size,
            most_glimpses=self.grid.num_locations,
            whole_to_attend=False,
            whole_to_classify=False,
            policy=self.config.policy,
            policies=(),  # more than a list of names: `policy` checks them
            mean=self.config.mean,
            std=self.config.std,
            grid=self.grid,
            resize_size=self.config.preprocess_size,
        )

    @property
    def episodic(self) -> "Looker":
        """Its own episode can be run step by step."""
        return self

    def ready(self, fast: bool = True) -> "Looker":
        """Returns the agent ready to look often: here itself."""
        return self

    def remember(
        self,
        memory: Any,
        glimpses: Float[Tensor, "batch channels height width"],
        locations: Int[Tensor, " batch"],
    ) -> Any:
        """Returns the memory with one more glimpse for each sample; `None` is the empty memory."""
        patches = self.grid.patches(glimpses[:, None])  # it takes (B, glimpses, C, h, w)
        return self.core.remember(memory, patches, self.positions[locations])

    def sample_drop_path(self, batch_size: int, generator: Randomness = None) -> Tensor | None:
        """Draws drop-path masks, or `None` outside training."""
        return self.core.sample_drop_path(batch_size, generator)

    def believe(self, memory: Any, drop_masks: Tensor | None = None) -> Belief:
        """Encodes the remembered glimpses and classifies the scene."""
        features = self.core.read(memory, drop_masks)  # (B, 2, D)
        class_logits, distill_logits = self.core.classify(features)
        return Belief(features.flatten(1), class_logits, distill_logits)

    def believe_all(
        self,
        glimpses: Float[Tensor, "batch steps channels height width"],
        locations: Int[Tensor, "batch steps"],
        drop_masks: Tensor | None = None,
    ) -> list[Belief]:
        """Returns the belief after each glimpse, from one pass; for a core that can (`OnePassCore`)."""
        assert isinstance(self.core, OnePassCore)
        patches = self.grid.patches(glimpses).unflatten(1, (*locations.shape[1:], -1))  # (B, T, p, pixels)
        features = self.core.read_all(patches, self.positions[locations], drop_masks)  # (B, T, 2, D)
        logits = (part.unflatten(0, locations.shape) for part in self.core.classify(features.flatten(0, 1)))
        parts = zip(features.flatten(2).unbind(1), *(part.unbind(1) for part in logits), strict=True)
        return [Belief(*part) for part in parts]

    def believe_each(
        self,
        memory: Any,
        num_glimpses: Int[Tensor, " batch"],
        glimpses: Float[Tensor, "batch tried channels height width"],
        locations: Int[Tensor, "batch tried"],
    ) -> Belief:
        """Returns the belief after one more glimpse, for each that is tried; for a core that can.

        Args:
            memory: What is remembered of episodes.
            num_glimpses: How many of each sample's glimpses come before.
            glimpses: What to try after them, one at a time.
            locations: Where those were sensed.
        """
        assert isinstance(self.core, OnePassCore)
        patches = self.grid.patches(glimpses).unflatten(1, (*locations.shape[1:], -1))  # (B, K, p, pixels)
        features = self.core.read_each(memory, num_glimpses, patches, self.positions[locations])
        features = features.flatten(0, 1)  # (B K, 2, D)
        return Belief(features.flatten(1), *self.core.classify(features))

    def policy(self, policy: Policy | str | None = None) -> Policy:
        """Returns the policy meant: one given, one named, or by default the agent's own."""
        if isinstance(policy, Policy):
            return policy
        return make_policy(policy or self.config.policy, self.grid, self.actor, self.config.sharpness)

    @torch.no_grad()
    def look(
        self,
        images: Float[Tensor, "batch channels height width"],
        num_glimpses: int,
        first_location: Location | Tensor | None = None,
        policy: Policy | str | None = None,
        generator: Randomness = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Trace:
        """Looks at scenes glimpse by glimpse and returns what it saw and thought.

        Args:
            images: Normalised scenes, all of the agent's size (`predict` takes images of any kind). Only the
                glimpses asked for are looked at; of the others only the range of values is checked.
            num_glimpses: Glimpses to sense in each scene.
            first_location: Where the first glimpse is sensed: a grid index or (row, column) for all, or a
                tensor of one grid index each; random by default.
            policy: A policy or its name; by default the agent's own (the learned one is greedy).
            generator: Source of randomness for the first location and for random policies.
            on_step: Called after every glimpse.
        """
        self._require_scenes(images)
        images = images.to(self.device)
        first = self._first_locations(first_location, images.shape[0], generator)
        with self._looking() as looker:
            return looker.look_from(images, num_glimpses, first, looker.policy(policy), generator, on_step)

    @torch.no_grad()
    def look_from(
        self,
        images: Float[Tensor, "batch channels height width"],
        num_glimpses: int,
        first_location: Int[Tensor, " batch"],
        policy: Policy,
        generator: Randomness = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Trace:
        """The same as `look`, for arguments that have been checked and are on the agent's device."""
        steps = []
        sense = sense_images(images, self.grid)
        for step in rollout(self, sense, num_glimpses, first_location, policy, generator):
            steps.append((step.location, step.belief))
            if on_step is not None:
                on_step(step)
        return Trace.of(steps, self.grid, self.config.temperature)

    def _require_scenes(self, images: Any) -> None:
        """Raises unless images are a batch of normalised scenes of the agent's size."""
        if not isinstance(images, Tensor) or not images.is_floating_point():
            size = ", ".join(map(str, (self.config.channels, *self.grid.image_size)))
            got = str(images.dtype) if isinstance(images, Tensor) else f"a {type(images).__name__}"
            raise SensorError(
                f"look wants a tensor of normalised floats (batch, {size}), got {got}: agent.predict takes "
                "paths, PIL images and uint8 pixels"
            )
        self.grid.require_images(images, self.config.channels)
        advice = "normalise them first, or give them to agent.predict as uint8"
        require_normalised(images, self.config.mean, self.config.std, "scenes", advice)

    @contextmanager
    def _looking(self) -> Iterator["Looker"]:
        """Yields the looker that `look` uses."""
        yield self

    def _first_locations(
        self, given: Location | Tensor | None, batch_size: int, generator: Randomness
    ) -> Int[Tensor, " batch"]:
        if given is None:
            return random_locations(self.grid, batch_size, self.device, generator)
        locations = torch.as_tensor(
            self.grid.index(given) if isinstance(given, (tuple, int)) else given, device=self.device
        )
        if locations.is_floating_point() or locations.shape not in ((), (batch_size,)):
            raise LocationError(
                f"first_location is one location, or a tensor of one grid index for each of the {batch_size} "
                f"scenes, got {given}"
            )
        locations = locations.long().expand(batch_size)
        if batch_size:
            lowest, highest = locations.aminmax()
            self.grid.index(int(lowest))  # raises outside of the grid
            self.grid.index(int(highest))
        return locations

    def prepared(self) -> "Looker":
        """Returns the agent ready to look often: here itself."""
        return self

    @overload
    def predict(
        self, images: "list[Any] | tuple[Any, ...]", **how: Any
    ) -> "list[stam.prediction.Prediction]": ...

    @overload
    def predict(self, images: Any, **how: Any) -> "stam.prediction.Prediction": ...

    def predict(self, images: Any, **how: Any) -> Any:
        """Looks at an image until it is confident, and says what it is; the image may be of any size.

        Args:
            images: A path, a PIL image, uint8 pixels (height, width, 3) or (3, height, width), or a list of
                those, which gives a list of predictions.
            **how: The fields of `stam.prediction.Looking`: threshold, max_glimpses, policy, first_location
                and seed. Without them the same image gets the same answer, from the agent's first location.
        """
        from stam.prediction import Looking, predict

        return predict(self, images, Looking(**how))

    def session(
        self,
        first_location: Location | None = None,
        policy: Policy | str | None = None,
        generator: torch.Generator | None = None,
        threshold: float | None = None,
    ) -> "stam.live.Session":
        """Opens a live session: nothing seen yet, to be fed one glimpse at a time (see `stam.live`)."""
        from stam.live import Session

        return Session(self, first_location, policy, generator, threshold)


class Agent(Looker, nn.Module):
    """Classifies a scene from a sequence of glimpses and decides where to look next.

    An agent starts without a critic; `add_critic` makes one for training. It is part of a training's saved
    state, not of a saved agent.
    """

    core: ReencodingCore | CausalCore
    actor: Actor | JointActor | None
    critic: Critic | None

    def __init__(self, config: AgentConfig) -> None:
        super().__init__()
        require_policy(config.policy)
        self.config = config
        grid = config.grid
        make_core = CausalCore if config.core == "causal" else ReencodingCore
        self.core = make_core(
            num_classes=config.num_classes,
            patch_size=grid.patch_size,
            image_patches=grid.image_patches,
            channels=config.channels,
            width=config.width,
            depth=config.depth,
            num_heads=config.num_heads,
            mlp_ratio=config.mlp_ratio,
            drop_path=config.drop_path,
        )
        self.actor = _make_actor(config) if config.has_actor else None
        self.critic = None
        self.register_buffer("positions", grid.patch_positions(), persistent=False)
        self.reset_location_embedding()
        self._kept: Any = None  # the snapshot of `prepared`, and the weights it was made from

    def configure(self, **settings: object) -> "Agent":
        """Changes settings that no parameter depends on, such as labels or threshold."""
        allowed = {"labels", "threshold", "temperature", "policy", "first_location"}
        if not settings.keys() <= allowed:
            raise StamError(f"only {', '.join(sorted(allowed))} can be changed on a built agent")
        config = dataclasses.replace(self.config, **settings)  # type: ignore[arg-type]
        make_policy(config.policy, self.grid, self.actor)  # raises where it has no actor for that
        self.config = config
        return self

    def add_critic(self) -> Critic:
        """Makes a fresh critic for training and returns it."""
        self.critic = Critic(self.config.width, self.config.critic_width).to(self.device)
        return self.critic

    @torch.no_grad()
    def reset_location_embedding(self) -> None:
        """Starts e(l) from the core's position embeddings, interpolated to the grid of glimpses."""
        if not isinstance(self.actor, Actor):
            return
        patch_embedding = self.core.pos_embed[:, self.core.num_readout :]
        goal = (self.grid.rows, self.grid.columns)
        self.actor.location_embedding.copy_(
            interpolate_positions(patch_embedding, self.grid.image_patches, goal)[0]
        )

    def forward(self, memory: Any, drop_masks: Tensor | None = None) -> Belief:
        """The same as `believe`, for wrappers that call modules."""
        return self.believe(memory, drop_masks)

    def prepared(self) -> Looker:
        """Returns the agent as it is now, ready to look: the same numbers, sooner (see `stam.fast`).

        On a CPU it is a snapshot, which later changes of the agent do not reach; asked again, it is the same
        object while every weight is the same. Where a module was replaced or hooked it is a `PlainLooker`.
        """
        from stam.fast import prepare_again

        self._kept = prepare_again(self, self._kept)
        return self._kept.looker

    def compiled(self) -> Looker:
        """Returns the agent as it is now, compiled for this CPU: a live step takes two thirds of the time.

        It needs the causal core and a C++ compiler, and takes about a minute the first time. What was
        compiled is kept for the next process.
        """
        from stam.fast.cpu_compiled import compile_agent

        return compile_agent(self)

    def ready(self, fast: bool = True) -> Looker:
        """Returns the agent ready to look often; without `fast` its plain modules compute."""
        from stam.fast import prepare

        return prepare(self, fast)

    @contextmanager
    def _looking(self) -> Iterator[Looker]:
        with evaluating(self):
            yield self.prepared()

    def __getstate__(self) -> dict[str, Any]:
        """A copy prepares for itself."""
        return self.__dict__ | {"_kept": None}


def _make_actor(config: AgentConfig) -> Actor | JointActor:
    if config.actor == "joint":
        return JointActor(centre_out_order(config.grid), config.width, config.actor_width)
    return Actor(config.grid.num_locations, config.width, config.actor_width)


class PlainLooker(Looker):
    """What `prepared` returns where nothing faster may be used; `Agent.look` itself would prepare again.

    It calls the agent's own `remember`, `believe` and `policy`, so overrides and hooks take effect.
    """

    def __init__(self, agent: Agent) -> None:
        self.config, self.positions = agent.config, agent.positions
        self.core, self.actor, self.critic = agent.core, agent.actor, agent.critic
        self._agent = agent

    def remember(
        self,
        memory: Any,
        glimpses: Float[Tensor, "batch channels height width"],
        locations: Int[Tensor, " batch"],
    ) -> Any:
        """Returns the memory with one more glimpse for each sample."""
        return self._agent.remember(memory, glimpses, locations)

    def believe(self, memory: Any, drop_masks: Tensor | None = None) -> Belief:
        """Encodes the remembered glimpses and classifies the scene."""
        return self._agent.believe(memory, drop_masks)

    def policy(self, policy: Policy | str | None = None) -> Policy:
        """Returns the policy meant."""
        return self._agent.policy(policy)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Within it a module is in evaluation mode; afterwards each of its parts is in the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, was_training in modes:
            part.training = was_training


def interpolate_positions(
    embedding: Float[Tensor, "1 source width"], source: tuple[int, int], goal: tuple[int, int]
) -> Float[Tensor, "1 goal width"]:
    """Resizes position embeddings from one grid to another (bicubic, corners not aligned)."""
    if source == goal:
        return embedding
    planes = embedding.reshape(1, *source, -1).permute(0, 3, 1, 2).float()  # (1, D, rows, columns)
    planes = F.interpolate(planes, size=goal, mode="bicubic", align_corners=False)
    return planes.flatten(2).transpose(1, 2).to(embedding.dtype)
