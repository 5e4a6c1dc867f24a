"""What `stam serve` costs over HTTP: latency of 1 and of 200 clients, and its memory.

    python benchmarks/server.py latency --seconds 20
    python benchmarks/server.py memory --glimpses 100000
    python benchmarks/server.py uploads

The service runs in a process of its own and is called over 127.0.0.1 on connections that are kept open. Every
client looks at one scene after another, 1 to `--max-glimpses` of each, as fast as it is answered. Weights are
random: the time does not depend on them.
"""

import argparse
import asyncio
import io
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from live_latency import build, percentile
from PIL import Image

from stam.cli.serve import default_threads
from stam.web import Limits, Service
from stam.web import server as web_server


class Connection:
    """A minimal HTTP/1.1 client: what a request costs is the service's time, not the client's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        """Connects to the service."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Makes a request and returns the body of the answer."""
        kind = {"glimpses": "application/octet-stream", "view": "image/png"}.get(
            path.rpartition("/")[2].partition("?")[0], "application/json"
        )
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
        self.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await self.reader.readuntil(b"\r\n\r\n")
        status, _, headers = answer.partition(b"\r\n")
        length = headers.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        content = await self.reader.readexactly(int(length or 0))
        if status.split()[1][:1] != b"2":
            raise RuntimeError(f"{method} {path}: {status.decode()} {content.decode()}")
        return content


class Load:
    """Clients that look at scenes until told to stop, and how long each answer took them."""

    def __init__(self, port: int, glimpse_bytes: int, max_glimpses: int) -> None:
        self.port, self.max_glimpses = port, max_glimpses
        self.pixels = np.random.default_rng(0).integers(0, 256, (64, glimpse_bytes), dtype=np.uint8)
        self.glimpse_seconds: list[float] = []
        self.get_seconds: list[float] = []
        self.num_glimpses = 0
        self.stopped = False
        self.asks = True  # for the state of a session after each glimpse

    async def client(self, seed: int) -> None:
        """Looks at one scene after another."""
        draw = random.Random(seed)
        connection = await Connection.open(self.port)
        while not self.stopped:
            session = json.loads(await connection.request("POST", "/api/sessions", b"{}"))
            path = f"/api/sessions/{session['id']}"
            for count in range(draw.randint(1, self.max_glimpses)):
                body = self.pixels[draw.randrange(64)].tobytes()
                started = time.perf_counter()
                await connection.request("POST", f"{path}/glimpses?num_glimpses={count}", body)
                posted = time.perf_counter()
                self.glimpse_seconds.append(posted - started)
                if self.asks:
                    await connection.request("GET", path)
                    self.get_seconds.append(time.perf_counter() - posted)
                self.num_glimpses += 1
                if self.stopped:
                    break
            await connection.request("DELETE", path)
        connection.writer.close()

    async def run(self, num_clients: int, seconds: float) -> None:
        """Has many clients look for some seconds, after a second that does not count."""
        clients = [asyncio.create_task(self.client(seed)) for seed in range(num_clients)]
        await asyncio.sleep(min(1.0, seconds / 4))  # the first answers find caches cold
        self.glimpse_seconds.clear()
        self.get_seconds.clear()
        self.num_glimpses = 0
        await asyncio.sleep(seconds)
        self.stopped = True
        await asyncio.gather(*clients)


def milliseconds(seconds: list[float]) -> dict[str, float]:
    return {name: round(1e3 * percentile(seconds, share), 2) for name, share in (("p50", 0.5), ("p99", 0.99))}


def latency(given: argparse.Namespace) -> None:
    """Rounds in turn with and without TCP_NODELAY, so that both meet the same other load."""
    for num_clients in given.clients:
        rounds: dict[bool, list[Load]] = {True: [], False: []}
        for _ in range(given.rounds):
            for nodelay in (True, False):
                with serving(given, ["--nagle"] * (not nodelay)) as (_, port, glimpse_bytes):
                    load = Load(port, glimpse_bytes, given.max_glimpses)
                    asyncio.run(load.run(num_clients, given.seconds))
                    rounds[nodelay].append(load)
        for nodelay, loads in rounds.items():
            glimpses = [value for load in loads for value in load.glimpse_seconds]
            gets = [value for load in loads for value in load.get_seconds]
            row = {"size": given.size, "clients": num_clients, "TCP_NODELAY": nodelay}
            row |= {"glimpse ms": milliseconds(glimpses), "GET ms": milliseconds(gets)}
            row["glimpses a second"] = round(len(glimpses) / (given.seconds * given.rounds), 1)
            print(json.dumps(row), flush=True)


def memory(given: argparse.Namespace) -> None:
    """Resident memory of the service, every `--every` glimpses."""
    arguments = ["--keep-freed-memory"] * given.keep_freed_memory
    with serving(given, arguments) as (process, port, glimpse_bytes):
        load = Load(port, glimpse_bytes, given.max_glimpses)
        load.asks = False

        async def watch() -> None:
            clients = [asyncio.create_task(load.client(seed)) for seed in range(given.clients[0])]
            started, reported = time.perf_counter(), -1
            while load.num_glimpses < given.glimpses:
                await asyncio.sleep(0.2)
                load.glimpse_seconds.clear()
                load.get_seconds.clear()
                if load.num_glimpses // given.every > reported:
                    reported = load.num_glimpses // given.every
                    row = {"glimpses": load.num_glimpses, "MiB": resident_mib(process.pid)}
                    print(json.dumps(row | {"seconds": round(time.perf_counter() - started, 1)}), flush=True)
            load.stopped = True
            await asyncio.gather(*clients)

        asyncio.run(watch())
        print(json.dumps({"glimpses": load.num_glimpses, "MiB": resident_mib(process.pid)}))


def uploads(given: argparse.Namespace) -> None:
    """Peak memory of the service while many images of 40 megapixels, 40 kB each, are uploaded at once."""
    buffer = io.BytesIO()
    Image.new("RGBA", (8000, 5000), "red").save(buffer, "PNG")
    with serving(given, []) as (process, port, _):
        before = resident_mib(process.pid)

        async def upload() -> str:
            connection = await Connection.open(port)
            try:
                await connection.request("POST", "/api/view", buffer.getvalue())
                return "taken"
            except RuntimeError as error:
                return str(error).split()[3]

        async def all_of_them() -> list[str]:
            return await asyncio.gather(*(upload() for _ in range(given.clients[0])))

        answers = asyncio.run(all_of_them())
        peak = Path(f"/proc/{process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
        counts = {answer: answers.count(answer) for answer in sorted(set(answers))}
        print(json.dumps({"before MiB": before, "peak MiB": int(peak) // 1024, "answers": counts}))


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


@contextmanager
def serving(
    given: argparse.Namespace, arguments: list[str]
) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Runs this script's service in a process of its own."""
    command = [sys.executable, __file__, "serve", "--size", given.size, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = json.loads(process.stdout.readline())
            yield process, ready["port"], ready["glimpse bytes"]
        finally:
            process.terminate()


def serve(given: argparse.Namespace) -> None:
    """The service as `stam serve` runs it, or with what it improves left out."""
    agent = build(given.size)
    torch.set_num_threads(default_threads(agent.config.width))
    if given.nagle:  # the protocol is not named, and asyncio leaves the socket as it is
        web_server.listen = lambda host, port: socket.create_server((host, port), backlog=512)
    if given.keep_freed_memory:
        web_server.return_freed_memory = web_server.keep_large_blocks_apart = lambda: None
    height, width = agent.grid.glimpse_size

    def ready(url: str) -> None:
        port = int(url.rpartition(":")[2])
        print(json.dumps({"port": port, "glimpse bytes": height * width * agent.config.channels}), flush=True)

    service = Service(agent, "benchmark", Limits(max_sessions=1000, max_connections=1000))
    web_server.serve(service, port=0, on_ready=ready)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("latency", "memory", "uploads", "serve"))
    parser.add_argument("--size", choices=("least", "digits", "tiny", "small", "base"), default="digits")
    parser.add_argument(
        "--clients", type=int, nargs="+", help="by default 1 and 200; 16 and 8 for memory, uploads"
    )
    parser.add_argument("--seconds", type=float, default=10, help="of each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-glimpses", type=int, default=16, help="of a scene")
    parser.add_argument("--glimpses", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=5_000)
    parser.add_argument("--nagle", action="store_true", help="serve: without TCP_NODELAY")
    parser.add_argument("--keep-freed-memory", action="store_true", help="leave freed memory to malloc")
    given = parser.parse_args()
    given.clients = given.clients or {"memory": [16], "uploads": [8]}.get(given.what, [1, 200])
    {"latency": latency, "memory": memory, "uploads": uploads, "serve": serve}[given.what](given)


if __name__ == "__main__":
    main()
