"""A target is killed in the middle of a prompt that it scores; another one takes over.

The gateway, its links, the targets' servicers and engines are real, in this process, over timed models.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.fake_models.timed_model import TimedModel
from tests.helpers.streams import client, gateway_for
from tests.helpers.targets import target_worker
from tests.helpers.waiting import PATIENCE_S, until

MODEL = "timed:vocabulary=512,step_ms=0,agreement=0.7"
PROMPT = [(7 * at) % 500 for at in range(1000)]
"""Four passes."""
BODY: dict[str, Any] = {"prompt": PROMPT, "prompt_logprobs": 2, "echo": True, "logprobs": 1, "max_tokens": 5, "seed": 3}


class HeldModel(TimedModel):
    """Waits in its third pass until it may go on."""

    def __init__(self) -> None:
        super().__init__(MODEL, TimedModelConfig.parse(MODEL), 2**13, 4096)
        self.held, self.may_go_on = threading.Event(), threading.Event()
        self._passes = 0

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        self._passes += 1
        if self._passes == 3:
            self.held.set()
            self.may_go_on.wait(PATIENCE_S)
        return super().run(rows, wanted, hidden_layers)


async def test_each_position_comes_once_and_is_right() -> None:
    models = HeldModel(), HeldModel()
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(target_worker(model=model)) for model in models]
        for model in models:
            stack.callback(model.may_go_on.set)
        gateway = await stack.enter_async_context(gateway_for(MODEL, *(worker.address for worker in workers)))
        http, url = await stack.enter_async_context(client()), f"http://{gateway.http}/v1/completions"
        asking = asyncio.create_task(http.post(url, json=BODY))
        await until(lambda: any(model.held.is_set() for model in models))
        victim = next(at for at, model in enumerate(models) if model.held.is_set())
        models[1 - victim].may_go_on.set()
        await workers[victim].server.stop()
        models[victim].may_go_on.set()
        answer, plain = await asking, await http.post(url, json=BODY)
        assert answer.status_code == 200, answer.text
        [resumed], [expected] = answer.json()["choices"], plain.json()["choices"]
        assert resumed == expected
        assert len(resumed["prompt_logprobs"]) == len(PROMPT)
        assert resumed["logprobs"]["token_logprobs"].count(None) == 1
