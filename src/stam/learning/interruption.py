"""Ctrl-C and terminations while something is trained: said at once, done after the batch in hand."""

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from stam.learning import distributed

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END = 0  # no signal has this number
_SAID = "finishing this batch, then saving; Ctrl-C again stops at once"


class Interruption:
    """Whether Ctrl-C or a termination was asked for; true from the first time on.

    Attributes:
        number: The signal's number.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the batch; a second stops at once.

    Of several processes each gets Ctrl-C twice, the second time from torchrun: there it changes nothing. In
    another thread than the main one Python takes no signals: there nothing interrupts.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    def request(number: int, frame: FrameType | None) -> None:
        if interruption and not distributed.is_distributed():
            raise KeyboardInterrupt
        interruption.number = number

    before = {number: signal.signal(number, request) for number in _SIGNALS}
    try:
        with _said_at_once():
            yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _said_at_once() -> Iterator[None]:
    """Within it, a first signal is answered on stderr as soon as it arrives.

    Python calls a handler between two operations only, and one backward pass may take seconds. The number of
    a signal is written to a socket at once; a thread waits for it there.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    waiting = threading.Thread(target=_answer_first, args=(receiver,), daemon=True)
    waiting.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        sender.send(bytes([_END]))  # closing would not end it: processes that load images have the socket too
        waiting.join()
        receiver.close()
        sender.close()


def _answer_first(receiver: socket.socket) -> None:
    said = distributed.rank() > 0  # one of several processes says it
    while (number := receiver.recv(1)[0]) != _END:
        if number in _SIGNALS and not said:
            print(f"\n{_SAID}", file=sys.stderr, flush=True)
            said = True
