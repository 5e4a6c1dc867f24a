"""Training through `torch.distributed` beside ordinary training: losses, weights and speed.

    python benchmarks/distributed.py --size small --batch 1024

One process on one GPU, by default: with NCCL every exchange is made, though nobody else is there, and is
captured in the CUDA graph of a batch. With more GPUs, `--processes 4`. Every way of training runs in a
process of its own, from the same weights, through the same batches; the others are compared with the first.
How far the weights of two ways lie apart is given as a share of how far they moved: rounding alone sets plain
and fused modules apart.
`--device cpu --processes 2 --size tiny --batch 8 --glimpses 2` tries the script without a GPU.
"""

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from stam.config import CORES, AgentConfig
from stam.errors import StamError
from stam.evaluation.speed import make_learner
from stam.learning import distributed
from stam.learning.loop import Place
from stam.learning.optimisation import choose_device
from stam.learning.timing import synchronise
from stam.learning.training import AgentLearner
from stam.settings import ACTOR_OBJECTIVES, RunConfig, TrainingConfig

WAYS = {  # name: through torch.distributed, fused kernels, a CUDA graph
    "alone, graph": (False, True, True),
    "alone, no graph": (False, True, False),
    "alone, plain modules": (False, False, False),
    "distributed, no graph": (True, True, False),
    "distributed, graph": (True, True, True),
}
WARM_UP = 3  # the first batch compiles, the second is captured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=1, help="of the distributed ways")
    parser.add_argument("--size", default="small")
    parser.add_argument("--core", default="reencoding", choices=CORES)
    parser.add_argument("--actor-objective", default="actor-critic", choices=ACTOR_OBJECTIVES)
    parser.add_argument("--batch", type=int, default=1024, help="images of all processes")
    parser.add_argument("--glimpses", type=int, default=21)
    parser.add_argument("--precision", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--compared", type=int, default=6, help="batches whose losses are compared")
    parser.add_argument("--timed", type=int, default=10, help="batches that are timed after them")
    parser.add_argument("--seconds", type=float, default=240, help="the most that one way may take")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--work", help="one way; for the script itself")
    parser.add_argument("--out", type=Path, help="for the script itself")
    given = parser.parse_args()
    if given.work:
        work(given)
        return
    try:
        choose_device(given.device)
    except StamError as error:
        parser.error(str(error))
    if given.batch % given.processes:
        parser.error(f"--batch {given.batch} cannot be shared by {given.processes} processes")
    with tempfile.TemporaryDirectory() as folder:
        compare(given, Path(folder))


def compare(given: argparse.Namespace, folder: Path) -> None:
    """Runs every way and prints the table."""
    head = f"{'':<22} {'img/s':>8} {'graph':>6} {'exchange':>9} {'first batch':>12} {'GiB':>6}"
    print(f"{head} {'weights apart':>14}  losses apart, batch by batch")
    reference: dict[str, Any] | None = None
    for index, name in enumerate(given.ways):
        found, problem = run(given, name, folder / str(index))
        if found is None:
            print(f"{name:<22} failed: {problem}", flush=True)
            continue
        if reference is None:
            reference = found
        pairs = zip(found["losses"], reference["losses"], strict=True)
        apart = [max(abs(one[part] - two[part]) for part in two) for one, two in pairs]
        print(
            f"{name:<22} {found['images a second']:>8.1f} {'yes' if found['captured'] else 'no':>6} "
            f"{found['exchange']:>9} {found['first seconds']:>10.1f} s {found['GiB']:>6.1f} "
            f"{weights_apart(found, reference):>14.2e}  {' '.join(f'{value:.1e}' for value in apart)}",
            flush=True,
        )
    if reference is not None:
        means = [sum(losses.values()) / len(losses) for losses in reference["losses"]]
        print(f"mean of the reference's losses: {' '.join(f'{value:.3f}' for value in means)}")


def run(given: argparse.Namespace, name: str, folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Runs one way in processes of its own; returns what it found, or why there is nothing."""
    folder.mkdir()
    num_processes = given.processes if WAYS[name][0] else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_processes)}
    place |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # all processes are on this machine
    command = [sys.executable, __file__, "--work", name, "--out", str(folder)]
    for option in ("device", "size", "core", "actor_objective", "batch", "glimpses", "precision"):
        command += [f"--{option.replace('_', '-')}", str(getattr(given, option))]
    command += ["--compared", str(given.compared), "--timed", str(given.timed)]
    workers, logs = [], []
    for rank in range(num_processes):
        logs.append((folder / f"log{rank}").open("w+"))
        own = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        workers.append(subprocess.Popen(command, env=own, stdout=logs[-1], stderr=logs[-1]))
    try:
        deadline = time.monotonic() + given.seconds
        codes = [worker.wait(max(0.1, deadline - time.monotonic())) for worker in workers]
    except subprocess.TimeoutExpired:
        return None, f"took more than {given.seconds:g} s\n{said(folder)}"
    finally:
        for worker, log in zip(workers, logs, strict=True):
            worker.kill()
            worker.wait()
            log.close()
    if any(codes):
        return None, f"exit codes {codes}\n{said(folder)}"
    found = json.loads((folder / "found.json").read_text())
    weights = {part: load_file(folder / f"{part}.safetensors") for part in ("before", "after")}
    return found | weights, ""


def said(folder: Path) -> str:
    """Returns the end of what each process printed."""
    return "\n".join(log.read_text(errors="replace")[-3000:] for log in sorted(folder.glob("log*")))


def weights_apart(found: dict[str, Any], reference: dict[str, Any]) -> float:
    """Returns how far apart weights are, as a share of how far the reference's have moved."""
    names = reference["after"]
    apart = sum(float((found["after"][name] - reference["after"][name]).square().sum()) for name in names)
    moved = sum(
        float((reference["before"][name] - reference["after"][name]).square().sum()) for name in names
    )
    return (apart / moved) ** 0.5


def work(given: argparse.Namespace) -> None:
    """Trains in one way, and leaves what was found in `--out`."""
    shared, fast, graph = WAYS[given.work]
    device = f"cuda:{os.environ['LOCAL_RANK']}" if given.device == "cuda" else given.device
    if given.device == "cuda":
        torch.cuda.set_device(device)
    with joined(given.device) if shared else alone():
        torch.manual_seed(0)
        training = TrainingConfig(
            num_glimpses=given.glimpses,
            batch_size=given.batch,
            device=device,
            precision=given.precision,
            fast=fast,
            actor_objective=given.actor_objective,
        )
        agent = AgentConfig.of_size(given.size, 1000, core=given.core)
        learner = make_learner(RunConfig(agent=agent, training=training))
        if not graph:
            learner.use_cuda_graph = False
        elif given.device == "cuda":
            assert learner.use_cuda_graph, "the library would not capture this"
        measure(learner, given)


def measure(learner: AgentLearner, given: argparse.Namespace) -> None:
    """Learns from some batches that are compared, then from some that are timed."""
    before = weights(learner)
    losses, first = [], 0.0
    for index in range(given.compared):
        began = time.perf_counter()
        learner.learn_from(*batch(learner, index), Place(0, index, False))
        losses.append(learner.meter.means())
        first = first or time.perf_counter() - began
    after = weights(learner)
    images, labels = batch(learner, 0)
    began = time.perf_counter()
    for index in range(WARM_UP + given.timed):
        if index == WARM_UP:
            synchronise(learner.device)
            distributed.wait()
            began = time.perf_counter()
        learner.learn_from(images, labels, Place(0, given.compared + index, False))
    synchronise(learner.device)
    seconds = time.perf_counter() - began
    if distributed.rank() > 0:
        return
    graphed = learner._graphed
    on_gpu = learner.device.type == "cuda"
    found = {
        "images a second": given.batch * given.timed / seconds,
        "captured": graphed is not None and graphed._graph is not None,
        "exchange": exchange(),
        "first seconds": first,
        "GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "losses": losses,
    }
    save_file(before, given.out / "before.safetensors")
    save_file(after, given.out / "after.safetensors")
    (given.out / "found.json").write_text(json.dumps(found))


def exchange() -> str:
    """Returns what tensors of the model are exchanged through."""
    if not distributed.is_distributed():
        return "none"
    return "nccl" if "nccl" in str(dist.get_backend_config()) else "gloo"


def batch(learner: AgentLearner, index: int) -> tuple[Tensor, Tensor]:
    """Returns this process's part of a batch of random images and labels; each index is another."""
    config, count = learner.config.agent, learner.settings.batch_size
    numbers = torch.Generator(learner.device).manual_seed(index)
    shape = (count, config.channels, *config.grid.image_size)
    images = torch.randn(shape, device=learner.device, generator=numbers)
    labels = torch.randint(config.num_classes, (count,), device=learner.device, generator=numbers)
    own = count // distributed.world_size()
    part = slice(distributed.rank() * own, (distributed.rank() + 1) * own)
    return images[part].contiguous(), labels[part].contiguous()


def weights(learner: AgentLearner) -> dict[str, Tensor]:
    """Returns a copy of all weights that are trained."""
    named = learner.agent.named_parameters()
    return {name: value.detach().float().cpu().clone() for name, value in named}


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Joins the other processes, as `stam train` under `torchrun` does, also where there are none."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", init_method="env://")
    try:
        yield
    finally:
        gc.collect()  # graphs with exchanges in them must go before what they exchange through
        dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    yield


if __name__ == "__main__":
    main()
