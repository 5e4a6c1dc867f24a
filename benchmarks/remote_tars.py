"""How much memory and time it takes to open plain tars at a URL whose headers are known already.

    python benchmarks/remote_tars.py --images 130000

The listings are made up: nothing is read, and no server is needed.
"""

import argparse
import gc
import resource
import time
from pathlib import Path, PurePosixPath

import numpy as np

from stam.data import remote_tars
from stam.data.listing import Member

_SHARDS = 100


def main() -> None:
    """Opens made-up tars and prints what that took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=130_000)
    per_shard = parser.parse_args().images // _SHARDS

    def listed(url: str, shard: PurePosixPath) -> tuple[str, list[Member]]:
        labels = np.random.default_rng(len(url)).integers(0, 10, per_shard)
        members = []
        for number, label in enumerate(labels.tolist()):
            offset = number * 112_000
            members.append(Member(shard, f"{number:09d}.cls", offset + 512, 1, str(label)))
            members.append(Member(shard, f"{number:09d}.jpg", offset + 1536, 110_000))
        return url, members

    remote_tars._list = listed
    before, began = _now(), time.perf_counter()
    splits = remote_tars.open_remote_tars("https://host/{train-{00..95},val-{00..03}}.tar")
    seconds = time.perf_counter() - began
    gc.collect()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{len(splits.train) + len(splits.val)} images opened in {seconds:.1f} s")
    print(f"{most - before:.0f} MiB at most, {_now() - before:.0f} MiB afterwards")


def _now() -> float:
    """Returns the memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
