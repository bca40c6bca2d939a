"""Drafting several tokens in one forward pass: PARD, P-EAGLE and DFlash.

After each commit the network runs once over the root and over mask tokens behind it. The pass gives one distribution
for each of the next positions, independent of the tokens between. The tree is their product
(`paceline.drafting.product_tree`), with the target's noise at each position. Nodes that survive a commit stay, beside
those of the new distributions.

What the pass computes for mask tokens is never kept: the tokens at their positions were not known.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from paceline.core.growth import Growth
from paceline.core.tree import CommitResult
from paceline.drafting.cached_speculator import CachedRequest, CachedSpeculator, round_robin
from paceline.drafting.draw_prediction import MAX_ROWS, NetworkFacts, RankedTokens, predict_draws
from paceline.drafting.product_tree import draw_rows, grow_product_tree
from paceline.model.rows import Row


@dataclass(slots=True, eq=False)
class ParallelRequest(CachedRequest):
    """A request. Tokens before the root are computed as they become known, the root when draft tokens are wanted."""

    distributions: Sequence[RankedTokens] | None = None
    """Of the tokens after the root, by depth; None: the root's pass has not run."""
    may_grow: bool = False
    """Whether the distributions may give more nodes."""

    @property
    def computable(self) -> int:
        return max(0, self.missing - 1)

    @property
    def context_computed(self) -> bool:
        """Whether the inputs of the root's pass are complete."""
        return self.missing == 1

    @property
    def depth(self) -> int:
        """The deepest node allowed."""
        return max(0, min(self.opening.max_depth, self.limit - 1 - self.tree.position))

    @property
    def wants_pass(self) -> bool:
        """Whether the root's pass is due and can run."""
        return self.distributions is None and self.context_computed and self.depth > 0 and self.nodes_left > 0

    def root_moved(self, committed: CommitResult) -> list[int]:
        """The distributions were those of the old root."""
        self.distributions = None
        return []

    def refresh_frontier(self) -> None:
        self.may_grow = True

    def add_tokens(self) -> list[int]:
        """Add nodes from the distributions; return them."""
        self.may_grow = False
        distributions = (self.distributions or ())[: self.depth]
        return grow_product_tree(self.tree, distributions, self.nodes_left, self.least_path_log_prob)


@dataclass(slots=True, eq=False)
class HiddenStateRequest(ParallelRequest):
    """A request whose tokens can be computed once the target's states of the positions before have arrived."""

    @property
    def computable(self) -> int:
        return min(max(0, self.missing - 1), len(self.states))

    @property
    def context_computed(self) -> bool:
        return self.missing == 1 and self.states.known >= self.tree.position


D = TypeVar("D", bound=ParallelRequest)
ContextSpans = Sequence[tuple[D, range]]
"""Indices of the committed tokens to compute, by request."""
RequestedPasses = Sequence[tuple[D, int]]
"""Requests whose root's pass is to run, and how many distributions each wants."""


class ParallelSpeculator(CachedSpeculator[D]):
    """Runs the passes of roots. A subclass runs the network."""

    def __init__(
        self,
        facts: NetworkFacts,
        tokens_per_pass: int,
        tree_width: int,
        least_path_probability: float = 0.0,
        scratch_slots: int = 0,
    ) -> None:
        """`tokens_per_pass`: most distributions of one pass. `scratch_slots`: free slots that a root's pass uses while
        it runs. The rest: see `PredictingSpeculator`."""
        super().__init__(facts, tree_width, least_path_probability)
        self._tokens_per_pass, self._scratch_slots = tokens_per_pass, scratch_slots

    @abstractmethod
    def run_pass(self, context: ContextSpans[D], requested: RequestedPasses[D]) -> tuple[Tensor, Tensor | None]:
        """Logits of the wanted distributions, request by request [distributions, columns], and the token of each
        column; None: column n is token n."""

    @torch.inference_mode()
    def grow(self) -> dict[int, Growth]:
        """One pass: missing committed tokens, and the roots whose context is then complete."""
        by_link = self._by_link()
        context = list(self._context(by_link))
        requested = self._requested_passes(by_link)
        self._computed = bool(context or requested)
        if self._computed:
            self._set_distributions(requested, *self.run_pass(context, requested))
        return self._growths(
            {
                key: request.add_tokens()
                for key, request in self._requests.items()
                if request.may_grow and request.distributions is not None
            }
        )

    def _requested_passes(self, by_link: Sequence[Sequence[D]]) -> RequestedPasses[D]:
        most = max(1, MAX_ROWS // self._tokens_per_pass)
        if self._scratch_slots:
            most = min(most, len(self._free) // self._scratch_slots)
        waiting = [iter([request for request in requests if request.wants_pass]) for requests in by_link]
        requested = [
            (request, min(request.depth, self._tokens_per_pass))
            for request in itertools.islice(round_robin(waiting), most)
        ]
        self._next_link += len(requested)
        return requested

    def _set_distributions(self, requested: RequestedPasses[D], logits: Tensor, ids: Tensor | None) -> None:
        if not requested:
            return
        rows = [
            row for request, count in requested for row in draw_rows(request.history, request.tree.position + 1, count)
        ]
        distributions = iter(predict_draws(logits, rows, self._width, ids))
        for request, count in requested:
            request.distributions = list(itertools.islice(distributions, count))
            request.refresh_frontier()


class MaskTokenSpeculator(ParallelSpeculator[D]):
    """Uses one row per mask token. The row sees the root and the masks before it."""

    def __init__(
        self,
        facts: NetworkFacts,
        mask_token: int,
        tokens_per_pass: int,
        tree_width: int,
        least_path_probability: float = 0.0,
    ) -> None:
        """The root's row gives the first distribution, so a pass has `tokens_per_pass` - 1 masks. The rest: see
        `ParallelSpeculator`."""
        super().__init__(facts, tokens_per_pass, tree_width, least_path_probability, tokens_per_pass - 1)
        self._mask_token = mask_token

    def rows(self, context: ContextSpans[D], requested: RequestedPasses[D]) -> tuple[list[Row], list[int]]:
        """The rows of one pass, and the indices of those that give distributions: the context, then each request's root
        and masks. The roots count as computed from now on.
        """
        rows = [request.slot_table.row(request.tokens[i], i) for request, span in context for i in span]
        wanted = range(len(rows), len(rows) + sum(count for _, count in requested))
        free = reversed(self._free)  # no slot is taken during the pass
        for request, count in requested:
            rows.append(request.slot_table.row(request.tokens[-1], request.computed))
            request.computed += 1
            masks: list[int] = []
            for slot in itertools.islice(free, count - 1):
                masks.append(slot)
                rows.append(request.slot_table.branch_row(self._mask_token, masks))
        return rows, list(wanted)
