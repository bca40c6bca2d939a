"""Growth in blocks: one pass of the network gives a distribution for each of the next positions.

After each commit the network runs once for the root (PARD, P-EAGLE and DFlash over mask tokens behind it, Medusa with a
head for each depth). The distributions do not depend on the tokens between, so the probability of a path is the product
of its tokens' probabilities, with the target's noise at each position. The tree consists of the likeliest paths, where
Medusa (Cai et al. 2024, section 2.3.3) takes a fixed choice of them. Nodes that survive a commit stay, beside those of
the new distributions.

What the pass computes for mask tokens is never kept: the tokens at their positions were not known.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.logits_rules import History, SamplingRow
from paceline.core.tree import CommitResult, TokenTree
from paceline.drafting.best_first import RowNetwork
from paceline.drafting.draw_prediction import MAX_ROWS, RankedTokens, predict_draws
from paceline.drafting.network_speculator import DraftCache, DraftNetwork, NetworkRequest, round_robin, tree_width
from paceline.drafting.speculator import DraftingLimits
from paceline.model.rows import Row


@dataclass(slots=True, eq=False)
class BlockRequest(NetworkRequest):
    """Tokens before the root are computed as they become known, the root when draft tokens are wanted."""

    distributions: Sequence[RankedTokens] | None = None
    """Of the tokens after the root, by depth; None: the root's pass has not run."""
    logits: Tensor | None = None
    """[distributions, columns], if the request has rules that depend on the path and the network `sees_paths`."""
    may_grow: bool = False
    """Whether the distributions may give more nodes."""

    @property
    def wanted(self) -> int:
        return max(0, self.missing - 1)

    @property
    def wants_pass(self) -> bool:
        """Whether the root's pass is due and can run."""
        if self.states is None:
            complete = self.missing == 1
        else:
            complete = (self.missing == 1 or self.states.latest) and self.states.complete(self.tree.position)
        wanted = self.depth_limit > 0 and self.nodes_left > 0 and self.least_path_log_prob < 0.0
        return self.distributions is None and complete and wanted

    def root_moved(self, committed: CommitResult) -> list[int]:
        """The distributions were those of the old root."""
        self.distributions = self.logits = None
        return []

    def refresh(self) -> None:
        self.may_grow = True


ContextSpans = Sequence[tuple[BlockRequest, range]]
"""Indices of the committed tokens to compute, by request."""
RequestedPasses = Sequence[tuple[BlockRequest, int]]
"""Requests whose root's pass is to run, and how many distributions each wants."""


class BlockNetwork(DraftNetwork, Protocol):
    """A network whose pass gives several distributions."""

    tokens_per_pass: int
    """Most distributions of one pass."""
    scratch_slots: int
    """Free slots that a root's pass uses while it runs."""
    sees_paths: bool
    """Whether all distributions are kept, and rules that look back see each node's own path."""

    def run(self, context: ContextSpans, requested: RequestedPasses, free: Sequence[int]) -> Tensor:
        """Logits of the wanted distributions, request by request [distributions, columns]. `free`: scratch slots, from
        the end."""


class MaskTokens:
    """Blocks of a network of rows, with one row per mask token. The row sees the root and the masks before it."""

    sees_paths = False

    def __init__(self, network: RowNetwork, mask: int, tokens_per_pass: int, feature: Tensor | None = None) -> None:
        """The root's row gives the first distribution, so a pass has `tokens_per_pass` - 1 masks. `feature`: of a
        head's mask tokens, [1, h]."""
        self.description, self.slots, self.ids = network.description, network.slots, network.ids
        self.mapping, self.first_row, self.state_size = network.mapping, network.first_row, network.state_size
        self.tokens_per_pass, self.scratch_slots = tokens_per_pass, tokens_per_pass - 1
        self.layer_states = network.layer_states
        self._network, self._mask, self._feature = network, mask, feature

    def run(self, context: ContextSpans, requested: RequestedPasses, free: Sequence[int]) -> Tensor:
        features = None if self._feature is None else self._features(self._feature, context, requested)
        rows, wanted = self._rows(context, requested, free)
        return self._network.run(rows, features, wanted).logits

    def _rows(
        self, context: ContextSpans, requested: RequestedPasses, free: Sequence[int]
    ) -> tuple[list[Row], list[int]]:
        """The rows of one pass, and the indices of the rows that give distributions. The context comes first, then each
        request's root and masks. The roots count as computed from now on.
        """
        rows = [request.slot_table.row(request.tokens[i], i) for request, span in context for i in span]
        wanted = range(len(rows), len(rows) + sum(count for _, count in requested))
        scratch = reversed(free)  # no slot is taken during the pass
        for request, count in requested:
            rows.append(request.slot_table.row(request.tokens[-1], request.computed))
            request.computed += 1
            masks: list[int] = []
            for slot in itertools.islice(scratch, count - 1):
                masks.append(slot)
                rows.append(request.slot_table.branch_row(self._mask, masks))
        return rows, list(wanted)

    def _features(self, mask: Tensor, context: ContextSpans, requested: RequestedPasses) -> Tensor:
        """[rows, h], in the order of the rows."""
        states = [state for request, span in context for state in request.take_states(len(span))]
        roots = [state for request, _ in requested for state in request.take_states(1)]
        features = self._network.encode(torch.stack(states + roots))
        parts = [features[: len(states)]]
        for root, (_, count) in zip(features[len(states) :], requested, strict=True):
            parts += [root.unsqueeze(0), mask.expand(count - 1, -1)]
        return torch.cat(parts)


class Blocks:
    """Runs the passes of roots, and adds the likeliest paths."""

    request_type = BlockRequest

    def __init__(self, network: BlockNetwork, limits: DraftingLimits) -> None:
        self.network, self.limits = network, limits
        self.computed = False
        self._width = tree_width(network, limits)

    def grow(self, pool: DraftCache[BlockRequest]) -> Mapping[int, list[int]]:
        """One pass: missing committed tokens, and the roots whose context is then complete."""
        by_link = pool.by_link()
        context = list(pool.context(by_link))
        requested = self._requested(pool, by_link)
        self.computed = bool(context or requested)
        if self.computed:
            self._set_distributions(requested, self.network.run(context, requested, pool.free))
        return {
            key: self._add_nodes(request, request.distributions)
            for key, request in pool.requests.items()
            if request.may_grow and request.distributions is not None
        }

    def _requested(self, pool: DraftCache[BlockRequest], by_link: Sequence[Sequence[BlockRequest]]) -> RequestedPasses:
        network = self.network
        most = max(1, MAX_ROWS // network.tokens_per_pass)
        if network.scratch_slots:
            most = min(most, len(pool.free) // network.scratch_slots)
        waiting = [iter([request for request in requests if request.wants_pass]) for requests in by_link]
        requests = list(itertools.islice(round_robin(waiting), most))
        pool.turns += len(requests)
        count = network.tokens_per_pass
        return [(each, count if network.sees_paths else min(each.depth_limit, count)) for each in requests]

    def _set_distributions(self, requested: RequestedPasses, logits: Tensor) -> None:
        if not requested:
            return
        rows = [
            row for request, count in requested for row in draw_rows(request.history, request.tree.position + 1, count)
        ]
        distributions = iter(predict_draws(logits, rows, self._width, self.network.ids))
        for (request, count), own_logits in zip(requested, logits.split([n for _, n in requested]), strict=True):
            request.distributions = list(itertools.islice(distributions, count))
            if self.network.sees_paths and request.history.has_logits_rules:
                request.logits = own_logits.clone()
            request.refresh()

    def _add_nodes(self, request: BlockRequest, distributions: Sequence[RankedTokens]) -> list[int]:
        request.may_grow = False
        after = None if request.logits is None else functools.partial(self._distribution, request, request.logits)
        return grow_product_tree(
            request.tree,
            distributions[: request.depth_limit],
            request.nodes_left,
            request.least_path_log_prob,
            after,
        )

    def _distribution(self, request: BlockRequest, logits: Tensor, node: int) -> RankedTokens:
        """Of the token after this node. Rules see the path to it."""
        depth = request.tree.depths[node]
        [ranked] = predict_draws(logits[depth : depth + 1], [request.draw_row(node)], self._width, self.network.ids)
        return ranked


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
