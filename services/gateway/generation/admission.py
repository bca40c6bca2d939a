"""Admission: limits on the completions that run and wait, and on the request bodies that arrive.

An admitted request waits at its target for as long as it takes. It is refused later only if no target is left. So the
limits are checked before a body is read, before its prompts are encoded, and once more when its completions begin.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from paceline_services.gateway.api_errors import OverloadedError
from paceline_services.gateway.routing.fleet import Fleet
from paceline_services.service_entrypoint import option, positive_int

MAX_BODIES_BYTES = 256 * 2**20
"""Of all bodies being read. Above it, bodies larger than `SMALL_BODY_BYTES` are refused: they would fill the memory."""
SMALL_BODY_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits of one gateway; sizes in bytes."""

    max_in_flight: int = option(1024, "completions generated at once, over all requests and models")
    max_queue: int = option(1024, "completions of a model without a first token, over all gateways", type=positive_int)
    max_body_bytes: int = option(8 * 2**20, "largest request body")
    max_body_s: float = option(60.0, "seconds for a request body to come")
    resume_s: float = option(30.0, "seconds that a request waits for a usable target")


@dataclass(slots=True)
class Capacity:
    """What all models of a gateway share. `closing`: new requests are refused."""

    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    in_flight: int = 0
    bytes_reading: int = 0
    """Bytes received of bodies that are not complete."""
    closing: bool = False
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def check_body(self, size: int) -> None:
        """Raises `OverloadedError` for a large body, `size` bytes so far, while too many bytes are being read."""
        if size > SMALL_BODY_BYTES and self.bytes_reading > max(MAX_BODIES_BYTES, self.limits.max_body_bytes):
            raise OverloadedError(
                f"{self.bytes_reading} bytes of bodies are being read; try again soon", reason="bodies"
            )

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait until the running ones have ended, at most `timeout_s`."""
        self.closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.in_flight:
                    self._idle.clear()
                    await self._idle.wait()

    def release(self, completions: int) -> None:
        """So many completions have ended."""
        self.in_flight -= completions
        if not self.in_flight:
            self._idle.set()


class AdmissionQueue:
    """Admits the completions of one model."""

    def __init__(self, capacity: Capacity, fleet: Fleet) -> None:
        self.in_flight = 0
        """Completions that this gateway generates."""
        self._capacity = capacity
        self._fleet = fleet

    @property
    def waiting(self) -> int:
        """Completions of all gateways without a first token: at a target, or waiting here for a target."""
        return self._fleet.waiting + max(0, self.in_flight - self._fleet.in_flight)

    def check(self, completions: int) -> None:
        """Raises `OverloadedError` if so many more completions exceed a limit.

        An empty queue takes a request that is larger than the queue: otherwise it would never be served.
        """
        in_flight, limits = self._capacity.in_flight, self._capacity.limits
        if in_flight + completions > limits.max_in_flight:
            raise OverloadedError(
                f"{in_flight} completions are being generated, the limit is {limits.max_in_flight}",
                self._fleet.retry_after_s(),
                reason="in_flight",
            )
        if (waiting := self.waiting) and waiting + completions > limits.max_queue:
            raise OverloadedError(
                f"{waiting} completions wait for their first token, the limit is {limits.max_queue}",
                self._fleet.retry_after_s(),
                reason="queue",
            )

    def acquire(self, completions: int) -> None:
        """Count completions that begin, until `release`. Raises `OverloadedError` if they exceed a limit."""
        self.check(completions)
        self.in_flight += completions
        self._capacity.in_flight += completions

    def release(self, completions: int) -> None:
        """So many completions have ended."""
        self.in_flight -= completions
        self._capacity.release(completions)
