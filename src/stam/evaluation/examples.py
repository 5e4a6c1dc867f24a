"""A few scenes, step by step: what was seen, what was believed, where the agent wants to look next."""

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stam.data.randomness import random_order
from stam.errors import StamError, require
from stam.evaluation.scenes import LooksAtScenes, SceneReader, first_locations, policy_for
from stam.files import save_content
from stam.model.agent import Looker
from stam.model.episode import Step, Trace
from stam.model.policy import Policy
from stam.scene.grid import Grid
from stam.shapes import Float, Int, UInt8


@dataclass(frozen=True)
class Example:
    """One scene and what an agent made of it.

    Attributes:
        image: The scene; the agent saw the glimpses at `locations` only.
        label: The true class.
        grid: Where glimpses lie.
        classes: Class names.
        locations: Where each glimpse was sensed.
        predictions: The answer after each glimpse.
        confidences: Its probability.
        maps: After each glimpse, the policy's probability of looking at each location next; the last row,
            and the map of an agent without an actor, is zero.
    """

    image: UInt8[np.ndarray, "height width 3"]
    label: int
    grid: Grid
    classes: tuple[str, ...]
    locations: Int[np.ndarray, " glimpses"]
    predictions: Int[np.ndarray, " glimpses"]
    confidences: Float[np.ndarray, " glimpses"]
    maps: Float[np.ndarray, "glimpses locations"]

    @property
    def has_maps(self) -> bool:
        """Whether the agent has a policy that can be drawn."""
        return bool(self.maps.any())

    @property
    def is_right(self) -> np.ndarray:
        """Whether the answer after each glimpse is the true class."""
        return self.predictions == self.label


def choose_examples(labels: Int[np.ndarray, " scenes"], count: int) -> Int[np.ndarray, " chosen"]:
    """Picks scenes without looking at how the agent did: in a fixed random order, another class each time."""
    order = random_order(len(labels), "examples")
    times: dict[int, int] = {}
    repeats = []
    for scene in order:
        label = int(labels[scene])
        repeats.append(times.get(label, 0))
        times[label] = times.get(label, 0) + 1
    return order[np.argsort(np.array(repeats, dtype=np.int64), kind="stable")[:count]]


def collect_examples(
    agent: LooksAtScenes,
    reader: SceneReader,
    count: int,
    num_glimpses: int,
    policy: str,
    seed: int = 0,
) -> list[Example]:
    """Looks at a few scenes, glimpse by glimpse, with the first locations of a seed."""
    chosen = choose_examples(reader.scenes.labels, count)
    examples: list[Example] = []
    for batch in reader.batches(chosen, "examples"):
        first = first_locations(agent.grid, batch.indices, seed)
        how = policy_for(policy, agent.grid, batch.indices, seed)
        if isinstance(agent, Looker) and policy.startswith("learned"):
            trace, maps = look_with_maps(agent, batch.images, num_glimpses, first, agent.policy(how))
        else:
            trace = agent.look(batch.images, num_glimpses, first, how)
            maps = torch.zeros(len(batch.images), num_glimpses, agent.grid.num_locations)
        pixels = batch.pixels.permute(0, 2, 3, 1).cpu().numpy()
        for row, image in enumerate(pixels):
            examples.append(
                Example(
                    image=image,
                    label=int(batch.labels[row]),
                    grid=agent.grid,
                    classes=agent.labels,
                    locations=trace.locations[row].cpu().numpy(),
                    predictions=trace.predictions[row].cpu().numpy(),
                    confidences=trace.confidences[row].cpu().numpy(),
                    maps=maps[row].cpu().numpy(),
                )
            )
    return examples


def look_with_maps(
    agent: Looker,
    images: Float[Tensor, "batch channels height width"],
    num_glimpses: int,
    first_location: Int[Tensor, " batch"],
    policy: Policy,
) -> tuple[Trace, Float[Tensor, "batch glimpses locations"]]:
    """Looks, and returns the policy's probability of each location after each glimpse; the last is zero."""
    maps: list[Tensor] = []

    def add_map(step: Step) -> None:
        likely = policy.probabilities(step.belief.state, step.seen)
        maps.append(torch.zeros_like(likely) if step.decision is None else likely)

    trace = agent.look(images, num_glimpses, first_location, policy, on_step=add_map)
    return trace, torch.stack(maps, dim=1)


_ARRAYS = ("image", "locations", "predictions", "confidences", "maps")


def save_examples(examples: list[Example], path: str | Path) -> None:
    """Writes examples as one `.npz` of plain arrays."""
    if not examples:
        return
    grid = examples[0].grid
    arrays = {name: np.stack([getattr(example, name) for example in examples]) for name in _ARRAYS}
    arrays["label"] = np.array([example.label for example in examples])
    arrays["classes"] = np.array(examples[0].classes)
    arrays["sizes"] = np.array([grid.image_size, grid.glimpse_size, grid.patch_size])
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    save_content(Path(path), buffer.getvalue())


def load_examples(path: str | Path) -> list[Example]:
    """Reads examples that `save_examples` wrote."""
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        require(unpacked <= _MOST_BYTES, f"it would unpack to {unpacked} bytes")
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in (*_ARRAYS, "label", "classes", "sizes")}
        image_size, glimpse_size, patch_size = (tuple(pair) for pair in arrays["sizes"].tolist())
        grid = Grid(image_size, glimpse_size, patch_size)
        classes = tuple(str(name) for name in arrays["classes"])
        _require_sound(arrays, grid, len(classes))
        return [
            Example(label=int(label), grid=grid, classes=classes, **dict(zip(_ARRAYS, parts, strict=True)))
            for label, *parts in zip(arrays["label"], *(arrays[name] for name in _ARRAYS), strict=True)
        ]
    except Exception as error:  # a damaged archive makes numpy and zipfile raise nearly anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise StamError(f"cannot read the examples '{path}': {reason}; evaluate again") from error


_MOST_BYTES = 2**30


def _require_sound(arrays: dict[str, np.ndarray], grid: Grid, num_classes: int) -> None:
    """Raises unless arrays have the shapes and numbers of examples."""
    count, num_glimpses = arrays["locations"].shape
    shapes = {
        "image": (count, *grid.image_size, 3),
        "label": (count,),
        "predictions": (count, num_glimpses),
        "confidences": (count, num_glimpses),
        "maps": (count, num_glimpses, grid.num_locations),
    }
    for name, shape in shapes.items():
        found = arrays[name].shape
        require(found == shape, f"'{name}' has the shape {found}, not {shape}")
    for name, limit in (
        ("locations", grid.num_locations),
        ("predictions", num_classes),
        ("label", num_classes),
    ):
        numbers = arrays[name]
        require(numbers.dtype.kind == "i", f"'{name}' must hold whole numbers")
        require(bool(((numbers >= 0) & (numbers < limit)).all()), f"'{name}' must be from 0 to {limit - 1}")
    require(arrays["image"].dtype == np.uint8, "'image' must hold bytes")
    for name in ("confidences", "maps"):
        finite = arrays[name].dtype.kind == "f" and bool(np.isfinite(arrays[name]).all())
        require(finite, f"'{name}' must hold finite numbers")
