"""The token tree: the one thing that a draft and a target share.

A request's tree hangs from its *root*, the last committed token. Every other node is a guess. The draft side
*grows* the tree with `add`, the target side takes growth in with `graft`; both *commit* the tokens that the
target drew: the path through them survives, every other branch is forgotten.

A draft grows ahead of the target, so growth may name parents that a commit has meanwhile passed. `graft`
sorts that out without asking back: see its docstring. What comes late, twice or as nonsense is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter

ROOT_ID = 0
"""In growth, the parent id that names the committed token at the growth's base position. On a node: no id."""

TRAIL = 512
"""How many committed positions growth may still name. Older growth is too late to be of use."""

LEAST_LOG_PROB = -1e4
"""Stands for every smaller one, minus infinity too, so that sums along a path stay finite."""

Law = Mapping[int, int]
"""What a draft drew a guess from: tokens, each with a positive weight in proportion to which it is drawn. An empty one
stands for certainty: nothing but this guess could have come."""
CERTAIN: Law = {}


def _certain() -> Law:
    return CERTAIN


class Node:
    """One token at one position; guessed, unless it is a root.

    `log_prob` is the natural log of the probability that the target draws it, given that it drew the parent's path.
    `path_log_prob` is the sum of these from the root down, and so falls along every path.
    """

    __slots__ = (
        "cells",
        "children",
        "ids",
        "law",
        "log_prob",
        "parent",
        "path_log_prob",
        "position",
        "source",
        "token",
    )

    def __init__(
        self,
        token: int,
        position: int,
        parent: Node | None,
        law: Law = CERTAIN,
        log_prob: float = 0.0,
        path_log_prob: float = 0.0,
    ) -> None:
        self.token = token
        self.position = position
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.cells: dict[int, int] = {}
        """By draft that guessed it: with which guesses the outcome of this one is counted (`Weigh`)."""
        self.ids: dict[int, int] = {}
        """By draft: what it calls the guess."""
        self.source = 0
        """Which draft is surest of it."""
        self.log_prob, self.path_log_prob = log_prob, path_log_prob
        self.law = law
        """What it was drawn from, where the strategy wants to know."""

    @property
    def id(self) -> int:
        """What the first of the request's drafts, or the only one, calls it. `ROOT_ID`: nothing (yet, or any more)."""
        return self.ids.get(0, ROOT_ID)

    def path(self) -> list[Node]:
        """The nodes below the root down to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


Weigh = Callable[[float, int, int], tuple[int, float]]
"""What a draft's guess counts for: from the log-probability that the draft gives it, how many siblings the draft had
guessed before, and the depth below the root. Returns the guess's cell, and a log-probability that is not positive."""


Permit = Callable[[Node, int], bool]
"""Whether this token can come after this node."""


def believe(log_prob: float, rank: int, depth: int) -> tuple[int, float]:
    """A guess counts for what its draft says."""
    return 0, log_prob


def believe_all(source: int) -> Weigh:
    return believe


def permit_any(parent: Node, token: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Growth:
    """New nodes as they travel from draft to target: parallel sequences, parents before children.

    Their ids count up from `first_id`. `laws` are those that the nodes were drawn from, or none at all.

    Raises ValueError if lengths differ, an id is not positive, a log-probability is not a number, or a node cannot have
    come from its law. What else a draft may get wrong (unknown parents, repeated ids) is no error: `TokenTree.graft`
    drops it.
    """

    base_position: int
    first_id: int
    parent_ids: Sequence[int]
    tokens: Sequence[int]
    log_probs: Sequence[float]
    laws: Sequence[Law] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.parent_ids), len(self.tokens), len(self.log_probs), len(self.laws or self.tokens)}
        if len(lengths) > 1:
            raise ValueError(f"growth with sequences of lengths {sorted(lengths)}")
        if self.first_id <= ROOT_ID:
            raise ValueError("growth with a node id that is not positive")
        if any(map(math.isnan, self.log_probs)):
            raise ValueError("growth with a log-probability that is not a number")
        for token, law in zip(self.tokens, self.laws, strict=False):
            if law and (token not in law or min(law.values()) <= 0):
                raise ValueError(f"growth with token {token} of a law that it cannot have been drawn from")

    def __reduce__(self) -> tuple[Callable[..., Growth], tuple[object, ...]]:
        """What dataclasses have instead takes ten times as long, and growth passes through pipes all the time."""
        return Growth, (
            self.base_position,
            self.first_id,
            self.parent_ids,
            self.tokens,
            self.log_probs,
            self.laws,
        )

    def __len__(self) -> int:
        """How many nodes."""
        return len(self.tokens)

    def is_followed_by(self, other: Growth) -> bool:
        """Whether the two can be added: the other goes on where this one stops, under the same root."""
        return other.base_position == self.base_position and other.first_id == self.first_id + len(self)

    def __add__(self, other: Growth) -> Growth:
        return Growth(
            self.base_position,
            self.first_id,
            [*self.parent_ids, *other.parent_ids],
            [*self.tokens, *other.tokens],
            [*self.log_probs, *other.log_probs],
            [*self.every_law(), *other.every_law()] if self.laws or other.laws else (),
        )

    def every_law(self) -> Sequence[Law]:
        """One for each node."""
        return self.laws or [CERTAIN] * len(self)

    @property
    def node_ids(self) -> range:
        return range(self.first_id, self.first_id + len(self))


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit did to the tree. `path` holds the surviving guesses, now committed, in order.

    `missed` is the first drawn token that no node had guessed, or None if all were.
    """

    path: list[Node]
    missed: int | None


class TokenTree:
    """A replica of one request's tree: its guesses as one list, parents before children. Not thread-safe."""

    def __init__(
        self,
        position: int,
        token: int,
        weighs: Callable[[int], Weigh] = believe_all,
        width: int | None = None,
        permit: Permit = permit_any,
    ) -> None:
        """`weighs`: what each draft's guesses count for in the path's log-probability. Of a guess that several drafts
        make the surest one's word counts.

        `width`: most children that `graft` gives a node, the first to come; None: any number. With 1 the tree is a
        chain. `graft` drops what `permit` does not let in; the parent is the root or a node below it.
        """
        self.root = Node(token, position, None)
        self._nodes: list[Node] = []
        self._best: dict[tuple[int, int], list[Node]] = {}
        """What `best` gave since the tree last changed: a step asks twice and more."""
        self._weighs = weighs
        self._width = width or math.inf
        self._permit = permit
        self._next_id = ROOT_ID + 1
        self._by_id: dict[int, dict[int, Node]] = {}  # by source and id
        # Committed nodes by position, each with its successor as the only child: late growth may name them.
        self._trail: dict[int, Node] = {position: self.root}

    @property
    def size(self) -> int:
        """How many guesses there are."""
        return len(self._nodes)

    def nodes(self) -> Sequence[Node]:
        """All guesses, parents before children. They are the tree's own list."""
        return self._nodes

    def add(self, parent: Node, token: int, log_prob: float, law: Law = CERTAIN) -> Node:
        """Draft side: guess `token` after `parent`. It gets an id when it is described (`growth`).

        Raises ValueError if the parent has that child already.
        """
        if token in parent.children:
            raise ValueError(f"node {parent.id} already has a child for token {token}")
        return self._attach(parent, token, 0, log_prob, law, self._weighs(0))

    def growth(self, nodes: Sequence[Node]) -> Growth:
        """Draft side: describe nodes for the other replica, each once, parents before children. They get fresh ids."""
        first_id, root = self._next_id, self.root
        self._next_id += len(nodes)
        for id_, node in enumerate(nodes, first_id):
            node.ids[0] = id_
        laws = [node.law for node in nodes]
        return Growth(
            base_position=root.position,
            first_id=first_id,
            parent_ids=[ROOT_ID if n.parent is root else n.parent.ids[0] for n in nodes if n.parent],
            tokens=[node.token for node in nodes],
            log_probs=[node.log_prob for node in nodes],
            laws=laws if any(laws) else (),
        )

    def graft(self, growth: Growth, max_size: int, source: int = 0) -> int:
        """Target side: take in growth; return how many nodes were new. Each `source` has ids of its own.

        A node whose parent is alive joins the tree. If the same guess is there already, or its parent was
        committed and the next committed token is the one it guessed, then the node there goes by its id from
        now on, unless it has one. Everything else is dropped, as is what would outgrow `max_size` or `width`.
        """
        nodes, root_position = self._nodes, self.root.position
        before, width = len(nodes), self._width
        known = self._by_id.setdefault(source, {})
        top, weigh = self._trail.get(growth.base_position), self._weighs(source)
        id_ = growth.first_id - 1
        for parent_id, token, log_prob, law in zip(
            growth.parent_ids, growth.tokens, growth.log_probs, growth.laws or repeat(CERTAIN), strict=False
        ):
            id_ += 1
            parent = known.get(parent_id) if parent_id else top
            if parent is None or id_ in known:
                continue
            node = parent.children.get(token)
            if node is None:
                committed = parent.position < root_position
                full = len(nodes) >= max_size or len(parent.children) >= width
                if committed or full or not self._permit(parent, token):
                    continue
                node = self._attach(parent, token, source, log_prob, law, weigh)
            elif source not in node.cells and node.parent is not None:  # of a committed node nothing follows
                self._agree(node, source, log_prob, weigh)
            if source not in node.ids:  # one draft has one id of each guess: a hostile one cannot make us keep more
                node.ids[source] = id_
                known[id_] = node
        return len(nodes) - before

    def commit(self, tokens: Sequence[int]) -> Committed:
        """The target drew `tokens` after the root. The last one becomes the new root."""
        path: list[Node] = []
        missed: int | None = None
        root = self.root
        for token in tokens:
            node = root.children.get(token)
            if node is not None:
                path.append(node)
                node.parent = None
            else:
                node = Node(token, root.position + 1, None)
                missed = token if missed is None else missed
            root.children = {token: node}
            self._trail[node.position] = root = node
            passed = self._trail.pop(root.position - TRAIL, None)
            if passed is not None:
                self._forget_names(passed)
        self.root = root
        self._best.clear()
        root.path_log_prob = 0.0  # from which on path probabilities count now
        guesses, self._nodes = self._nodes, []
        for node in guesses:
            parent = node.parent
            if parent is root or (parent is not None and parent.parent is not None):
                node.path_log_prob = parent.path_log_prob + node.log_prob
                self._nodes.append(node)
            elif parent is not None:
                # They let go of each other, too: what is tied in cycles stays until the garbage collector has looked
                # at all that a busy engine holds.
                if self._by_id:
                    self._forget_names(node)
                node.parent = None
        return Committed(path, missed)

    def forget_ids(self, source: int = 0) -> None:
        """Another draft takes over from this one: its ids start afresh. The guesses stay."""
        known = self._by_id.get(source, {})
        for node in known.values():
            del node.ids[source]
        known.clear()

    def followed(self, tokens: Sequence[int]) -> list[Node]:
        """The guesses that these tokens after the root are. Raises KeyError if one was not guessed."""
        nodes, node = [], self.root
        for token in tokens:
            node = node.children[token]
            nodes.append(node)
        return nodes

    def best(self, count: int, max_depth: int) -> Sequence[Node]:
        """The `count` guesses with the largest path probability, best first, none deeper than `max_depth`.

        Path probability falls along a path, so parents come before their children and the set is closed
        under parents.
        """
        best = self._best.get((count, max_depth))
        if best is None:
            deepest = self.root.position + max_depth
            near = [node for node in self._nodes if node.position <= deepest]
            near.sort(key=attrgetter("path_log_prob"), reverse=True)
            best = self._best[count, max_depth] = near[:count]
        return best

    def _forget_names(self, node: Node) -> None:
        for source, id_ in node.ids.items():
            self._by_id.get(source, {}).pop(id_, None)

    def _attach(self, parent: Node, token: int, source: int, log_prob: float, law: Law, weigh: Weigh) -> Node:
        """A draft is the first to guess this."""
        children, position = parent.children, parent.position + 1
        rank = len(children) if len(self._by_id) < 2 else _guessed(children, source)
        if not LEAST_LOG_PROB <= log_prob <= 0.0:
            log_prob = _bounded(log_prob)
        cell, log_prob = weigh(log_prob, rank, position - self.root.position)
        node = children[token] = Node(token, position, parent, law, log_prob, parent.path_log_prob + log_prob)
        node.source, node.cells[source] = source, cell
        self._nodes.append(node)
        if self._best:
            self._best.clear()
        return node

    def _agree(self, node: Node, source: int, log_prob: float, weigh: Weigh) -> None:
        """Another draft has guessed this. Guesses drawn from laws are verified whatever they are: nothing changes."""
        assert node.parent is not None
        rank, depth = _guessed(node.parent.children, source), node.position - self.root.position
        node.cells[source], log_prob = weigh(_bounded(log_prob), rank, depth)
        if log_prob > node.log_prob and self._width > 1:
            self._best.clear()
            node.source, node.log_prob = source, log_prob
            for below in self._nodes:
                if below.parent is not None:
                    below.path_log_prob = below.parent.path_log_prob + below.log_prob


def _bounded(log_prob: float) -> float:
    return min(max(log_prob, LEAST_LOG_PROB), 0.0)


def _guessed(children: Mapping[int, Node], source: int) -> int:
    """How many of these a draft has guessed."""
    return sum(source in child.cells for child in children.values())
