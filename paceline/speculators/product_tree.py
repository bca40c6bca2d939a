"""Trees from laws that do not depend on the guesses between: of the token after the root, of the one after that, ...

Heads that look several tokens ahead at once (Medusa) and drafters with mask tokens (PARD, P-EAGLE, DFlash) give one
law per depth. A path is then as likely as the product of its guesses, and the best tree is all paths that are likely
enough: Medusa's (Cai et al. 2024, section 2.3.3), with the best paths instead of a fixed choice of them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from paceline.sampling import History, Row
from paceline.speculators.predicted import Law
from paceline.tree import Node, TokenTree


def draws(history: History, position: int, count: int) -> list[Row]:
    """The target's draws of `count` positions from `position` on, the first after the root.

    The guesses between are not known; to rules that look back they are tokens outside the vocabulary.
    """
    unknown = history.vocabulary_size
    return [Row(history.params, position + depth, history, [unknown] * depth) for depth in range(count)]


def grow(tree: TokenTree, laws: Sequence[Law], most: int, floor: float) -> list[Node]:
    """Add the `most` likeliest guesses, those only whose path's log-probability is above `floor`.

    Every node at depth d, one that was there before, too, gets children from the law d of `laws`. The new nodes come
    level by level, in the order of their parents: in which they are cheapest on the wire.
    """
    serial = itertools.count()  # breaks ties by age, so that nodes are never compared
    offers: list[tuple[float, int, Node, int]] = []

    def offer(parent: Node, rank: int) -> None:
        depth = parent.position - tree.root.position
        if depth < len(laws) and rank < len(laws[depth]):
            chance = parent.path_log_prob + laws[depth][rank][1]
            if chance > floor:
                heapq.heappush(offers, (-chance, next(serial), parent, rank))

    for node in (tree.root, *tree.nodes()):
        offer(node, 0)
    new: set[Node] = set()
    while offers and len(new) < most:
        _, _, parent, rank = heapq.heappop(offers)
        offer(parent, rank + 1)
        token, log_prob = laws[parent.position - tree.root.position][rank]
        if token not in parent.children:
            node = tree.add(parent, token, log_prob)
            new.add(node)
            offer(node, 0)
    return _by_parent(tree, new)


def _by_parent(tree: TokenTree, new: set[Node]) -> list[Node]:
    ordered: list[Node] = []
    level = [tree.root]
    while level:
        level = [child for node in level for child in node.children.values()]
        ordered += filter(new.__contains__, level)
    return ordered
