"""A session as one plain file: tensors and a JSON record, nothing that could run code."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from stam.config import AgentConfig, from_plain, to_plain
from stam.errors import StamError, WeightsError
from stam.files import save_content
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


def load_session(path: str | Path, agent: Looker, policy: Policy | None = None) -> Session:
    """Restores a session, which then goes on exactly as the saved one would have.

    Args:
        path: The file that `save_session` wrote.
        agent: The agent it was opened on; that another one was is noticed.
        policy: The policy, where the session was opened with one of the caller's own.
    """
    tensors, record = _read(Path(path))
    policy_name = record["policy"]
    if policy_name is None and policy is None:
        raise StamError(f"the session in '{path}' has a policy of its own: pass it as policy=")
    saved = from_plain(AgentConfig, record["agent"])  # what is newer than the file has its default
    if _of_glimpses(saved) != _of_glimpses(agent.config):
        raise WeightsError(f"the session in '{path}' was opened on another agent: load that one")
    generator = torch.Generator()
    generator.set_state(tensors["generator"])
    session = Session(
        agent, record["first_location"], policy or policy_name, generator, threshold=record["threshold"]
    )
    locations = tensors["locations"].tolist()
    glimpses = {
        location: pixels.to(agent.device)
        for location, pixels in zip(locations, tensors["glimpses"], strict=True)
    }
    session.resume(glimpses, frozenset(tensors["missed"].tolist()), record["location"])
    if session.step is not None:
        difference = (session.step.probabilities.cpu() - tensors["probabilities"]).abs().max()
        if not difference <= _SAME_BELIEF:
            raise WeightsError(
                f"the session in '{path}' was opened on an agent of the same shape with other weights: "
                f"its probabilities differ by {float(difference):.2g}"
            )
    return session


def _of_glimpses(config: AgentConfig) -> AgentConfig:
    """Leaves out what says nothing of how glimpses are taken in: two sessions may differ in that."""
    return replace(config, labels=(), threshold=0.0, preprocess_size=None)


def _read(path: Path) -> tuple[dict[str, Tensor], dict]:
    if not path.is_file():
        raise StamError(f"no session at '{path}': check the path")
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {})[FORMAT])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise StamError(f"'{path}' is not a saved session, or is damaged: {error}") from error
    version = str(record.get("format_version"))
    if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise StamError(f"'{path}' has format {version}, this reads {FORMAT_VERSION}: upgrade stam-vision")
    return tensors, record
