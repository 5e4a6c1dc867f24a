"""The web service: a page to watch an agent look, and an HTTP API for remote sensors."""

from stam.web.app import SceneService, Service, create_app
from stam.web.limits import Limits
from stam.web.looks import LookService, create_looks_app
from stam.web.server import serve

__all__ = ["Limits", "LookService", "SceneService", "Service", "create_app", "create_looks_app", "serve"]
