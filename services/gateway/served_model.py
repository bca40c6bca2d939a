"""The core that HTTP and gRPC share: what is served, whether there is room, a choice turned into pieces."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass, field

from paceline.core.messages import Delta, Submission
from paceline.telemetry.gateway_metrics import GatewayMetrics
from paceline.text import Tokenizer
from paceline_services.gateway.admission import AdmissionLimits, AdmissionQueue, Capacity, Permit
from paceline_services.gateway.api_errors import NoTargetError, OverloadedError
from paceline_services.gateway.failover import FailoverRequest
from paceline_services.gateway.generation import GenerationRequest, OutputChunk, OutputProcessor
from paceline_services.gateway.routing.fleet import Fleet
from paceline_services.gateway.structured_output import GrammarChecks, StructuredBody

FINAL_STATS_TIMEOUT_S = 2.0
"""How long to wait for the statistics of a request that a stop string ended."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The model as requests are checked against it."""

    max_model_len: int
    vocabulary_size: int
    eos_token_ids: Sequence[int]


@dataclass(slots=True)
class ServedModel:
    """One model, served by a fleet, in the room that all models of a gateway share."""

    model: str
    tokenizer: Tokenizer
    fleet: Fleet
    metrics: GatewayMetrics
    capacity: Capacity = field(default_factory=Capacity)
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    created: int = field(default_factory=lambda: int(time.time()))
    queue: AdmissionQueue = field(init=False)

    def __post_init__(self) -> None:
        self.queue = AdmissionQueue(self.capacity, self.fleet)
        self.metrics.set_queue_source(self.model, lambda: self.queue.waiting)
        self.metrics.set_target_count_source(self.model, lambda: self.fleet.targets_up)
        self.metrics.set_breaker_source(self.model, self.fleet.breaker_states)

    @property
    def limits(self) -> AdmissionLimits:
        return self.capacity.limits

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
        if self.capacity.closing:
            return NoTargetError("the gateway is closing", reason="closing")
        if not self.fleet.has_targets:
            return NoTargetError("no target is up; try again soon")
        if not self.fleet.available:
            return NoTargetError("every target fails; try again soon", self.fleet.retry_after_s(), reason="breaker")
        return None

    def model_limits(self) -> ModelLimits:
        """Raises `NoTargetError`: only a target knows."""
        if error := self.unavailable():
            raise self._count_rejection(error)
        description = self.fleet.description
        assert description is not None
        return ModelLimits(description.max_model_len, description.vocabulary_size, description.eos_token_ids)

    def admit(self, choices: int) -> None:
        """Raises `OverloadedError` if so many more choices are too many."""
        with self.counting_rejections():
            self.queue.check(choices)

    async def grammar_of(self, body: StructuredBody) -> str:
        """The grammar that a body asks for, or none. Raises `InvalidRequestError` or `OverloadedError`."""
        with self.counting_rejections():
            return await self.grammars.grammar_of(body)

    def permits(self, choices: int) -> list[Permit]:
        """A place for each choice that is about to begin. Raises `OverloadedError`."""
        with self.counting_rejections():
            return self.queue.permits(choices)

    async def generate(self, choice: GenerationRequest, place: Permit) -> AsyncGenerator[OutputChunk]:
        """The pieces of one completion; the last one has a finish reason. Closing it cancels everywhere.

        Raises an `ApiError` if the target is lost for good, or cannot serve it.
        """
        if error := self.unavailable():
            place.close()
            raise self._count_rejection(error)
        if choice.counts_prompt:
            choice.client.count_tokens(len(choice.prompt), "prompt")
        submission = Submission(
            uuid.uuid4().hex,
            choice.prompt,
            choice.sampling,
            choice.speculative,
            cache_salt=choice.cache_salt,
            client=choice.client.name,
            group=choice.group,
        )
        text = OutputProcessor(choice, self.tokenizer)
        with closing(place), self.metrics.track(self.model) as progress:
            run = FailoverRequest(self.fleet, submission, self.limits.resume_s, progress, choice.session)
            async with aclosing(run.deltas()) as deltas:
                async for delta in deltas:
                    piece = text.process(delta)
                    progress.tokens(len(piece.tokens))
                    choice.client.count_tokens(len(piece.tokens), "output")
                    if piece.finish_reason is None:
                        yield piece
                        continue
                    if delta.finish_reason is None:
                        run.finish_early()
                        if choice.speculative.report:
                            await _add_final_stats(piece, deltas)
                    progress.finished(piece.finish_reason, text.usage(len(choice.prompt), piece))
                    yield piece
                    return

    @contextmanager
    def counting_rejections(self) -> Iterator[None]:
        """Requests that are turned away for want of room."""
        try:
            yield
        except OverloadedError as error:
            raise self._count_rejection(error) from None

    def _count_rejection(self, error: OverloadedError | NoTargetError) -> OverloadedError | NoTargetError:
        self.metrics.rejected(self.model, error.reason)
        return error


async def _add_final_stats(piece: OutputChunk, deltas: AsyncGenerator[Delta]) -> None:
    """A stop string ended the choice here; the target reports on it once it knows."""
    with suppress(TimeoutError):  # then the answer goes without statistics
        async with asyncio.timeout(FINAL_STATS_TIMEOUT_S):
            async for delta in deltas:
                piece.speculation, piece.timings = delta.speculation, delta.timings
                piece.cached_tokens = delta.usage.cached_tokens if delta.usage else 0


async def generate_all(
    gateway: ServedModel, choices: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, OutputChunk]]:
    """The pieces of several choices as they come, each with its choice's index. The first error ends all."""
    places = gateway.permits(len(choices))
    try:
        runs = [gateway.generate(choice, place) for choice, place in zip(choices, places, strict=True)]
        async with aclosing(_single(runs[0]) if len(runs) == 1 else _interleaved(runs)) as parts:
            async for part in parts:
                yield part
    finally:
        for place in places:  # of choices that were cancelled before they began
            place.close()


async def _single(pieces: AsyncGenerator[OutputChunk]) -> AsyncGenerator[tuple[int, OutputChunk]]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield 0, piece


async def _interleaved(runs: Sequence[AsyncGenerator[OutputChunk]]) -> AsyncGenerator[tuple[int, OutputChunk]]:
    ready: asyncio.Queue[tuple[int, OutputChunk | Exception]] = asyncio.Queue()
    tasks = []
    try:
        for index, pieces in enumerate(runs):
            tasks.append(asyncio.create_task(_enqueue(ready, index, pieces)))
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


async def _enqueue(
    ready: asyncio.Queue[tuple[int, OutputChunk | Exception]], index: int, pieces: AsyncGenerator[OutputChunk]
) -> None:
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                ready.put_nowait((index, piece))
    except Exception as error:  # noqa: BLE001 - raised again where the pieces are read
        ready.put_nowait((index, error))
