"""CUDA graphs: how a GPU is kept busy, with the same code that runs everywhere.

All that a batch launches, its T updates included, is captured once and replayed for every later batch:
thousands of launches become one, and the host is free to prepare the next batch meanwhile.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from sys import stderr
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from stam.fast.cuda import rounded_weights
from stam.fast.cuda_policy import fuse_policy
from stam.model.agent import Looker
from stam.model.episode import Trace
from stam.model.policy import Policy


class GraphedFunction:
    """A function of tensors, replayed as a CUDA graph; it returns tensors or nothing, and may change state.

    The first call runs as written, so that everything lazy has happened; the second is captured. Inputs of
    another shape than the first run as written. What the function reads beside its inputs must keep its
    place in memory, and be changed in place.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...] | None],
        generator: torch.Generator | None = None,
        announced: bool = False,
        pool: Any = None,
    ) -> None:
        """Takes a function and says how to treat it.

        Args:
            function: What to capture.
            generator: The one source of randomness it draws from.
            announced: Whether to say why the first call takes long: it compiles kernels.
            pool: Memory to share with other graphs (`torch.cuda.graph_pool_handle`), for functions that are
                never replayed at the same time and return nothing.
        """
        self._function, self._generator, self._announced = function, generator, announced
        self._pool = pool
        self._inputs: tuple[Tensor, ...] | None = None
        self._outputs: tuple[Tensor, ...] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._most_bytes = 0

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...] | None:
        """Runs the function on the current stream."""
        if self._inputs is None:
            return self._run_as_written(inputs)
        if any(kept.shape != given.shape for kept, given in zip(self._inputs, inputs, strict=True)):
            return self._function(*inputs)
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given)
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()
        return None if self._outputs is None else tuple(output.clone() for output in self._outputs)

    def _run_as_written(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        began = time.monotonic()
        if self._announced:
            tqdm.write("compiling kernels for the GPU, once (--no-fast starts at once)", stderr)
        self._inputs = tuple(given.clone() for given in inputs)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = self._function(*self._inputs)
        self._most_bytes = torch.cuda.max_memory_allocated() - before
        if self._announced:
            torch.cuda.synchronize()
            tqdm.write(f"compiled; the first batch took {time.monotonic() - began:.0f} s", stderr)
        return result

    def _capture(self) -> torch.cuda.CUDAGraph:
        assert self._inputs is not None
        graph = torch.cuda.CUDAGraph()
        if self._generator is not None:
            graph.register_generator_state(self._generator)
            state = self._generator.get_state()
        _release_workspaces()
        # threads that pin memory for the next batch may go on
        with _no_garbage_collection(), torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):
            # Every glimpse needs larger blocks than the one before, and a capture cannot give memory back:
            # cut from one large block, they are merged again.
            whole = torch.empty(self._most_bytes, dtype=torch.uint8, device=self._inputs[0].device)
            del whole
            self._outputs = self._function(*self._inputs)
        _release_workspaces()
        if self._generator is not None:
            self._generator.set_state(state)
        return graph


def _release_workspaces() -> None:
    """Lets cuBLAS forget where it keeps what it works with.

    Made while capturing, that lies in the graph's own memory, and all of it would be held after the graph is
    gone.
    """
    release = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if release is not None:
        release()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Within it nothing is freed by chance: an older graph that goes would spoil the one being captured."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphedLook:
    """`Looker.look` with one kind of policy, for many batches of one size on a GPU."""

    def __init__(self, agent: Looker, num_glimpses: int, policy: Callable[..., Policy]) -> None:
        """Prepares to look.

        Args:
            agent: Who looks, in evaluation mode.
            num_glimpses: Glimpses to sense in each scene.
            policy: Makes the policy from the tensors that a call gives beside images and first locations;
                it must not draw at random.
        """

        def look(images: Tensor, first_location: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
            dtype = torch.get_autocast_dtype(images.device.type)
            enabled = torch.is_autocast_enabled(images.device.type)
            # rounded weights that are kept belong to whoever looked first, not to the graph
            rounding = torch.autocast(images.device.type, dtype, enabled, cache_enabled=False)
            with rounding, rounded_weights(agent) if enabled else nullcontext():
                trace = agent.look_from(images, num_glimpses, first_location, fuse_policy(policy(*more)))
            return trace.locations, trace.class_logits, trace.distill_logits, trace.probabilities

        self._look = GraphedFunction(look)
        self._grid = agent.grid

    @torch.no_grad()
    def __call__(self, images: Tensor, first_location: Tensor, *more: Tensor) -> Trace:
        """Looks at a batch of scenes."""
        outputs = self._look(images, first_location, *more)
        assert outputs is not None
        locations, class_logits, distill_logits, probabilities = outputs
        return Trace(locations, class_logits, distill_logits, probabilities, self._grid)


class Pipeline:
    """On a GPU, prepares a batch while the one before is still being learned from; elsewhere does nothing.

    At most one batch is prepared ahead, lest a fast host fill the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device
        self._done: list[torch.cuda.Event] = []

    @contextmanager
    def preparing(self, *given: Tensor) -> Iterator[None]:
        """Within it, work goes to a stream of its own, which may read what is given."""
        if self._side is None:
            yield
            return
        if len(self._done) > 1:
            self._done.pop(0).synchronize()
        for tensor in given:
            if tensor.is_cuda:
                tensor.record_stream(self._side)
        with torch.cuda.stream(self._side):
            yield

    @contextmanager
    def using(self, *prepared: Tensor) -> Iterator[None]:
        """Within it, work goes to the usual stream, after what was prepared is ready."""
        if self._side is None:
            yield
            return
        usual = torch.cuda.current_stream(self._device)
        usual.wait_stream(self._side)
        for tensor in prepared:
            tensor.record_stream(usual)
        yield
        self._done.append(usual.record_event())
