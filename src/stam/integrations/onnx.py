"""One step of an agent as an ONNX graph, to be run where there is no PyTorch.

Inputs: `glimpses` (batch, n, channels, height, width), normalised floats, and `locations` (batch, n), int64
grid indices. Outputs: `probabilities` (batch, classes), calibrated if the agent is, and `policy`
(batch, locations), how likely each location comes next, 0 where it was seen. Batch and n are free. The most
likely location is the one to look at next.

Of an agent with a causal core the graph takes one glimpse at a time (n is 1) and carries what it keeps of the
earlier ones. Two more inputs, `seen` (batch, locations) and `cache` (depth, 2, batch, heads, patches, head
width), are the outputs `new_seen` and `new_cache` of the step before. At first nothing is seen, and the cache
has no patches.
"""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stam.config import AgentConfig
from stam.errors import StamError, require_package
from stam.files import save_content
from stam.model.agent import Agent
from stam.model.causal import CausalMemory
from stam.shapes import Bool, Float, Int

METADATA_KEY = "stam"
METADATA_VERSION = "1.1"
TOLERANCE = 1e-4
_OPSET = 18


class StepGraph(nn.Module):
    """An agent's step as a function of everything observed so far."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent

    def forward(
        self,
        glimpses: Float[Tensor, "batch glimpses channels height width"],
        locations: Int[Tensor, "batch glimpses"],
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch locations"]]:
        """Returns the probabilities of the classes and of the next location."""
        agent = self.agent
        positions = agent.positions[locations].flatten(1)
        belief = agent.believe(agent.core.remember(None, agent.grid.patches(glimpses), positions))
        unseen = torch.ones(locations.shape[0], agent.grid.num_locations, device=locations.device)
        seen = unseen.scatter(1, locations, 0.0) == 0
        policy = agent.policy().probabilities(belief.state, seen)
        return belief.probabilities(agent.config.temperature), policy


class CachedStepGraph(nn.Module):
    """A step of an agent with a causal core, as a function of one glimpse and what it keeps of the others."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent

    def forward(
        self,
        glimpses: Float[Tensor, "batch 1 channels height width"],
        locations: Int[Tensor, "batch 1"],
        seen: Bool[Tensor, "batch locations"],
        cache: Float[Tensor, "depth 2 batch heads patches head_width"],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the probabilities of the classes and of the next location, and what to pass on."""
        agent = self.agent
        before = CausalMemory(cache, cache.new_zeros(locations.shape[0], 2, agent.config.width))
        memory = agent.remember(before, glimpses[:, 0], locations[:, 0])
        belief = agent.believe(memory)
        unseen = torch.ones(locations.shape[0], agent.grid.num_locations, device=locations.device)
        seen = seen | (unseen.scatter(1, locations, 0.0) == 0)
        policy = agent.policy().probabilities(belief.state, seen)
        return belief.probabilities(agent.config.temperature), policy, seen, memory.cache


def empty_state(config: AgentConfig, batch_size: int) -> tuple[Tensor, Tensor]:
    """Returns what the graph of a causal core begins with: nothing seen, and an empty cache."""
    seen = torch.zeros(batch_size, config.grid.num_locations, dtype=torch.bool)
    heads, head_width = config.num_heads, config.width // config.num_heads
    return seen, torch.zeros(config.depth, 2, batch_size, heads, 0, head_width)


def metadata(agent: Agent) -> dict[str, Any]:
    """Returns what a runner needs to know beside the graph."""
    config, grid = agent.config, agent.grid
    return {
        "version": METADATA_VERSION,
        "rows": grid.rows,
        "first_location": agent.first_location,
        "columns": grid.columns,
        "image_size": list(grid.image_size),
        "glimpse_size": list(grid.glimpse_size),
        "channels": config.channels,
        "mean": list(config.mean),
        "std": list(config.std),
        "preprocess_size": config.preprocess_size,
        "labels": list(agent.labels),
        "threshold": config.threshold,
        "temperature": config.temperature,
        "policy": config.policy,
        "core": config.core,
        "cache": list(empty_state(config, 1)[1].shape) if config.core == "causal" else None,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what the exporter says about its own insides and about packages it does not need."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def export_onnx(agent: Agent, path: str | Path) -> None:
    """Writes an agent's step as one ONNX file, its metadata as JSON under the key `stam`.

    Args:
        agent: The agent, in evaluation mode.
        path: Where to; a file there is replaced once the new one is whole.
    """
    onnx = require_package("onnx", extra="export")
    require_package("onnxscript", extra="export")
    if agent.training:
        raise StamError("the agent is in training mode: call agent.eval() before exporting it")
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise StamError(f"could not write '{path}': its folder does not exist")
    graph, inputs, shapes, outputs = _traced(agent)
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            graph.eval(),
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=shapes,
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, {METADATA_KEY: json.dumps(metadata(agent))})
    model.producer_name = "stam-vision"
    save_content(path, model.SerializeToString())


def _traced(agent: Agent) -> tuple[nn.Module, dict[str, Tensor], dict[str, dict[int, Any]], list[str]]:
    """Returns the graph to export, inputs to trace it with, their sizes that are free, and its outputs."""
    grid, batch = agent.grid, torch.export.Dim("batch")
    locations = torch.tensor([[0, 1, 2], [2, 1, 0]], device=agent.device) % grid.num_locations
    glimpses = torch.zeros(2, 3, agent.config.channels, *grid.glimpse_size, device=agent.device)
    if agent.config.core != "causal":
        free = {0: batch, 1: torch.export.Dim("num_glimpses")}
        inputs = {"glimpses": glimpses, "locations": locations}
        return StepGraph(agent), inputs, dict.fromkeys(inputs, free), ["probabilities", "policy"]
    seen, empty = (part.to(agent.device) for part in empty_state(agent.config, 2))
    inputs = {
        "glimpses": glimpses[:, :1],
        "locations": locations[:, :1],
        "seen": seen,
        "cache": nn.functional.pad(empty, (0, 0, 0, 2 * grid.patches_per_glimpse)),
    }
    shapes: dict[str, dict[int, Any]] = {name: {0: batch} for name in ("glimpses", "locations", "seen")}
    shapes["cache"] = {2: batch, 4: torch.export.Dim("num_patches")}
    outputs = ["probabilities", "policy", "new_seen", "new_cache"]
    return CachedStepGraph(agent), inputs, shapes, outputs


@dataclass(frozen=True)
class Parity:
    """The largest differences between ONNX and PyTorch over whole episodes.

    Attributes:
        num_episodes: Episodes compared, each at every count of glimpses.
        probabilities: Largest difference of a class probability.
        policy: Largest difference of a location's probability.
    """

    num_episodes: int
    probabilities: float
    policy: float

    @property
    def ok(self) -> bool:
        """Whether both are within the tolerance of 1e-4."""
        return self.probabilities <= TOLERANCE and self.policy <= TOLERANCE  # false for what is no number


@torch.no_grad()
def check_parity(agent: Agent, path: str | Path, num_episodes: int = 100, seed: int = 0) -> Parity:
    """Runs episodes over random scenes with both, and compares them after every glimpse.

    Where the agent looks is decided by ONNX; PyTorch is shown the same glimpses.
    """
    runtime = require_package("onnxruntime", extra="export")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    grid, steps = agent.grid, (_OnnxSteps(session, agent, num_episodes), _TorchSteps(agent))
    generator = torch.Generator().manual_seed(seed)
    scenes = torch.randn(num_episodes, agent.config.channels, *grid.image_size, generator=generator)
    locations = torch.randint(grid.num_locations, (num_episodes, 1), generator=generator)
    largest = torch.zeros(2)
    while True:
        got, want = (step(grid.cut(scenes, locations), locations) for step in steps)
        gaps = [(a - b).abs().max() for a, b in zip(got, want, strict=True)]
        largest = torch.maximum(largest, torch.stack(gaps))
        if locations.shape[1] == grid.num_locations:
            return Parity(num_episodes, *largest.tolist())
        locations = torch.cat((locations, got[1].argmax(dim=1, keepdim=True)), dim=1)


class _OnnxSteps:
    """An exported agent, step by step."""

    def __init__(self, session: Any, agent: Agent, batch_size: int) -> None:
        self._session = session
        is_causal = agent.config.core == "causal"
        self._kept: tuple[Tensor, ...] = empty_state(agent.config, batch_size) if is_causal else ()

    def __call__(self, glimpses: Tensor, locations: Tensor) -> list[Tensor]:
        """Returns what it says to the latest of all glimpses so far."""
        if self._kept:
            glimpses, locations = glimpses[:, -1:], locations[:, -1:]
        names = [given.name for given in self._session.get_inputs()]
        given = zip(names, (glimpses, locations, *self._kept), strict=True)
        outputs = self._session.run(None, {name: tensor.contiguous().numpy() for name, tensor in given})
        probabilities, policy, *kept = map(torch.from_numpy, outputs)
        self._kept = tuple(kept)
        return [probabilities, policy]


class _TorchSteps:
    """An agent, step by step."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._memory = agent, None

    def __call__(self, glimpses: Tensor, locations: Tensor) -> list[Tensor]:
        """Returns what it says to the latest of all glimpses so far."""
        agent, places = self._agent, locations.to(self._agent.device)
        self._memory = agent.remember(self._memory, glimpses[:, -1].to(agent.device), places[:, -1])
        belief = agent.believe(self._memory)
        seen = torch.zeros(len(places), agent.grid.num_locations, dtype=torch.bool, device=agent.device)
        policy = agent.policy().probabilities(belief.state, seen.scatter(1, places, True))
        return [belief.probabilities(agent.config.temperature).cpu(), policy.cpu()]
