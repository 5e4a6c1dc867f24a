"""What an agent is, as frozen dataclasses that check themselves and round-trip through JSON."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import reprlib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from stam.errors import ConfigError, did_you_mean, require, require_choice
from stam.files import parse_json
from stam.scene.grid import Grid, Size
from stam.scene.pixels import IMAGENET_MEAN, IMAGENET_STD

CORE_SIZES: dict[str, tuple[int, int, int]] = {  # width, depth, heads, as DeiT names them
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
}

CORES = ("reencoding", "causal")
ACTORS = ("pairwise", "joint")

T = TypeVar("T")


def require_sensible_numbers(config: Any) -> None:
    """Raises where a setting is not a finite number, or a seed larger than random numbers take."""
    for name, value in vars(config).items():
        for number in value if isinstance(value, tuple) else (value,):
            finite = not isinstance(number, float) or math.isfinite(number)
            require(finite, f"{name} must be a finite number, got {number}")
        if name.endswith("seed") and value is not None:
            require(0 <= value < 2**63, f"{name} must be from 0 to 2**63 - 1, got {value}")


def require_at_least_one(config: Any, *names: str) -> None:
    """Raises where a count is none."""
    for name in names:
        require(getattr(config, name) >= 1, f"{name} must be at least 1, got {getattr(config, name)}")


def require_not_negative(config: Any, *names: str) -> None:
    """Raises where a rate or a size is below 0."""
    for name in names:
        require(getattr(config, name) >= 0, f"{name} must be 0 or more, got {getattr(config, name)}")


def is_writable(text: str) -> bool:
    """Tells whether a text can be written as UTF-8; a file name of other bytes cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_timm_name(name: str) -> None:
    """Raises unless a name is one of timm's own architectures: others fetch code or files from elsewhere."""
    plain = re.fullmatch(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_-]+)?", name) is not None
    require(
        plain,
        f"timm model '{name}' is not the plain name of an architecture: use one such as resnet50 or "
        "resnet50.a1_in1k",
    )


def to_plain(value: Any) -> Any:
    """Turns a configuration into dictionaries, lists and numbers, ready for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], values: Any, where: str = "") -> T:
    """Builds a dataclass from what a file says, and takes nothing on trust.

    Every value must be of the kind its field is declared as, numbers must be finite and fit in 64 bits, and
    an unknown key is an error that names the nearest one. A class with a static method `upgraded` is given
    what an earlier version wrote, to bring it up to date.

    Args:
        cls: The dataclass.
        values: Dictionaries, lists, strings and numbers, as JSON has them.
        where: The path to them, for an error.

    Raises:
        ConfigError: Something in it is unknown, missing, or not of its kind.
    """
    called = where.rstrip(".") or "it"
    require(isinstance(values, Mapping), f"{called} must be an object, got {_shown(values)}")
    upgraded = getattr(cls, "upgraded", None)
    values = values if upgraded is None else upgraded(values)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise ConfigError(f"unknown setting '{where}{key}': {did_you_mean(str(key), fields)}")
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        require(name in values or not needed, f"{where}{name} is missing: {cls.__name__} needs it")
    hints = typing.get_type_hints(cls)
    return cls(**{key: _restore(hints[key], value, f"{where}{key}") for key, value in values.items()})


def _restore(hint: Any, value: Any, where: str) -> Any:
    """Returns a value as its field's type says, or raises."""
    if isinstance(hint, types.UnionType):
        return _restore_one_of(typing.get_args(hint), value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value, f"{where}.")
    if typing.get_origin(hint) is tuple:
        return _restore_tuple(typing.get_args(hint), value, where)
    if typing.get_origin(hint) is dict:
        require(isinstance(value, Mapping), f"{where} must be an object, got {_shown(value)}")
        inner = typing.get_args(hint)[1]
        return {str(key): _restore(inner, item, f"{where}.{key}") for key, item in value.items()}
    if not _is_kind(hint, value):
        raise ConfigError(f"{where} must be {_KINDS.get(hint, hint)}, got {_shown(value)}")
    return float(value) if hint is float else value


def _restore_one_of(options: tuple[Any, ...], value: Any, where: str) -> Any:
    """Returns a value as the first type of a union that it can be, or raises as the last one does."""
    if value is None and types.NoneType in options:
        return None
    options = tuple(option for option in options if option is not types.NoneType)
    for option in options[:-1]:
        with contextlib.suppress(ConfigError):
            return _restore(option, value, where)
    return _restore(options[-1], value, where)


def _restore_tuple(inner: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    count = None if inner[-1] is Ellipsis else len(inner)
    numbered = f"a list of {count}" if count is not None else "a list"
    sound = isinstance(value, (list, tuple)) and count in (None, len(value))
    if not sound:
        raise ConfigError(f"{where} must be {numbered}, got {_shown(value)}")
    if count is None and inner[0] is str and all(type(item) is str for item in value):
        return tuple(value)  # a list of names may have millions
    hints = inner if count is not None else itertools.repeat(inner[0])
    return tuple(
        _restore(hint, item, f"{where}[{index}]")
        for index, (hint, item) in enumerate(zip(hints, value, strict=False))
    )


_KINDS = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
_MOST = 2**63  # numbers that fit in 64 bits


def _is_kind(hint: Any, value: Any) -> bool:
    if hint is int:
        return type(value) is int and abs(value) < _MOST
    if hint is float:
        is_whole = type(value) is int and abs(value) < _MOST
        return is_whole or (type(value) is float and math.isfinite(value))
    return hint is Any or type(value) is hint


def _shown(value: Any) -> str:
    """Returns a value for an error, in a few words."""
    text = reprlib.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class AgentConfig:
    """Everything needed to build an agent. The paper's symbols: D `width`, C `num_classes`.

    Attributes:
        num_classes: Classes to tell apart.
        image_size: Pixels of the whole scene, one number or (height, width).
        glimpse_size: Pixels of what is sensed at once.
        patch_size: Pixels of a transformer patch.
        channels: Colour channels.
        core: How glimpses are encoded: `reencoding`, the paper's, encodes all of them together again after
            each; `causal` encodes each once, after the earlier ones, and keeps its keys and values.
        width: Embedding width of the core.
        depth: Transformer blocks.
        num_heads: Attention heads.
        mlp_ratio: Hidden width of a block's MLP over `width`.
        drop_path: Largest drop-path rate; it rises linearly from 0 over the blocks.
        actor: How it rates locations: `pairwise`, the paper's, takes the state with one location after the
            other; `joint` rates all of them at once, from the state alone, which costs much less.
        actor_width: Hidden width of the actor.
        critic_width: Hidden width of the critic.
        policy: Who picks the next location: `learned` has an actor; `random`, `plus`, `spiral` and
            `centre-out` need none. `learned:8` lets the actor choose until 8 glimpses have been seen, then
            the order `centre-out`: late glimpses add little, so where to take them is learned badly.
        threshold: Confidence above which a live agent stops (the paper's gamma).
        temperature: Divides the logits before the softmax at inference; 1 until calibrated.
        mean: Channel means the images were normalised with.
        std: Channel standard deviations the images were normalised with.
        preprocess_size: What the shorter side of an image becomes before its centre is cropped to
            `image_size`; none resizes straight to that. A training takes it from the data's `resize_size`.
        labels: Class names; without them a class is named by its number.
        first_location: Row and column, counted from 0, where predictions and live sessions begin; none begins
            at the grid's centre. `stam evaluate --first-locations --store` finds it.
        sharpness: For maps of where the agent would look: factor on the actor's logits before the softmax.
            Without one, as in the paper, logits are divided by their norm first. A training sets it.
    """

    num_classes: int
    image_size: Size = 224
    glimpse_size: Size = 32
    patch_size: Size = 16
    channels: int = 3
    core: str = "reencoding"
    width: int = 384
    depth: int = 12
    num_heads: int = 6
    mlp_ratio: float = 4.0
    drop_path: float = 0.1
    actor: str = "pairwise"
    actor_width: int = 2048
    critic_width: int = 512
    policy: str = "learned"
    threshold: float = 0.9
    temperature: float = 1.0
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    preprocess_size: int | None = None
    labels: tuple[str, ...] = ()
    first_location: tuple[int, int] | None = None
    sharpness: float | None = None

    def __post_init__(self) -> None:
        """Checks every setting before anything is built from it."""
        require_sensible_numbers(self)
        _ = self.grid  # raises where the sizes do not divide
        require_at_least_one(
            self, "num_classes", "channels", "width", "depth", "num_heads", "actor_width", "critic_width"
        )
        require_choice("core", self.core, CORES)
        require_choice("actor", self.actor, ACTORS)
        require(
            self.width % self.num_heads == 0,
            f"num_heads {self.num_heads} does not divide width {self.width}: use another number of heads",
        )
        require(self.mlp_ratio > 0, f"mlp_ratio must be above 0, got {self.mlp_ratio}")
        require(0 <= self.drop_path < 1, f"drop_path must be in [0, 1), got {self.drop_path}")
        require(0 <= self.threshold <= 1, f"threshold must be in [0, 1], got {self.threshold}")
        require(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")
        for name in ("mean", "std"):
            given = len(getattr(self, name))
            require(
                given == self.channels, f"{name} needs {self.channels} values, one a channel, got {given}"
            )
        require(all(value > 0 for value in self.std), f"std must be above 0, got {self.std}")
        if self.first_location is not None:
            self.grid.index(self.first_location)  # raises outside of the grid
        size = self.preprocess_size
        require(size is None or size >= 1, f"preprocess_size must be at least 1 or none, got {size}")
        require(
            len(self.labels) in (0, self.num_classes),
            f"labels must name all {self.num_classes} classes or none, got {len(self.labels)}",
        )
        require(len(set(self.labels)) == len(self.labels), "labels must differ from each other")
        unwritable = [label for label in self.labels if not is_writable(label)]
        require(not unwritable, f"labels must be text that can be written, got {unwritable[:1]!r}")

    @property
    def grid(self) -> Grid:
        """The geometry of a scene."""
        return _grid(self.image_size, self.glimpse_size, self.patch_size)

    @property
    def has_actor(self) -> bool:
        """Whether the agent learns where to look."""
        return self.policy.partition(":")[0] == "learned"

    @staticmethod
    def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
        """Brings a configuration of format 1.0 up to date, which had `handover` and `mirrored`."""
        values = dict(values)
        handover, mirrored = values.pop("handover", None), values.pop("mirrored", False)
        require(not mirrored, "the agent looks at mirrored glimpses too, which versions after 0.1 do not")
        require(handover is None or type(handover) is int, "handover must be a whole number or none")
        if handover is not None and values.get("policy", "learned") == "learned":
            values["policy"] = f"learned:{handover}"
        return values

    @classmethod
    def of_size(cls, size: str, num_classes: int, **settings: Any) -> "AgentConfig":
        """Returns the configuration of a named DeiT size: tiny, small or base."""
        require_choice("size", size, tuple(CORE_SIZES))
        width, depth, num_heads = CORE_SIZES[size]
        return cls(num_classes=num_classes, width=width, depth=depth, num_heads=num_heads, **settings)

    def to_json(self) -> str:
        """Returns the configuration as JSON."""
        return json.dumps(to_plain(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "AgentConfig":
        """Reads the configuration back from JSON."""
        return from_plain(cls, parse_json(text, "the configuration"))


@lru_cache(maxsize=64)
def _grid(image_size: Size, glimpse_size: Size, patch_size: Size) -> Grid:
    """Makes a grid once: it is asked for several times at every live step."""
    return Grid(image_size, glimpse_size, patch_size)
