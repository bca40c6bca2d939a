"""The engine's loop sleeps only when there is nothing to do."""

from __future__ import annotations

from typing import Any

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.messages import GenerationRequest, SpeculationStats
from paceline.engine.draft_client import DraftUpdates, NoDraftClient
from paceline.engine.engine import Engine
from paceline.engine.engine_loop import EngineLoop
from paceline.engine.engine_messages import StepResult
from paceline.model import ModelOutput
from paceline_lab.fake_models.table_model import TableModel
from tests.exactness.test_engine import FREE
from tests.helpers.pipes import computing, joined
from tests.helpers.workers import until


class SubmitsDuringPoll(NoDraftClient):
    """A poll for growth reads the pipe: submissions in `late` arrive in the middle of a step."""

    def __init__(self) -> None:
        self.late: list[GenerationRequest] = []
        self.loop: EngineLoop | None = None

    def poll(self, timeout_s: float) -> DraftUpdates:
        while self.late and self.loop is not None:
            self.loop._messages.append(self.late.pop())
        return DraftUpdates()


async def test_a_request_during_the_last_step_of_another_is_served() -> None:
    drafting, ended = SubmitsDuringPoll(), set[str]()
    engine = Engine(TableModel(8, 256, 256), EngineConfig(slots=256), SpeculativeConfig(), drafting, FREE)
    drafting.late = [GenerationRequest("second", [1, 2], SamplingParams(max_tokens=1))]
    async with joined() as (connection, pipe):
        drafting.loop = EngineLoop(engine, pipe)
        connection.on(StepResult, lambda step: ended.update(d.request_id for d in step.deltas if d.finish_reason))
        async with computing(connection, drafting.loop.run):
            connection.send(GenerationRequest("first", [1, 2], SamplingParams(max_tokens=1)))
            await until(lambda: ended == {"first", "second"})


async def test_statistics_are_sent_when_due_and_at_the_end() -> None:
    """Steps are 0.03 s apart, so every fourth step sends the statistics of four steps."""
    now, received = [0.0], list[StepResult]()
    model = TableModel(8, 256, 256)
    engine = Engine(model, EngineConfig(slots=256), SpeculativeConfig(), NoDraftClient(), FREE, clock=lambda: now[0])

    def receive(step: StepResult) -> None:
        received.append(step)

    run = model.run

    def passing(*args: Any) -> ModelOutput:
        now[0] += 0.03
        return run(*args)

    model.run = passing  # type: ignore[method-assign]
    async with joined() as (connection, pipe):
        connection.on(StepResult, receive)
        async with computing(connection, EngineLoop(engine, pipe).run):
            connection.send(GenerationRequest("r", [1, 2], SamplingParams(max_tokens=11)))
            await until(lambda: bool(received) and received[-1].deltas[-1].finish_reason is not None)
    assert [len(step.stats) for step in received] == [1, 0, 0, 0, 4, 0, 0, 0, 4, 0, 2]
    assert sum(each.generation_tokens for step in received for each in step.stats) == 11
    assert [step.deltas[0].speculation is not None for step in received] == [bool(step.stats) for step in received]
    assert received[-1].deltas[0].speculation == SpeculationStats(steps=11)
