"""Processes that run Python side by side: copies of one that has imported torch, which takes seconds."""

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch.distributed", "stam.cli.train", "stam.evaluation"])


class Ended(NamedTuple):
    """How a process ended, and what it wrote to stdout and stderr."""

    code: int
    out: str
    said: str


def run_together(
    code: str,
    arguments: Sequence[object],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    timeout: float = 120,
) -> list[Ended]:
    """Runs `python -c CODE ARGUMENTS` in as many processes as there are environments, and waits for all.

    Args:
        code: What they run. The package is not checked for types there.
        arguments: What all of them are given in `sys.argv`.
        environments: Variables of each, over those of this process.
        folder: An existing folder for what they write.
        timeout: Seconds until all are killed, and the test fails.
    """
    words, processes = ["-c", *map(str, arguments)], list[BaseProcess]()
    for number, environment in enumerate(environments):
        given = (code, words, os.environ | environment, folder / f"process-{number}")
        processes.append(_FORKS.Process(target=_run, args=given))
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
            assert process.exitcode is not None, f"it ran for more than {timeout} seconds"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    codes = [process.exitcode for process in processes]
    texts = [
        [(folder / f"process-{number}.{kind}").read_text() for kind in ("out", "err")]
        for number in range(len(processes))
    ]
    return [Ended(code or 0, *text) for code, text in zip(codes, texts, strict=True)]


def _run(code: str, words: list[str], environment: dict[str, str], place: Path) -> None:
    for stream, kind in ((sys.stdout, "out"), (sys.stderr, "err")):
        with Path(f"{place}.{kind}").open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    exec(compile(code, "-c", "exec"), {"__name__": "__main__"})
