"""The token tree: the one thing that a draft and a target share.

A request's tree hangs from its *root*, the last committed token. Every other node is a guess. The draft side
*grows* the tree with `add`, the target side takes growth in with `graft`; both *commit* the tokens that the
target drew: the path through them survives, every other branch is forgotten.

A node is a number: its index in the tree's lists (`tokens`, `parents`, `depths`, ...). The root is node 0, and parents
come before their children. A commit numbers the survivors anew, and says how (`CommitResult`).

A draft grows ahead of the target, so growth may name parents that a commit has meanwhile passed. `graft`
sorts that out without asking back: see its docstring. What comes late, twice or as nonsense is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple, TypeVar

from paceline.core.growth import CERTAIN_TOKEN, ROOT_ID, DraftDistribution, Growth

T = TypeVar("T")

ROOT = 0
"""The root's node."""
RECENT_POSITIONS = 512
"""How many committed positions growth may still name. Older growth is too late to be of use."""

MIN_LOG_PROB = -1e4
"""Stands for every smaller one, minus infinity too, so that sums along a path stay finite."""

CalibratedLogProbs = Mapping[tuple[float, int, int], tuple[int, float]]
"""What a draft's guess counts for: by the log-probability that the draft gives it, how many siblings the draft had
guessed before, and the depth below the root. The guess's cell, and a log-probability that is not positive."""

TokenFilter = Callable[[Sequence[int], int], bool]
"""Whether a token can come after these tokens below the root."""


class CommitResult(NamedTuple):
    """What a commit did to the tree. `path` and `kept` are nodes as they were numbered before.

    `path`: the guesses that are committed now, in order. `kept`: those that are still guesses; the one at index i is
    node i + 1 from now on.
    """

    path: Sequence[int]
    kept: Sequence[int]


class TokenTree:
    """A replica of one request's tree. Not thread-safe."""

    def __init__(
        self,
        position: int,
        token: int,
        weighs: Mapping[int, CalibratedLogProbs] | None = None,
        permit: TokenFilter | None = None,
        *,
        chain: bool = False,
    ) -> None:
        """`weighs`: by draft, what its guesses count for in the path's log-probability; without one, what it says. Of a
        guess that several drafts make the surest one's word counts.

        `graft` drops what `permit` does not let in, and in a `chain` every child of a node but the first.
        """
        self.position = position
        """The root's. A node's is as much larger as it is deep."""
        self._calibrated = weighs or {}
        self._token_filter = permit
        self._chain = chain
        self._draft_ids: dict[int, _DraftIds] = {}  # by draft
        self._recent_tokens = [token]  # the last committed tokens, the root's at the end
        self._next_id = ROOT_ID + 1
        self._clear(token)

    def _clear(self, token: int) -> None:
        """There is nothing but the root."""
        self.tokens = [token]
        self.parents = [-1]
        self.depths = [0]
        self.path_log_probs = [0.0]
        """Natural log of the probability that the target draws all of the path. It falls along every path."""
        self.sources = [0]
        """Which draft is surest of the guess."""
        self.calibration_cells = [0]
        """With which of this draft's guesses the outcome is counted (`CalibratedLogProbs`)."""
        self.distributions: dict[int, DraftDistribution] = {}
        """What guesses were drawn from, where the strategy wants to know. Those that are not here are certain."""
        self._other_sources: dict[int, dict[int, int]] = {}  # by node and draft: the cells of drafts that are less sure
        self._wire_ids: dict[int, int] = {}  # by node that was described
        self._children: dict[tuple[int, int], int] = {}  # by parent and token
        self._best_cache: dict[tuple[int, int], list[int]] = {}
        """What `best` gave since the tree last changed: a step asks twice and more."""

    @property
    def size(self) -> int:
        """How many guesses there are."""
        return len(self.tokens) - 1

    def nodes(self) -> range:
        """All guesses, parents before children."""
        return range(1, len(self.tokens))

    def child(self, parent: int, token: int) -> int | None:
        return self._children.get((parent, token))

    def children(self, parent: int) -> list[int]:
        """In the order in which they came. Looks through the whole tree."""
        return [node for node, above in enumerate(self.parents) if above == parent]

    def log_prob(self, node: int) -> float:
        """Natural log of the probability that the target draws the guess, given that it drew its parent's path."""
        return self.path_log_probs[node] - self.path_log_probs[self.parents[node]]

    def path(self, node: int) -> list[int]:
        """The nodes below the root down to this one."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """The tokens below the root down to this node's."""
        return [self.tokens[each] for each in self.path(node)]

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The guesses that the first of these tokens after the root are, as far as they were guessed."""
        nodes: list[int] = []
        node: int | None = ROOT
        for token in tokens:
            if node is None or (node := self._children.get((node, token))) is None:
                break
            nodes.append(node)
        return nodes

    def best(self, count: int, max_depth: int) -> Sequence[int]:
        """The `count` guesses with the largest path probability, best first, none deeper than `max_depth`.

        Path probability falls along a path, so parents come before their children and the set is closed
        under parents.
        """
        best = self._best_cache.get((count, max_depth))
        if best is None:
            near = [node for node in self.nodes() if self.depths[node] <= max_depth]
            near.sort(key=self.path_log_probs.__getitem__, reverse=True)
            best = self._best_cache[count, max_depth] = near[:count]
        return best

    def outcomes(self, path: Sequence[int], tokens: Sequence[int]) -> Iterator[tuple[int, int, int, bool]]:
        """What it decides that the target draws `tokens` after the root, which `match` the path: node, draft, cell, and
        whether the guess was drawn, of every guess at a place that they reach; once for each draft that made it."""
        drawn = dict(zip((ROOT, *path), tokens, strict=False))
        for node, parent in enumerate(self.parents):
            if parent in drawn:
                hit = drawn[parent] == self.tokens[node]
                yield node, self.sources[node], self.calibration_cells[node], hit
                for source, cell in self._other_sources.get(node, {}).items():
                    yield node, source, cell, hit

    def guessed_by(self, source: int, node: int) -> bool:
        """Whether this draft has made the guess, be it as one of several."""
        return self.sources[node] == source or source in self._other_sources.get(node, ())

    # The draft's side: growing, and describing what grew.

    def add(self, parent: int, token: int, log_prob: float, law: DraftDistribution = CERTAIN_TOKEN) -> int:
        """Guess `token` after `parent`. It gets an id when it is described (`growth`).

        Raises ValueError if the parent has that child already.
        """
        if (parent, token) in self._children:
            raise ValueError(f"node {parent} already has a child for token {token}")
        self._best_cache.clear()
        return self._append(parent, token, clamp_log_prob(log_prob), law)

    def growth(self, nodes: Sequence[int]) -> Growth:
        """Describe nodes for the other replica, each once. They get fresh ids, in the order of their parents' ids: so
        they are cheapest on the wire (`paceline.wire.node_codec`)."""
        ids, first_id = self._wire_ids, self._next_id
        self._next_id += len(nodes)
        nodes = self._by_parents(nodes)
        ids.update(zip(nodes, range(first_id, self._next_id), strict=True))
        laws = [self.distributions.get(node, CERTAIN_TOKEN) for node in nodes] if self.distributions else []
        return Growth(
            base_position=self.position,
            first_id=first_id,
            parent_ids=[ids.get(self.parents[node], ROOT_ID) for node in nodes],
            tokens=[self.tokens[node] for node in nodes],
            log_probs=[self.log_prob(node) for node in nodes],
            distributions=laws if any(laws) else (),
        )

    def _by_parents(self, nodes: Sequence[int]) -> list[int]:
        below: dict[int, list[int]] = {}
        for node in nodes:
            below.setdefault(self.parents[node], []).append(node)
        described = sorted(below.keys() - set(nodes), key=lambda node: self._wire_ids.get(node, ROOT_ID))
        ordered = [node for parent in described for node in below[parent]]
        for node in ordered:  # it grows meanwhile
            ordered += below.get(node, ())
        return ordered

    # The target's side: taking growth in.

    def graft(self, growth: Growth, max_size: int, source: int = 0) -> int:
        """Take in growth; return how many nodes were new. Each `source` has ids of its own.

        A node whose parent is alive joins the tree. If the same guess is there already, or its parent was
        committed and the next committed token is the one it guessed, then the node there goes by its id from
        now on, unless it has one. Everything else is dropped, as is what would outgrow `max_size`.
        """
        names = self._draft_ids.get(source) or self._draft_ids.setdefault(
            source, _DraftIds(self._calibrated.get(source))
        )
        known, children, before = names.nodes, self._children, len(self.tokens)
        top = ROOT if growth.base_position == self.position else None
        laws = growth.distributions or repeat(CERTAIN_TOKEN)
        self._best_cache.clear()
        for id_, parent_id, token, log_prob, law in zip(
            growth.node_ids, growth.parent_ids, growth.tokens, growth.log_probs, laws, strict=False
        ):
            parent = known.get(parent_id) if parent_id else top
            if parent is None:
                parent = self._late_parent(names, id_, parent_id, growth.base_position, token)
            if parent is None or id_ in known:
                continue
            node = children.get((parent, token))
            if node is None:
                if len(self.tokens) <= max_size and self._allows(parent, token):
                    cell, log_prob = names.calibrate(parent, self.depths[parent] + 1, log_prob)
                    known[id_] = self._append(parent, token, log_prob, law, source, cell)
            elif node not in known.values():  # one id each: a hostile draft cannot make us keep more
                known[id_] = node
                if not self.guessed_by(source, node):
                    self._add_source(names, node, log_prob, source)
        return len(self.tokens) - before

    def forget_ids(self, source: int = 0) -> None:
        """Another draft takes over from this one: its ids start afresh. The guesses stay."""
        self._draft_ids.pop(source, None)

    def _append(
        self, parent: int, token: int, log_prob: float, law: DraftDistribution, source: int = 0, cell: int = 0
    ) -> int:
        node = self._children[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.path_log_probs.append(self.path_log_probs[parent] + log_prob)
        self.sources.append(source)
        self.calibration_cells.append(cell)
        if law:
            self.distributions[node] = law
        return node

    def _allows(self, parent: int, token: int) -> bool:
        if self._chain and parent != self.size:
            return False
        return self._token_filter is None or self._token_filter(self.path_tokens(parent), token)

    def _add_source(self, names: _DraftIds, node: int, log_prob: float, source: int) -> None:
        """Another draft has guessed this. Guesses drawn from laws are verified whatever they are: nothing changes."""
        cell, log_prob = names.calibrate(self.parents[node], self.depths[node], log_prob)
        if log_prob > self.log_prob(node) and not self._chain:
            source, self.sources[node] = self.sources[node], source
            cell, self.calibration_cells[node] = self.calibration_cells[node], cell
            words = {below: self.log_prob(below) for below in self._below(node)} | {node: log_prob}
            for below, word in words.items():
                self.path_log_probs[below] = self.path_log_probs[self.parents[below]] + word
        self._other_sources.setdefault(node, {})[source] = cell

    def _late_parent(self, names: _DraftIds, id_: int, parent_id: int, base_position: int, token: int) -> int | None:
        """The parent is no guess. The root, if it is that; if it was committed before, so may the guess have been."""
        at = names.committed.get(parent_id) if parent_id else base_position
        if at is None:
            return None
        behind = self.position - at
        if behind == 0:
            return ROOT
        if 0 < behind <= min(len(self._recent_tokens), RECENT_POSITIONS) and self._recent_tokens[-behind] == token:
            names.mark_committed(id_, at + 1)
        return None

    # Both sides.

    def commit(self, tokens: Sequence[int]) -> CommitResult:
        """The target drew `tokens` after the root. The last one becomes the new root."""
        path = self.match(tokens)
        moved = self._below(path[-1]) if len(path) == len(tokens) else {}
        before, self.position = self.position, self.position + len(tokens)
        self._recent_tokens += tokens
        if len(self._recent_tokens) > 2 * RECENT_POSITIONS:
            del self._recent_tokens[:-RECENT_POSITIONS]
        for names in self._draft_ids.values():
            names.renumber(moved, path, before + 1)
        kept = list(moved)[1:]
        if kept:
            self._renumber(path, kept, moved)
        elif self.size:
            self._clear(tokens[-1])
        else:
            self.tokens[ROOT] = tokens[-1]
        return CommitResult(path, kept)

    def _below(self, top: int) -> dict[int, int]:
        """This node and all guesses on paths through it, and what they are once it is the root."""
        moved = {top: ROOT}
        for node, parent in enumerate(self.parents):
            if parent in moved:
                moved[node] = len(moved)
        return moved

    def _renumber(self, path: Sequence[int], kept: Sequence[int], moved: Mapping[int, int]) -> None:
        """Nothing is left but the end of the path, now the root, and these guesses."""
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
    """What one draft calls the nodes of a tree, target side, and what its guesses count for."""

    __slots__ = ("calibrated", "child_counts", "committed", "ids", "nodes")

    def __init__(self, weigh: CalibratedLogProbs | None) -> None:
        self.calibrated = weigh
        self.child_counts: dict[int, int] = {}
        """By node: how many of its children the draft has guessed."""
        self.nodes: dict[int, int] = {}
        """Guesses by id."""
        self.committed: dict[int, int] = {}
        """Positions by id, of guesses that were committed since."""
        self.ids: dict[int, int] = {}
        """Their ids by position."""

    def calibrate(self, parent: int, depth: int, log_prob: float) -> tuple[int, float]:
        """The draft guesses a child of this node: its cell, and the log-probability that counts."""
        if not MIN_LOG_PROB <= log_prob <= 0.0:
            log_prob = clamp_log_prob(log_prob)
        choice = self.child_counts.get(parent, 0)
        self.child_counts[parent] = choice + 1
        return (0, log_prob) if self.calibrated is None else self.calibrated[log_prob, choice, depth]

    def renumber(self, moved: Mapping[int, int], path: Sequence[int], position: int) -> None:
        """After a commit. `moved`: what the root and its guesses were, and are. `path`: what was committed, from this
        position on."""
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
        """A guess of this id is committed now. A position has one id: a draft cannot make us keep more."""
        if position not in self.ids:
            self.ids[position], self.committed[id_] = id_, position
            if len(self.ids) > 2 * RECENT_POSITIONS:
                self.ids = dict(sorted(self.ids.items())[-RECENT_POSITIONS:])
                self.committed = {id_: position for position, id_ in self.ids.items()}


def _renumbered(by_guess: dict[int, T], moved: Mapping[int, int]) -> dict[int, T]:
    return {new: each for node, each in by_guess.items() if (new := moved.get(node))}


def clamp_log_prob(log_prob: float) -> float:
    """Of what is too small, or no number, the least."""
    return 0.0 if log_prob > 0.0 else log_prob if log_prob > MIN_LOG_PROB else MIN_LOG_PROB
