"""Virtual time for blocking code: time jumps to the next event.

Each actor is a thread, and only one thread runs at any moment. So an actor may be written as if it were alone, with
loops and waits, and the result is deterministic. (A discrete event simulation by processes.)
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Message = TypeVar("Message")


class ActorStoppedError(BaseException):
    """Raised in a waiting actor when the simulation ends, so that it unwinds."""


class _Actor:
    """A thread that runs only between `resume` and its next `pause`."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.done = False
        self._body = body
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._stopping = False
        threading.Thread(target=self._run, daemon=True).start()

    def resume(self) -> None:
        """Run the actor until it pauses or ends. Raises what it raised."""
        self._go.release()
        self._back.acquire()
        if self.error is not None:
            raise self.error

    def pause(self) -> None:
        """Called in the actor's thread: return at the next `resume`."""
        self._back.release()
        self._go.acquire()
        if self._stopping:
            raise ActorStoppedError

    def stop(self) -> None:
        if not self.done:
            self._stopping = True
            self.resume()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._stopping:
                self._body()
        except ActorStoppedError:
            pass
        except Exception as error:  # noqa: BLE001 - raised again by `resume`
            self.error = error
        self.done = True
        self._back.release()


class VirtualTime:
    """A clock in seconds, its events and its actors."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._actors: list[_Actor] = []
        self._running: _Actor | None = None

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        """Pause the calling actor."""
        actor = self._current()
        self.after(seconds, lambda: self._resume(actor))
        actor.pause()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after `seconds`. It must not wait."""
        heapq.heappush(self._events, (self._now + max(seconds, 0.0), next(self._serial), action))

    def start(self, body: Callable[[], None]) -> None:
        """Start an actor now."""
        actor = _Actor(body)
        self._actors.append(actor)
        self.after(0.0, lambda: self._resume(actor))

    def run(self, until: Callable[[], bool]) -> None:
        """Run until the condition holds or no event is left. Then stop every actor.

        Raises what an actor raised.
        """
        try:
            while self._events and not until():
                self._now, _, action = heapq.heappop(self._events)
                action()
        except KeyboardInterrupt:
            self._actors.clear()  # a running actor cannot be stopped; its thread ends with the process
            raise
        finally:
            for actor in self._actors:
                actor.stop()

    def _resume(self, actor: _Actor) -> None:
        self._running = actor
        try:
            actor.resume()
        finally:
            self._running = None

    def _current(self) -> _Actor:
        if self._running is None:
            raise RuntimeError("only an actor can wait")
        return self._running

    def wait(self, ready: Callable[[], bool], wakeup: Wakeup, timeout_s: float | None) -> None:
        """Wait until `wakeup` is notified and `ready` holds, or for `timeout_s`."""
        if ready():
            return
        actor, over = self._current(), False

        def wake() -> None:
            nonlocal over
            if not over:
                over = True
                self._resume(actor)

        wakeup.listeners.append(wake)
        if timeout_s is not None:
            self.after(timeout_s, wake)
        actor.pause()


class Wakeup:
    """Wakes the actors that wait for it."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []

    def notify(self) -> None:
        listeners, self.listeners = self.listeners, []
        for listener in listeners:
            listener()


class DelayedLink(Generic[Message]):
    """One direction of a link: messages arrive after a delay, in order."""

    def __init__(self, time: VirtualTime, delay_s: float) -> None:
        self.delay_s = delay_s
        self.sent = 0
        self._time = time
        self._arrived: deque[Message] = deque()
        self._wakeup = Wakeup()

    def put(self, message: Message) -> None:
        self.sent += 1
        self._time.after(self.delay_s, lambda: self._arrive(message))

    def take(self, timeout_s: float | None) -> list[Message]:
        """All arrived messages. Waits up to `timeout_s` (None: without limit) if there are none."""
        if timeout_s != 0.0:
            self._time.wait(lambda: bool(self._arrived), self._wakeup, timeout_s)
        taken = list(self._arrived)
        self._arrived.clear()
        return taken

    def _arrive(self, message: Message) -> None:
        self._arrived.append(message)
        self._wakeup.notify()
