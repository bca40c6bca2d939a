"""A mutant gateway for tests: a request that is replayed on another target gets the next seed."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from dataclasses import replace

from paceline.messages import Delta, GenerationRequest
from paceline.wire.target_link import TargetLink
from paceline_services.gateway.__main__ import main

right = TargetLink.submit


def wrong(self: TargetLink, request: GenerationRequest) -> AsyncGenerator[Delta]:
    if request.committed:
        sampling = request.sampling
        request = replace(request, sampling=sampling.model_copy(update={"seed": sampling.seed + 1}))
    return right(self, request)


if __name__ == "__main__":
    TargetLink.submit = wrong  # type: ignore[method-assign]
    sys.exit(main())
