"""Drafting with a small model of the target's family: the best leaves first, over all requests.

The draft predicts the target's draw with the target's own noise (`paceline.sampling`): it perturbs its logits just
as the target will, and guesses that the largest wins, or else the second largest, and so on. How sure it is follows
from the perturbed logits: a softmax over them. At temperature 0 these are the plain logits.

A node is *expanded* when it has run through the model, so that its children are known. Each round expands the nodes
with the largest path probability, whoever's they are: the alternatives to a first choice come up as soon as they
are likelier than going deeper.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.model.model import Model
from paceline.model.rows import Lane, Row
from paceline.sampling import History, scores
from paceline.sampling import Row as DrawRow
from paceline.speculators.base import Commit, DraftError, Opening, Speculator
from paceline.tree import Growth, Node, TokenTree
from paceline.verify import STRATEGIES

ROUND_ROWS = 8
"""Nodes expanded per round; a model runs so many rows for about the price of one."""
PREFILL_ROWS = 256
"""Context tokens computed per round."""
LEAST_PATH_PROBABILITY = 0.02
"""A node less likely than this is not worth expanding."""


@dataclass(slots=True)
class _Draft:
    """One request: its replica of the tree, and what of it the draft model has computed."""

    opening: Opening
    tokens: list[int]
    tree: TokenTree
    history: History
    lane: Lane = field(default_factory=Lane)
    slots: dict[Node, int] = field(default_factory=dict)
    """Slots of expanded guesses."""

    @property
    def missing(self) -> int:
        """Committed tokens, the root among them, that are not computed."""
        return len(self.tokens) - len(self.lane)

    def frontier(self, count: int, limit: int) -> list[tuple[float, Node]]:
        """The likeliest guesses that are not expanded and may be, as (path log-probability, node)."""
        depth = min(self.opening.max_depth, limit - self.tree.root.position)
        open_nodes = [
            (node.path_log_prob, node)
            for node in self.tree.nodes()
            if node not in self.slots and node.position - self.tree.root.position < depth
        ]
        return heapq.nlargest(count, open_nodes, key=lambda pair: pair[0])


class DraftModel(Speculator):
    """Method `draft_model`."""

    method = "draft_model"

    def __init__(self, model: Model, tree_width: int) -> None:
        """`tree_width`: most children per node."""
        self.model = model.name
        self.vocabulary_fingerprint = model.fingerprint
        self.vocabulary_size = model.vocabulary_size
        self.position_limit = model.max_model_len
        self._model = model
        self._width = tree_width
        self._free = list(range(model.slots, 0, -1))
        self._drafts: dict[int, _Draft] = {}

    def open(self, opening: Opening) -> None:
        self.close(opening.request_id)
        tokens = list(opening.tokens)
        if len(tokens) > min(self.position_limit, len(self._free)):
            raise DraftError(f"no room for {len(tokens)} tokens")
        split = len(tokens) - opening.output_tokens
        law = STRATEGIES[_strategy(opening)].law(opening.sampling)
        self._drafts[opening.request_id] = _Draft(
            opening,
            tokens,
            TokenTree(len(tokens) - 1, tokens[-1]),
            History(law, tokens[:split], tokens[split:], self._model.vocabulary_size),
        )

    def commit(self, commit: Commit) -> None:
        draft = self._drafts.get(commit.request_id)
        if draft is None:
            return
        if draft.tree.root.position != commit.base_position:
            raise DraftError(f"the root is at {draft.tree.root.position}, the commit at {commit.base_position}")
        path = draft.tree.commit(commit.tokens).path
        if not draft.missing:
            # The path's computed guesses become computed tokens; the last token may be one of them.
            for node in path:
                if node not in draft.slots:
                    break
                draft.lane.slots.append(draft.slots.pop(node))
        draft.tokens += commit.tokens
        draft.history.extend(commit.tokens)
        alive = set(draft.tree.nodes())
        self._free += [draft.slots.pop(node) for node in list(draft.slots) if node not in alive]

    def close(self, request_id: int) -> None:
        draft = self._drafts.pop(request_id, None)
        if draft is not None:
            self._free += [*draft.lane.slots, *draft.slots.values()]

    def grow(self) -> dict[int, Growth]:
        """One pass of the draft model: missing context first, then the likeliest guesses."""
        rows: list[Row] = []
        expanded: list[tuple[_Draft, Node]] = []
        wanted: list[int] = []
        budget = PREFILL_ROWS
        for draft in self._drafts.values():
            budget -= self._compute_context(draft, rows, budget)
            if rows and not draft.missing and rows[-1].slot == draft.lane.slots[-1]:  # the root is in this pass
                expanded.append((draft, draft.tree.root))
                wanted.append(len(rows) - 1)
        for draft, node in self._likeliest():
            slot = self._free.pop()
            branch = [draft.slots[n] for n in node.path()[:-1]] + [slot]
            draft.slots[node] = slot
            expanded.append((draft, node))
            wanted.append(len(rows))
            rows.append(draft.lane.branch_row(node.token, branch))
        if not rows:
            return {}
        logits = self._model.run(rows, wanted).logits
        return self._add_children(expanded, logits) if expanded else self.grow()

    def _compute_context(self, draft: _Draft, rows: list[Row], budget: int) -> int:
        """Rows for missing committed tokens; returns how many."""
        start = len(draft.lane)
        count = min(draft.missing, max(budget, 0), len(self._free))
        draft.lane.slots += [self._free.pop() for _ in range(count)]
        rows += [draft.lane.row(draft.tokens[i], i) for i in range(start, start + count)]
        return count

    def _likeliest(self) -> list[tuple[_Draft, Node]]:
        """The guesses to expand in this round, over all requests whose context is complete."""
        least = math.log(LEAST_PATH_PROBABILITY)
        candidates = [
            (log_prob, draft, node)
            for draft in self._drafts.values()
            if not draft.missing and draft.tree.size < draft.opening.max_nodes
            for log_prob, node in draft.frontier(ROUND_ROWS, self.position_limit)
            if log_prob > least
        ]
        count = min(ROUND_ROWS, len(self._free))
        return [(draft, node) for _, draft, node in heapq.nlargest(count, candidates, key=lambda c: c[0])]

    def _add_children(self, expanded: Sequence[tuple[_Draft, Node]], logits: torch.Tensor) -> dict[int, Growth]:
        rows = [_draw_row(draft, node) for draft, node in expanded]
        law = torch.log_softmax(scores(logits, rows), -1)
        best = law.topk(min(self._width, law.shape[-1]))
        new: dict[int, list[Node]] = {}
        for (draft, node), tokens, log_probs in zip(expanded, best.indices.tolist(), best.values.tolist(), strict=True):
            nodes = new.setdefault(draft.opening.request_id, [])
            nodes += [
                draft.tree.add(node, token, log_prob)
                for token, log_prob in zip(tokens, log_probs, strict=True)
                if log_prob > -math.inf and token not in node.children
            ]
        return {key: self._drafts[key].tree.growth(nodes) for key, nodes in new.items() if nodes}


def _draw_row(draft: _Draft, node: Node) -> DrawRow:
    """The draw after `node` that the target will make."""
    path = [n.token for n in node.path()]
    return DrawRow(draft.history.params, node.position + 1, draft.history, path)


def _strategy(opening: Opening) -> str:
    if opening.strategy not in STRATEGIES:
        raise DraftError(f"unknown strategy {opening.strategy!r}")
    return opening.strategy
