"""Trees from laws that do not depend on the guesses between: of the token after the root, of the one after that, ...

Heads that look several tokens ahead at once (Medusa) and drafters with mask tokens (PARD, P-EAGLE, DFlash) give one
law per depth. A path is then as likely as the product of its guesses, and the best tree is all paths that are likely
enough: Medusa's (Cai et al. 2024, section 2.3.3), with the best paths instead of a fixed choice of them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from paceline.core.sampling import History, SamplingRow
from paceline.core.tree import TokenTree
from paceline.drafting.draw_prediction import RankedTokens


def draw_rows(history: History, position: int, count: int) -> list[SamplingRow]:
    """The target's draws of `count` positions from `position` on, the first after the root.

    The guesses between are not known; to rules that look back they are tokens outside the vocabulary.
    """
    unknown = history.vocabulary_size
    return [SamplingRow(history.params, position + depth, history, [unknown] * depth) for depth in range(count)]


def grow_product_tree(tree: TokenTree, laws: Sequence[RankedTokens], most: int, floor: float) -> list[int]:
    """Add the `most` likeliest guesses, those only whose path's log-probability is above `floor`.

    Every node at depth d, one that was there before, too, gets children from the law d of `laws`.
    Returns the new nodes.
    """
    serial = itertools.count()  # breaks ties by age
    offers: list[tuple[float, int, int, int]] = []

    def offer(parent: int, rank: int) -> None:
        depth = tree.depths[parent]
        if depth < len(laws) and rank < len(laws[depth]):
            chance = tree.path_log_probs[parent] + laws[depth][rank][1]
            if chance > floor:
                heapq.heappush(offers, (-chance, next(serial), parent, rank))

    for node in range(tree.size + 1):
        offer(node, 0)
    new: list[int] = []
    while offers and len(new) < most:
        _, _, parent, rank = heapq.heappop(offers)
        offer(parent, rank + 1)
        token, log_prob = laws[tree.depths[parent]][rank]
        if tree.child(parent, token) is None:
            node = tree.add(parent, token, log_prob)
            new.append(node)
            offer(node, 0)
    return new
