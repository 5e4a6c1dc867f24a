"""A session as one plain file: tensors and a JSON record, nothing that could run code."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from stam.config import AgentConfig, from_plain, to_plain
from stam.errors import ConfigError, FileError, StamError, WeightsError, require
from stam.files import parse_json, save_content
from stam.live.session import Session
from stam.model.agent import Looker
from stam.model.policy import Policy

FORMAT = "stam-session"
FORMAT_VERSION = "1.0"
_SAME_BELIEF = 1e-3  # another batch or machine rounds differently; other weights differ by more


def save_session(session: Session, path: str | Path) -> None:
    """Writes a session to a file, to be continued later with `load_session`.

    The file holds the glimpses, where they were sensed, what was missed, where to look next, the threshold,
    the policy's name and the state of the random numbers. It appears whole or not at all.
    """
    now = session.snapshot
    config = session.agent.config
    glimpses = [pixels.cpu() for pixels in now.glimpses.values()]
    tensors = {
        "glimpses": torch.stack(glimpses)
        if glimpses
        else torch.zeros(0, config.channels, *session.agent.grid.glimpse_size),
        "locations": torch.tensor(list(now.glimpses), dtype=torch.long),
        "missed": torch.tensor(sorted(now.missed), dtype=torch.long),
        "generator": session.generator.get_state(),
        "probabilities": torch.zeros(0) if now.step is None else now.step.probabilities.cpu(),
    }
    record = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "agent": to_plain(config),
        "policy": session.policy_name,
        "threshold": session.threshold,
        "first_location": session.first_location,
        "location": now.location,
    }
    save_content(path, save(tensors, metadata={FORMAT: json.dumps(record)}))


@dataclass(frozen=True)
class _Record:
    """What a file says of its session beside the tensors."""

    format: str
    format_version: str
    agent: AgentConfig
    policy: str | None
    threshold: float
    first_location: int
    location: int | None


def load_session(path: str | Path, agent: Looker, policy: Policy | None = None) -> Session:
    """Restores a session, which then goes on exactly as the saved one would have.

    Args:
        path: The file that `save_session` wrote.
        agent: The agent it was opened on; that another one was is noticed.
        policy: The policy, where the session was opened with one of the caller's own.
    """
    path = Path(path)
    if not path.is_file():
        raise StamError(f"no session at '{path}': check the path")
    try:
        with safe_open(path, framework="pt") as file:
            record = _read_record(file.metadata() or {})
            _require_same_agent(record.agent, agent.config, path)
            tensors = _read_tensors(file, agent.config)
        generator = torch.Generator()
        generator.set_state(tensors["generator"])
    except (SafetensorError, FileError, ConfigError, OSError, RuntimeError, MemoryError) as error:
        raise StamError(f"'{path}' is not a saved session, or is damaged: {error}") from error
    if record.policy is None and policy is None:
        raise StamError(f"the session in '{path}' has a policy of its own: pass it as policy=")
    session = Session(
        agent, record.first_location, policy or record.policy, generator, threshold=record.threshold
    )
    locations, missed = tensors["locations"].tolist(), frozenset(tensors["missed"].tolist())
    _require_places(locations, missed, record.location, agent.grid.num_locations, path)
    glimpses = {
        location: pixels.to(agent.device)
        for location, pixels in zip(locations, tensors["glimpses"], strict=True)
    }
    session.resume(glimpses, missed, record.location)
    if session.step is not None:
        difference = (session.step.probabilities.cpu() - tensors["probabilities"]).abs().max()
        if not difference <= _SAME_BELIEF:
            raise WeightsError(
                f"the session in '{path}' was opened on an agent of the same shape with other weights: "
                f"its probabilities differ by {float(difference):.2g}"
            )
    return session


def _read_record(metadata: dict[str, str]) -> _Record:
    require(FORMAT in metadata, f"it has no {FORMAT}")
    values = parse_json(metadata[FORMAT], "its record")
    version = str(values.get("format_version")) if isinstance(values, dict) else ""
    if version and version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise ConfigError(f"it has format {version:.40}, this reads {FORMAT_VERSION}: upgrade stam-vision")
    return from_plain(_Record, values)  # what is newer in an agent than the file has its default


def _read_tensors(file: Any, config: AgentConfig) -> dict[str, Tensor]:
    """Reads the tensors of a session after looking at their sizes."""
    found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    require(found.keys() == set(_NAMES), f"it holds {', '.join(sorted(found))}"[:200])
    count, missed = found["locations"][:1], found["missed"][:1]
    most, num_classes = config.grid.num_locations, config.num_classes
    expected = {
        "glimpses": (*count, config.channels, *config.grid.glimpse_size),
        "locations": count,
        "missed": missed,
        "generator": tuple(torch.Generator().get_state().shape),
        "probabilities": (num_classes,) if any(count) else (0,),
    }
    few = len(count) == len(missed) == 1 and max(count[0], missed[0]) <= most
    require(few, f"it has more glimpses than the {most} of a scene")
    for name, shape in expected.items():
        require(found[name] == shape, f"'{name}' has the shape {found[name]}, not {shape}")
    tensors = {}
    for name in _NAMES:
        tensor = file.get_tensor(name)
        sound = tensor.dtype == _WHOLE[name] if name in _WHOLE else tensor.is_floating_point()
        require(sound, f"'{name}' holds {tensor.dtype}")
        tensors[name] = tensor if name in _WHOLE else tensor.float()
        require(bool(tensors[name].isfinite().all()), f"'{name}' holds numbers that are not finite")
    return tensors


_WHOLE = {"locations": torch.int64, "missed": torch.int64, "generator": torch.uint8}
_NAMES = ("glimpses", "probabilities", *_WHOLE)


def _require_places(
    locations: list[int], missed: frozenset[int], location: int | None, num_locations: int, path: Path
) -> None:
    """Raises unless locations are on the grid, and each is what it is said to be only once."""
    seen = set(locations)
    places = [*locations, *missed, *([] if location is None else [location])]
    sound = all(0 <= place < num_locations for place in places) and len(seen) == len(locations)
    sound = sound and not seen & missed and location not in seen
    if not sound or (location is None) != (len(seen) == num_locations):
        raise StamError(f"'{path}' is not a saved session, or is damaged: its locations cannot be")


def _require_same_agent(saved: AgentConfig, own: AgentConfig, path: Path) -> None:
    if _of_glimpses(saved) != _of_glimpses(own):
        raise WeightsError(f"the session in '{path}' was opened on another agent: load that one")


def _of_glimpses(config: AgentConfig) -> AgentConfig:
    """Leaves out what says nothing of how glimpses are taken in: two sessions may differ in that."""
    return replace(config, labels=(), threshold=0.0, preprocess_size=None)
