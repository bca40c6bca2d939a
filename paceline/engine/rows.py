"""What one pass runs: the rows of all works, and what the strategy is told of each."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.scheduler import Work
from paceline.model.rows import Row
from paceline.sampling import Row as DrawRow
from paceline.strategies import Guessed
from paceline.tree import ROOT


def rows_of(works: Sequence[Work]) -> tuple[list[Row], list[int]]:
    """The rows of all works, and the indices of those that are drawn from, work by work."""
    rows: list[Row] = []
    wanted: list[int] = []
    for work in works:
        request = work.request
        rows += [request.lane.row(request.tokens[i], i) for i in range(work.start, work.stop)]
        if work.draws:
            wanted += range(len(rows) - 1, len(rows) + len(work.nodes))
        if work.nodes:
            tokens, parents = request.tree.tokens, request.tree.parents
            branches: dict[int, list[int]] = {ROOT: []}
            for node, slot in zip(work.nodes, work.slots, strict=True):
                branch = branches[node] = [*branches[parents[node]], slot]
                rows.append(request.lane.branch_row(tokens[node], branch))
    return rows, wanted


def guessed(work: Work) -> Guessed:
    """What the strategy is given: among it what the target draws with after the root and after each guess."""
    request, tree = work.request, work.request.tree
    following = tree.position + 1
    rows = [DrawRow(request.law, following, request.history)]
    for node in work.nodes:
        path = tree.path_tokens(node) if request.history.rules else ()  # else nothing looks back
        rows.append(DrawRow(request.law, following + tree.depths[node], request.history, path))
    return Guessed(tree, work.nodes, rows, request.tokens)
