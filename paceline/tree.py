"""The token tree: the one thing that a draft and a target share.

A request's tree hangs from its *root*, the last committed token. Every other node is a guess. The draft side
*grows* the tree with `add`, the target side takes growth in with `graft`; both *commit* the tokens that the
target drew: the path through them survives, every other branch is forgotten.

A draft grows ahead of the target, so growth may name parents that a commit has meanwhile passed. `graft`
sorts that out without asking back: see its docstring. What comes late, twice or as nonsense is dropped.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.witnesses import together

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


@dataclass(slots=True, eq=False)
class Word:
    """What one draft says of a guess: that the target draws it with this probability, given that it drew the parent's
    path. Natural logs."""

    source: int
    """Which of a request's drafts."""
    log_prob: float
    rank: int = 0
    """How many of the guess's siblings it had guessed before."""
    depth: int = 1
    """How far below the root the guess was then."""
    id: int = ROOT_ID
    """What it calls the guess. `ROOT_ID`: nothing (yet, or any more)."""
    chance_log_prob: float = 0.0
    """What the tree makes of `log_prob`."""


@dataclass(slots=True, eq=False)
class Node:
    """One token at one position; guessed, unless it is a root.

    `chance_log_prob` is what the tree makes of all words on this guess and its siblings: the natural log of the
    probability that the target draws it, given that it drew the parent's path. `path_log_prob` is the sum of these from
    the root down, and so falls along every path.
    """

    token: int
    position: int
    parent: Node | None
    chance_log_prob: float = 0.0
    path_log_prob: float = 0.0
    words: dict[int, Word] = field(default_factory=dict)
    """Of each draft that guessed it, in the order in which they did."""
    children: dict[int, Node] = field(default_factory=dict)
    law: Law = field(default_factory=_certain)
    """What it was drawn from, where the strategy wants to know."""

    @property
    def log_prob(self) -> float:
        """The word of the draft that guessed it first, or alone."""
        return next(iter(self.words.values())).log_prob

    @property
    def id(self) -> int:
        """What the first of the request's drafts, or the only one, calls it."""
        return self.words[0].id if 0 in self.words else ROOT_ID

    @property
    def source(self) -> int:
        """Which draft is surest of it."""
        return max(self.words.values(), key=lambda word: word.chance_log_prob).source

    def path(self) -> list[Node]:
        """The nodes below the root down to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def subtree(self) -> Iterator[Node]:
        """This node's descendants, parents first."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


Weigh = Callable[[Word], float]
"""What the log-probability of a word counts as."""


Permit = Callable[[Node, int], bool]
"""Whether this token can come after this node."""


def _speakers(place: Node) -> set[int]:
    """The drafts that have guessed what follows."""
    return set().union(*(guess.words for guess in place.children.values()))


def _as_it_is(word: Word) -> float:
    return word.log_prob


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
    """A replica of one request's tree. Not thread-safe."""

    def __init__(
        self, position: int, token: int, weigh: Weigh = _as_it_is, width: int | None = None, permit: Permit = permit_any
    ) -> None:
        """`weigh` corrects a word where it counts, in the path's log-probability. It must give no positive value.

        `width`: most children that `graft` gives a node, the first to come; None: any number. With 1 the tree is a
        chain. `graft` drops what `permit` does not let in; the parent is the root or a node below it.
        """
        self.root = Node(token, position, None)
        self.size = 0
        self._weigh = weigh
        self._width = width or math.inf
        self._permit = permit
        self._sources: set[int] = set()
        """Which drafts have ever spoken."""
        self._next_id = ROOT_ID + 1
        self._by_id: dict[tuple[int, int], Node] = {}  # by source and id
        # What `best` gave since the tree last changed: a step asks twice and more, and most trees stay as they were.
        self._best: dict[tuple[int, int], list[Node]] = {}
        # Committed nodes by position, each with its successor as the only child: late growth may name them.
        self._trail: dict[int, Node] = {position: self.root}

    def add(self, parent: Node, token: int, log_prob: float, law: Law = CERTAIN) -> Node:
        """Draft side: guess `token` after `parent`. It gets an id when it is described (`growth`).

        Raises ValueError if the parent has that child already.
        """
        if token in parent.children:
            raise ValueError(f"node {parent.id} already has a child for token {token}")
        node = self._attach(parent, token, law)
        self._hear(node, 0, ROOT_ID, log_prob, len(parent.children) - 1)
        return node

    def growth(self, nodes: Sequence[Node]) -> Growth:
        """Draft side: describe nodes for the other replica, each once, parents before children. They get fresh ids."""
        first_id = self._next_id
        for node in nodes:
            self._name(node, node.words[0], self._next_id)
            self._next_id += 1
        laws = [n.law for n in nodes]
        return Growth(
            base_position=self.root.position,
            first_id=first_id,
            parent_ids=[ROOT_ID if n.parent is self.root else n.parent.id for n in nodes if n.parent],
            tokens=[n.token for n in nodes],
            log_probs=[n.log_prob for n in nodes],
            laws=laws if any(laws) else (),
        )

    def graft(self, growth: Growth, max_size: int, source: int = 0) -> int:
        """Target side: take in growth; return how many nodes were new. Each `source` has ids of its own.

        A node whose parent is alive joins the tree. If the same guess is there already, or its parent was
        committed and the next committed token is the one it guessed, then the node there goes by its id from
        now on, unless it has one. Everything else is dropped, as is what would outgrow `max_size` or `width`.
        """
        before = self.size
        self._sources.add(source)
        places: dict[int, Node] = {}  # those on whose guesses there are new words
        for id_, parent_id, token, log_prob, law in zip(
            growth.node_ids, growth.parent_ids, growth.tokens, growth.log_probs, growth.every_law(), strict=True
        ):
            parent = self._parent(source, parent_id, growth.base_position)
            if parent is None or (source, id_) in self._by_id:
                continue
            rank = sum(source in sibling.words for sibling in parent.children.values())
            node = parent.children.get(token)
            if node is None and self._takes(parent, token, max_size):
                node = self._attach(parent, token, law)
            if node is not None and self._hear(node, source, id_, log_prob, rank):
                places[id(parent)] = parent
        if len(self._sources) > 1 and self._width > 1:  # what is drawn from laws is not verified for being drawn twice
            self._settle(places.values())
        return self.size - before

    def commit(self, tokens: Sequence[int]) -> Committed:
        """The target drew `tokens` after the root. The last one becomes the new root."""
        path: list[Node] = []
        missed: int | None = None
        self._best.clear()
        for token in tokens:
            node = self.root.children.get(token)
            if node is not None:
                path.append(node)
            elif missed is None:
                missed = token
            self._advance(node or Node(token, self.root.position + 1, None))
        self._add_up()
        return Committed(path, missed)

    def forget_ids(self, source: int = 0) -> None:
        """Another draft takes over from this one: its ids start afresh. The guesses stay."""
        for key in [key for key in self._by_id if key[0] == source]:
            self._by_id.pop(key).words[source].id = ROOT_ID

    def nodes(self) -> Iterator[Node]:
        """All guesses, parents before children."""
        return self.root.subtree()

    def followed(self, tokens: Sequence[int]) -> list[Node]:
        """The guesses that these tokens after the root are. Raises KeyError if one was not guessed."""
        nodes, node = [], self.root
        for token in tokens:
            node = node.children[token]
            nodes.append(node)
        return nodes

    def best(self, count: int, max_depth: int) -> list[Node]:
        """The `count` guesses with the largest path probability, best first, none deeper than `max_depth`.

        Path probability falls along a path, so parents come before their children and the set is closed
        under parents.
        """
        known = self._best.get((count, max_depth))
        if known is None:
            known = self._best[count, max_depth] = self._search(count, max_depth)
        return known.copy()

    def _search(self, count: int, max_depth: int) -> list[Node]:
        chosen: list[Node] = []
        serial = 0  # breaks ties by age, so that nodes are never compared
        frontier: list[tuple[float, int, Node]] = []

        def offer(parent: Node) -> None:
            nonlocal serial
            if parent.position - self.root.position >= max_depth:
                return
            for child in parent.children.values():
                serial += 1
                heapq.heappush(frontier, (-child.path_log_prob, serial, child))

        offer(self.root)
        while frontier and len(chosen) < count:
            _, _, node = heapq.heappop(frontier)
            chosen.append(node)
            offer(node)
        return chosen

    def _parent(self, source: int, id_: int, base_position: int) -> Node | None:
        return self._trail.get(base_position) if id_ == ROOT_ID else self._by_id.get((source, id_))

    def _takes(self, parent: Node, token: int, max_size: int) -> bool:
        committed = parent.position < self.root.position
        has_room = self.size < max_size and len(parent.children) < self._width
        return not committed and has_room and self._permit(parent, token)

    def _attach(self, parent: Node, token: int, law: Law) -> Node:
        node = parent.children[token] = Node(token, parent.position + 1, parent, law=law)
        self.size += 1
        return node

    def _hear(self, node: Node, source: int, id_: int, log_prob: float, rank: int) -> bool:
        """A draft guesses this. It has one word on each guess, and one id: a hostile one cannot make us keep more.

        Returns whether this word counts.
        """
        word, depth = node.words.get(source), node.position - self.root.position
        new = word is None
        if word is None:
            word = node.words[source] = Word(source, min(max(log_prob, LEAST_LOG_PROB), 0.0), rank, depth)
        if word.id == ROOT_ID != id_:
            self._name(node, word, id_)
        if not new or node.parent is None or depth < 1:
            return False
        self._best.clear()
        word.chance_log_prob = self._weigh(word)
        if len(node.words) == 1:
            node.chance_log_prob = word.chance_log_prob
            node.path_log_prob = node.parent.path_log_prob + node.chance_log_prob
        return True

    def _settle(self, places: Iterable[Node]) -> None:
        """What follows these is as likely as all the words on it make it. Of one draft alone it is so already."""
        contested = [place for place in places if len(_speakers(place)) > 1]
        for place in contested:
            guesses = place.children.values()
            words = [{w.source: w.chance_log_prob for w in guess.words.values()} for guess in guesses]
            for guess, log_prob in zip(guesses, together(words), strict=True):
                guess.chance_log_prob = log_prob
        if contested:
            self._add_up()

    def _name(self, node: Node, word: Word, id_: int) -> None:
        word.id = id_
        self._by_id[word.source, id_] = node

    def _forget_names(self, node: Node) -> None:
        for word in node.words.values():
            self._by_id.pop((word.source, word.id), None)

    def _advance(self, root: Node) -> None:
        """Commit one token: its node becomes the root, its siblings and all below them are forgotten."""
        for child in self.root.children.values():
            self.size -= 1
            if child is not root:
                self._forget(child)
        self.root.children = {root.token: root}
        root.parent = None
        self._trail[root.position] = self.root = root
        passed = self._trail.pop(root.position - TRAIL, None)
        if passed is not None:
            self._forget_names(passed)

    def _forget(self, node: Node) -> None:
        """They let go of each other, too: what is tied in cycles stays until the garbage collector has looked at all
        that a busy engine holds."""
        self._forget_names(node)
        node.parent = None
        for descendant in node.subtree():
            self._forget_names(descendant)
            descendant.parent = None
            self.size -= 1

    def _add_up(self) -> None:
        """Path probabilities count from the root."""
        self.root.path_log_prob = 0.0
        for node in self.root.subtree():
            assert node.parent is not None
            node.path_log_prob = node.parent.path_log_prob + node.chance_log_prob
