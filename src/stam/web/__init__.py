"""The web service: a page to watch an agent look, and an HTTP API for remote sensors."""

from stam.errors import require_package

for _name in ("fastapi", "uvicorn"):
    require_package(_name, extra="web")

from stam.web.app import Service, create_app  # noqa: E402
from stam.web.limits import Limits  # noqa: E402
from stam.web.server import serve  # noqa: E402

__all__ = ["Limits", "Service", "create_app", "serve"]
