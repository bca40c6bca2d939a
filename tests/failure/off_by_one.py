"""A gateway with a mistake, as a mutant for tests: whoever is replayed on another target gets the next seed."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from paceline.messages import Delta
from services.gateway.__main__ import main
from services.gateway.run import Run
from services.gateway.target import Target, Text

right = Run._on


async def wrong(self: Run, target: Target, text: Text) -> AsyncGenerator[Delta]:
    if self._committed:
        sampling = self._submission.sampling
        changed = sampling.model_copy(update={"seed": sampling.seed + 1})
        self._submission = replace(self._submission, sampling=changed)
    async with aclosing(right(self, target, text)) as deltas:
        async for delta in deltas:
            yield delta


if __name__ == "__main__":
    Run._on = wrong  # type: ignore[method-assign]
    sys.exit(main())
