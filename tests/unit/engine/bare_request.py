"""Requests without an engine around them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import SamplingParams
from paceline.core.logits_rules import History
from paceline.core.tree import TokenTree
from paceline.engine.request import Request
from paceline.messages import GenerationRequest

CONTEXT = 1000
"""Positions."""


def bare_request(
    prompt: Sequence[int],
    *,
    key: int = 1,
    output: int = 20,
    limits: tuple[int, int] = (4, 8),
    draft: str | None = None,
    client: str = "",
    group: str = "",
    priority: int = 0,
    accepted_average: float | None = None,
) -> Request:
    """A greedy request without calibration. `limits`: depth and nodes that a step verifies."""
    params = SamplingParams(temperature=0.0, max_tokens=output)
    generation_request = GenerationRequest(
        f"r{key}",
        list(prompt),
        params,
        client=client,
        group=group,
        priority=priority,
        accepted_average=accepted_average,
    )
    history = History(params, prompt, (), CONTEXT)
    tree = TokenTree(len(prompt) - 1, prompt[-1])
    request = Request(
        key, generation_request, history, tree, max_tokens=output, limits=limits, calibrations={}, arrived=0.0
    )
    request.draft = draft
    return request
