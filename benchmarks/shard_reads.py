"""What a pass over indexed shards asks of a web server: requests, bytes and time, by the length of runs.

    python benchmarks/shard_reads.py --latency-ms 30 --workers 4

Made-up images are packed and served at 127.0.0.1 by a server that waits before each answer, as storage far
away does. They are read through fsspec, as from any URL: one by one; a request for each, but those of a batch
at the same time; and in runs. They are small pictures in large files, so that little but reading is measured.
Needs fsspec and aiohttp.
"""

import argparse
import http.server
import io
import json
import socketserver
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stam.data import BatchLoader, Scenes, batches, epoch_indices, open_scenes, prepare_shards


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Serves a folder, by ranges, and counts."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, root: Path, latency: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.latency = root, latency
        self.requests, self.bytes, self.lock = 0, 0, threading.Lock()

    def count(self, num_bytes: int) -> None:
        """Notes an answer."""
        with self.lock:
            self.requests += 1
            self.bytes += num_bytes


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        """Sends a file, or the range of it that is asked for."""
        path = self.server.root / Path(self.path).name
        time.sleep(self.server.latency)
        with path.open("rb") as file:
            asked = self.headers.get("Range")
            if asked:
                start, end = (int(number) for number in asked.removeprefix("bytes=").split("-"))
                file.seek(start)
                content = file.read(end + 1 - start)
            else:
                content = file.read()
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.server.count(len(content))

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def serving(root: Path, latency: float) -> Iterator[Server]:
    server = Server(root, latency)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def draw_images(folder: Path, count: int, num_bytes: int) -> None:
    """Draws small images, and puts zeros behind them that make files of so many bytes."""
    numbers = np.random.default_rng(0)
    for part, number in (("train", count), ("val", 2)):
        for label in range(2):
            (folder / part / f"class{label}").mkdir(parents=True)
            for index in range(number // 2):
                buffer = io.BytesIO()
                pixels = numbers.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(buffer, "JPEG")
                content = buffer.getvalue().ljust(num_bytes, b"\0")
                (folder / part / f"class{label}" / f"{index}.jpg").write_bytes(content)


class OneByOne:
    """Shards that are not read ahead."""

    def __init__(self, shards: Scenes) -> None:
        self.load, self.labels, self.classes, self.num = (
            shards.load,
            shards.labels,
            shards.classes,
            len(shards),
        )

    def __len__(self) -> int:
        return self.num


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--image-bytes", type=int, default=110_000, help="by default as ImageNet's")
    parser.add_argument("--batch", type=int, default=128, help="images of a batch in one process")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--latency-ms", type=float, default=30)
    parser.add_argument(
        "--runs", type=int, nargs="+", default=[0, 1, 8, 32], help="lengths of runs; 0: one by one"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        draw_images(home / "images", given.images, given.image_bytes)
        prepare_shards(open_scenes(home / "images"), home / "packed", shard_bytes=32_000_000)
        with serving(home / "packed", given.latency_ms / 1e3) as server:
            scenes = open_scenes(f"http://127.0.0.1:{server.server_port}").train
            for run_length in given.runs:
                order = epoch_indices(len(scenes), 0, 1.0, seed=0, run_length=run_length or 1)
                source: Any = scenes if run_length else OneByOne(scenes)
                server.requests = server.bytes = 0
                began = time.perf_counter()
                loader = BatchLoader(source, batches(order, given.batch), num_workers=given.workers)
                shown = sum(len(batch) for batch in loader)
                seconds = time.perf_counter() - began
                row = {"run": run_length or "one by one", "images": shown, "requests": server.requests}
                row |= {"MB": round(server.bytes / 1e6, 1), "images a second": round(shown / seconds)}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
