"""Trees from distributions that do not depend on the tokens between: one for each depth below the root.

Medusa heads and drafts with mask tokens (PARD, P-EAGLE, DFlash) give one distribution per depth. The probability of a
path is the product of its tokens' probabilities. The tree consists of the likeliest paths, where Medusa (Cai et al.
2024, section 2.3.3) takes a fixed choice of them.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Sequence

from paceline.core.logits_rules import History, SamplingRow
from paceline.core.tree import TokenTree
from paceline.drafting.draw_prediction import RankedTokens


def draw_rows(history: History, position: int, count: int) -> list[SamplingRow]:
    """The target's draws at `count` positions, beginning with `position`, the first after the root.

    The tokens between are unknown: rules that look back see a token outside the vocabulary.
    """
    unknown = history.vocabulary_size
    return [SamplingRow(history.params, position + depth, history, [unknown] * depth) for depth in range(count)]


def grow_product_tree(
    tree: TokenTree,
    distributions: Sequence[RankedTokens],
    most: int,
    least_path_log_prob: float,
    after: Callable[[int], RankedTokens] | None = None,
) -> list[int]:
    """Add the `most` likeliest nodes with a path log-probability above `least_path_log_prob`; return them.

    Every node at depth d, new or not, gets children from `distributions[d]`. `after`: the distribution after a node, if
    rules make it depend on the node's path.
    """
    serial = itertools.count()  # breaks ties by age
    candidates: list[tuple[float, int, int, int]] = []

    @functools.cache
    def ranked(node: int) -> RankedTokens:
        depth = tree.depths[node]
        if depth >= len(distributions) or tree.path_log_probs[node] <= least_path_log_prob:
            return ()
        return distributions[depth] if after is None else after(node)

    def push(parent: int, rank: int) -> None:
        if rank < len(ranked(parent)):
            path_log_prob = tree.path_log_probs[parent] + ranked(parent)[rank][1]
            if path_log_prob > least_path_log_prob:
                heapq.heappush(candidates, (-path_log_prob, next(serial), parent, rank))

    for node in range(tree.size + 1):
        push(node, 0)
    new: list[int] = []
    while candidates and len(new) < most:
        _, _, parent, rank = heapq.heappop(candidates)
        push(parent, rank + 1)
        token, log_prob = ranked(parent)[rank]
        if tree.child(parent, token) is None:
            node = tree.add(parent, token, log_prob)
            new.append(node)
            push(node, 0)
    return new
