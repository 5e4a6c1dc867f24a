"""Many sessions at once, from many threads: what waits at the same time is thought about together."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from stam.errors import StamError, require
from stam.live.session import LiveStep, Session, Update, by_count, require_evaluation, think
from stam.model.agent import Looker
from stam.model.policy import Policy
from stam.scene.grid import Location


class UnknownSessionError(StamError, KeyError):
    """There is no such session: it never was, was closed, or has expired."""

    def __str__(self) -> str:
        return str(self.args[0])


class PoolFullError(StamError):
    """As many sessions are open as may be."""


@dataclass
class _Entry:
    session: Session
    opened: float
    used: float


@dataclass
class _Job:
    """Something to be done to a session by the worker: take a glimpse, or any other call."""

    session: Session
    prepare: Callable[[], Update | LiveStep] | None
    call: Callable[[], Any] | None
    future: "Future[Any]" = field(default_factory=Future)


class SessionPool:
    """Keeps sessions under names and feeds them from any thread.

    One worker thread does all the thinking. Whatever glimpses arrive while it is busy wait, and are then
    taken as one batch, so the batch grows with the load and a lone session never waits for company.

    Every session expires when it was not used for `idle_seconds` or is older than `lifetime_seconds`.
    """

    def __init__(
        self,
        agent: Looker,
        *,
        max_sessions: int = 256,
        idle_seconds: float = 600.0,
        lifetime_seconds: float = 3600.0,
        max_batch: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the worker; close the pool, or use it in a `with`, to end it.

        Args:
            agent: Who looks, with the weights it has now.
            max_sessions: Sessions open at once; one more is refused.
            idle_seconds: How long a session is kept after its latest use.
            lifetime_seconds: How long a session is kept at all.
            max_batch: The most glimpses thought about in one pass.
            clock: Tells the seconds; for tests.
        """
        require(max_sessions >= 1, f"max_sessions must be at least 1, got {max_sessions}")
        require(max_batch >= 1, f"max_batch must be at least 1, got {max_batch}")
        require(
            idle_seconds > 0 and lifetime_seconds > 0, "idle_seconds and lifetime_seconds must be above 0"
        )
        require_evaluation(agent)
        self.agent, self.max_sessions, self.max_batch = agent.prepared(), max_sessions, max_batch
        self.idle_seconds, self.lifetime_seconds = idle_seconds, lifetime_seconds
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._policies: dict[str, Policy] = {}
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()  # guards all of the above
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="stam-session-pool", daemon=True)
        self._worker.start()

    def __enter__(self) -> "SessionPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes no more glimpses, and ends the worker when none is waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._worker.join()

    def __len__(self) -> int:
        """Returns how many sessions are open."""
        with self._changed:
            self._expire()
            return len(self._entries)

    def open(
        self,
        first_location: Location | None = None,
        policy: str | None = None,
        seed: int | None = None,
        threshold: float | None = None,
    ) -> str:
        """Opens a session and returns its name; see `Session` for the arguments."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        name = policy or self.agent.config.policy
        with self._changed:
            self._expire()
            if len(self._entries) >= self.max_sessions:
                raise PoolFullError(
                    f"{self.max_sessions} sessions are open, and no more may be: close one, or try again "
                    f"later (idle ones are closed after {self.idle_seconds:g} seconds)"
                )
            if name not in self._policies:  # one object for all, so that they can choose in one pass
                used = {entry.session.policy_name for entry in self._entries.values()}
                self._policies = {known: kept for known, kept in self._policies.items() if known in used}
                self._policies[name] = self.agent.policy(name)
            session = Session(self.agent, first_location, name, generator, threshold)
            session.policy = self._policies[name]
            key, now = secrets.token_urlsafe(12), self._clock()
            self._entries[key] = _Entry(session, opened=now, used=now)
        return key

    def get(self, key: str) -> Session:
        """Returns a session, to be read; only the pool may change it."""
        with self._changed:
            return self._used(key).session

    def _used(self, key: str) -> _Entry:
        """Returns what is kept of a session, which is used now; the caller holds the lock."""
        self._expire()
        entry = self._entries.get(key)
        if entry is None:
            raise UnknownSessionError(f"no session '{key}': it was closed, has expired, or never was")
        entry.used = self._clock()
        return entry

    def expires_in(self, key: str) -> float:
        """Returns the seconds a session is kept if it is not used again."""
        with self._changed:
            entry = self._used(key)
            return min(self.idle_seconds, entry.opened + self.lifetime_seconds - self._clock())

    def discard(self, key: str) -> None:
        """Closes a session."""
        with self._changed:
            self._used(key)
            del self._entries[key]

    def submit(
        self, key: str, glimpse: Any, location: Location | None = None, num_glimpses: int | None = None
    ) -> "Future[LiveStep]":
        """Hands a glimpse to a session without waiting; see `Session.observe`.

        The same pixels may be sent to the same location again, by a sensor that got no answer: the session
        does not change, and the answer is the same.

        Args:
            key: The session's name.
            glimpse: What was sensed.
            location: Where; by default where the agent asked.
            num_glimpses: How many glimpses the sender believes the session has seen before this one. Any
                other number is an `OutOfStepError`, unless the glimpse is the latest one sent again.
        """
        session = self.get(key)

        def prepare() -> Update | LiveStep:
            again = session.answer_again(glimpse, location, num_glimpses)
            return again or session.prepare(glimpse, location)

        return self._enqueue(_Job(session, prepare, None))

    def observe(
        self, key: str, glimpse: Any, location: Location | None = None, num_glimpses: int | None = None
    ) -> LiveStep:
        """Hands a glimpse to a session and waits for what the agent says; see `submit`."""
        return self.submit(key, glimpse, location, num_glimpses).result()

    def call(self, key: str, function: Callable[[Session], Any]) -> "Future[Any]":
        """Does something else to a session, in its turn, such as `Session.missed` or `Session.policy_map`."""
        session = self.get(key)
        return self._enqueue(_Job(session, None, lambda: function(session)))

    def _expire(self) -> None:
        now = self._clock()
        for key, entry in list(self._entries.items()):
            if now - entry.used > self.idle_seconds or now - entry.opened > self.lifetime_seconds:
                del self._entries[key]

    def _enqueue(self, job: _Job) -> "Future[Any]":
        with self._changed:
            if self._closed:
                raise StamError("the session pool is closed: open a new one")
            self._jobs.append(job)
            self._changed.notify_all()
        return job.future

    def _next_batch(self) -> list[_Job]:
        """Waits for work and takes it in order of arrival, no session twice; nothing when the pool closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            batch: list[_Job] = []
            left: deque[_Job] = deque()
            taken: set[int] = set()
            while self._jobs and len(batch) < self.max_batch:
                job = self._jobs.popleft()
                (left if id(job.session) in taken else batch).append(job)
                taken.add(id(job.session))
            self._jobs.extendleft(reversed(left))
            return batch

    def _work(self) -> None:
        while batch := self._next_batch():
            updates: dict[int, _Job] = {}
            prepared: list[Update] = []
            for job in batch:
                if not job.future.set_running_or_notify_cancel():
                    continue
                try:
                    if job.prepare is None:
                        assert job.call is not None
                        job.future.set_result(job.call())
                    elif isinstance(change := job.prepare(), Update):
                        prepared.append(change)
                        updates[id(job.session)] = job
                    else:
                        job.future.set_result(change)
                except Exception as error:  # whatever it is belongs to the one who asked
                    job.future.set_exception(error)
            for group in by_count(prepared):
                jobs = [updates[id(update.session)] for update in group]
                try:
                    steps = think(group)
                except Exception as error:
                    for job in jobs:
                        job.future.set_exception(error)
                    continue
                for job, step in zip(jobs, steps, strict=True):
                    job.future.set_result(step)
