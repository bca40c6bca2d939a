"""The core that HTTP and gRPC share: what is served, whether there is room, a choice turned into pieces."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field

from paceline.messages import Delta, Submission
from paceline.telemetry.gateway_metrics import GatewayMetrics
from paceline.text import Tokenizer
from services.gateway.choice import Choice, ChoiceText, Piece
from services.gateway.errors import NoTargetError, OverloadedError, UnknownModelError
from services.gateway.fleet import Fleet
from services.gateway.run import Run

LAST_WORDS_S = 2.0
"""How long to wait for the statistics of a request that a stop string ended."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`resume_s`: see `Run`. `max_in_flight`: choices being generated at once, over all requests."""

    max_in_flight: int = 1024
    max_body_bytes: int = 8 * 2**20
    resume_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """The model as requests are checked against it."""

    max_model_len: int
    vocabulary_size: int
    eos_token_ids: Sequence[int]


@dataclass(slots=True)
class Gateway:
    """One model, served by a fleet. `closing`: take no new requests."""

    model: str
    tokenizer: Tokenizer
    fleet: Fleet
    metrics: GatewayMetrics
    limits: Limits = field(default_factory=Limits)
    created: int = field(default_factory=lambda: int(time.time()))
    closing: bool = False
    in_flight: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ready(self) -> bool:
        return self.fleet.up and not self.closing

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output; None while no target is up."""
        description = self.fleet.description
        return None if description is None else description.max_model_len

    def check_model(self, name: str | None) -> None:
        """No name at all means the model served. Raises `UnknownModelError`."""
        if name is not None and name != self.model:
            raise UnknownModelError(name, self.model)

    def served(self) -> Served:
        """Raises `NoTargetError`: only a target knows."""
        description = self.fleet.description
        if description is None or self.closing:
            raise NoTargetError("the gateway is closing" if self.closing else "no target is up; try again soon")
        return Served(description.max_model_len, description.vocabulary_size, description.eos_token_ids)

    def admit(self, choices: int) -> None:
        """Raises `OverloadedError` if so many more choices are too many."""
        if self.in_flight + choices > self.limits.max_in_flight:
            raise OverloadedError(
                f"{self.in_flight} completions are being generated, the limit is {self.limits.max_in_flight}"
            )

    async def generate(self, choice: Choice) -> AsyncGenerator[Piece]:
        """The pieces of one completion; the last one has a finish reason. Closing it cancels everywhere.

        Raises an `ApiError` if the target is lost for good, or cannot serve it.
        """
        submission = Submission(uuid.uuid4().hex, choice.prompt, choice.sampling, choice.speculative)
        text = ChoiceText(choice, self.tokenizer)
        with self._counted(), self.metrics.track(self.model) as progress:
            run = Run(self.fleet, submission, self.limits.resume_s, progress.replayed)
            async with aclosing(run.deltas()) as deltas:
                async for delta in deltas:
                    piece = text.take(delta)
                    progress.tokens(len(piece.tokens))
                    if piece.finish_reason is None:
                        yield piece
                        continue
                    if delta.finish_reason is None:
                        run.cancel()
                        if choice.speculative.report:
                            await _add_last_words(piece, deltas)
                    progress.finished(piece.finish_reason, text.usage(len(choice.prompt), piece))
                    yield piece
                    return

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests, and wait until those that run have ended, or so many seconds."""
        self.closing = True
        with suppress(TimeoutError):  # those that still run are cut off
            async with asyncio.timeout(timeout_s):
                while self.in_flight:
                    self._idle.clear()
                    await self._idle.wait()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()


async def _add_last_words(piece: Piece, deltas: AsyncGenerator[Delta]) -> None:
    """A stop string ended the choice here; the target reports on it once it knows."""
    with suppress(TimeoutError):  # then the answer goes without statistics
        async with asyncio.timeout(LAST_WORDS_S):
            async for delta in deltas:
                piece.speculation, piece.timings = delta.speculation, delta.timings
                piece.cached_tokens = delta.usage.cached_tokens if delta.usage else 0


async def merged(gateway: Gateway, choices: Sequence[Choice]) -> AsyncGenerator[tuple[int, Piece]]:
    """The pieces of several choices as they come, each with its choice's index. The first error ends all."""
    if len(choices) == 1:
        async with aclosing(gateway.generate(choices[0])) as only:
            async for part in only:
                yield 0, part
        return
    ready: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
    tasks = [asyncio.create_task(_feed(ready, index, gateway.generate(c))) for index, c in enumerate(choices)]
    try:
        running = len(tasks)
        while running:
            index, piece = await ready.get()
            if isinstance(piece, Exception):
                raise piece
            running -= piece.finish_reason is not None
            yield index, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(ready: asyncio.Queue[tuple[int, Piece | Exception]], index: int, pieces: AsyncGenerator[Piece]) -> None:
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                ready.put_nowait((index, piece))
    except Exception as error:  # noqa: BLE001 - raised again where the pieces are read
        ready.put_nowait((index, error))
