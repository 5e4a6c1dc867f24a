"""What a person sees of a training: how much there is to do, a bar that moves, and how long it will take."""

import sys
import time
from typing import Any

from tqdm import tqdm

_SECONDS = 15.0  # of training, before they say how long the rest takes
_WORTH_SAYING = 10.0  # seconds that are left


class Progress:
    """The progress of a run through its batches; a context that ends the bar.

    Args:
        description: What the bar is called.
        epochs: Epochs in all.
        batch_size: Images of a batch.
        num_batches: Batches in all.
        num_left: Those that are still to be done.
        shown: Whether anything is shown; of several processes one shows it.
    """

    def __init__(
        self, description: str, epochs: int, batch_size: int, num_batches: int, num_left: int, shown: bool
    ) -> None:
        self._batch_size, self._shown = batch_size, shown
        self._done_before = self._done = (num_batches - num_left) * batch_size
        self._total = num_batches * batch_size
        self._since = time.monotonic()
        self._estimated = False
        if shown and num_left:
            in_all = (
                f"{_count(num_batches, 'batch', 'es')} of {batch_size} images in {_count(epochs, 'epoch')}"
            )
            left = in_all if num_left == num_batches else f"{num_left:,} of {in_all} are left"
            print(f"{description}: {left}", file=sys.stderr)
        self._bar = tqdm(
            total=self._total,
            initial=self._done,
            desc=description,
            unit="img",
            file=sys.stderr,
            mininterval=0.5,
            disable=not shown,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *given: object) -> None:
        self._bar.close()

    def within_batch(self, share: float) -> None:
        """Moves to a share of the batch in hand."""
        self._move_to(self._done + int(min(share, 1.0) * self._batch_size))

    def end_batch(self, words: dict[str, Any]) -> None:
        """Moves to the end of the batch, with a few words beside the bar."""
        self._bar.set_postfix(words, refresh=False)
        self._done += self._batch_size
        self._move_to(self._done)
        if self._done == self._done_before + self._batch_size and not self._estimated:
            # the first batch of a start takes longer: kernels are compiled, images are loaded ahead
            self._done_before, self._since = self._done, time.monotonic()

    def _move_to(self, images: int) -> None:
        self._bar.update(images - self._bar.n if not self._bar.disable else 0)
        seconds, done = time.monotonic() - self._since, images - self._done_before
        if not self._estimated and seconds > _SECONDS and done > 0:
            self._estimated = True
            left = seconds / done * (self._total - images)
            if self._shown and left > _WORTH_SAYING:
                said = f"about {duration(left)} to go at this speed; Ctrl-C saves, to go on later"
                tqdm.write(said, file=sys.stderr)


def duration(seconds: float) -> str:
    """Returns a time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _count(number: int, thing: str, ending: str = "s") -> str:
    return f"{number:,} {thing}{'' if number == 1 else ending}"
