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
from stam.evaluation.outcomes import located_on_grid
from stam.evaluation.scenes import SceneBatch, SceneRandomness, SceneReader, first_locations, policy_for
from stam.files import save_content
from stam.model.agent import Looker
from stam.model.episode import Step, Trace
from stam.model.looker import LookTrace, SceneLooker
from stam.model.policy import Policy
from stam.scene.grid import Grid
from stam.shapes import Float, Int, UInt8


@dataclass(frozen=True)
class Example:
    """One scene and what an agent made of it.

    Attributes:
        image: The scene; the agent saw what lies in `boxes` only, at the resolution that `sizes` says.
        label: The true class.
        grid: Where glimpses lie; none for a looker whose glimpses lie on no grid.
        classes: Class names.
        locations: Where on the grid each glimpse was sensed; empty without one.
        predictions: The answer after each glimpse.
        confidences: Its probability.
        maps: After each glimpse, the policy's probability of looking at each location next; the last row,
            and the map of an agent without an actor, is zero.
        boxes: Top, left, bottom and right of every part of each look, as shares of the scene; 0 for no part.
        sizes: Height and width in pixels that each part was sensed at.
        pixels: Pixels used to classify, after each look.
    """

    image: UInt8[np.ndarray, "height width 3"]
    label: int
    grid: Grid | None
    classes: tuple[str, ...]
    locations: Int[np.ndarray, " located"]
    predictions: Int[np.ndarray, " glimpses"]
    confidences: Float[np.ndarray, " glimpses"]
    maps: Float[np.ndarray, "glimpses locations"]
    boxes: Float[np.ndarray, "glimpses parts 4"]
    sizes: Int[np.ndarray, "glimpses parts 2"]
    pixels: Int[np.ndarray, " glimpses"]

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
    agent: SceneLooker,
    reader: SceneReader,
    count: int,
    num_glimpses: int,
    policy: str,
    seed: int = 0,
) -> list[Example]:
    """Looks at a few scenes of different classes, with the first locations of a seed."""
    return look_closely(
        agent, reader, choose_examples(reader.scenes.labels, count), num_glimpses, policy, seed
    )


def look_closely(
    agent: SceneLooker,
    reader: SceneReader,
    chosen: Int[np.ndarray, " chosen"],
    num_glimpses: int,
    policy: str,
    seed: int = 0,
) -> list[Example]:
    """Looks at some scenes, glimpse by glimpse, with the first locations of a seed."""
    examples: list[Example] = []
    grid, labels = agent.facts.grid, agent.facts.labels
    for batch in reader.batches(chosen, "examples"):
        trace, maps = _look(agent, batch, num_glimpses, policy, seed)
        images = batch.pixels.permute(0, 2, 3, 1).cpu().numpy()
        located = located_on_grid(trace).cpu().numpy()[:, : num_glimpses if grid is not None else 0]
        for row, image in enumerate(images):
            examples.append(
                Example(
                    image=image,
                    label=int(batch.labels[row]),
                    grid=grid,
                    classes=labels,
                    locations=located[row],
                    predictions=trace.predictions[row].cpu().numpy(),
                    confidences=trace.confidences[row].cpu().numpy(),
                    maps=maps[row].cpu().numpy(),
                    boxes=trace.boxes[row].cpu().numpy(),
                    sizes=trace.sizes.cpu().numpy(),
                    pixels=trace.pixels[row].cpu().numpy(),
                )
            )
    return examples


def _look(
    looker: SceneLooker, batch: SceneBatch, num_glimpses: int, policy: str, seed: int
) -> tuple[LookTrace, Float[Tensor, "batch glimpses locations"]]:
    """Looks at a batch with the randomness of a seed; returns policy maps too, zero where there are none."""
    agent: Looker | None = looker.episodic
    if agent is None:
        drawn = SceneRandomness(batch.indices, seed)
        trace = looker.look(batch.images, num_glimpses, policy=policy, generator=drawn)
        return trace, torch.zeros(len(batch.images), num_glimpses, 0)
    first = first_locations(agent.grid, batch.indices, seed)
    how = policy_for(policy, agent.grid, batch.indices, seed)
    if policy.startswith("learned"):
        return look_with_maps(agent, batch.images, num_glimpses, first, agent.policy(how))
    found = agent.look(batch.images, num_glimpses, first, how)
    return found, torch.zeros(len(batch.images), num_glimpses, agent.grid.num_locations)


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


_ARRAYS = ("image", "locations", "predictions", "confidences", "maps", "boxes", "pixels")


def save_examples(examples: list[Example], path: str | Path) -> None:
    """Writes examples as one `.npz` of plain arrays."""
    if not examples:
        return
    grid = examples[0].grid
    arrays = {name: np.stack([getattr(example, name) for example in examples]) for name in _ARRAYS}
    arrays["label"] = np.array([example.label for example in examples])
    arrays["classes"] = np.array(examples[0].classes)
    arrays["view_sizes"] = examples[0].sizes
    if grid is not None:
        arrays["sizes"] = np.array([grid.image_size, grid.glimpse_size, grid.patch_size])
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    save_content(Path(path), buffer.getvalue())


def load_examples(path: str | Path) -> list[Example]:
    """Reads examples that `save_examples` wrote."""
    path = Path(path)
    try:
        require(path.is_file(), "it is not a file")
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        require(unpacked <= _MOST_BYTES, f"it would unpack to {unpacked} bytes")
        with np.load(path, allow_pickle=False) as stored:
            grid_too = ("sizes",) if "sizes" in stored.files else ()
            arrays = {name: stored[name] for name in (*_ARRAYS, "label", "classes", "view_sizes", *grid_too)}
        grid = Grid(*(tuple(pair) for pair in arrays["sizes"].tolist())) if grid_too else None
        sizes = arrays["view_sizes"]
        classes = tuple(str(name) for name in arrays["classes"])
        _require_sound(arrays, grid, len(classes))
        return [
            Example(
                label=int(label),
                grid=grid,
                classes=classes,
                sizes=sizes,
                **dict(zip(_ARRAYS, parts, strict=True)),
            )
            for label, *parts in zip(arrays["label"], *(arrays[name] for name in _ARRAYS), strict=True)
        ]
    except Exception as error:  # a damaged archive makes numpy and zipfile raise nearly anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise StamError(f"cannot read the examples '{path}': {reason}; evaluate again") from error


_MOST_BYTES = 2**30


def _require_sound(arrays: dict[str, np.ndarray], grid: Grid | None, num_classes: int) -> None:
    """Raises unless arrays have the shapes and numbers of examples."""
    count, num_glimpses = arrays["predictions"].shape
    parts = arrays["boxes"].shape[2]
    image_size = arrays["image"].shape[1:3] if grid is None else grid.image_size
    num_locations = 0 if grid is None else grid.num_locations
    shapes = {
        "image": (count, *image_size, 3),
        "label": (count,),
        "locations": (count, 0 if grid is None else num_glimpses),
        "confidences": (count, num_glimpses),
        "maps": (count, num_glimpses, num_locations),
        "boxes": (count, num_glimpses, parts, 4),
        "pixels": (count, num_glimpses),
        "view_sizes": (num_glimpses, parts, 2),
    }
    for name, shape in shapes.items():
        found = arrays[name].shape
        require(found == shape, f"'{name}' has the shape {found}, not {shape}")
    for name, limit in (
        ("locations", num_locations),
        ("pixels", 2**31),
        ("view_sizes", 2**15),
        ("predictions", num_classes),
        ("label", num_classes),
    ):
        numbers = arrays[name]
        require(numbers.dtype.kind == "i", f"'{name}' must hold whole numbers")
        require(bool(((numbers >= 0) & (numbers < limit)).all()), f"'{name}' must be from 0 to {limit - 1}")
    require(arrays["image"].dtype == np.uint8, "'image' must hold bytes")
    for name in ("confidences", "maps", "boxes"):
        finite = arrays[name].dtype.kind == "f" and bool(np.isfinite(arrays[name]).all())
        require(finite, f"'{name}' must hold finite numbers")
