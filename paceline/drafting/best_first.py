"""Best-first drafting with a network that computes one token after another, over all requests at once.

A node is *expanded* when it has run through the network, which gives its children. Each round expands the nodes with
the largest path probability, over all requests: an alternative is expanded once it is likelier than going deeper.
Children are the predicted draws of the target (`paceline.drafting.draw_prediction`). For strategies that verify with
the draft's distribution, a node gets one child, sampled from it (`paceline.drafting.sampled_drafts`).

Expanded nodes use the slots that committed tokens leave (`CachedSpeculator`), and give them up when tokens need them.
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

from paceline.config import STRATEGIES
from paceline.core.growth import Growth
from paceline.core.logits_rules import History
from paceline.core.policy.step_cost import RowCost, StepCost, nodes_to_verify
from paceline.core.tree import ROOT, CommitResult, TokenTree
from paceline.drafting.cached_speculator import CachedRequest, CachedSpeculator, round_robin
from paceline.drafting.draw_prediction import MAX_ROWS, NetworkFacts, predict_draws
from paceline.drafting.sampled_drafts import SampledToken, sample_draft_tokens
from paceline.model.row_probe import finish
from paceline.model.rows import Row

DEFAULT_ROW_COST = RowCost([8], [1.0])
"""The cost of rows if it was not measured."""

D = TypeVar("D", bound="BestFirstRequest")
ScoredNode = tuple[float, D, int]
"""A node that can be expanded: its path log-probability, its request, the node."""


@dataclass(slots=True, eq=False)
class BestFirstRequest(CachedRequest):
    """A request whose nodes are expanded."""

    slots: dict[int, int] = field(default_factory=dict)
    """The slots of expanded nodes. Empty while committed tokens are missing."""
    frontier: list[int] = field(default_factory=list)
    """The nodes that can be expanded next, likeliest first."""

    @property
    def all_slots(self) -> Sequence[int]:
        return [*self.slot_table.slots, *self.slots.values()]

    @property
    def sampled(self) -> bool:
        """Whether draft tokens are sampled from the draft's distribution."""
        return STRATEGIES[self.opening.strategy].sampled_drafts

    @property
    def wanted(self) -> int:
        """How many tokens need computing. The root's pass gives its children, and is due when children are wanted."""
        return self.missing if self.depth_limit > 0 and self.least_path_log_prob < 0.0 else max(0, self.missing - 1)

    @property
    def computable(self) -> int:
        return self.wanted

    @property
    def depth_limit(self) -> int:
        """The depth from which on nodes get no children."""
        return min(self.opening.max_depth, self.limit - 1 - self.tree.position)

    def root_moved(self, committed: CommitResult) -> list[int]:
        """The first nodes of the committed path stay computed, as long as they are expanded."""
        known = [self.slots.pop(node) for node in itertools.takewhile(self.slots.__contains__, committed.path)]
        self.slot_table.slots.extend(known)
        self.computed += len(known)
        slots, self.slots = self.slots, {}
        self.slots = {node: slots.pop(old) for node, old in enumerate(committed.kept, 1) if old in slots}
        return list(slots.values())

    def refresh_frontier(self) -> None:
        tree, slots = self.tree, self.slots
        depth_limit, least_path_log_prob = self.depth_limit, self.least_path_log_prob
        nodes = zip(tree.parents, tree.depths, tree.path_log_probs, strict=True)
        self.frontier = [
            node
            for node, (parent, depth, path_log_prob) in enumerate(nodes)
            if path_log_prob > least_path_log_prob
            and depth < depth_limit
            and (parent == ROOT or parent in slots)
            and node not in slots
        ]
        self.frontier.sort(key=tree.path_log_probs.__getitem__, reverse=True)

    def expandable(self, width: int) -> Sequence[int]:
        """The first nodes of the frontier, as many as the node limit allows `width` children each; the last may get
        fewer."""
        nodes_left = 0 if self.missing else self.nodes_left
        return self.frontier[: -(-nodes_left // width)]


@dataclass(slots=True)
class DraftPass(Generic[D]):
    """The rows of one forward pass. Node i of `expanded` is computed by row `wanted[i]`."""

    rows: list[Row] = field(default_factory=list)
    owners: list[tuple[D, int | None]] = field(default_factory=list)
    """The request and node of each row; node None: a committed token."""
    wanted: list[int] = field(default_factory=list)
    expanded: list[tuple[D, int]] = field(default_factory=list)

    def add_row(self, request: D, node: int | None, row: Row) -> None:
        self.rows.append(row)
        self.owners.append((request, node))

    def expand_last(self, request: D, node: int) -> None:
        """The last row expands `node`."""
        self.wanted.append(len(self.rows) - 1)
        self.expanded.append((request, node))


class BestFirstSpeculator(CachedSpeculator[D]):
    """Expands the likeliest nodes. A subclass runs the network."""

    def __init__(
        self,
        facts: NetworkFacts,
        tree_width: int,
        cost: RowCost | None = None,
        least_path_probability: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`cost`: of the network's passes, if measured. The rest: see `PredictingSpeculator`."""
        super().__init__(facts, tree_width, least_path_probability)
        self._cost = StepCost(cost or DEFAULT_ROW_COST)
        self._clock = clock

    @abstractmethod
    def run(self, this: DraftPass[D]) -> tuple[Tensor, Tensor | None]:
        """Logits [expanded nodes, columns] and the token of each column; None: column n is token n."""

    def grow(self) -> dict[int, Growth]:
        """One pass of the network: missing committed tokens first, then the likeliest nodes."""
        start = self._clock()
        this = DraftPass[D]()
        by_link = self._by_link()
        self._add_context(this, by_link)
        context = len(this.rows)
        self._add_nodes(this, by_link)
        self._computed = bool(this.rows)
        if not this.rows:
            return {}
        began = self._clock()
        logits, ids = self.run(this)
        finish(logits)
        pass_s = self._clock() - began
        grown = self._add_children(this.expanded, logits, ids) if this.expanded else {}
        if not context:
            self._cost.passes.observe(len(this.rows), pass_s)
            self._cost.observe(len(this.rows), self._clock() - start)
        return grown

    def tree(self, request_id: int) -> TokenTree:
        """The tree of an open request."""
        return self._requests[request_id].tree

    def rewind(self, request_id: int, length: int) -> None:
        """Take back all nodes of an open request, and its committed tokens after the first `length`.

        The first `length` - 1 tokens stay computed; the last one is expanded again.
        """
        request = self._requests[request_id]
        self._free += [*request.slots.values(), *request.slot_table.slots[length:]]
        request.slots.clear()
        request.frontier.clear()
        request.slot_table.truncate(length)
        del request.tokens[length:]
        request.computed = min(request.computed, length - 1)
        request.tree = TokenTree(length - 1, request.tokens[-1])
        split = min(length, len(request.opening.tokens) - request.opening.output_tokens)
        request.history = History(
            request.history.params, request.tokens[:split], request.tokens[split:], self.vocabulary_size
        )

    def check_integrity(self) -> None:
        """Raises AssertionError, too, if a node that left its tree holds a slot."""
        if any(request.slots.keys() - set(request.tree.nodes()) for request in self._requests.values()):
            raise AssertionError("a node that left its tree holds a slot")
        super().check_integrity()

    @property
    def _reclaimable_slots(self) -> int:
        return len(self._free) + sum(len(request.slots) for request in self._requests.values())

    def _take(self, count: int) -> list[int]:
        """Take slots from expanded nodes if needed, unless even these are too few."""
        while len(self._free) < count <= self._reclaimable_slots:
            self._reclaim_slots(count - len(self._free))
        return super()._take(count)

    def _reclaim_slots(self, count: int) -> None:
        """Free up to `count` slots: those of the unlikeliest nodes of the request with the most expanded nodes, on the
        link that holds the most slots."""
        held: Counter[int] = Counter()
        for request in self._requests.values():
            held[request.opening.link] += len(request.slot_table) + len(request.slots)
        expanded = [request for request in self._requests.values() if request.slots]
        largest = max(expanded, key=lambda request: (held[request.opening.link], len(request.slots)))
        tree = largest.tree
        for node in sorted(largest.slots, key=lambda node: (tree.path_log_probs[node], -tree.depths[node]))[:count]:
            self._free.append(largest.slots.pop(node))
        largest.refresh_frontier()

    def _add_context(self, this: DraftPass[D], by_link: Sequence[Sequence[D]]) -> None:
        """Rows for missing committed tokens. The last one of a request expands its root."""
        for request, span in self._context(by_link):
            for i in span:
                this.add_row(request, None, request.slot_table.row(request.tokens[i], i))
            if not request.missing:
                this.expand_last(request, ROOT)

    def _add_nodes(self, this: DraftPass[D], by_link: Sequence[Sequence[D]]) -> None:
        """Rows for the likeliest nodes. Their number maximises the summed path probability per second of the pass."""
        most = min(MAX_ROWS, len(self._free))
        offers = [self._likeliest(requests)[:most] for requests in by_link]
        best = sorted(itertools.chain(*offers), key=_neg_log_prob)[:most]
        probabilities = [math.exp(path_log_prob) for path_log_prob, _, _ in best]
        count = nodes_to_verify(probabilities, len(this.wanted), len(this.rows), most, self._cost)
        self._next_link += count
        for _, request, node in itertools.islice(round_robin(map(iter, offers)), count):
            branch = [request.slots[above] for above in request.tree.path(node)[:-1]]
            request.slots[node] = self._free.pop()
            [token] = request.to_draft_tokens([request.tree.tokens[node]])
            this.add_row(request, node, request.slot_table.branch_row(token, [*branch, request.slots[node]]))
            this.expand_last(request, node)

    def _likeliest(self, requests: Iterable[D]) -> list[ScoredNode[D]]:
        """The nodes of these requests that can be expanded, likeliest first."""
        nodes = [
            (request.tree.path_log_probs[node], request, node)
            for request in requests
            if request.frontier
            for node in request.expandable(1 if request.sampled else self._width)
        ]
        return sorted(nodes, key=_neg_log_prob)

    def _add_children(self, expanded: Sequence[tuple[D, int]], logits: Tensor, ids: Tensor | None) -> dict[int, Growth]:
        new: dict[int, list[int]] = {}
        for (request, node), children in zip(expanded, self._children(expanded, logits, ids), strict=True):
            nodes = new.setdefault(request.opening.request_id, [])
            nodes += [request.tree.add(node, *child) for child in children[: request.nodes_left]]
        for key in new:
            self._requests[key].refresh_frontier()
        return self._growths(new)

    def _children(
        self, expanded: Sequence[tuple[D, int]], logits: Tensor, ids: Tensor | None
    ) -> list[Sequence[tuple[int, float] | SampledToken]]:
        """The new children of each node, likeliest first. A node that lost its slot is expanded a second time, and has
        children already."""
        children: list[Sequence[tuple[int, float] | SampledToken]] = [()] * len(expanded)
        predicted = [i for i, (request, _) in enumerate(expanded) if not request.sampled]
        sampled = [
            i for i, (request, node) in enumerate(expanded) if request.sampled and node not in request.tree.parents
        ]
        if predicted:
            nodes, chosen = _selected(predicted, expanded, logits)
            ranked = predict_draws(chosen, [request.draw_row(node) for request, node in nodes], self._width, ids)
            for i, (request, node), tokens in zip(predicted, nodes, ranked, strict=True):
                children[i] = request.new_children(node, tokens)
        if sampled:  # unlikely tokens, too: without them the samples would not follow the distribution
            nodes, chosen = _selected(sampled, expanded, logits)
            samples = sample_draft_tokens(chosen, [request.draw_row(node) for request, node in nodes], ids)
            for i, sample in zip(sampled, samples, strict=True):
                children[i] = [] if sample is None else [sample]
        return children


def _neg_log_prob(node: ScoredNode[BestFirstRequest]) -> float:
    return -node[0]


def _selected(
    indices: Sequence[int], expanded: Sequence[tuple[D, int]], logits: Tensor
) -> tuple[Sequence[tuple[D, int]], Tensor]:
    """These nodes and their logits, without a copy in the usual case of all nodes."""
    if len(indices) == len(expanded):
        return expanded, logits
    return [expanded[i] for i in indices], logits[list(indices)]
