"""STAM: an agent that classifies a scene it never sees whole, one glimpse at a time."""

from stam import weights
from stam.config import AgentConfig
from stam.errors import StamError
from stam.model.agent import Agent
from stam.model.episode import Trace
from stam.scene.grid import Grid
from stam.weights import load

__version__ = "0.1.0"

__all__ = ["Agent", "AgentConfig", "Grid", "StamError", "Trace", "load", "weights"]
