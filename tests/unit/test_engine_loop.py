"""The engine's loop sleeps only when there is nothing to do."""

from __future__ import annotations

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.engine.drafting import News, NoDrafting
from paceline.engine.engine import Engine
from paceline.engine.loop import EngineLoop
from paceline.engine.orders import Stepped
from paceline.messages import Submission
from paceline.model.table import TableModel
from tests.exactness.test_engine import FREE
from tests.pipes import computing, joined
from tests.workers import until


class ReadsOrders(NoDrafting):
    """A poll for growth reads the pipe, and there are orders in it: those of `late`, handed to the loop in a step."""

    def __init__(self) -> None:
        self.late: list[Submission] = []
        self.loop: EngineLoop | None = None

    def poll(self, timeout_s: float) -> News:
        while self.late and self.loop is not None:
            self.loop._orders.append(self.late.pop())
        return News()


async def test_a_request_that_comes_during_the_last_step_of_another_is_served() -> None:
    drafting, ended = ReadsOrders(), set[str]()
    engine = Engine(TableModel(8, 256, 256), EngineConfig(slots=256), SpeculativeConfig(), drafting, FREE)
    drafting.late = [Submission("second", [1, 2], SamplingParams(max_tokens=1))]
    async with joined() as (connection, pipe):
        drafting.loop = EngineLoop(engine, pipe)
        connection.deliver(Stepped, lambda step: ended.update(d.request_id for d in step.deltas if d.finish_reason))
        async with computing(connection, drafting.loop.run):
            connection.send(Submission("first", [1, 2], SamplingParams(max_tokens=1)))
            await until(lambda: ended == {"first", "second"})
