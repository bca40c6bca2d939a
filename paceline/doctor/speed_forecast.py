"""Forecasts speed from acceptance by depth and the cost of rows, with the arithmetic of
`paceline.core.policy.step_cost`.

It leaves out the draft's own time. A draft in the target's process adds that time to what is measured; drafts elsewhere
hide most of it behind the target's passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.policy.step_cost import RowCost, StepCost, nodes_to_verify
from paceline.doctor.measurements import MeasuredAcceptance


def forecast_tokens_per_s(acceptance: MeasuredAcceptance, requests: int, most_rows: int, cost: RowCost) -> float:
    """Tokens per second of all requests together, if each step verifies the nodes that pay.

    `cost`: seconds of a pass by rows. `most_rows`: rows that a pass can have.
    """
    gains = sorted(node_gains(acceptance, requests), reverse=True)
    count = nodes_to_verify(gains, requests, requests, most_rows - requests, StepCost(cost))
    return (requests + sum(gains[:count])) / cost(requests + count)


def batch_seconds(
    acceptance: MeasuredAcceptance, sizes: Sequence[tuple[int, int]], most_rows: int, cost: RowCost
) -> float:
    """Seconds until all requests that arrive together are finished. `sizes`: prompt and output tokens of each.

    Prompts are computed first, in full passes; a prompt's pass draws the first token. Each request that finishes
    leaves fewer requests to share a pass.
    """
    passes, rest = divmod(sum(prompt for prompt, _ in sizes), most_rows)
    seconds = passes * cost(most_rows) + (cost(rest) if rest else 0.0)
    lengths, drawn = sorted(output for _, output in sizes), 1
    for finished, length in enumerate(lengths):
        running = len(lengths) - finished
        if length > drawn:
            seconds += running * (length - drawn) / forecast_tokens_per_s(acceptance, running, most_rows, cost)
            drawn = length
    return seconds


def node_gains(acceptance: MeasuredAcceptance, requests: int) -> list[float]:
    """Expected accepted tokens of each node that a step of so many requests could verify.

    All nodes of one depth share the depth's acceptance equally. Each depth has as many nodes as were verified there on
    average, and at least one, so that a draft with few draft tokens is not rounded away.
    """
    reached, accepted = acceptance.drafted_by_depth, acceptance.accepted_by_depth
    width = acceptance.nodes / max(1, sum(reached))
    nodes: list[float] = []
    for verified, accepted_here in zip(reached, accepted, strict=True):
        count = max(1, round(requests * width * verified / max(1, acceptance.steps)))
        each = requests * accepted_here / max(1, acceptance.steps) / count
        nodes += [each] * count
    return nodes
