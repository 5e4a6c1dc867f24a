"""Live use: a session is fed one glimpse at a time and never sees the scene."""

from stam.live.pool import PoolFullError, SessionPool, UnknownSessionError
from stam.live.saving import load_session, save_session
from stam.live.session import (
    LiveLooker,
    LiveStep,
    Session,
    location_probabilities,
    observe_all,
)
from stam.scene.windows import Window, WindowSensor, look_through, scene_view, windows

__all__ = [
    "LiveLooker",
    "LiveStep",
    "PoolFullError",
    "Session",
    "SessionPool",
    "UnknownSessionError",
    "Window",
    "WindowSensor",
    "load_session",
    "location_probabilities",
    "look_through",
    "observe_all",
    "save_session",
    "scene_view",
    "windows",
]
