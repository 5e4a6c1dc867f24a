"""One step of an agent as an ONNX graph, to be run where there is no PyTorch.

Inputs: `glimpses` (batch, n, channels, height, width), normalised floats, and `locations` (batch, n), int64
grid indices. Outputs: `probabilities` (batch, classes), calibrated if the agent is, and `policy`
(batch, locations), how likely each location comes next, 0 where it was seen. Batch and n are free. The most
likely location is the one to look at next.
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

from stam.errors import StamError, require_package
from stam.files import save_content
from stam.model.agent import Agent
from stam.shapes import Float, Int

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


def metadata(agent: Agent) -> dict[str, Any]:
    """Returns what a runner needs to know beside the graph."""
    config, grid = agent.config, agent.grid
    return {
        "version": METADATA_VERSION,
        "rows": grid.rows,
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
    grid = agent.grid
    glimpses = torch.zeros(2, 3, agent.config.channels, *grid.glimpse_size, device=agent.device)
    locations = torch.tensor([[0, 1, 2], [2, 1, 0]], device=agent.device) % grid.num_locations
    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("num_glimpses")}
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            StepGraph(agent).eval(),
            (glimpses, locations),
            input_names=["glimpses", "locations"],
            output_names=["probabilities", "policy"],
            dynamic_shapes={"glimpses": dynamic, "locations": dynamic},
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, {METADATA_KEY: json.dumps(metadata(agent))})
    model.producer_name = "stam-vision"
    save_content(path, model.SerializeToString())


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
        return max(self.probabilities, self.policy) <= TOLERANCE


@torch.no_grad()
def check_parity(agent: Agent, path: str | Path, num_episodes: int = 100, seed: int = 0) -> Parity:
    """Runs episodes over random scenes with both, and compares them after every glimpse.

    Where the agent looks is decided by ONNX; PyTorch is shown the same glimpses.
    """
    runtime = require_package("onnxruntime", extra="export")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    graph, grid = StepGraph(agent), agent.grid
    generator = torch.Generator().manual_seed(seed)
    scenes = torch.randn(num_episodes, agent.config.channels, *grid.image_size, generator=generator)
    locations = torch.randint(grid.num_locations, (num_episodes, 1), generator=generator)
    largest = torch.zeros(2)
    while True:
        glimpses = grid.cut(scenes, locations)
        outputs = session.run(None, {"glimpses": glimpses.numpy(), "locations": locations.numpy()})
        got = [torch.from_numpy(output) for output in outputs]
        want = [output.cpu() for output in graph(glimpses.to(agent.device), locations.to(agent.device))]
        gaps = [(a - b).abs().max() for a, b in zip(got, want, strict=True)]
        largest = torch.maximum(largest, torch.stack(gaps))
        if locations.shape[1] == grid.num_locations:
            return Parity(num_episodes, *largest.tolist())
        locations = torch.cat((locations, got[1].argmax(dim=1, keepdim=True)), dim=1)
