"""The web service in tests."""

import struct
import threading
import time
import zlib

from stam.web import Service
from stam.web.server import build_server, listen


def bomb(width=60_000, height=60_000) -> bytes:
    """A PNG of a few hundred bytes that says it is enormous."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 10_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


class RunningServer:
    """The service behind a real socket, as `stam serve` runs it."""

    def __init__(self, service: Service, **settings) -> None:
        self.listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        quiet = {"log_level": "critical", "timeout_graceful_shutdown": 1, "timeout_keep_alive": 120}
        self.server = build_server(service, **(quiet | settings))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})

    def __enter__(self) -> str:
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self.url

    def __exit__(self, *exception) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.listener.close()
