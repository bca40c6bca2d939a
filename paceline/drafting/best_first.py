"""Best-first growth over a network that computes one token after another, for all requests at once.

A node is *expanded* when it has run through the network, which gives its children. Each round expands the nodes with
the largest path probability, over all requests: an alternative is expanded once it is likelier than going deeper.
Children are the predicted draws of the target. For strategies that verify with the draft's distribution, a node gets
one child, sampled from it (`paceline.drafting.draw_prediction` has both).

A head (EAGLE, MTP) drafts from the target's hidden states. The row of the token at position i + 1 has position i. Its
feature comes from the state of position i, and it predicts the token at i + 2. A draft token has no such state yet: its
row takes the feature that the head computed in its parent's row. When the target commits draft tokens, their states
come with the commit, so their rows are computed again from these. The nodes below them stay in the tree and are
expanded again. A head drafts once all states have come.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.config import STRATEGIES
from paceline.core.policy.step_cost import RowCost, StepCost, nodes_to_verify
from paceline.core.tree import ROOT, CommitResult
from paceline.drafting.draw_prediction import MAX_ROWS, SampledToken, predict_draws, sample_draft_tokens
from paceline.drafting.network_speculator import (
    DraftCache,
    DraftNetwork,
    NetworkRequest,
    inputs,
    round_robin,
    tree_width,
)
from paceline.drafting.speculator import DraftDescription, DraftingLimits
from paceline.drafting.vocabulary.vocabulary_mapping import VocabularyMapping
from paceline.model.attention import Pass
from paceline.model.decoder import LlamaModel
from paceline.model.gpu.device_passes import DevicePasses
from paceline.model.model import Model
from paceline.model.row_probe import finish
from paceline.model.rows import Row

DEFAULT_ROW_COST = RowCost([8], [1.0])
"""The cost of rows if it was not measured."""


class RowOutput(NamedTuple):
    """`logits` [wanted rows, columns]; `features` [wanted rows, h], the inputs of these rows' children, of heads."""

    logits: Tensor
    features: Tensor | None = None


class RowNetwork(DraftNetwork, Protocol):
    """A network with a KV cache in slots 1 to `slots`: rows of tokens in, logits out."""

    def encode(self, states: Tensor) -> Tensor:
        """The target's hidden states [n, layers, H] as features [n, h]. Only of heads."""

    def run(self, rows: Sequence[Row], features: Tensor | None, wanted: Sequence[int]) -> RowOutput:
        """One pass over `rows` with `features` [rows, h]. The output has one row for each index in `wanted`."""


class ModelNetwork:
    """A language model of its own, which reads no hidden states.

    With a `mapping`, the model runs over tokens of another vocabulary (TLI). Its logits are reduced to the tokens that
    both vocabularies have and indexed by the target's ids, so the target's noise applies to them. Committed tokens
    become one or more input tokens, so positions in the KV cache differ from the target's; noise uses the target's.
    """

    first_row = state_size = 0

    def __init__(self, model: Model, method: str = "draft_model", mapping: VocabularyMapping | None = None) -> None:
        """Raises ValueError if the vocabularies have too little in common."""
        fingerprint, size = model.fingerprint, model.vocabulary_size
        self._columns = self.ids = None
        if mapping is not None:
            mapping.require_common()
            fingerprint, size = mapping.target.tokenizer.fingerprint, mapping.target.size
            self._columns = torch.tensor(mapping.common)
            self.ids = torch.tensor([mapping.target_ids[token] for token in mapping.common])
        self.description = DraftDescription(method, model.name, fingerprint, size, (), model.max_model_len)
        self.slots, self.mapping, self.layer_states = model.slots, mapping, model.states
        if model.states is not None:
            model.states.reruns_accepted = True
        self._model = model

    def encode(self, states: Tensor) -> Tensor:
        raise NotImplementedError("a model of its own has no features")

    def run(self, rows: Sequence[Row], features: Tensor | None, wanted: Sequence[int]) -> RowOutput:
        logits = self._model.run(rows, wanted).logits
        if self._columns is None or self.ids is None:
            return RowOutput(logits)
        if self._columns.device != logits.device:  # once
            self._columns, self.ids = self._columns.to(logits.device), self.ids.to(logits.device)
        return RowOutput(logits.index_select(-1, self._columns))

    @property
    def device_passes(self) -> DevicePasses | None:
        """See `GraphedNetwork`. Tokens of another vocabulary are mapped on the host."""
        return self._model.device_passes if isinstance(self._model, LlamaModel) and self.mapping is None else None

    def forward(self, this: Pass, features: Tensor | None) -> tuple[Tensor, None]:
        assert isinstance(self._model, LlamaModel)
        return self._model.forward(this), None

    def logits(self, final: Tensor) -> Tensor:
        assert isinstance(self._model, LlamaModel)
        return self._model.output(final)


@dataclass(slots=True, eq=False, weakref_slot=True)
class BestFirstRequest(NetworkRequest):
    """A request whose nodes are expanded: `slots` are those of expanded nodes."""

    features: dict[int, Tensor] = field(default_factory=dict)
    """[h] of each expanded node, including the root, if the network is a head."""
    frontier: list[int] = field(default_factory=list)
    """The nodes that can be expanded next, likeliest first."""

    @property
    def sampled(self) -> bool:
        """Whether draft tokens are sampled from the draft's distribution."""
        return STRATEGIES[self.opening.strategy].sampled_drafts

    @property
    def wanted(self) -> int:
        """The root's pass gives its children, and is due when children are wanted."""
        return self.missing if self.depth_limit > 0 and self.least_path_log_prob < 0.0 else max(0, self.missing - 1)

    def root_moved(self, committed: CommitResult) -> list[int]:
        """The first nodes of the committed path stay computed, as long as they are expanded, unless they run again."""
        slots, self.slots = self.slots, {}
        self.features.clear()
        if not self.reruns_accepted:
            known = [slots.pop(node) for node in itertools.takewhile(slots.__contains__, committed.path)]
            self.slot_table.slots.extend(known)
            self.computed += len(known)
            self.slots = {node: slots.pop(old) for node, old in enumerate(committed.kept, 1) if old in slots}
        return list(slots.values())

    def refresh(self) -> None:
        """A head's frontier is empty until the root is expanded: without its feature no child has an input."""
        if self.states is not None and ROOT not in self.features:
            self.frontier = []
            return
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


ScoredNode = tuple[float, BestFirstRequest, int]
"""A node that can be expanded: its path log-probability, its request, the node."""


@dataclass(slots=True)
class DraftPass:
    """The rows of one forward pass, of committed tokens first. Node i of `expanded` is computed by row `wanted[i]`."""

    rows: list[Row] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    """The target's, of a head's rows of committed tokens."""
    features: list[Tensor] = field(default_factory=list)
    """Of the parents of a head's draft tokens."""
    wanted: list[int] = field(default_factory=list)
    expanded: list[tuple[BestFirstRequest, int]] = field(default_factory=list)

    def expand_last(self, request: BestFirstRequest, node: int) -> None:
        """The last row expands `node`."""
        self.wanted.append(len(self.rows) - 1)
        self.expanded.append((request, node))


class BestFirst:
    """Expands the likeliest nodes."""

    request_type = BestFirstRequest

    def __init__(
        self,
        network: RowNetwork,
        limits: DraftingLimits,
        cost: RowCost | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`cost`: of the network's passes, if measured."""
        self.network, self.limits = network, limits
        self.computed = False
        self._width = tree_width(network, limits)
        self._cost = StepCost(cost or DEFAULT_ROW_COST)
        self._clock = clock

    def grow(self, pool: DraftCache[BestFirstRequest]) -> Mapping[int, list[int]]:
        """One pass of the network: missing committed tokens first, then the likeliest nodes."""
        start = self._clock()
        self._forget_lost(pool)
        this = DraftPass()
        by_link = pool.by_link()
        self._add_context(this, pool.context(by_link))
        context = len(this.rows)
        self._add_nodes(this, pool, by_link)
        self.computed = bool(this.rows)
        if not this.rows:
            return {}
        began = self._clock()
        logits = self._run(this)
        finish(logits)
        pass_s = self._clock() - began
        new = self._add_children(this.expanded, logits) if this.expanded else {}
        if not context:
            self._cost.passes.observe(len(this.rows), pass_s)
            self._cost.observe(len(this.rows), self._clock() - start)
        return new

    def _forget_lost(self, pool: DraftCache[BestFirstRequest]) -> None:
        """Where layers keep states, no node can run below one whose inputs gave way to others'."""
        if (kept := self.network.layer_states) is None:
            return
        for request in pool.requests.values():
            lost = {node for node, slot in request.slots.items() if not kept.keeps_inputs(slot)}
            if lost:
                pool.forget(request, [node for node in request.slots if lost.intersection(request.tree.path(node))])

    def _add_context(self, this: DraftPass, context: Iterable[tuple[BestFirstRequest, range]]) -> None:
        """Rows for missing committed tokens. The last one of a request expands its root."""
        for request, span in context:
            this.rows += [request.slot_table.row(request.tokens[i], i) for i in span]
            this.states += request.take_states(len(span))
            if not request.missing:
                this.expand_last(request, ROOT)

    def _add_nodes(
        self, this: DraftPass, pool: DraftCache[BestFirstRequest], by_link: Sequence[Sequence[BestFirstRequest]]
    ) -> None:
        """Rows for the likeliest nodes. Their number maximises the summed path probability per second of the pass."""
        most = min(MAX_ROWS, len(pool.free))
        offers = [self._likeliest(requests)[:most] for requests in by_link]
        best = sorted(itertools.chain(*offers), key=_neg_log_prob)[:most]
        probabilities = [math.exp(path_log_prob) for path_log_prob, _, _ in best]
        count = nodes_to_verify(probabilities, len(this.wanted), len(this.rows), most, self._cost)
        pool.turns += count
        for _, request, node in itertools.islice(round_robin(map(iter, offers)), count):
            branch = [request.slots[above] for above in request.tree.path(node)[:-1]]
            request.slots[node] = pool.free.pop()
            [token] = inputs(self.network, [request.tree.tokens[node]])
            this.rows.append(request.slot_table.branch_row(token, [*branch, request.slots[node]]))
            if request.states is not None:
                this.features.append(request.features[request.tree.parents[node]])
            this.expand_last(request, node)

    def _likeliest(self, requests: Iterable[BestFirstRequest]) -> list[ScoredNode]:
        """The nodes of these requests that can be expanded, likeliest first."""
        nodes = [
            (request.tree.path_log_probs[node], request, node)
            for request in requests
            if request.frontier
            for node in request.expandable(1 if request.sampled else self._width)
        ]
        return sorted(nodes, key=_neg_log_prob)

    def _run(self, this: DraftPass) -> Tensor:
        """Run the network, and keep a head's features; return the logits."""
        parts = [self.network.encode(torch.stack(this.states))] if this.states else []
        parts += [torch.stack(this.features)] if this.features else []
        output = self.network.run(this.rows, torch.cat(parts) if parts else None, this.wanted)
        if output.features is not None:
            for (request, node), feature in zip(this.expanded, output.features, strict=True):
                request.features[node] = feature
        return output.logits

    def _add_children(self, expanded: Sequence[tuple[BestFirstRequest, int]], logits: Tensor) -> dict[int, list[int]]:
        new: dict[int, list[int]] = {}
        requests = {}
        for (request, node), children in zip(expanded, self._children(expanded, logits), strict=True):
            requests[request.opening.request_id] = request
            nodes = new.setdefault(request.opening.request_id, [])
            nodes += [request.tree.add(node, *child) for child in children[: request.nodes_left]]
        for request in requests.values():
            request.refresh()
        return new

    def _children(
        self, expanded: Sequence[tuple[BestFirstRequest, int]], logits: Tensor
    ) -> list[Sequence[tuple[int, float] | SampledToken]]:
        """The new children of each node, likeliest first. A node that lost its slot is expanded a second time, and has
        children already."""
        ids = self.network.ids
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


def _neg_log_prob(node: ScoredNode) -> float:
    return -node[0]


def _selected(
    indices: Sequence[int], expanded: Sequence[tuple[BestFirstRequest, int]], logits: Tensor
) -> tuple[Sequence[tuple[BestFirstRequest, int]], Tensor]:
    """These nodes and their logits, without a copy in the usual case of all nodes."""
    if len(indices) == len(expanded):
        return expanded, logits
    return [expanded[i] for i in indices], logits[list(indices)]
