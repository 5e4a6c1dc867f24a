"""Work spread over threads (Pillow decodes and encodes outside the interpreter lock), with a progress bar."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 16  # items a thread takes at once, so that millions of items do not mean millions of futures


def map_with_progress(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    description: str,
    num_workers: int | None = None,
    progress: bool = True,
    unit: str = "img",
    chunk: int = _CHUNK,
) -> Iterator[Result]:
    """Yields `function(item)` for each item, in order; an error or Ctrl-C drops what has not begun.

    Args:
        function: What to do; called from several threads.
        items: What to do it to.
        description: The bar's title.
        num_workers: Threads; one a core if not given.
        progress: Whether to show the bar (on a terminal only).
        unit: What the bar counts.
        chunk: Items a thread takes at once.
    """
    stopped = threading.Event()

    def run(start: int) -> list[Result]:
        return [function(item) for item in items[start : start + chunk] if not stopped.is_set()]

    pool = ThreadPoolExecutor(num_workers or os.cpu_count() or 1)
    try:
        chunks = pool.map(run, range(0, len(items), chunk))
        with tqdm(total=len(items), desc=description, unit=unit, disable=None if progress else True) as bar:
            for results in chunks:
                yield from results
                bar.update(len(results))
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
