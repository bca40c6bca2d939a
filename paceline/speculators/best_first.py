"""Growing trees with a network that is run over tokens one after another: the best leaves first, over all requests.

A draft predicts the target's draw with the target's own noise (`paceline.sampling`): it perturbs its logits just as
the target will, and guesses that the largest wins, or else the second largest, and so on. How sure it is follows from
the perturbed logits: a softmax over them. At temperature 0 these are the plain logits.

A node is *expanded* when it has run through the network, so that its children are known. Each round expands the nodes
with the largest path probability, whichever request's they are: the alternatives to a first choice come up as soon as
they are likelier than going deeper.

Requests have owners, the targets that one draft serves. The rows of a round are divided among these max-min fairly:
nobody gets more than an equal share while others want theirs, and what one does not want is there for the others.

Committed tokens own their slots from the moment they are known. Guesses live on what is left, and give way: so a
request that was taken in can always be computed, and one that cannot be is refused at once.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from abc import abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from paceline.budget import ROW_BUCKET, Haste, RowCost, StepCost, worthwhile
from paceline.model.rows import Lane, Row
from paceline.sampling import History, shortlist
from paceline.sampling import Row as DrawRow
from paceline.speculators.base import Commit, DraftError, Limit, Opening, Speculator
from paceline.tree import Growth, Node, TokenTree
from paceline.verify import STRATEGIES

PREFILL_ROWS = 256
"""Context tokens computed per round."""
LISTED = 64
"""Tokens per node among which the target's draw is looked for."""
MOST_ROWS = 256
"""Rows of one round."""
MOST_PRICE = 0.2
"""Path probability of guesses that are made however slow a round is."""
BY_THE_BUCKET = RowCost([ROW_BUCKET], [1.0])
"""What rows cost where nobody has measured it."""

Each = TypeVar("Each")
D = TypeVar("D", bound="Draft")


@dataclass(slots=True, eq=False)
class Draft:
    """One request: its replica of the tree, and what of it the network has computed."""

    opening: Opening
    tokens: list[int]
    """Those that the network is run over."""
    tree: TokenTree
    history: History
    limit: int
    """No node stands at or beyond this position."""
    floor: float
    """Log-probability of a path, above which guesses are made."""
    lane: Lane = field(default_factory=Lane)
    """Slots of all tokens, computed or not."""
    computed: int = 0
    slots: dict[Node, int] = field(default_factory=dict)
    """Slots of expanded guesses. There are none while tokens are missing."""
    frontier: list[Node] = field(default_factory=list)
    """The guesses that are not expanded and may be, likeliest first."""

    @property
    def missing(self) -> int:
        """Committed tokens, the root among them, that are not computed."""
        return len(self.tokens) - self.computed

    @property
    def computable(self) -> int:
        """How many of them can be computed now."""
        return self.missing

    def keep(self, path: Sequence[Node]) -> None:
        """The first nodes of a committed path keep what was computed of them, as far as it holds for tokens, too."""
        known = [self.slots.pop(node) for node in itertools.takewhile(self.slots.__contains__, path)]
        self.lane.slots += known
        self.computed += len(known)

    def forgotten(self) -> list[int]:
        """After a commit: the slots of guesses that are of no use any more, taken from them."""
        alive = set(self.tree.nodes())
        return [self.slots.pop(node) for node in list(self.slots) if node not in alive]

    def may_expand(self, node: Node) -> bool:
        """Whether children of this node are wanted."""
        depth = node.position - self.tree.root.position
        return node.path_log_prob > self.floor and depth < self.opening.max_depth and node.position + 1 < self.limit

    def survey(self) -> None:
        """Find the frontier, after anything but growth."""
        self.frontier.clear()
        reached = [self.tree.root]
        while reached:
            for child in filter(self.may_expand, reached.pop().children.values()):
                (reached if child in self.slots else self.frontier).append(child)
        self.frontier.sort(key=_unlikeliness)

    def advance(self, expanded: Sequence[Node]) -> None:
        """After growth: the root has been expanded, or the first nodes of the frontier. Some had children before."""
        if self.tree.root in expanded:
            return self.survey()
        del self.frontier[: len(expanded)]
        for node in expanded:
            self.frontier += filter(self.may_expand, node.children.values())
        self.frontier.sort(key=_unlikeliness)

    def expandable(self, width: int) -> Sequence[Node]:
        """As many of the frontier as the tree has room for a child of, if all but the last get `width` of them."""
        room = 0 if self.missing else max(0, self.opening.max_nodes - self.tree.size)
        return self.frontier[: -(-room // width)]


@dataclass(slots=True)
class Round(Generic[D]):
    """The rows of one pass, and the nodes that are expanded by it: each by the row of its index in `wanted`."""

    rows: list[Row] = field(default_factory=list)
    of: list[tuple[D, Node | None]] = field(default_factory=list)
    """Whose each row is; None: it is that of a committed token."""
    wanted: list[int] = field(default_factory=list)
    expanded: list[tuple[D, Node]] = field(default_factory=list)

    def add(self, draft: D, node: Node | None, row: Row) -> None:
        self.rows.append(row)
        self.of.append((draft, node))

    def expand_last(self, draft: D, node: Node) -> None:
        """The last row is that of `node`."""
        self.wanted.append(len(self.rows) - 1)
        self.expanded.append((draft, node))


class BestFirst(Speculator, Generic[D]):
    """What all methods share whose guesses need the guess before; a subclass says what one pass computes."""

    def __init__(
        self,
        slots: int,
        tree_width: int,
        cost: RowCost | None = None,
        least_path_probability: float = 0.02,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`slots`: positions for which there is room. `tree_width`: most children per node. `cost`: of the network's
        passes, if anybody measured it. Guesses whose path is not likelier than `least_path_probability`, or than what a
        row costs (`Haste`), are not made; with 0 none is too unlikely or too dear."""
        self.slots = slots
        self._width = tree_width
        self._cost = StepCost(cost or BY_THE_BUCKET)
        self._haste = Haste() if cost and least_path_probability else None
        self._clock = clock
        self._least = least_path_probability
        self._free = list(range(slots, 0, -1))
        self._drafts: dict[int, D] = {}
        self._turn = 0
        """Guesses that had a row so far: the next one goes to the next owner."""
        self._ran = False
        """Whether the last round ran the network; if not, there was nothing worth it."""

    @abstractmethod
    def run(self, this: Round[D]) -> tuple[Tensor, Tensor | None]:
        """One pass: logits [expanded nodes, columns], and the token of each column, None: column n is token n."""

    @abstractmethod
    def begin(self, opening: Opening, tree: TokenTree, history: History, floor: float) -> D:
        """A draft of this request, nothing of which is computed."""

    @property
    def behind(self) -> bool:
        return self._ran

    def open(self, opening: Opening) -> None:
        self.close(opening.request_id)
        strategy = STRATEGIES.get(opening.strategy)
        if strategy is None:
            raise DraftError(f"unknown strategy {opening.strategy!r}")
        tokens = list(opening.tokens)
        self._check(tokens, len(tokens))
        split = len(tokens) - opening.output_tokens
        history = History(strategy.law(opening.sampling), tokens[:split], tokens[split:], self.vocabulary_size)
        tree = TokenTree(len(tokens) - 1, tokens[-1])
        draft = self.begin(opening, tree, history, self._floor(opening.least_path_probability))
        draft.lane.slots += self._take(len(draft.tokens))
        self._drafts[opening.request_id] = draft

    def commit(self, commit: Commit) -> None:
        draft = self._drafts.get(commit.request_id)
        if draft is None:
            return
        if draft.tree.root.position != commit.base_position:
            raise DraftError(f"the root is at {draft.tree.root.position}, the commit at {commit.base_position}")
        self._check(commit.tokens, len(draft.tokens) + len(commit.tokens))
        draft.keep(draft.tree.commit(commit.tokens).path)
        draft.tokens += commit.tokens
        draft.history.extend(commit.tokens)
        self._free += draft.forgotten()
        draft.lane.slots += self._take(len(draft.tokens) - len(draft.lane))
        if self._haste and draft.opening.max_nodes:
            self._haste.observe(len(commit.tokens), self._clock())
        draft.floor = self._floor(draft.opening.least_path_probability)
        draft.survey()

    def limit(self, limit: Limit) -> None:
        draft = self._drafts.get(limit.request_id)
        if draft is not None:
            draft.opening = replace(
                draft.opening,
                max_depth=limit.max_depth,
                max_nodes=limit.max_nodes,
                least_path_probability=limit.least_path_probability,
            )
            draft.floor = self._floor(limit.least_path_probability)
            draft.survey()

    def close(self, request_id: int) -> None:
        draft = self._drafts.pop(request_id, None)
        if draft is not None:
            self._free += [*draft.lane.slots, *draft.slots.values()]

    def grow(self) -> dict[int, Growth]:
        """One pass of the network: missing context first, then the likeliest guesses."""
        start = self._clock()
        this = Round[D]()
        owned = self._owned()
        self._add_context(this, owned)
        context = len(this.rows)
        self._add_guesses(this, owned)
        self._ran = bool(this.rows)
        if not this.rows:
            return {}
        logits, ids = self.run(this)
        grown = self._add_children(this.expanded, logits, ids) if this.expanded else {}
        if not context:
            self._cost.observe(len(this.rows), self._clock() - start)
        return grown

    def check_integrity(self) -> None:
        """Prove that every slot is free, or that of one committed token or living guess. Raises AssertionError."""
        if any(draft.slots.keys() - set(draft.tree.nodes()) for draft in self._drafts.values()):
            raise AssertionError("a guess that was forgotten holds a slot")
        held = [s for draft in self._drafts.values() for s in (*draft.lane.slots, *draft.slots.values())]
        if sorted([*self._free, *held]) != list(range(1, self.slots + 1)):
            raise AssertionError(f"{len(self._free)} slots free and {len(held)} held, of {self.slots}")

    def _floor(self, wanted: float) -> float:
        price = self._haste.price(self._cost.row_s) if self._haste else 0.0
        least = max(wanted, self._least, min(price, MOST_PRICE))
        return math.log(least) if least else -math.inf

    def _check(self, tokens: Sequence[int], length: int) -> None:
        """Raises `DraftError` unless these tokens can be run, as the last of so many."""
        if length >= self.position_limit:
            raise DraftError(f"{length} tokens; the draft's positions end at {self.position_limit}")
        if not all(0 <= token < self.vocabulary_size for token in tokens):
            raise DraftError(f"a token id is outside the draft's vocabulary of {self.vocabulary_size}")

    def _take(self, count: int) -> list[int]:
        """Slots for committed tokens; guesses give theirs up if need be. Raises `DraftError` if that is not enough."""
        if count > len(self._free):
            within_reach = len(self._free) + sum(len(draft.slots) for draft in self._drafts.values())
            if count > within_reach:
                raise DraftError(f"out of slots: {count} needed, {within_reach} of {self.slots} free")
            while count > len(self._free):
                self._give_way(count - len(self._free))
        return [self._free.pop() for _ in range(count)]

    def _give_way(self, count: int) -> None:
        """Free up to so many slots: of the owner that holds the most, the request with the most guesses, and of these
        the unlikeliest."""
        held: Counter[int] = Counter()
        for draft in self._drafts.values():
            held[draft.opening.owner] += len(draft.lane) + len(draft.slots)
        guessing = [draft for draft in self._drafts.values() if draft.slots]
        most = max(guessing, key=lambda draft: (held[draft.opening.owner], len(draft.slots)))
        for node in sorted(most.slots, key=lambda node: (node.path_log_prob, -node.position))[:count]:
            self._free.append(most.slots.pop(node))
        most.survey()

    def _owned(self) -> list[list[D]]:
        """The requests of each owner, first of the one whose turn it is."""
        owned: defaultdict[int, list[D]] = defaultdict(list)
        for draft in self._drafts.values():
            owned[draft.opening.owner].append(draft)
        turn = self._turn % max(1, len(owned))
        whole = list(owned.values())
        return whole[turn:] + whole[:turn]

    def _add_context(self, this: Round[D], owned: Sequence[Sequence[D]]) -> None:
        """Rows for missing committed tokens."""
        shares = Counter(itertools.islice(dealt(map(_missing, owned)), PREFILL_ROWS))
        for key, count in shares.items():
            draft = self._drafts[key]
            start = draft.computed
            draft.computed += count
            for i in range(start, draft.computed):
                this.add(draft, None, draft.lane.row(draft.tokens[i], i))
            if not draft.missing and draft.may_expand(draft.tree.root):
                this.expand_last(draft, draft.tree.root)

    def _add_guesses(self, this: Round[D], owned: Sequence[Sequence[D]]) -> None:
        """Rows for the likeliest guesses of requests whose context is complete or in this pass.

        As many as make the most of the pass if the likeliest had it: the chance that children are wanted, per second.
        """
        most = min(MOST_ROWS, len(self._free))
        hands = [list(itertools.islice(self._likeliest(drafts), most)) for drafts in owned]
        offered = itertools.islice(heapq.merge(*hands, key=_unlikeliness_of), most)
        chances = [math.exp(node.path_log_prob) for _, node in offered]
        count = worthwhile(chances, len(this.wanted), len(this.rows), most, self._cost)
        self._turn += count
        chosen = itertools.islice(dealt(map(iter, hands)), count)
        for draft, node in sorted(chosen, key=_node_id):  # on the wire, parents cost least in this order
            branch = [draft.slots[above] for above in node.path()[:-1]]
            draft.slots[node] = self._free.pop()
            this.add(draft, node, draft.lane.branch_row(node.token, [*branch, draft.slots[node]]))
            this.expand_last(draft, node)

    def _likeliest(self, drafts: Iterable[D]) -> Iterator[tuple[D, Node]]:
        """What these requests could have expanded, best first."""
        offers = (zip(itertools.repeat(draft), draft.expandable(self._width)) for draft in drafts)
        return heapq.merge(*offers, key=_unlikeliness_of)

    def _add_children(
        self, expanded: Sequence[tuple[D, Node]], logits: Tensor, ids: Tensor | None
    ) -> dict[int, Growth]:
        tokens_RK, scores_RK = shortlist(logits, [_draw_row(draft, node) for draft, node in expanded], LISTED, ids)
        log_probs_RK = torch.log_softmax(scores_RK, -1)
        chosen, likely = (each[:, : self._width].tolist() for each in (tokens_RK, log_probs_RK))
        new: dict[int, list[Node]] = {}
        ran: dict[int, list[Node]] = {}
        for (draft, node), tokens, log_probs in zip(expanded, chosen, likely, strict=True):
            # A node whose slot was taken back is expanded again, and has its children already.
            guesses = [
                (token, log_prob)
                for token, log_prob in zip(tokens, log_probs, strict=True)
                if node.path_log_prob + log_prob > draft.floor and token not in node.children
            ]
            room = max(0, draft.opening.max_nodes - draft.tree.size)
            nodes = [draft.tree.add(node, *guess) for guess in guesses[:room]]
            new.setdefault(draft.opening.request_id, []).extend(nodes)
            ran.setdefault(draft.opening.request_id, []).append(node)
        for key, nodes in ran.items():
            self._drafts[key].advance(nodes)
        return {key: self._drafts[key].tree.growth(nodes) for key, nodes in new.items() if nodes}


def dealt(hands: Iterable[Iterator[Each]]) -> Iterator[Each]:
    """One of each in turn, for as long as it has any: every beginning is a max-min fair share of the whole."""
    turns = deque(hands)
    while turns:
        hand = turns.popleft()
        for each in itertools.islice(hand, 1):
            yield each
            turns.append(hand)


def _missing(drafts: Iterable[Draft]) -> Iterator[int]:
    """The request of each token that can be computed. Few missing ones first: a prompt takes several rounds anyway."""
    for draft in sorted(drafts, key=lambda draft: draft.computable):
        yield from itertools.repeat(draft.opening.request_id, draft.computable)


def _unlikeliness(node: Node) -> float:
    return -node.path_log_prob


def _unlikeliness_of(guess: tuple[Draft, Node]) -> float:
    return -guess[1].path_log_prob


def _node_id(guess: tuple[Draft, Node]) -> int:
    return guess[1].id


def _draw_row(draft: Draft, node: Node) -> DrawRow:
    """The draw after `node` that the target will make."""
    path = [n.token for n in node.path()]
    return DrawRow(draft.history.params, node.position + 1, draft.history, path)
