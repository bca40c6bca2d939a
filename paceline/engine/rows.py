"""What one pass runs: the rows of all works, and what the strategy is told of each."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.scheduler import Work
from paceline.model.rows import Row
from paceline.sampling import Row as DrawRow
from paceline.strategies import Guessed


def rows_of(works: Sequence[Work]) -> tuple[list[Row], list[int]]:
    """The rows of all works, and the indices of those that are drawn from, work by work."""
    rows: list[Row] = []
    wanted: list[int] = []
    for work in works:
        request = work.request
        rows += [request.lane.row(request.tokens[i], i) for i in range(work.start, work.stop)]
        if work.draws:
            wanted += range(len(rows) - 1, len(rows) + len(work.nodes))
        branches: dict[int, list[int]] = {id(request.tree.root): []}
        for node, slot in zip(work.nodes, work.slots, strict=True):
            branches[id(node)] = [*branches[id(node.parent)], slot]
            rows.append(request.lane.branch_row(node.token, branches[id(node)]))
    return rows, wanted


def guessed(work: Work) -> Guessed:
    """What the strategy is given: among it what the target draws with after the root and after each guess."""
    request, root = work.request, work.request.tree.root
    rows = [DrawRow(request.law, root.position + 1, request.history)]
    if not request.history.rules:  # nothing looks back
        rows += [DrawRow(request.law, node.position + 1, request.history) for node in work.nodes]
        return Guessed(root, work.nodes, rows, request.tokens)
    paths: dict[int, list[int]] = {id(root): []}
    for node in work.nodes:
        path = paths[id(node)] = [*paths[id(node.parent)], node.token]
        rows.append(DrawRow(request.law, node.position + 1, request.history, path))
    return Guessed(root, work.nodes, rows, request.tokens)
