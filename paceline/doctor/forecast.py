"""How fast it should be, from what was accepted at each depth and what rows cost: the arithmetic of `paceline.budget`.

The draft's own time is not in it. What was measured beside it in one process has that time in it; drafts elsewhere hide
most of it behind the target's passes.
"""

from __future__ import annotations

from paceline.budget import Cost, worthwhile
from paceline.doctor.figures import Acceptance


def forecast(acceptance: Acceptance, requests: int, most_rows: int, cost: Cost) -> float:
    """Tokens per second of so many requests at once, if each step verifies the nodes that pay.

    `cost`: of a pass, by rows; it has no more than `most_rows`.
    """
    worth = sorted(node_worth(acceptance, requests), reverse=True)
    count = worthwhile(worth, requests, requests, most_rows - requests, cost)
    return (requests + sum(worth[:count])) / cost(requests + count)


def node_worth(acceptance: Acceptance, requests: int) -> list[float]:
    """For each node that a step of so many requests could verify: the tokens that it brings.

    All nodes of one depth share what that depth brought. There are as many as there were, over all depths alike.
    """
    reached, accepted = acceptance.drafted_by_depth, acceptance.accepted_by_depth
    width = acceptance.nodes / max(1, sum(reached))
    nodes: list[float] = []
    for steps, brought in zip(reached, accepted, strict=True):
        count = round(requests * width * steps / max(1, acceptance.steps))
        each = requests * brought / max(1, acceptance.steps) / max(1, count)
        nodes += [each] * count
    return nodes
