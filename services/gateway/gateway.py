"""The core that HTTP and gRPC share: what is served, whether there is room, a choice turned into pieces."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass, field

from paceline.messages import Delta, Submission
from paceline.telemetry.gateway_metrics import GatewayMetrics
from paceline.text import Tokenizer
from services.gateway.admission import Limits, Place, Queue, Room
from services.gateway.choice import Choice, ChoiceText, Piece
from services.gateway.errors import NoTargetError, OverloadedError
from services.gateway.fleet import Fleet
from services.gateway.run import Run
from services.gateway.structure import GrammarChecks, Structured

LAST_WORDS_S = 2.0
"""How long to wait for the statistics of a request that a stop string ended."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model as requests are checked against it."""

    max_model_len: int
    vocabulary_size: int
    eos_token_ids: Sequence[int]


@dataclass(slots=True)
class Gateway:
    """One model, served by a fleet, in the room that all models of a gateway share."""

    model: str
    tokenizer: Tokenizer
    fleet: Fleet
    metrics: GatewayMetrics
    room: Room = field(default_factory=Room)
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    created: int = field(default_factory=lambda: int(time.time()))
    queue: Queue = field(init=False)

    def __post_init__(self) -> None:
        self.queue = Queue(self.room, self.fleet)
        self.metrics.follow_queue(self.model, lambda: self.queue.waiting)
        self.metrics.follow_targets(self.model, lambda: self.fleet.targets_up)
        self.metrics.follow_breakers(self.model, self.fleet.breaker_states)

    @property
    def limits(self) -> Limits:
        return self.room.limits

    @property
    def in_flight(self) -> int:
        return self.queue.in_flight

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output; None while no target is up."""
        description = self.fleet.description
        return None if description is None else description.max_model_len

    @property
    def vocabulary_size(self) -> int:
        """Of the model, as far as is known: its tokenizer may have fewer tokens."""
        description = self.fleet.description
        return max(len(self.tokenizer.pieces), 0 if description is None else description.vocabulary_size)

    def unavailable(self) -> NoTargetError | None:
        """Why no request would be served now; None if one would."""
        if self.room.closing:
            return NoTargetError("the gateway is closing", reason="closing")
        if not self.fleet.alive:
            return NoTargetError("no target is up; try again soon")
        if not self.fleet.up:
            return NoTargetError("every target fails; try again soon", self.fleet.retry_after_s(), reason="breaker")
        return None

    def served(self) -> Served:
        """Raises `NoTargetError`: only a target knows."""
        if error := self.unavailable():
            raise self._counted(error)
        description = self.fleet.description
        assert description is not None
        return Served(description.max_model_len, description.vocabulary_size, description.eos_token_ids)

    def admit(self, choices: int) -> None:
        """Raises `OverloadedError` if so many more choices are too many."""
        with self.counting():
            self.queue.check(choices)

    async def grammar_of(self, body: Structured) -> str:
        """The grammar that a body asks for, or none. Raises `InvalidRequestError` or `OverloadedError`."""
        with self.counting():
            return await self.grammars.grammar_of(body)

    def enter(self, choices: int) -> list[Place]:
        """A place for each choice that is about to begin. Raises `OverloadedError`."""
        with self.counting():
            return self.queue.enter(choices)

    async def generate(self, choice: Choice, place: Place) -> AsyncGenerator[Piece]:
        """The pieces of one completion; the last one has a finish reason. Closing it cancels everywhere.

        Raises an `ApiError` if the target is lost for good, or cannot serve it.
        """
        if error := self.unavailable():
            place.close()
            raise self._counted(error)
        if choice.pays_prompt:
            choice.caller.used(len(choice.prompt), "prompt")
        submission = Submission(
            uuid.uuid4().hex,
            choice.prompt,
            choice.sampling,
            choice.speculative,
            cache_salt=choice.cache_salt,
            client=choice.caller.name,
            group=choice.group,
        )
        text = ChoiceText(choice, self.tokenizer)
        with closing(place), self.metrics.track(self.model) as progress:
            run = Run(self.fleet, submission, self.limits.resume_s, progress, choice.session)
            async with aclosing(run.deltas()) as deltas:
                async for delta in deltas:
                    piece = text.take(delta)
                    progress.tokens(len(piece.tokens))
                    choice.caller.used(len(piece.tokens), "output")
                    if piece.finish_reason is None:
                        yield piece
                        continue
                    if delta.finish_reason is None:
                        run.enough()
                        if choice.speculative.report:
                            await _add_last_words(piece, deltas)
                    progress.finished(piece.finish_reason, text.usage(len(choice.prompt), piece))
                    yield piece
                    return

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Requests that are turned away for want of room."""
        try:
            yield
        except OverloadedError as error:
            raise self._counted(error) from None

    def _counted(self, error: OverloadedError | NoTargetError) -> OverloadedError | NoTargetError:
        self.metrics.rejected(self.model, error.reason)
        return error


async def _add_last_words(piece: Piece, deltas: AsyncGenerator[Delta]) -> None:
    """A stop string ended the choice here; the target reports on it once it knows."""
    with suppress(TimeoutError):  # then the answer goes without statistics
        async with asyncio.timeout(LAST_WORDS_S):
            async for delta in deltas:
                piece.speculation, piece.timings = delta.speculation, delta.timings
                piece.cached_tokens = delta.usage.cached_tokens if delta.usage else 0


async def merged(gateway: Gateway, choices: Sequence[Choice]) -> AsyncGenerator[tuple[int, Piece]]:
    """The pieces of several choices as they come, each with its choice's index. The first error ends all."""
    places = gateway.enter(len(choices))
    try:
        runs = [gateway.generate(choice, place) for choice, place in zip(choices, places, strict=True)]
        async with aclosing(_only(runs[0]) if len(runs) == 1 else _interleaved(runs)) as parts:
            async for part in parts:
                yield part
    finally:
        for place in places:  # of choices that were cancelled before they began
            place.close()


async def _only(pieces: AsyncGenerator[Piece]) -> AsyncGenerator[tuple[int, Piece]]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield 0, piece


async def _interleaved(runs: Sequence[AsyncGenerator[Piece]]) -> AsyncGenerator[tuple[int, Piece]]:
    ready: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
    tasks = []
    try:
        for index, pieces in enumerate(runs):
            tasks.append(asyncio.create_task(_feed(ready, index, pieces)))
            await asyncio.sleep(0)  # to submit one may take milliseconds, and a thousand of them seconds: others go on
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
