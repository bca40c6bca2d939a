"""Requests without an engine around them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import SamplingParams
from paceline.core.messages import Submission
from paceline.core.tree import TokenTree
from paceline.engine.request import Request

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
) -> Request:
    """A greedy one, which counts every word for what it says. `limits`: depth and nodes of a step's guesses."""
    params = SamplingParams(temperature=0.0, max_tokens=output)
    tree = TokenTree(len(prompt) - 1, prompt[-1])
    submission = Submission(f"r{key}", list(prompt), params, client=client, group=group)
    request = Request(key, submission, params, output, limits, CONTEXT, tree, {}, arrived=0.0)
    request.draft = draft
    return request
