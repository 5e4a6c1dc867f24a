"""Live use: a session is fed one glimpse at a time and never sees the scene."""

from stam.live.pool import PoolFullError, SessionPool, UnknownSessionError
from stam.live.saving import load_session, save_session
from stam.live.session import AllSeenError, LiveStep, OutOfStepError, Session, observe_all
from stam.live.through import look_through, scene_view
from stam.scene.windows import Window, WindowSensor, windows

__all__ = [
    "AllSeenError",
    "LiveStep",
    "OutOfStepError",
    "PoolFullError",
    "Session",
    "SessionPool",
    "UnknownSessionError",
    "Window",
    "WindowSensor",
    "load_session",
    "look_through",
    "observe_all",
    "save_session",
    "scene_view",
    "windows",
]
