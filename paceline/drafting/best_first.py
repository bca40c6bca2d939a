"""Growing trees with a network that is run over tokens one after another: the best leaves first, over all requests.

A draft predicts the target's draw with the target's own noise (`paceline.core.sampling`): it perturbs its logits just
as
the target will, and guesses that the largest wins, or else the second largest, and so on. How sure it is follows from
the perturbed logits: a softmax over them. At temperature 0 these are the plain logits. For strategies that verify by
the draft's law it draws one guess instead, from that law (`paceline.drafting.sampled_drafts`).

A node is *expanded* when it has run through the network, so that its children are known. Each round expands the nodes
with the largest path probability, whichever request's they are: the alternatives to a first choice come up as soon as
they are likelier than going deeper.

Guesses live on the slots that committed tokens leave (`CachedSpeculator`), and give way to these.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from paceline.core.growth import Growth
from paceline.core.policy.step_cost import RowCost, StepCost, nodes_to_verify
from paceline.core.sampling import SamplingRow as DrawRow
from paceline.core.tree import ROOT, CommitResult
from paceline.core.verify import STRATEGIES
from paceline.drafting.cached_draft import CachedDraft, CachedSpeculator, round_robin
from paceline.drafting.draw_prediction import predict_draws
from paceline.drafting.sampled_drafts import SampledToken, sample_draft_tokens
from paceline.model.rows import Row

MAX_ROWS = 256
"""Rows of one round."""
DEFAULT_ROW_COST = RowCost([8], [1.0])
"""What rows cost where nobody has measured it."""

D = TypeVar("D", bound="BestFirstDraft")
ScoredNode = tuple[float, D, int]
"""A node that can be expanded: its path's log-probability, its request, its number there."""


@dataclass(slots=True, eq=False)
class BestFirstDraft(CachedDraft):
    """Its guesses are computed, too, so that they can have children."""

    slots: dict[int, int] = field(default_factory=dict)
    """Slots of expanded guesses. There are none while tokens are missing."""
    frontier: list[int] = field(default_factory=list)
    """The guesses that are not expanded and may be, likeliest first."""

    @property
    def all_slots(self) -> Sequence[int]:
        return [*self.slot_table.slots, *self.slots.values()]

    @property
    def sampled(self) -> bool:
        """Whether guesses are drawn from the draft's own law."""
        return STRATEGIES[self.opening.strategy].sampled_drafts

    @property
    def wanted(self) -> int:
        """How many tokens are to be computed. The root is not while its children are not: they come of its pass."""
        return self.missing if self.depth_limit > 0 and self.floor < 0.0 else max(0, self.missing - 1)

    @property
    def computable(self) -> int:
        return self.wanted

    @property
    def depth_limit(self) -> int:
        """The depth of nodes from which on children are not wanted."""
        return min(self.opening.max_depth, self.limit - 1 - self.tree.position)

    def root_moved(self, committed: CommitResult) -> list[int]:
        """The first nodes of the path keep what was computed of them, as far as it holds for tokens, too."""
        known = [self.slots.pop(node) for node in itertools.takewhile(self.slots.__contains__, committed.path)]
        self.slot_table.slots.extend(known)
        self.computed += len(known)
        slots, self.slots = self.slots, {}
        self.slots = {node: slots.pop(old) for node, old in enumerate(committed.kept, 1) if old in slots}
        return list(slots.values())

    def refresh_frontier(self) -> None:
        """Find the frontier."""
        tree, slots, reach, floor = self.tree, self.slots, self.depth_limit, self.floor
        places = zip(tree.parents, tree.depths, tree.path_log_probs, strict=True)
        self.frontier = [
            node
            for node, (parent, depth, path_log_prob) in enumerate(places)
            if path_log_prob > floor and depth < reach and (parent == ROOT or parent in slots) and node not in slots
        ]
        self.frontier.sort(key=tree.path_log_probs.__getitem__, reverse=True)

    def expandable(self, width: int) -> Sequence[int]:
        """As many of the frontier as the tree has room for a child of, if all but the last get `width` of them."""
        room = 0 if self.missing else self.nodes_left
        return self.frontier[: -(-room // width)]


@dataclass(slots=True)
class DraftPass(Generic[D]):
    """The rows of one pass, and the nodes that are expanded by it: each by the row of its index in `wanted`."""

    rows: list[Row] = field(default_factory=list)
    owners: list[tuple[D, int | None]] = field(default_factory=list)
    """Whose each row is; None: it is that of a committed token."""
    wanted: list[int] = field(default_factory=list)
    expanded: list[tuple[D, int]] = field(default_factory=list)

    def add_row(self, draft: D, node: int | None, row: Row) -> None:
        self.rows.append(row)
        self.owners.append((draft, node))

    def expand_last(self, draft: D, node: int) -> None:
        """The last row is that of `node`."""
        self.wanted.append(len(self.rows) - 1)
        self.expanded.append((draft, node))


class BestFirstSpeculator(CachedSpeculator[D]):
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
        passes, if anybody measured it. Guesses whose path is not likelier than `least_path_probability`
        are not made; with 0 none is too unlikely."""
        super().__init__(slots, least_path_probability)
        self._width = tree_width
        self._cost = StepCost(cost or DEFAULT_ROW_COST)
        self._clock = clock

    @abstractmethod
    def run(self, this: DraftPass[D]) -> tuple[Tensor, Tensor | None]:
        """One pass: logits [expanded nodes, columns], and the token of each column, None: column n is token n."""

    def grow(self) -> dict[int, Growth]:
        """One pass of the network: missing context first, then the likeliest guesses."""
        start = self._clock()
        this = DraftPass[D]()
        owned = self._by_link()
        self._add_context(this, owned)
        context = len(this.rows)
        self._add_guesses(this, owned)
        self._computed = bool(this.rows)
        if not this.rows:
            return {}
        logits, ids = self.run(this)
        grown = self._add_children(this.expanded, logits, ids) if this.expanded else {}
        if not context:
            self._cost.observe(len(this.rows), self._clock() - start)
        return grown

    def check_integrity(self) -> None:
        """Prove, too, that no guess that was forgotten holds a slot."""
        if any(draft.slots.keys() - set(draft.tree.nodes()) for draft in self._drafts.values()):
            raise AssertionError("a guess that was forgotten holds a slot")
        super().check_integrity()

    @property
    def _reclaimable_slots(self) -> int:
        return len(self._free) + sum(len(draft.slots) for draft in self._drafts.values())

    def _take(self, count: int) -> list[int]:
        """Guesses give theirs up if need be, and if it is of use."""
        while len(self._free) < count <= self._reclaimable_slots:
            self._reclaim_slots(count - len(self._free))
        return super()._take(count)

    def _reclaim_slots(self, count: int) -> None:
        """Free up to so many slots: of the owner that holds the most, the request with the most guesses, and of these
        the unlikeliest."""
        held: Counter[int] = Counter()
        for draft in self._drafts.values():
            held[draft.opening.link] += len(draft.slot_table) + len(draft.slots)
        guessing = [draft for draft in self._drafts.values() if draft.slots]
        most = max(guessing, key=lambda draft: (held[draft.opening.link], len(draft.slots)))
        tree = most.tree
        for node in sorted(most.slots, key=lambda node: (tree.path_log_probs[node], -tree.depths[node]))[:count]:
            self._free.append(most.slots.pop(node))
        most.refresh_frontier()

    def _add_context(self, this: DraftPass[D], owned: Sequence[Sequence[D]]) -> None:
        """Rows for missing committed tokens."""
        for draft, span in self._context(owned):
            for i in span:
                this.add_row(draft, None, draft.slot_table.row(draft.tokens[i], i))
            if not draft.missing:
                this.expand_last(draft, ROOT)

    def _add_guesses(self, this: DraftPass[D], owned: Sequence[Sequence[D]]) -> None:
        """Rows for the likeliest guesses of requests whose context is complete or in this pass.

        As many as make the most of the pass if the likeliest had it: the chance that children are wanted, per second.
        """
        most = min(MAX_ROWS, len(self._free))
        hands = [self._likeliest(drafts)[:most] for drafts in owned]
        offered = sorted(itertools.chain(*hands), key=_neg_log_prob)[:most]
        chances = [math.exp(path_log_prob) for path_log_prob, _, _ in offered]
        count = nodes_to_verify(chances, len(this.wanted), len(this.rows), most, self._cost)
        self._next_link += count
        for _, draft, node in itertools.islice(round_robin(map(iter, hands)), count):
            branch = [draft.slots[above] for above in draft.tree.path(node)[:-1]]
            draft.slots[node] = self._free.pop()
            [token] = draft.to_draft_tokens([draft.tree.tokens[node]])
            this.add_row(draft, node, draft.slot_table.branch_row(token, [*branch, draft.slots[node]]))
            this.expand_last(draft, node)

    def _likeliest(self, drafts: Iterable[D]) -> list[ScoredNode[D]]:
        """What these requests could have expanded, best first."""
        offers = [
            (draft.tree.path_log_probs[node], draft, node)
            for draft in drafts
            if draft.frontier
            for node in draft.expandable(1 if draft.sampled else self._width)
        ]
        return sorted(offers, key=_neg_log_prob)

    def _add_children(self, expanded: Sequence[tuple[D, int]], logits: Tensor, ids: Tensor | None) -> dict[int, Growth]:
        new: dict[int, list[int]] = {}
        for (draft, node), guesses in zip(expanded, self._guesses(expanded, logits, ids), strict=True):
            nodes = new.setdefault(draft.opening.request_id, [])
            nodes += [draft.tree.add(node, *guess) for guess in guesses[: draft.nodes_left]]
        for key in new:
            self._drafts[key].refresh_frontier()
        return {key: self._drafts[key].tree.growth(nodes) for key, nodes in new.items() if nodes}

    def _guesses(
        self, expanded: Sequence[tuple[D, int]], logits: Tensor, ids: Tensor | None
    ) -> list[Sequence[tuple[int, float] | SampledToken]]:
        """New children of each node, likeliest first. A node whose slot was taken back is expanded again, and has its
        children already."""
        guesses: list[Sequence[tuple[int, float] | SampledToken]] = [()] * len(expanded)
        foreseen = [i for i, (draft, _) in enumerate(expanded) if not draft.sampled]
        drawn = [i for i, (draft, node) in enumerate(expanded) if draft.sampled and node not in draft.tree.parents]
        if foreseen:
            for i, some in zip(foreseen, self._predicted(*_selected(foreseen, expanded, logits), ids), strict=True):
                guesses[i] = some
        if drawn:  # whatever the token is: those that were left out would be missing from the law
            these, logits = _selected(drawn, expanded, logits)
            for i, guess in zip(
                drawn, sample_draft_tokens(logits, [_draw_row(*each) for each in these], ids), strict=True
            ):
                guesses[i] = [] if guess is None else [guess]
        return guesses

    def _predicted(
        self, expanded: Sequence[tuple[D, int]], logits: Tensor, ids: Tensor | None
    ) -> list[list[tuple[int, float]]]:
        """The likeliest draws of the target, if they are likely enough."""
        laws = predict_draws(logits, [_draw_row(draft, node) for draft, node in expanded], self._width, ids)
        return [
            [
                (token, log_prob)
                for token, log_prob in law
                if draft.tree.path_log_probs[node] + log_prob > draft.floor and draft.tree.child(node, token) is None
            ]
            for (draft, node), law in zip(expanded, laws, strict=True)
        ]


def _neg_log_prob(offer: ScoredNode[BestFirstDraft]) -> float:
    return -offer[0]


def _selected(
    these: Sequence[int], expanded: Sequence[tuple[D, int]], logits: Tensor
) -> tuple[Sequence[tuple[D, int]], Tensor]:
    """Those nodes and their logits; all are the usual case."""
    if len(these) == len(expanded):
        return expanded, logits
    return [expanded[i] for i in these], logits[list(these)]


def _draw_row(draft: BestFirstDraft, node: int) -> DrawRow:
    """The draw after `node` that the target will make."""
    tree = draft.tree
    position = tree.position + tree.depths[node] + 1
    return DrawRow(draft.history.params, position, draft.history, tree.path_tokens(node))
