"""The network to a target is cut during requests: connections stay open, and nothing arrives.

The gateway, its links, the target's servicer and its engine are real, in this process, over a timed model. The
reference are the target's own tokens without speculation.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

from loadtests.chaos.chaos_cases import NUMBERS, cases
from paceline_lab.bench.impairment_proxy import Impairment, ImpairmentProxy
from tests.helpers.streams import came, client, gateway_for, streaming, timed_target, unfinished
from tests.helpers.targets import NEVER_ENDS
from tests.helpers.waiting import PATIENCE_S, until
from tests.helpers.workers import host_and_port

MODEL = "timed:vocabulary=512,step_ms=20"
TOKENS = 60


async def test_a_target_that_is_cut_off() -> None:
    """Its requests continue on the other target with the same tokens. It cancels them, and is used again later.

    Only an unanswered ping shows the cut, after ten seconds.
    """
    async with AsyncExitStack() as stack:
        near, far = [await stack.enter_async_context(timed_target(MODEL)) for _ in range(2)]
        network = stack.enter_context(ImpairmentProxy(host_and_port(far.address), Impairment()))
        gateway = await stack.enter_async_context(gateway_for(MODEL, near.address, network.address))
        http, url = await stack.enter_async_context(client()), f"http://{gateway.http}"
        known = await cases(http, url, NUMBERS[:1], TOKENS)
        long = [replace(case, body={**case.body, "max_tokens": NEVER_ENDS}) for case in known[:6]]
        lasting = await stack.enter_async_context(unfinished(http, long, url))
        await until(lambda: bool(near.servicer.busy and far.servicer.busy))
        async with streaming(http, known, url) as streams:
            await came(streams, 20)
            network.hang()
        for stream in streams:
            stream.check()
        counts = [len(stream.got.tokens) for stream in lasting]
        await until(lambda: all(len(s.got.tokens) > count for s, count in zip(lasting, counts, strict=True)))
        await until(lambda: not far.servicer.busy)
        network.go_on()
        async with asyncio.timeout(PATIENCE_S):
            while not far.servicer.busy:
                await stack.enter_async_context(unfinished(http, long[:1], url))
                await asyncio.sleep(0.2)
