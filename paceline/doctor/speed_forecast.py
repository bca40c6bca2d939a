"""How fast it should be, from what was accepted at each depth and what rows cost: the arithmetic of
`paceline.core.policy.step_cost`.

The draft's own time is not in it. What was measured beside it in one process has that time in it; drafts elsewhere hide
most of it behind the target's passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.policy.step_cost import RowCost, StepCost, nodes_to_verify
from paceline.doctor.measurements import MeasuredAcceptance


def forecast_tokens_per_s(acceptance: MeasuredAcceptance, requests: int, most_rows: int, cost: RowCost) -> float:
    """Tokens per second of so many requests at once, if each step verifies the nodes that pay.

    `cost`: of a pass, by rows; it has no more than `most_rows`.
    """
    worth = sorted(node_gains(acceptance, requests), reverse=True)
    count = nodes_to_verify(worth, requests, requests, most_rows - requests, StepCost(cost))
    return (requests + sum(worth[:count])) / cost(requests + count)


def batch_seconds(
    acceptance: MeasuredAcceptance, sizes: Sequence[tuple[int, int]], most_rows: int, cost: RowCost
) -> float:
    """Seconds until requests that come at once are all answered. `sizes`: of each, the tokens of its prompt and of its
    answer.

    Prompts are computed first, in full passes; a prompt's pass draws the first token. Each answer that is over leaves
    fewer requests to share a pass.
    """
    passes, rest = divmod(sum(prompt for prompt, _ in sizes), most_rows)
    seconds = passes * cost(most_rows) + (cost(rest) if rest else 0.0)
    lengths, drawn = sorted(answer for _, answer in sizes), 1
    for over, length in enumerate(lengths):
        left = len(lengths) - over
        if length > drawn:
            seconds += left * (length - drawn) / forecast_tokens_per_s(acceptance, left, most_rows, cost)
            drawn = length
    return seconds


def node_gains(acceptance: MeasuredAcceptance, requests: int) -> list[float]:
    """For each node that a step of so many requests could verify: the tokens that it brings.

    All nodes of one depth share what that depth brought. There are as many as there were, over all depths alike, and
    one at least: who guesses in few steps brings what it brings.
    """
    reached, accepted = acceptance.drafted_by_depth, acceptance.accepted_by_depth
    width = acceptance.nodes / max(1, sum(reached))
    nodes: list[float] = []
    for steps, brought in zip(reached, accepted, strict=True):
        count = max(1, round(requests * width * steps / max(1, acceptance.steps)))
        each = requests * brought / max(1, acceptance.steps) / count
        nodes += [each] * count
    return nodes
