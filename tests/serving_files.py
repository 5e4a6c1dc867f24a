"""A folder behind HTTP on this machine, as a web server or an object store has it."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class FileServer(http.server.ThreadingHTTPServer):
    """Serves a folder by ranges and notes every request: method, path, range."""

    daemon_threads = True

    def __init__(self, root: Path, by_ranges: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.by_ranges = root, by_ranges
        self.requests: list[tuple[str, str, str | None]] = []
        self.failures = 0  # how many of the next requests are answered 503

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        name = self.path.partition("?")[0].lstrip("/")
        asked = self.headers.get("Range") if self.server.by_ranges else None
        self.server.requests.append((self.command, name, asked))
        path = self.server.root / name
        if self.server.failures:
            self.server.failures -= 1
            return self._send(503, b"", with_body)
        if not path.is_file():
            return self._send(404, b"", with_body)
        content, total = path.read_bytes(), path.stat().st_size
        if asked is None:
            return self._send(200, content, with_body, path)
        first, last = (int(number or total - 1) for number in asked.removeprefix("bytes=").split("-"))
        place = f"bytes {first}-{min(last, total - 1)}/{total}"
        return self._send(206, content[first : last + 1], with_body, path, place)

    def _send(
        self, status: int, content: bytes, with_body: bool, path: Path | None = None, place: str = ""
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if path is not None:
            self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        if place:
            self.send_header("Content-Range", place)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(root: Path, by_ranges: bool = True) -> Iterator[FileServer]:
    """Serves a folder for as long as the context lasts."""
    with FileServer(root, by_ranges) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
