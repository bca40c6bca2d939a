"""Drafting with a network that has a KV cache: committed tokens, their slots, and the target's hidden states.

A committed token gets its slot as soon as it is known. So an open request can always be computed, and one that does not
fit is refused at once. Hidden states arrive during the target's prefill, with commits, or later, when the target finds
a prefix in its cache or moves a request to this draft worker.

A draft worker serves several targets, each over one link. The rows of a round are divided max-min fairly between links:
no link gets more than an equal share while another wants more, and unused shares go to the others.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from paceline.core.tree import CommitResult, TokenTree
from paceline.drafting.draw_prediction import NetworkFacts, PredictedRequest, PredictingSpeculator
from paceline.drafting.speculator import Commit, Context, DraftError, Opening, new_hidden_states
from paceline.model.rows import SlotTable

PREFILL_ROWS = 256
"""Context tokens computed per round."""

Item = TypeVar("Item")


class HiddenStateQueue:
    """The target's hidden states of a request's positions, in order, until they are used."""

    def __init__(self) -> None:
        self.known = 0
        """Positions whose states have arrived."""
        self._unused: deque[Tensor] = deque()

    def __len__(self) -> int:
        """The number of unused states."""
        return len(self._unused)

    def add(self, position: int, states: Tensor) -> None:
        """Append the states [positions, layers, H] from `position` on, except known ones.

        Raises `DraftError` if earlier states are missing.
        """
        new = new_hidden_states(self.known, position, states)
        self._unused.extend(new)
        self.known += len(new)

    def take(self, count: int) -> list[Tensor]:
        """The first `count` unused states, [layers, H] each."""
        return [self._unused.popleft() for _ in range(count)]


@dataclass(slots=True, eq=False)
class CachedRequest(PredictedRequest):
    """A request and the tokens that the network has computed for it."""

    tokens: list[int]
    """The network's input tokens. The last one is the root."""
    limit: int
    """No node is at or beyond this position."""
    slot_table: SlotTable = field(default_factory=SlotTable)
    """The slots of `tokens`, computed or not."""
    computed: int = 0
    """How many of `tokens` are computed."""
    states: HiddenStateQueue = field(default_factory=HiddenStateQueue)
    """Hidden states for tokens that are not computed yet, if the network needs them."""

    @property
    def missing(self) -> int:
        """How many of `tokens` are not computed."""
        return len(self.tokens) - self.computed

    @property
    def computable(self) -> int:
        """How many of the missing tokens can and need to be computed now."""
        return self.missing

    @property
    def all_slots(self) -> Sequence[int]:
        """Every slot that the request holds."""
        return self.slot_table.slots

    def to_draft_tokens(self, tokens: Sequence[int]) -> list[int]:
        """The target's tokens as input tokens of the network."""
        return list(tokens)

    def root_moved(self, committed: CommitResult) -> list[int]:
        """Follow a commit to the tree; return the slots that became free.

        Slots of committed draft tokens may stay in use, as the first new ones of `slot_table`.
        """
        return []


F = TypeVar("F", bound=CachedRequest)


class CachedSpeculator(PredictingSpeculator[F], Generic[F]):
    """Gives committed tokens their slots, and computes them. A subclass adds the draft tokens."""

    def __init__(self, facts: NetworkFacts, tree_width: int, least_path_probability: float) -> None:
        super().__init__(facts, tree_width, least_path_probability)
        self.slots = facts.slots
        self._free = list(range(facts.slots, 0, -1))
        self._next_link = 0
        """How many shares were dealt: it decides which link is first in the next round."""

    def new_request(self, opening: Opening, tree: TokenTree) -> F:
        request = super().new_request(opening, tree)
        self._check_length(len(request.tokens))
        request.slot_table.slots.extend(self._take(len(request.tokens)))
        return request

    def context(self, context: Context) -> None:
        if request := self._requests.get(context.request_id):
            request.states.add(context.base_position, context.hidden_states)

    def advance(self, request: F, commit: Commit) -> None:
        tokens = request.to_draft_tokens(commit.tokens)
        self._check_length(len(request.tokens) + len(tokens))
        self._free += request.root_moved(request.tree.commit(commit.tokens))
        request.tokens += tokens
        request.history.extend(commit.tokens)
        request.slot_table.slots.extend(self._take(len(request.tokens) - len(request.slot_table)))
        if commit.hidden_states is not None:
            request.states.add(commit.base_position, commit.hidden_states)
        request.refresh_frontier()

    def release(self, request: F) -> None:
        self._free += request.all_slots

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is free or has one holder."""
        held = [slot for request in self._requests.values() for slot in request.all_slots]
        if sorted([*self._free, *held]) != list(range(1, self.slots + 1)):
            raise AssertionError(f"{len(self._free)} slots free and {len(held)} held, of {self.slots}")

    def _check_length(self, length: int) -> None:
        """Raises `DraftError` unless the network has positions for `length` tokens and one more."""
        if length >= self.position_limit:
            raise DraftError(f"{length} tokens; the draft's positions end at {self.position_limit}")

    @property
    def _reclaimable_slots(self) -> int:
        """Slots that committed tokens can get."""
        return len(self._free)

    def _take(self, count: int) -> list[int]:
        """Slots for committed tokens. Raises `DraftError` if there are too few."""
        if count > len(self._free):
            raise DraftError(f"out of slots: {count} needed, {self._reclaimable_slots} of {self.slots} free")
        return [self._free.pop() for _ in range(count)]

    def _by_link(self) -> list[list[F]]:
        """The requests of each link, the link whose turn it is first."""
        by_link: defaultdict[int, list[F]] = defaultdict(list)
        for request in self._requests.values():
            by_link[request.opening.link].append(request)
        first = self._next_link % max(1, len(by_link))
        groups = list(by_link.values())
        return groups[first:] + groups[:first]

    def _context(self, by_link: Sequence[Sequence[F]]) -> Iterator[tuple[F, range]]:
        """The committed tokens that this round computes. They count as computed from now on."""
        shares = Counter(itertools.islice(round_robin(map(_missing_tokens, by_link)), PREFILL_ROWS))
        for key, count in shares.items():
            request = self._requests[key]
            start = request.computed
            request.computed += count
            yield request, range(start, request.computed)


def round_robin(iterators: Iterable[Iterator[Item]]) -> Iterator[Item]:
    """One item of each iterator in turn, until all are exhausted. Every prefix is a max-min fair division."""
    turns = deque(iterators)
    while turns:
        iterator = turns.popleft()
        for item in itertools.islice(iterator, 1):
            yield item
            turns.append(iterator)


def _missing_tokens(requests: Iterable[CachedRequest]) -> Iterator[int]:
    """The request id of every token to compute. Requests with few tokens come first.

    Paused requests are left out: most of them end before they go on.
    """
    drafting = [request for request in requests if request.opening.max_nodes]
    for request in sorted(drafting, key=lambda request: request.computable):
        yield from itertools.repeat(request.opening.request_id, request.computable)
