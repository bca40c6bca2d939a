"""A gateway with a mistake, as a mutant for tests: whoever is replayed on another target gets the next seed."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from paceline.core.messages import Delta
from paceline_services.gateway.__main__ import main
from paceline_services.gateway.failover import FailoverRequest
from paceline_services.gateway.routing.target_worker import RoutingPrompt, Target

right = FailoverRequest._run_on


async def wrong(self: FailoverRequest, target: Target, text: RoutingPrompt) -> AsyncGenerator[Delta]:
    if self._committed:
        sampling = self._submission.sampling
        changed = sampling.model_copy(update={"seed": sampling.seed + 1})
        self._submission = replace(self._submission, sampling=changed)
    async with aclosing(right(self, target, text)) as deltas:
        async for delta in deltas:
            yield delta


if __name__ == "__main__":
    FailoverRequest._run_on = wrong  # type: ignore[method-assign]
    sys.exit(main())
