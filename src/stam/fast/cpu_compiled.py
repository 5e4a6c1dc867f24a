"""The causal core on a CPU, compiled for the machine it runs on: a live step takes two thirds of the time.

A live step has few tokens, so it costs what its calls and its small matrix products cost. PyTorch's
ahead-of-time compiler (AOTInductor) makes one function of the whole pass, with the weights inside. That takes
about a minute, once: the function is kept in the cache folder, under a digest of all that it depends on.
"""

import hashlib
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from stam.errors import FileError, StamError, require
from stam.fast.cpu import PackedLooker, can_prepare
from stam.fast.cpu_causal import PackedCausalCore, PackedCausalMemory
from stam.fast.known import unknown_part
from stam.files import cache_folder, take_turns, write_atomically
from stam.model.agent import Agent, evaluating
from stam.model.causal import CausalCore
from stam.model.vit import Block
from stam.shapes import Float, Int

_FORMAT = 1  # goes up when what is compiled changes, so that nothing older is used
_MOST_KEPT = 8  # compiled agents in the cache folder
_MOST_SCENES = 3  # more of them are faster together, by the packed weights
_OPTIONS = {
    "freezing": True,  # the weights never change: they are laid out as the products read them
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",  # products of few rows, in half of the library's time
    "cpp.min_chunk_size": 4096,  # less than that is not worth a second thread
}

Step = Callable[[Tensor, Tensor, Tensor, Tensor], Sequence[Tensor]]


class CompiledLooker(PackedLooker):
    """A snapshot of an agent, of which the core of a single scene is compiled."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        assert isinstance(agent.core, CausalCore)
        self.core = CompiledCausalCore(agent.core, compile_step(agent.core, agent.positions.shape[1]))


def compile_agent(agent: Agent) -> CompiledLooker:
    """Returns an agent as it is now, its core compiled for as many threads as torch has now."""
    require(
        isinstance(agent.core, CausalCore),
        "only a causal core can be compiled, and this agent has the paper's: train one with --core causal",
    )
    changed = unknown_part(agent)
    require(changed is None, f"{changed} is not as it was built: only an unchanged agent can be compiled")
    require(can_prepare(agent), "only an agent in float32 on a CPU can be compiled: agent.float().cpu()")
    return CompiledLooker(agent)


class CompiledCausalCore(PackedCausalCore):
    """A packed core that takes the step of a few scenes by a compiled function, one scene after the other."""

    def __init__(self, core: CausalCore, step: Step) -> None:
        super().__init__(core)
        self.step = step

    def remember(
        self,
        memory: PackedCausalMemory | None,
        patches: Float[Tensor, "batch patches pixels"],
        positions: Int[Tensor, "batch patches"],
    ) -> PackedCausalMemory:
        """Encodes the patches of one more glimpse, given those before."""
        seen = (self.empty_cache(1),) * len(patches) if memory is None else memory.caches
        if not 1 <= len(patches) <= _MOST_SCENES or any(len(cache) != 1 for cache in seen):
            return super().remember(memory, patches, positions)
        patches = patches.float()  # nobody else checks it
        caches, features = [], []
        for index, cache in enumerate(seen):
            longer = cache.extend(positions.shape[1], 0)
            rows, own = longer.rows.values, slice(index, index + 1)
            given = patches[own].contiguous(), positions[own].contiguous(), rows, torch.tensor(cache.count)
            feature, new = self.step(*given)
            rows[:, :, cache.count : longer.count] = new
            caches.append(longer)
            features.append(feature)
        return PackedCausalMemory(tuple(caches), torch.cat(features))


class _Step(nn.Module):
    """One more glimpse of one scene, by the plain modules: this is what is compiled."""

    def __init__(self, core: CausalCore, num_patches: int) -> None:
        super().__init__()
        self.core, self.num_patches = core, num_patches

    def forward(
        self,
        patches: Float[Tensor, "1 patches pixels"],
        positions: Int[Tensor, "1 patches"],
        rows: Float[Tensor, "depth 1 room both"],
        count: Int[Tensor, ""],
    ) -> tuple[Float[Tensor, "1 readouts width"], Float[Tensor, "depth 1 patches both"]]:
        """Returns the features after the glimpse, and the keys and values of its patches.

        Args:
            patches: The glimpse.
            positions: Where its patches lie.
            rows: Keys beside values of earlier patches, in all blocks, with room behind them.
            count: How many earlier patches there are.
        """
        core = self.core
        x = torch.cat((core.readout_tokens(), core.embed(patches, positions)), dim=1)  # (1, R + p, D)
        is_past = torch.arange(rows.shape[2]) < count
        mask = torch.cat((is_past.new_ones(x.shape[1]), is_past)).expand(1, 1, x.shape[1], -1)
        blocks = [_BlockRows(each, core.num_readout) for each in rows]
        features = core.encode(x, core.num_readout, mask=mask, extend=blocks)
        return features, torch.stack([block.new for block in blocks])


class _BlockRows:
    """The keys and values of earlier patches in one block, as `PackedCausalCore` keeps them."""

    new: Float[Tensor, "1 patches both"]

    def __init__(self, past: Float[Tensor, "1 room both"], num_readout: int) -> None:
        self.past, self.num_readout = past, num_readout

    def __call__(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the new tokens, then those of the rows."""
        heads, width = key.shape[1], key.shape[3]
        parts = [part[:, :, self.num_readout :].transpose(1, 2).flatten(2) for part in (key, value)]
        self.new = torch.cat(parts, dim=2)
        past = self.past.unflatten(2, (2, heads, width)).permute(2, 0, 3, 1, 4)  # (2, 1, heads, room, d)
        return torch.cat((key, past[0]), dim=2), torch.cat((value, past[1]), dim=2)


def compile_step(core: CausalCore, num_patches: int) -> Step:
    """Returns the compiled step of a core, from the cache folder where it is there.

    Args:
        core: The core, with the weights it has now.
        num_patches: Patches of a glimpse.
    """
    with evaluating(core):
        step = _Step(core, num_patches)
        try:
            place = cache_folder() / "compiled" / f"{_digest(step)}.pt2"
        except RuntimeError:  # the user has no home: nothing can be kept
            return _compiled(step, None)
        with take_turns(place.with_suffix(".lock")):
            return _kept(step, place) or _compiled(step, place)


def _kept(step: _Step, place: Path) -> Step | None:
    """Returns what was compiled earlier; `None` if it is not there, damaged, or computes other numbers."""
    if not place.is_file():
        return None
    try:
        found = _load(place)
        if not _agrees(found, step):
            return None
    except Exception:  # a damaged library fails in many ways
        return None
    with suppress(OSError):
        os.utime(place)  # the ones used last are kept
    return found


def _compiled(step: _Step, place: Path | None) -> Step:
    """Compiles a step, and keeps it where it can be kept."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    require(
        shutil.which(compiler) is not None,
        f"compiling needs the C++ compiler '{compiler}', which was not found: install it, or look without "
        "compiling",
    )
    try:
        with TemporaryDirectory() as temporary:
            package = Path(temporary) / "step.pt2"
            _compile(step, package)
            found = _load(package)
            if place is not None:
                with suppress(FileError):  # a full disk, or a folder of somebody else: it works all the same
                    write_atomically(place, lambda path: shutil.copyfile(package, path))
    except Exception as error:  # a compiler fails in many ways, none of which is the user's mistake
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StamError(f"the agent could not be compiled ({line}): look without compiling") from error
    require(_agrees(found, step), "the compiled agent computes other numbers: look without compiling")
    if place is not None:
        _forget_old(place.parent)
    return found


def _compile(step: _Step, package: Path) -> None:
    room = torch.export.Dim("room", min=2, max=2**20)
    with torch.no_grad(), warnings.catch_warnings(), fresh_cache(dir=str(package.parent)):
        warnings.simplefilter("ignore")  # of torch, about itself
        program = torch.export.export(step, _example(step, 24, 8), dynamic_shapes=({}, {}, {2: room}, {}))
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(package), inductor_configs=_OPTIONS
        )


def _load(package: Path) -> Step:
    loader = torch._inductor.aoti_load_package(str(package)).loader
    return lambda *inputs: loader.boxed_run(list(inputs))  # calling the package itself reads a record anew


@torch.no_grad()
def _agrees(found: Step, step: _Step) -> bool:
    """Tells whether what was compiled computes what the plain modules compute."""
    examples = [_example(step, room, count) for room, count in ((24, 0), (24, 8), (60, 59))]
    pairs = [pair for given in examples for pair in zip(found(*given), step(*given), strict=True)]
    return all(torch.allclose(got, want, atol=1e-3, rtol=1e-3) for got, want in pairs)


def _example(step: _Step, room: int, count: int) -> tuple[Tensor, ...]:
    """Returns inputs of a step: some glimpse, after others."""
    core, source = step.core, torch.Generator().manual_seed(0)
    height, width = core.patch_size
    return (
        torch.randn(1, step.num_patches, core.channels * height * width, generator=source),
        torch.arange(step.num_patches)[None],
        torch.randn(len(core.blocks), 1, room, 2 * core.pos_embed.shape[2], generator=source),
        torch.tensor(count),
    )


def _digest(step: _Step) -> str:
    """Returns a name for all that a compiled step depends on: code, machine, threads, shapes and weights."""
    core = step.core
    machine = f"{platform.machine()} {_processor()} {torch.get_num_threads()}"
    num_heads = cast(Block, core.blocks[0]).attn.num_heads
    shape = f"{step.num_patches} {core.patch_size} {num_heads}"
    digest = hashlib.sha256(f"{_FORMAT} {torch.__version__} {machine}\n{core}\n{shape}\n".encode())
    for name, weight in core.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """Returns what a processor can do: code compiled for one may be unknown to another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _forget_old(folder: Path) -> None:
    """Removes what was used longest ago."""
    with suppress(OSError):  # another process removes the same
        kept = sorted(folder.glob("*.pt2"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in kept[_MOST_KEPT:]:
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
