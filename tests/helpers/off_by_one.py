"""A mutant gateway for tests: a request that is replayed on another target gets the next seed."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from paceline.core.messages import Delta, GenerationRequest
from paceline.telemetry.tracing import TraceSpan
from paceline_services.gateway.__main__ import main
from paceline_services.gateway.failover import FailoverRequest
from paceline_services.gateway.routing.target_connection import TargetConnection

right = FailoverRequest._run_on


async def wrong(
    self: FailoverRequest,
    target: TargetConnection,
    request: GenerationRequest,
    blocks: Sequence[int],
    span: TraceSpan,
) -> AsyncGenerator[Delta]:
    if request.committed:
        sampling = request.sampling
        request = replace(request, sampling=sampling.model_copy(update={"seed": sampling.seed + 1}))
    async with aclosing(right(self, target, request, blocks, span)) as deltas:
        async for delta in deltas:
            yield delta


if __name__ == "__main__":
    FailoverRequest._run_on = wrong  # type: ignore[method-assign]
    sys.exit(main())
