"""STAM: an agent that classifies a scene it never sees whole, one glimpse at a time."""

from stam import weights
from stam.agent import Agent
from stam.config import AgentConfig
from stam.episode import Trace
from stam.errors import StamError
from stam.grid import Grid
from stam.weights import load

__version__ = "0.1.0"

__all__ = ["Agent", "AgentConfig", "Grid", "StamError", "Trace", "load", "weights"]
