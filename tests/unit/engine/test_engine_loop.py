"""The engine's loop sleeps only when there is nothing to do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.engine.draft_client import NoDraftClient, PollResult
from paceline.engine.engine import Engine
from paceline.engine.engine_loop import EngineLoop, StepResult
from paceline.ipc.pipe import Pipe
from paceline.messages import GenerationRequest, SpeculationStats
from paceline.model import ModelOutput
from paceline.model.rows import Row
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers.pipes import computing, joined
from tests.helpers.targets import FREE
from tests.helpers.waiting import PATIENCE_S, until


class ReadsPipe(NoDraftClient):
    """Waits in the first step until a message has arrived: a poll for growth reads the pipe."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.polls = 0

    def poll(self, timeout_s: float) -> PollResult:
        self.polls += 1
        if self.polls == 1:
            self.pipe.receive(PATIENCE_S)
        return PollResult()


async def test_a_request_during_the_last_step_of_another_is_served() -> None:
    ended = set[str]()
    async with joined() as (connection, pipe):
        drafting = ReadsPipe(pipe)
        engine = Engine(TableModel(8, 256, 256), EngineConfig(slots=256), SpeculativeConfig(), drafting, FREE)
        connection.on(StepResult, lambda step: ended.update(d.request_id for d in step.deltas if d.finish_reason))
        async with computing(connection, EngineLoop(engine, pipe).run):
            connection.send(GenerationRequest("first", [1, 2], SamplingParams(max_tokens=1)))
            await until(lambda: drafting.polls > 0)
            connection.send(GenerationRequest("second", [1, 2], SamplingParams(max_tokens=1)))
            await until(lambda: ended == {"first", "second"})


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_statistics_are_sent_when_due_and_at_the_end(asynchronous: bool) -> None:
    """Steps are 0.15 s apart, so every fourth step sends the statistics of four steps. A step that is delivered behind
    the next one's pass is sent with its own."""
    now, received = [0.0], list[StepResult]()

    class Ticking(TableModel):
        def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
            now[0] += 0.15
            return super().run(rows, wanted, hidden_layers)

    model, config = Ticking(8, 256, 256), EngineConfig(slots=256)
    model.asynchronous = asynchronous
    engine = Engine(model, config, SpeculativeConfig(), NoDraftClient(), FREE, clock=lambda: now[0])
    async with joined() as (connection, pipe):
        connection.on(StepResult, received.append)
        async with computing(connection, EngineLoop(engine, pipe).run):
            connection.send(GenerationRequest("r", [1, 2], SamplingParams(max_tokens=11)))
            await until(lambda: bool(received) and received[-1].deltas[-1].finish_reason is not None)
    assert [len(step.stats) for step in received] == [1, 0, 0, 0, 4, 0, 0, 0, 4, 0, 2]
    assert sum(each.generation_tokens for step in received for each in step.stats) == 11
    assert [step.deltas[0].speculation is not None for step in received] == [bool(step.stats) for step in received]
    assert received[-1].deltas[0].speculation == SpeculationStats(steps=11)
