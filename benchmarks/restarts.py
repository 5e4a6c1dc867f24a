"""Kills processes of trainings under `torchrun --max-restarts`, and compares what is learned.

    python benchmarks/restarts.py --kills 20

One training by two processes is left alone. The others lose a process (SIGKILL) at a moment drawn anew, up to
three times each, until so many were killed. All must end with exactly the same metrics.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

MAX_RESTARTS = 3
SETTINGS = (
    *("--no-fit", "--image-size", "32", "--glimpse-size", "8", "--patch-size", "4", "--width", "32"),
    *("--depth", "2"),
    *("--num-heads", "2", "--actor-width", "32", "--critic-width", "16", "--num-glimpses", "3"),
    *("--epochs", "4", "--epoch-share", "1", "--batch-size", "8", "--resize-size", "None"),
    *("--init", "none", "--device", "cpu", "--num-workers", "1", "--no-check", "--save-minutes", "0"),
    *("--teacher-training.epochs", "2", "--teacher-training.batch-size", "8"),
    *("--teacher-training.warmup-epochs", "0", "--teacher-training.device", "cpu"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        draw_images(home / "images")
        started = time.monotonic()
        train(home, "undisturbed", [])
        usual = time.monotonic() - started
        wanted = metrics(home / "undisturbed")
        killed, number = 0, 0
        while killed < given.kills:
            number += 1
            planned = min(MAX_RESTARTS, given.kills - killed)
            deaths = train(home, f"run{number}", [draw.uniform(0, usual / 2) for _ in range(planned)], draw)
            killed += len(deaths)
            same = metrics(home / f"run{number}") == wanted
            print(json.dumps({"run": number, "killed after": deaths, "same metrics": same}), flush=True)
            if not same:
                raise SystemExit(f"run {number} learned something else")
    print(json.dumps({"killed": killed, "runs": number, "all the same": True}))


def draw_images(folder: Path) -> None:
    numbers = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 4)):
        for label in range(3):
            (folder / part / f"class{label}").mkdir(parents=True)
            for index in range(count):
                pixels = numbers.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / f"class{label}" / f"{index}.png")


def train(home: Path, name: str, delays: list[float], draw: random.Random | None = None) -> list[float]:
    """Trains in `home/name`, kills a process after each delay, and returns the delays that came to pass."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(MAX_RESTARTS))
    launch += ("--master-addr", "127.0.0.1", "--master-port", str(port), "--monitor-interval", "0.1")
    command = (sys.executable, *launch, "-m", "stam", "train", "tiny", str(home / "images"))
    command += ("--out", str(home / name), *SETTINGS)
    deaths = []
    with (home / f"{name}.log").open("w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log)
        for delay in delays:
            try:
                job.wait(delay)
                break  # it was faster
            except subprocess.TimeoutExpired:
                workers = children(job.pid)
                if workers and draw is not None:
                    os.kill(draw.choice(workers), signal.SIGKILL)
                    deaths.append(round(delay, 1))
        if job.wait() != 0:
            raise SystemExit(f"{name} failed:\n{(home / f'{name}.log').read_text()[-3000:]}")
    return deaths


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started and that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # gone meanwhile
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def metrics(folder: Path) -> list[str]:
    return [(folder / part / "metrics.jsonl").read_text() for part in ("", "teacher")]


if __name__ == "__main__":
    main()
