"""A remote sensor that talks to `stam serve` over HTTP, with nothing but Python's standard library.

    stam serve RUN --port 8000
    python examples/http_client.py http://127.0.0.1:8000

The scene here is one of the service's own samples; put your sensor in the place of `sense`.
"""

import io
import json
import sys
import time
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from PIL import Image


def call(method: str, url: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
    """Makes a request; an answer of 4xx is raised as urllib's HTTPError, its body says what was wrong."""
    with urlopen(Request(url, body, {"Content-Type": kind}, method=method), timeout=60) as answer:
        return answer.read()


def post_glimpse(session: str, num_glimpses: int, pixels: bytes, attempts_left: int = 4) -> dict:
    """Posts a glimpse, again where no answer comes: by `num_glimpses` the service knows one sent twice."""
    try:
        url = f"{session}/glimpses?num_glimpses={num_glimpses}"
        return json.loads(call("POST", url, pixels, "image/png"))
    except HTTPError:
        raise  # an answer, if not the one hoped for
    except (OSError, HTTPException):  # no whole answer: refused, broken off, or too late
        if attempts_left == 0:
            raise
        time.sleep(0.2)
        return post_glimpse(session, num_glimpses, pixels, attempts_left - 1)


def main(service: str) -> None:
    """Looks at the first sample scene."""
    agent = json.loads(call("GET", f"{service}/api/agent"))
    height, width = agent["grid"]["glimpse_size"]
    scene = Image.open(io.BytesIO(call("GET", f"{service}/api/scenes/0"))).convert("RGB")

    def sense(row: int, column: int) -> bytes:
        buffer = io.BytesIO()
        left, top = column * width, row * height
        scene.crop((left, top, left + width, top + height)).save(buffer, "PNG")
        return buffer.getvalue()

    session = json.loads(call("POST", f"{service}/api/sessions", b"{}"))
    address, location = f"{service}/api/sessions/{session['id']}", session["location"]
    num_glimpses = 0
    while True:
        step = post_glimpse(address, num_glimpses, sense(*location))
        num_glimpses = step["num_glimpses"]
        print(f"{num_glimpses:2} at {location}: {step['label']}, {step['confidence']:.0%} sure")
        if step["stop"]:
            break
        location = step["location"]
    call("DELETE", address)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
