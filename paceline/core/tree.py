"""The token tree: the state that a draft and a target share.

A request's tree hangs from its *root*, the last committed token. Every other node is a draft token. The draft *grows*
the tree with `add`; the target takes growth in with `graft`. Both *commit* the tokens that the target drew: the nodes
below the committed path survive, all other branches are dropped.

A node is an index into the tree's lists (`tokens`, `parents`, `depths`, ...). The root is node 0, and parents come
before their children. A commit renumbers the surviving nodes and returns how (`CommitResult`).

A draft grows ahead of the target, so growth may name parents that a commit has passed meanwhile. `graft` resolves such
growth without asking the draft again. Late, repeated and invalid growth is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple, TypeVar

from paceline.core.growth import CERTAIN_TOKEN, ROOT_ID, DraftDistribution, Growth

T = TypeVar("T")

ROOT = 0
RECENT_POSITIONS = 512
"""How many committed positions growth may still name."""

MIN_LOG_PROB = -1e4
"""Replaces every smaller log-probability, minus infinity included, so that sums along a path stay finite."""

CalibratedLogProbs = Mapping[tuple[float, int, int], tuple[int, float]]
"""A node's calibration cell and calibrated log-probability (not positive), by the draft's log-probability, the number
of earlier siblings from the same draft, and the depth."""

TokenFilter = Callable[[Sequence[int], int], bool]
"""Whether a token may follow these tokens below the root."""


class CommitResult(NamedTuple):
    """How a commit changed the tree, in the old numbering.

    `path`: the committed nodes, in order. `kept`: the surviving nodes; `kept[i]` is now node i + 1.
    """

    path: Sequence[int]
    kept: Sequence[int]


class TokenTree:
    """A replica of one request's tree. Not thread-safe."""

    def __init__(
        self,
        position: int,
        token: int,
        calibrated: Mapping[int, CalibratedLogProbs] | None = None,
        token_filter: TokenFilter | None = None,
        *,
        chain: bool = False,
    ) -> None:
        """`position`, `token`: the root's. `calibrated`: calibrated log-probabilities by draft; the draft's own for
        other drafts. If several drafts guess a node, the largest log-probability counts.

        `graft` drops tokens that `token_filter` rejects, and in a `chain` every child of a node but the first.
        """
        self.position = position
        """The root's position; a node's position is this plus its depth."""
        self._calibrated = calibrated or {}
        self._token_filter = token_filter
        self._chain = chain
        self._draft_ids: dict[int, _DraftIds] = {}  # by draft
        self._recent_tokens = [token]  # the last committed tokens, the root's at the end
        self._next_id = ROOT_ID + 1
        self._clear(token)

    def _clear(self, token: int) -> None:
        """Drop all nodes but the root."""
        self.tokens = [token]
        self.parents = [-1]
        self.depths = [0]
        self.path_log_probs = [0.0]
        """Natural log of the probability that the target draws all of the path. It falls along every path."""
        self.sources = [0]
        """The draft whose log-probability counts."""
        self.calibration_cells = [0]
        """The cell of this draft's calibration that counts the node's outcome (`CalibratedLogProbs`)."""
        self.distributions: dict[int, DraftDistribution] = {}
        """The draft's distribution by node, for strategies that need it. Nodes without one are certain."""
        self._other_sources: dict[int, dict[int, int]] = {}  # calibration cells by node and other draft that guessed it
        self._wire_ids: dict[int, int] = {}  # by described node
        self._children: dict[tuple[int, int], int] = {}  # by parent and token
        self._best_cache: dict[tuple[int, int], list[int]] = {}
        """Results of `best` since the tree last changed: a step asks several times."""

    @property
    def size(self) -> int:
        """How many nodes hang below the root."""
        return len(self.tokens) - 1

    def nodes(self) -> range:
        """All nodes below the root, parents before children."""
        return range(1, len(self.tokens))

    def child(self, parent: int, token: int) -> int | None:
        return self._children.get((parent, token))

    def children(self, parent: int) -> list[int]:
        """The node's children in the order in which they arrived. Scans the whole tree."""
        return [node for node, above in enumerate(self.parents) if above == parent]

    def log_prob(self, node: int) -> float:
        """Natural log of the probability that the target draws the node's token, given the path above it."""
        return self.path_log_probs[node] - self.path_log_probs[self.parents[node]]

    def path(self, node: int) -> list[int]:
        """The nodes from below the root down to this one."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """The tokens from below the root down to this node's."""
        return [self.tokens[each] for each in self.path(node)]

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The longest path of nodes below the root that carries the first of these tokens."""
        nodes: list[int] = []
        node: int | None = ROOT
        for token in tokens:
            if node is None or (node := self._children.get((node, token))) is None:
                break
            nodes.append(node)
        return nodes

    def best(self, count: int, max_depth: int) -> Sequence[int]:
        """The `count` nodes with the largest path probability, best first, none deeper than `max_depth`.

        Path probability falls along a path, so parents come before their children and the set is closed under parents.
        """
        best = self._best_cache.get((count, max_depth))
        if best is None:
            near = [node for node in self.nodes() if self.depths[node] <= max_depth]
            near.sort(key=self.path_log_probs.__getitem__, reverse=True)
            best = self._best_cache[count, max_depth] = near[:count]
        return best

    def height(self, nodes: Sequence[int]) -> int:
        """The depth of the deepest of these nodes; 0 without any."""
        return max(map(self.depths.__getitem__, nodes), default=0)

    def outcomes(self, path: Sequence[int], tokens: Sequence[int]) -> Iterator[tuple[int, int, int, bool]]:
        """(node, draft, calibration cell, drawn) of each node whose parent is on the drawn path, once per draft.

        `tokens`: the target's draws after the root. `path`: nodes that `match` all but the last. `drawn`: whether the
        target drew the node's token.
        """
        drawn = dict(zip((ROOT, *path), tokens, strict=False))
        for node, parent in enumerate(self.parents):
            if parent in drawn:
                hit = drawn[parent] == self.tokens[node]
                yield node, self.sources[node], self.calibration_cells[node], hit
                for source, cell in self._other_sources.get(node, {}).items():
                    yield node, source, cell, hit

    def guessed_by(self, source: int, node: int) -> bool:
        """Whether this draft, among others perhaps, has sent the node."""
        return self.sources[node] == source or source in self._other_sources.get(node, ())

    # The draft's side.

    def add(self, parent: int, token: int, log_prob: float, distribution: DraftDistribution = CERTAIN_TOKEN) -> int:
        """Add a node for `token` after `parent` and return it. `growth` gives it an id.

        Raises ValueError if the parent has that child already.
        """
        if (parent, token) in self._children:
            raise ValueError(f"node {parent} already has a child for token {token}")
        self._best_cache.clear()
        return self._append(parent, token, clamp_log_prob(log_prob), distribution)

    def growth(self, nodes: Sequence[int]) -> Growth:
        """Describe nodes for the other replica, each once.

        They get fresh ids, in the order of their parents' ids: cheapest on the wire (`paceline.wire.node_codec`).
        """
        ids, first_id = self._wire_ids, self._next_id
        self._next_id += len(nodes)
        nodes = self._by_parents(nodes)
        ids.update(zip(nodes, range(first_id, self._next_id), strict=True))
        sampled_from = [self.distributions.get(node, CERTAIN_TOKEN) for node in nodes] if self.distributions else []
        return Growth(
            base_position=self.position,
            first_id=first_id,
            parent_ids=[ids.get(self.parents[node], ROOT_ID) for node in nodes],
            tokens=[self.tokens[node] for node in nodes],
            log_probs=[self.log_prob(node) for node in nodes],
            distributions=sampled_from if any(sampled_from) else (),
        )

    def _by_parents(self, nodes: Sequence[int]) -> list[int]:
        below: dict[int, list[int]] = {}
        for node in nodes:
            below.setdefault(self.parents[node], []).append(node)
        described = sorted(below.keys() - set(nodes), key=lambda node: self._wire_ids.get(node, ROOT_ID))
        ordered = [node for parent in described for node in below[parent]]
        for node in ordered:  # the list grows meanwhile
            ordered += below.get(node, ())
        return ordered

    # The target's side.

    def graft(self, growth: Growth, max_size: int, source: int = 0) -> int:
        """Take in growth from the draft `source`; return how many nodes were new. Each draft has its own ids.

        A node whose parent is alive joins the tree. A node that the tree already has, or that was committed
        meanwhile, gives its id to the existing node, which keeps the first id that each draft gave it. All other nodes
        are dropped, as are nodes beyond `max_size`.
        """
        ids = self._draft_ids.get(source) or self._draft_ids.setdefault(source, _DraftIds(self._calibrated.get(source)))
        known, children, before = ids.nodes, self._children, len(self.tokens)
        top = ROOT if growth.base_position == self.position else None
        distributions = growth.distributions or repeat(CERTAIN_TOKEN)
        self._best_cache.clear()
        for id_, parent_id, token, log_prob, distribution in zip(
            growth.node_ids, growth.parent_ids, growth.tokens, growth.log_probs, distributions, strict=False
        ):
            parent = known.get(parent_id) if parent_id else top
            if parent is None:
                parent = self._late_parent(ids, id_, parent_id, growth.base_position, token)
            if parent is None or id_ in known:
                continue
            node = children.get((parent, token))
            if node is None:
                if len(self.tokens) <= max_size and self._allows(parent, token):
                    cell, log_prob = ids.calibrate(parent, self.depths[parent] + 1, log_prob)
                    known[id_] = self._append(parent, token, log_prob, distribution, source, cell)
            elif node not in known.values():  # one id per node: bounds what a hostile draft makes us keep
                known[id_] = node
                if not self.guessed_by(source, node):
                    self._add_source(ids, node, log_prob, source)
        return len(self.tokens) - before

    def forget_ids(self, source: int = 0) -> None:
        """Forget a draft's ids, since another draft takes its place. The nodes stay."""
        self._draft_ids.pop(source, None)

    def _append(
        self, parent: int, token: int, log_prob: float, distribution: DraftDistribution, source: int = 0, cell: int = 0
    ) -> int:
        node = self._children[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.path_log_probs.append(self.path_log_probs[parent] + log_prob)
        self.sources.append(source)
        self.calibration_cells.append(cell)
        if distribution:
            self.distributions[node] = distribution
        return node

    def _allows(self, parent: int, token: int) -> bool:
        if self._chain and parent != self.size:
            return False
        return self._token_filter is None or self._token_filter(self.path_tokens(parent), token)

    def _add_source(self, ids: _DraftIds, node: int, log_prob: float, source: int) -> None:
        """Another draft guessed this node. In a chain its log-probability does not count: see `SAMPLED_DRAFT_SCORE`."""
        cell, log_prob = ids.calibrate(self.parents[node], self.depths[node], log_prob)
        if log_prob > self.log_prob(node) and not self._chain:
            source, self.sources[node] = self.sources[node], source
            cell, self.calibration_cells[node] = self.calibration_cells[node], cell
            log_probs = {below: self.log_prob(below) for below in self._below(node)} | {node: log_prob}
            for below, log_prob in log_probs.items():
                self.path_log_probs[below] = self.path_log_probs[self.parents[below]] + log_prob
        self._other_sources.setdefault(node, {})[source] = cell

    def _late_parent(self, ids: _DraftIds, id_: int, parent_id: int, base_position: int, token: int) -> int | None:
        """The root, if it is the parent; else None. If the parent was committed earlier and `token` after it, too, the
        id names that committed position from now on."""
        position = ids.committed.get(parent_id) if parent_id else base_position
        if position is None:
            return None
        behind = self.position - position
        if behind == 0:
            return ROOT
        if 0 < behind <= min(len(self._recent_tokens), RECENT_POSITIONS) and self._recent_tokens[-behind] == token:
            ids.mark_committed(id_, position + 1)
        return None

    # Both sides.

    def commit(self, tokens: Sequence[int]) -> CommitResult:
        """Commit the tokens that the target drew after the root. The last one becomes the new root."""
        path = self.match(tokens)
        moved = self._below(path[-1]) if len(path) == len(tokens) else {}
        before, self.position = self.position, self.position + len(tokens)
        self._recent_tokens += tokens
        if len(self._recent_tokens) > 2 * RECENT_POSITIONS:
            del self._recent_tokens[:-RECENT_POSITIONS]
        for ids in self._draft_ids.values():
            ids.renumber(moved, path, before + 1)
        kept = list(moved)[1:]
        if kept:
            self._renumber(path, kept, moved)
        elif self.size:
            self._clear(tokens[-1])
        else:
            self.tokens[ROOT] = tokens[-1]
        return CommitResult(path, kept)

    def _below(self, top: int) -> dict[int, int]:
        """The new numbers of this node and the nodes below it, once it is the root."""
        moved = {top: ROOT}
        for node, parent in enumerate(self.parents):
            if parent in moved:
                moved[node] = len(moved)
        return moved

    def _renumber(self, path: Sequence[int], kept: Sequence[int], moved: Mapping[int, int]) -> None:
        """Keep only the end of the path, now the root, and the `kept` nodes."""
        parents = [moved[self.parents[node]] for node in kept]
        tokens = [self.tokens[node] for node in kept]
        self.tokens = [self.tokens[path[-1]], *tokens]
        self.parents = [-1, *parents]
        self.depths = [0, *(self.depths[node] - len(path) for node in kept)]
        self.sources = [0, *map(self.sources.__getitem__, kept)]
        self.calibration_cells = [0, *map(self.calibration_cells.__getitem__, kept)]
        self.distributions, self._other_sources = (
            _renumbered(self.distributions, moved),
            _renumbered(self._other_sources, moved),
        )
        self._wire_ids = _renumbered(self._wire_ids, moved)
        self._children = dict(zip(zip(parents, tokens, strict=True), self.nodes(), strict=True))
        self._best_cache.clear()
        top = self.path_log_probs[path[-1]]
        self.path_log_probs = [0.0, *(self.path_log_probs[node] - top for node in kept)]


class _DraftIds:
    """The target's record of one draft: its ids of the tree's nodes, and its calibration."""

    __slots__ = ("calibrated", "child_counts", "committed", "ids", "nodes")

    def __init__(self, calibrated: CalibratedLogProbs | None) -> None:
        self.calibrated = calibrated
        self.child_counts: dict[int, int] = {}
        """By node: how many of its children the draft has sent."""
        self.nodes: dict[int, int] = {}
        """Nodes by id."""
        self.committed: dict[int, int] = {}
        """Positions by id, of nodes that were committed since."""
        self.ids: dict[int, int] = {}
        """The inverse of `committed`."""

    def calibrate(self, parent: int, depth: int, log_prob: float) -> tuple[int, float]:
        """The calibration cell and log-probability of a new child of `parent`."""
        if not MIN_LOG_PROB <= log_prob <= 0.0:
            log_prob = clamp_log_prob(log_prob)
        rank = self.child_counts.get(parent, 0)
        self.child_counts[parent] = rank + 1
        return (0, log_prob) if self.calibrated is None else self.calibrated[log_prob, rank, depth]

    def renumber(self, moved: Mapping[int, int], path: Sequence[int], position: int) -> None:
        """Follow a commit. `moved`: new numbers of surviving nodes. `path`: the committed nodes, from `position` on."""
        nodes, self.nodes = self.nodes, {}
        for id_, node in nodes.items():
            if node in path:
                self.mark_committed(id_, position + path.index(node))
            elif node in moved:
                self.nodes[id_] = moved[node]
        self.child_counts = (
            {moved[node]: count for node, count in self.child_counts.items() if node in moved} if moved else {}
        )

    def mark_committed(self, id_: int, position: int) -> None:
        """The node of this id is committed now. One id per position: bounds what a draft makes us keep."""
        if position not in self.ids:
            self.ids[position], self.committed[id_] = id_, position
            if len(self.ids) > 2 * RECENT_POSITIONS:
                self.ids = dict(sorted(self.ids.items())[-RECENT_POSITIONS:])
                self.committed = {id_: position for position, id_ in self.ids.items()}


def _renumbered(by_node: dict[int, T], moved: Mapping[int, int]) -> dict[int, T]:
    return {new: value for node, value in by_node.items() if (new := moved.get(node))}


def clamp_log_prob(log_prob: float) -> float:
    """Clamp to [MIN_LOG_PROB, 0]; NaN becomes MIN_LOG_PROB."""
    return 0.0 if log_prob > 0.0 else log_prob if log_prob > MIN_LOG_PROB else MIN_LOG_PROB
