"""Whether there is room for a request. Whoever finds none is told at once, and when to come back.

What is let in is let in for good: it waits at its target, and is answered. So the limits are on what runs and on what
waits, and are checked before the work of reading and encoding a request, and once more, exactly, when it begins.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from paceline_services.gateway.api_errors import OverloadedError
from paceline_services.gateway.routing.fleet import Fleet

MAX_BODIES_BYTES = 256 * 2**20
"""Of all bodies that are being read. While there are more, large ones are refused: they would fill the memory."""
SMALL_BODY_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`resume_s`: see `Run`. `max_in_flight`: choices being generated at once, over all requests and models.

    `max_queue`: choices of one model that wait for their first token, over all its targets and all gateways.
    """

    max_in_flight: int = 1024
    max_body_bytes: int = 8 * 2**20
    resume_s: float = 30.0
    max_queue: int = 1024
    max_body_s: float = 60.0


@dataclass(slots=True)
class Capacity:
    """Of a whole gateway. `closing`: no new requests."""

    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    in_flight: int = 0
    bytes_reading: int = 0
    """Bytes of bodies that have come and are not whole yet."""
    closing: bool = False
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def check_body(self, size: int) -> None:
        """Raises `OverloadedError` if a body, of which so much has come, is one large one too many."""
        if size > SMALL_BODY_BYTES and self.bytes_reading > max(MAX_BODIES_BYTES, self.limits.max_body_bytes):
            raise OverloadedError(
                f"{self.bytes_reading} bytes of bodies are being read; try again soon", reason="bodies"
            )

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests, and wait until those that run have ended, or so many seconds."""
        self.closing = True
        with suppress(TimeoutError):  # those that still run are cut off
            async with asyncio.timeout(timeout_s):
                while self.in_flight:
                    self._idle.clear()
                    await self._idle.wait()

    def released(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()


class AdmissionQueue:
    """What runs and waits of one model."""

    def __init__(self, room: Capacity, fleet: Fleet) -> None:
        self.in_flight = 0
        """Choices of this gateway."""
        self._capacity = room
        self._fleet = fleet

    @property
    def waiting(self) -> int:
        """Choices, from everybody, that wait for their first token: at a target, or here for one to take them."""
        return self._fleet.waiting + max(0, self.in_flight - self._fleet.in_flight)

    def check(self, choices: int) -> None:
        """Raises `OverloadedError` if so many more choices are too many.

        An empty queue takes a request that is longer than the queue may be: else it would never be served.
        """
        room, most = self._capacity, self._capacity.limits
        if room.in_flight + choices > most.max_in_flight:
            raise OverloadedError(
                f"{room.in_flight} completions are being generated, the limit is {most.max_in_flight}",
                self._fleet.retry_after_s(),
                reason="in_flight",
            )
        if (waiting := self.waiting) and waiting + choices > most.max_queue:
            raise OverloadedError(
                f"{waiting} completions wait for their first token, the limit is {most.max_queue}",
                self._fleet.retry_after_s(),
                reason="queue",
            )

    def permits(self, choices: int) -> list[Permit]:
        """A place for each. Raises `OverloadedError`."""
        self.check(choices)
        self.in_flight += choices
        self._capacity.in_flight += choices
        return [Permit(self._capacity, self) for _ in range(choices)]


class Permit:
    """One choice's."""

    def __init__(self, room: Capacity, queue: AdmissionQueue) -> None:
        self._capacity = room
        self._queue = queue
        self._held = True

    def close(self) -> None:
        """It has ended. Harmless if it had before."""
        if self._held:
            self._held = False
            self._queue.in_flight -= 1
            self._capacity.released()
