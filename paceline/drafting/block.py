"""Growth in blocks: one pass of the network gives a distribution for each of the next positions.

After each commit the network runs once for the root (PARD, P-EAGLE and DFlash over mask tokens behind it, Medusa with a
head for each depth). The tree consists of the likeliest paths, where Medusa (Cai et al. 2024, section 2.3.3) takes a
fixed choice of them. Nodes that survive a commit stay, beside those of the new distributions.

Of most networks the distributions do not depend on the tokens between: the probability of a path is the product of its
tokens' probabilities, with the target's noise at each position. Others (DFlash2, DSpark, XPress) have a small head that
corrects a distribution by the path before it. Their paths are found level by level.

What the pass computes for mask tokens is never kept: the tokens at their positions were not known.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.core.logits_rules import History, SamplingRow
from paceline.core.tree import ROOT, CommitResult, TokenTree
from paceline.drafting.best_first import RowNetwork
from paceline.drafting.draw_prediction import MAX_ROWS, RankedTokens, predict_draws
from paceline.drafting.network_speculator import DraftCache, DraftNetwork, NetworkRequest, round_robin, tree_width
from paceline.drafting.speculator import DraftingLimits
from paceline.model.rows import Row

Path = tuple[int, ...]
"""Tokens below the root."""
NO_STATES = torch.empty(0)


class DraftBlock(NamedTuple):
    """What a root's pass gives."""

    logits: Tensor
    """[distributions, columns]"""
    states: Tensor = NO_STATES
    """[positions, h] of the whole block, for a `PathScorer`."""
    tokens: Sequence[int] = ()
    """The token before the root and the root, for a `PathScorer`; the root twice if it is a request's first token."""


PathScorer = Callable[[Sequence[DraftBlock], Sequence[Path]], Tensor]
"""Logits [n, columns] of what follows n paths of one length, each in its block."""


def logits_of_pass(blocks: Sequence[DraftBlock], paths: Sequence[Path]) -> Tensor:
    """The `PathScorer` of a network whose distributions do not depend on the path."""
    return torch.stack([block.logits[len(path)] for block, path in zip(blocks, paths, strict=True)])


@dataclass(slots=True, eq=False)
class BlockRequest(NetworkRequest):
    """Tokens before the root are computed as they become known, the root when draft tokens are wanted.

    The root's pass leaves `distributions`, or `block` if these depend on the path; both are None until it has run.
    """

    distributions: Sequence[RankedTokens] | None = None
    """Of the tokens after the root, by depth."""
    block: DraftBlock | None = None
    ranked: dict[Path, RankedTokens] = field(default_factory=dict)
    """What follows a path of `block`, as far as it was asked for."""
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
        return self.distributions is None and self.block is None and complete and wanted

    def root_moved(self, committed: CommitResult) -> list[int]:
        """The distributions were those of the old root."""
        self.distributions = self.block = None
        self.ranked.clear()
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
    """Whether all distributions are computed, and rules that look back see each node's own path."""
    scorer: PathScorer | None
    """None: the distributions do not depend on the path."""

    def run(self, context: ContextSpans, requested: RequestedPasses, free: Sequence[int]) -> Sequence[DraftBlock]:
        """The wanted distributions of each request. `free`: scratch slots, from the end."""


class MaskTokens:
    """Blocks of a network of rows, with one row per mask token. The row sees the root and the masks before it."""

    sees_paths = False
    scorer: PathScorer | None = None

    def __init__(self, network: RowNetwork, mask: int, tokens_per_pass: int, feature: Tensor | None = None) -> None:
        """The root's row gives the first distribution, so a pass has `tokens_per_pass` - 1 masks. `feature`: of a
        head's mask tokens, [1, h]."""
        self.description, self.slots, self.ids = network.description, network.slots, network.ids
        self.mapping, self.first_row, self.state_size = network.mapping, network.first_row, network.state_size
        self.tokens_per_pass, self.scratch_slots = tokens_per_pass, tokens_per_pass - 1
        self.layer_states = network.layer_states
        self._network, self._mask, self._feature = network, mask, feature

    def run(self, context: ContextSpans, requested: RequestedPasses, free: Sequence[int]) -> Sequence[DraftBlock]:
        features = None if self._feature is None else self._features(self._feature, context, requested)
        rows, wanted = self._rows(context, requested, free)
        logits = self._network.run(rows, features, wanted).logits
        return [DraftBlock(part) for part in logits.split([count for _, count in requested])] if requested else []

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
        requests = {key: request for key, request in pool.requests.items() if request.may_grow}
        beams = {key: Beam(request, request.block) for key, request in requests.items() if request.block is not None}
        self._descend(list(beams.values()))
        new = {key: beam.add_nodes() for key, beam in beams.items()}
        for key, request in requests.items():
            if request.distributions is not None:
                new[key] = self._add_nodes(request, request.distributions)
            request.may_grow = request.distributions is None and request.block is None
        return new

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

    def _set_distributions(self, requested: RequestedPasses, blocks: Sequence[DraftBlock]) -> None:
        alike = []
        for (request, count), block in zip(requested, blocks, strict=True):
            request.refresh()
            if self.network.scorer or (self.network.sees_paths and request.history.has_logits_rules):
                # Views would keep the tensors of all requests alive.
                request.block = DraftBlock(block.logits.clone(), block.states.clone(), block.tokens)
            else:
                alike.append((request, count, block.logits))
        if not alike:
            return
        rows = [row for each, count, _ in alike for row in draw_rows(each.history, each.tree.position + 1, count)]
        logits = torch.cat([logits for _, _, logits in alike])
        distributions = iter(predict_draws(logits, rows, self._width, self.network.ids))
        for request, count, _ in alike:
            request.distributions = list(itertools.islice(distributions, count))

    def _add_nodes(self, request: BlockRequest, distributions: Sequence[RankedTokens]) -> list[int]:
        return grow_product_tree(
            request.tree, distributions[: request.depth_limit], request.nodes_left, request.least_path_log_prob
        )

    def _descend(self, beams: Sequence[Beam]) -> None:
        """All beams at once, level by level."""
        score = self.network.scorer or logits_of_pass
        while beams := [beam for beam in beams if beam.level]:
            unknown = [(beam, path) for beam in beams for _, path in beam.level if path not in beam.request.ranked]
            for start in range(0, len(unknown), MAX_ROWS):
                asked = unknown[start : start + MAX_ROWS]
                logits = score([beam.block for beam, _ in asked], [path for _, path in asked])
                rows = [beam.draw_row(path) for beam, path in asked]
                ranked = predict_draws(logits, rows, self._width, self.network.ids)
                for (beam, path), tokens in zip(asked, ranked, strict=True):
                    beam.request.ranked[path] = tokens
            for beam in beams:
                beam.descend()


class Beam:
    """The likeliest new paths of a request whose distributions depend on the path, found level by level.

    A path is at most as likely as its beginnings. So the likeliest `nodes_left` of all paths begin with those that are
    among the likeliest `nodes_left` of every level.
    """

    def __init__(self, request: BlockRequest, block: DraftBlock) -> None:
        self.request, self.block = request, block
        tree = request.tree
        self._nodes = {tuple(tree.path_tokens(node)): node for node in (ROOT, *tree.nodes())}
        self._depths = min(request.depth_limit, len(block.logits))
        self._found: list[tuple[float, Path, float]] = []
        """New paths, likeliest first, a path after its beginnings: log-probability, tokens, and that of the last."""
        self.level: list[tuple[float, Path]] = [(0.0, ())] if self._depths and request.nodes_left else []
        """The paths of one length, new or not, whose next tokens are wanted: log-probability and tokens."""

    def draw_row(self, path: Path) -> SamplingRow:
        """The target's draw after a path."""
        history = self.request.history
        return SamplingRow(history.params, self.request.tree.position + 1 + len(path), history, list(path))

    def descend(self) -> None:
        """Take the next tokens of `level` in, and go on with the paths that end with them."""
        request, length = self.request, len(self.level[0][1]) + 1
        for path_log_prob, path in self.level:
            for token, log_prob in request.ranked[path]:
                child = path_log_prob + log_prob, (*path, token), log_prob
                if child[0] > request.least_path_log_prob and child[1] not in self._nodes:
                    self._found.append(child)
        self._found = heapq.nlargest(request.nodes_left, self._found, key=itemgetter(0))  # stable
        self.level = [(log_prob, path) for log_prob, path, _ in self._found if len(path) == length]
        self.level += [
            (request.tree.path_log_probs[node], path)
            for path, node in self._nodes.items()
            if len(path) == length and request.tree.path_log_probs[node] > request.least_path_log_prob
        ]
        if length == self._depths:
            self.level = []

    def add_nodes(self) -> list[int]:
        """Add what was found to the tree; return the new nodes."""
        for _, path, log_prob in self._found:
            self._nodes[path] = self.request.tree.add(self._nodes[path[:-1]], path[-1], log_prob)
        return [self._nodes[path] for _, path, _ in self._found]


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
) -> list[int]:
    """Add the `most` likeliest nodes with a path log-probability above `least_path_log_prob`; return them.

    Every node at depth d, new or not, gets children from `distributions[d]`.
    """
    serial = itertools.count()  # breaks ties by age
    candidates: list[tuple[float, int, int, int]] = []

    def ranked(node: int) -> RankedTokens:
        depth = tree.depths[node]
        within = depth < len(distributions) and tree.path_log_probs[node] > least_path_log_prob
        return distributions[depth] if within else ()

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
