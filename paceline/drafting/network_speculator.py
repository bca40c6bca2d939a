"""Drafting with a network: a way to grow trees over it, and what the network has computed of each request.

Committed tokens get their slots in the network's KV cache as soon as they are known. So an open request can always be
computed, and one that does not fit is refused at once. Nodes of the tree may use the slots that are left, and give them
up when tokens need them. Hidden states of the target arrive during its prefill, with commits, or later, when it finds a
prefix in its cache or moves a request to this draft worker.

A draft worker serves several targets, each over one link. The rows of a round are divided max-min fairly between links:
no link gets more than an equal share while another wants more, and unused shares go to the others.
"""

from __future__ import annotations

import itertools
import math
import sys
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.config import STRATEGIES
from paceline.core.growth import Growth
from paceline.core.logits_rules import History, SamplingRow
from paceline.core.tree import CommitResult, TokenTree
from paceline.drafting.draw_prediction import RankedTokens
from paceline.drafting.speculator import (
    Commit,
    Context,
    DraftDescription,
    DraftError,
    DraftingLimits,
    Opening,
    new_hidden_states,
)
from paceline.drafting.tree_speculator import TreeRequest, TreeSpeculator
from paceline.drafting.vocabulary.vocabulary_mapping import VocabularyMapping
from paceline.grammar.grammar_state import GrammarCompiler
from paceline.model.rows import SlotTable
from paceline.model.states.state_cache import StateCache

PREFILL_ROWS = 256
"""Context tokens computed per round."""

Item = TypeVar("Item")


class DraftNetwork(Protocol):
    """What every network says of itself. `RowNetwork`, `BlockNetwork` and `MlpChainNetwork` say how it runs.

    A network without a KV cache has no `slots` and no input tokens before the root, and reads the root's state alone.
    """

    description: DraftDescription
    slots: int
    """Positions in its KV cache."""
    first_row: int
    """The first of a request's tokens that is an input: a head has no row for a request's first token."""
    state_size: int
    """Of a hidden state of the target, if it reads any."""
    ids: Tensor | None
    """int64 [columns]: the target's token of each logit; None: column n is token n."""

    @property
    def mapping(self) -> VocabularyMapping | None:
        """To its own tokens; None: they are the target's."""

    @property
    def layer_states(self) -> StateCache | None:
        """Of layers that keep states by request; None: no layer does."""


def prompt_inputs(network: DraftNetwork, tokens: Sequence[int]) -> list[int]:
    """The network's input tokens for all tokens of a new request."""
    if network.mapping is not None:
        return network.mapping.prompt_to_draft_tokens(tokens)
    return list(tokens[network.first_row :]) if network.slots else []


def inputs(network: DraftNetwork, tokens: Sequence[int]) -> list[int]:
    """The network's input tokens for tokens that follow."""
    if network.mapping is not None:
        return network.mapping.to_draft_tokens(tokens)
    return list(tokens) if network.slots else []


def tree_width(network: DraftNetwork, limits: DraftingLimits) -> int:
    """Most children of a node, of which the network must know as many."""
    columns = network.description.vocabulary_size if network.ids is None else len(network.ids)
    return min(limits.tree_width, columns)


class StateQueue:
    """The target's hidden states of a request's positions, in order, until they are used."""

    def __init__(self, *, latest: bool) -> None:
        """`latest`: only the last one is ever used."""
        self.known = 0
        """Positions whose states have arrived."""
        self.latest = latest
        self._unused: deque[Tensor] = deque(maxlen=1 if latest else None)

    def __len__(self) -> int:
        """The number of unused states."""
        return len(self._unused)

    def add(self, position: int, states: Tensor) -> None:
        """Append the states [positions, layers, H] from `position` on, except known ones.

        Raises `DraftError` if earlier states are missing.
        """
        new = new_hidden_states(self.known, position, states)
        self.known += len(new)
        self._unused.extend(new[-1:].clone() if self.latest else new)  # a view would keep all states alive

    def take(self, count: int) -> list[Tensor]:
        """The first `count` unused states, [layers, H] each."""
        return [self._unused.popleft() for _ in range(count)]

    @property
    def last(self) -> Tensor:
        """[layers, H] of the last known position."""
        return self._unused[-1]

    def complete(self, root: int) -> bool:
        """Whether what a root at this position was drawn from can be used."""
        return self.known == root > 0 if self.latest else self.known >= root


@dataclass(slots=True, eq=False)
class NetworkRequest(TreeRequest, ABC):
    """A request whose draws a network predicts, and the tokens that the network has computed for it."""

    history: History
    """Parameters and tokens, as the target's rules see them."""
    limits: DraftingLimits
    tokens: list[int]
    """The network's input tokens. The last one is the root."""
    input_limit: int
    """Committed input tokens and those of one path are at most so many."""
    states: StateQueue | None
    """Hidden states for tokens that are not computed yet; None: the network reads none."""
    reruns_accepted: bool
    """Whether accepted nodes are computed again: a head's from the target's states, and where layers keep states."""
    slot_table: SlotTable = field(default_factory=SlotTable)
    """The slots of `tokens`, computed or not."""
    computed: int = 0
    """How many of `tokens` are computed."""
    slots: dict[int, int] = field(default_factory=dict)
    """The slots of computed nodes. Empty while committed tokens are missing."""

    @property
    @abstractmethod
    def wanted(self) -> int:
        """How many of the missing tokens need to be computed now."""

    @abstractmethod
    def root_moved(self, committed: CommitResult) -> list[int]:
        """Follow a commit to the tree; return the slots that became free. `refresh` comes next.

        Slots of committed nodes may stay in use, as the first new ones of `slot_table`.
        """

    @abstractmethod
    def refresh(self) -> None:
        """The root, its state, the tree or the limits changed: decide again what to draft."""

    @property
    def missing(self) -> int:
        """How many of `tokens` are not computed."""
        return len(self.tokens) - self.computed

    @property
    def computable(self) -> int:
        """How many of the missing tokens can and need to be computed now."""
        return self.wanted if self.states is None else min(self.wanted, len(self.states))

    @property
    def all_slots(self) -> Sequence[int]:
        """Every slot that the request holds."""
        return [*self.slot_table.slots, *self.slots.values()]

    @property
    def depth_limit(self) -> int:
        """The depth from which on nodes get no children."""
        return max(0, min(self.opening.max_depth, self.input_limit - len(self.tokens)))

    @property
    def least_path_log_prob(self) -> float:
        """Only nodes with a larger path log-probability are added."""
        least = max(self.opening.least_path_probability, self.limits.least_path_probability)
        return math.log(least) if least else -math.inf

    def take_states(self, count: int) -> list[Tensor]:
        """The next unused states, [layers, H] each; none if the network reads none."""
        return [] if self.states is None else self.states.take(count)

    def draw_row(self, node: int) -> SamplingRow:
        """The target's draw after `node`."""
        position = self.tree.position + self.tree.depths[node] + 1
        return SamplingRow(self.history.params, position, self.history, self.tree.path_tokens(node))

    def new_children(self, node: int, ranked: RankedTokens) -> RankedTokens:
        """The tokens likely enough to follow `node` that it has no child for."""
        path_log_prob, tree, least = self.tree.path_log_probs[node], self.tree, self.least_path_log_prob
        return [
            (token, log_prob)
            for token, log_prob in ranked
            if path_log_prob + log_prob > least and tree.child(node, token) is None
        ]


R = TypeVar("R", bound=NetworkRequest)


class WayToGrow(Protocol[R]):
    """How trees grow over a network: best first, in blocks, by levels."""

    network: Any
    """A `DraftNetwork` of the kind that it runs."""
    limits: DraftingLimits
    request_type: type[R]
    computed: bool
    """Whether the last round ran the network, and another one may go on from there."""

    def grow(self, pool: DraftCache[R]) -> Mapping[int, list[int]]:
        """One round: the new nodes by request."""


class DraftCache(Generic[R]):
    """The slots of a network's KV cache, and the requests that hold them: `slots` of them, 1 to `slots`."""

    def __init__(self, slots: int, requests: Mapping[int, R]) -> None:
        """`requests`: the open ones. The owner adds to this dictionary and removes from it."""
        self.slots, self.requests = slots, requests
        self.free = list(range(slots, 0, -1))
        self.turns = 0
        """How many shares were dealt: it decides which link is first in the next round."""

    def take(self, count: int) -> list[int]:
        """Slots for committed tokens, from computed nodes if needed. Raises `DraftError` if even these are too few."""
        reclaimable = len(self.free) + sum(len(request.slots) for request in self.requests.values())
        if count > reclaimable:
            raise DraftError(f"out of slots: {count} needed, {reclaimable} of {self.slots} free")
        while len(self.free) < count:
            self._reclaim(count - len(self.free))
        return [self.free.pop() for _ in range(count)]

    def by_link(self) -> list[list[R]]:
        """The requests of each link, the link whose turn it is first."""
        by_link: defaultdict[int, list[R]] = defaultdict(list)
        for request in self.requests.values():
            by_link[request.opening.link].append(request)
        first = self.turns % max(1, len(by_link))
        groups = list(by_link.values())
        return groups[first:] + groups[:first]

    def context(self, by_link: Sequence[Sequence[R]]) -> Iterator[tuple[R, range]]:
        """The committed tokens that this round computes. They count as computed from now on."""
        shares = Counter(itertools.islice(round_robin(map(_missing_tokens, by_link)), PREFILL_ROWS))
        for key, count in shares.items():
            request = self.requests[key]
            start = request.computed
            request.computed += count
            yield request, range(start, request.computed)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is free or has one holder, none of which left its tree."""
        if any(request.slots.keys() - set(request.tree.nodes()) for request in self.requests.values()):
            raise AssertionError("a node that left its tree holds a slot")
        held = [slot for request in self.requests.values() for slot in request.all_slots]
        if sorted([*self.free, *held]) != list(range(1, self.slots + 1)):
            raise AssertionError(f"{len(self.free)} slots free and {len(held)} held, of {self.slots}")

    def forget(self, request: R, nodes: Iterable[int]) -> None:
        """Free the slots of computed nodes, which may be computed again."""
        for node in nodes:
            self.free.append(request.slots.pop(node))
        request.refresh()

    def _reclaim(self, count: int) -> None:
        """Free up to `count` slots: those of the unlikeliest nodes of the request with the most computed nodes, on the
        link that holds the most slots."""
        held: Counter[int] = Counter()
        for request in self.requests.values():
            held[request.opening.link] += len(request.slot_table) + len(request.slots)
        computed = [request for request in self.requests.values() if request.slots]
        largest = max(computed, key=lambda request: (held[request.opening.link], len(request.slots)))
        tree = largest.tree
        unlikeliest = sorted(largest.slots, key=lambda node: (tree.path_log_probs[node], -tree.depths[node]))
        self.forget(largest, unlikeliest[:count])


class NetworkSpeculator(TreeSpeculator[R]):
    """Every method with a network, by its way to grow."""

    def __init__(self, way: WayToGrow[R]) -> None:
        super().__init__(way.network.description)
        self._way = way
        self._network: DraftNetwork = way.network
        self._pool = DraftCache(self._network.slots, self._requests)
        limit = self.description.position_limit
        self._input_limit = limit - self._network.first_row if limit else sys.maxsize

    @property
    def behind(self) -> bool:
        return self._way.computed

    def new_request(self, opening: Opening, tree: TokenTree) -> R:
        history = request_history(opening, self.description.vocabulary_size, self.grammars)
        tokens = prompt_inputs(self._network, opening.tokens)
        self._check_length(len(tokens))
        kept = self._network.layer_states
        if kept is not None and len(self._requests) >= kept.requests:
            raise DraftError(f"the draft keeps states for {kept.requests} requests: raise max_num_seqs")
        states = StateQueue(latest=not self._network.slots) if self.description.hidden_state_layers else None
        request = self._way.request_type(
            opening,
            tree,
            history,
            self._way.limits,
            tokens,
            self._input_limit,
            states,
            reruns_accepted=states is not None or kept is not None,
        )
        request.slot_table.slots.extend(self._pool.take(len(tokens)))
        return request

    def context(self, context: Context) -> None:
        if request := self._requests.get(context.request_id):
            self._add_states(request, context.base_position, context.hidden_states)
            request.refresh()

    def advance(self, request: R, commit: Commit) -> None:
        tokens = inputs(self._network, commit.tokens)
        self._check_length(len(request.tokens) + len(tokens))
        self._pool.free += request.root_moved(request.tree.commit(commit.tokens))
        request.tokens += tokens
        request.history.extend(commit.tokens)
        request.slot_table.slots.extend(self._pool.take(len(request.tokens) - len(request.slot_table)))
        if commit.hidden_states is not None:
            self._add_states(request, commit.base_position, commit.hidden_states)
        request.refresh()

    def limits_changed(self, request: R) -> None:
        request.refresh()

    def release(self, request: R) -> None:
        self._pool.free += request.all_slots
        request.slot_table.clear()

    @torch.inference_mode()
    def grow(self) -> dict[int, Growth]:
        return self._growths(self._way.grow(self._pool))

    def tree(self, request_id: int) -> TokenTree:
        """The tree of an open request."""
        return self._requests[request_id].tree

    def rewind(self, request_id: int, length: int) -> None:
        """Take back all nodes of an open request, and its committed tokens after the first `length`.

        The first `length` - 1 tokens stay computed; the last one is computed again. For networks without hidden states,
        whose input tokens are the request's.
        """
        request = self._requests[request_id]
        self._pool.free += [*request.slots.values(), *request.slot_table.slots[length:]]
        request.slots.clear()
        request.slot_table.truncate(length)
        del request.tokens[length:]
        request.computed = min(request.computed, length - 1)
        if (kept := self._network.layer_states) is not None:
            request.computed = kept.prefix_length(request.slot_table.slots[: request.computed])
        request.tree = TokenTree(length - 1, request.tokens[-1])
        split = min(length, len(request.opening.tokens) - request.opening.output_tokens)
        request.history = History(
            request.history.params,
            request.tokens[:split],
            request.tokens[split:],
            self.description.vocabulary_size,
        )
        request.refresh()

    def check_integrity(self) -> None:
        """See `DraftCache`."""
        self._pool.check_integrity()

    def _check_length(self, length: int) -> None:
        """Raises `DraftError` unless the network has positions for `length` tokens and one more."""
        if 0 < self.description.position_limit <= length:
            raise DraftError(f"{length} tokens; the draft's positions end at {self.description.position_limit}")

    def _add_states(self, request: R, position: int, states: Tensor) -> None:
        if request.states is None:
            return
        shape = len(self.description.hidden_state_layers), self._network.state_size
        if states.shape[1:] != shape:
            raise DraftError(f"hidden states of shape {list(states.shape)}, not [positions, {shape[0]}, {shape[1]}]")
        request.states.add(position, states)


def request_history(opening: Opening, vocabulary_size: int, grammars: GrammarCompiler | None) -> History:
    """The history that the target has when it opens the request. Raises `DraftError` for an unknown strategy."""
    strategy = STRATEGIES.get(opening.strategy)
    if strategy is None:
        raise DraftError(f"unknown strategy {opening.strategy!r}")
    params, split = strategy.effective_params(opening.sampling), len(opening.tokens) - opening.output_tokens
    prompt, output = opening.tokens[:split], opening.tokens[split:]
    grammar = None if grammars is None else grammars.start_request(params, output)
    return History(params, prompt, output, vocabulary_size, grammar)


def round_robin(iterators: Iterable[Iterator[Item]]) -> Iterator[Item]:
    """One item of each iterator in turn, until all are exhausted. Every prefix is a max-min fair division."""
    turns = deque(iterators)
    while turns:
        iterator = turns.popleft()
        for item in itertools.islice(iterator, 1):
            yield item
            turns.append(iterator)


def _missing_tokens(requests: Iterable[NetworkRequest]) -> Iterator[int]:
    """The request id of every token to compute. Requests with few tokens come first.

    Paused requests are left out: most of them end before they go on.
    """
    drafting = [request for request in requests if request.opening.max_nodes]
    for request in sorted(drafting, key=lambda request: request.computable):
        yield from itertools.repeat(request.opening.request_id, request.computable)
