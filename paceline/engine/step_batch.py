"""What one pass runs: the rows of all works, and what the strategy is told of each."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.sampling import SamplingRow as DrawRow
from paceline.core.strategies import VerificationInput
from paceline.core.tree import ROOT
from paceline.engine.scheduler import ScheduledRequest
from paceline.model.rows import Row


def model_rows(works: Sequence[ScheduledRequest]) -> tuple[list[Row], list[int]]:
    """The rows of all works, and the indices of those that are drawn from, work by work."""
    rows: list[Row] = []
    wanted: list[int] = []
    for work in works:
        request = work.request
        rows += [request.slot_table.row(request.tokens[i], i) for i in range(work.start, work.stop)]
        if work.samples:
            wanted += range(len(rows) - 1, len(rows) + len(work.nodes))
        if work.nodes:
            tokens, parents = request.tree.tokens, request.tree.parents
            branches: dict[int, list[int]] = {ROOT: []}
            for node, slot in zip(work.nodes, work.slots, strict=True):
                branch = branches[node] = [*branches[parents[node]], slot]
                rows.append(request.slot_table.branch_row(tokens[node], branch))
    return rows, wanted


def verification_input(work: ScheduledRequest) -> VerificationInput:
    """What the strategy is given: among it what the target draws with after the root and after each guess."""
    request, tree = work.request, work.request.tree
    following = tree.position + 1
    rows = [DrawRow(request.effective_params, following, request.history)]
    for node in work.nodes:
        path = tree.path_tokens(node) if request.history.has_logits_rules else ()  # else nothing looks back
        rows.append(DrawRow(request.effective_params, following + tree.depths[node], request.history, path))
    return VerificationInput(tree, work.nodes, rows, request.tokens)
