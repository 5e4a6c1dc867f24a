"""The web service: a page to watch an agent look, and an HTTP API for remote sensors."""

from stam.web.app import Service, create_app
from stam.web.limits import Limits
from stam.web.server import serve

__all__ = ["Limits", "Service", "create_app", "serve"]
