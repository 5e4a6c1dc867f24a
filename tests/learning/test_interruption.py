"""Ctrl-C while something is trained."""

import ctypes
import os
import signal
import sys
import threading

import pytest

from stam.learning.interruption import interruptible


class Listening:
    """A stderr that does something when it is written to."""

    def __init__(self, heard) -> None:
        self.heard, self.text = heard, ""

    def write(self, text: str) -> None:
        self.text += text
        self.heard()

    def flush(self) -> None:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="an operation that no signal ends is made with pthreads")
def test_it_is_answered_while_an_operation_goes_on(monkeypatch):
    """Python's own handlers wait for the operation; it ends here when the answer is there."""
    lock, pthreads = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    pthreads.pthread_mutex_lock(lock)
    came_late = threading.Timer(20, pthreads.pthread_mutex_unlock, [lock])
    stderr = Listening(lambda: pthreads.pthread_mutex_unlock(lock))
    monkeypatch.setattr(sys, "stderr", stderr)
    with interruptible() as interruption:
        assert not interruption
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
        came_late.start()
        pthreads.pthread_mutex_lock(lock)  # as a long backward pass
        assert came_late.is_alive(), "it was not answered before the operation ended"
        came_late.cancel()
    assert interruption and interruption.number == signal.SIGINT
    assert stderr.text.strip() == "finishing this batch, then saving; Ctrl-C again stops at once"


def test_a_second_one_stops_at_once_and_the_answer_is_not_repeated(capsys):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible() as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.number == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
    assert capsys.readouterr().err.count("finishing this batch") == 1
    assert signal.getsignal(signal.SIGINT) == before and signal.set_wakeup_fd(-1) == -1
