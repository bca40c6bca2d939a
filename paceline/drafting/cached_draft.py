"""Following what targets commit with a network that is run over it: what all methods with one share.

Committed tokens own their slots from the moment they are known, so a request that was taken in can always be computed,
and one that cannot be is refused at once. A network may be fed with the target's hidden states, too. They come with the
target's prefill, with a commit, or long after, when the target finds a prefix in its cache or moves a request here.

Requests have owners, the targets that one draft serves. What a round has is divided among these max-min fairly: nobody
gets more than an equal share while others want theirs, and what one does not want is there for the others.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from torch import Tensor

from paceline.core.sampling import History
from paceline.core.tree import CommitResult, TokenTree
from paceline.drafting.draw_prediction import request_history
from paceline.drafting.speculator import Commit, Context, DraftError, Limit, Opening, Speculator, new_hidden_states
from paceline.model.rows import SlotTable

PREFILL_ROWS = 256
"""Context tokens computed per round."""

Item = TypeVar("Item")
F = TypeVar("F", bound="CachedDraft")


class HiddenStateQueue:
    """The target's hidden states of a request's positions, in their order, until they are used."""

    def __init__(self) -> None:
        self.known = 0
        """Positions of which they have come."""
        self._waiting: deque[Tensor] = deque()

    def __len__(self) -> int:
        """How many wait to be used."""
        return len(self._waiting)

    def add(self, position: int, states: Tensor) -> None:
        """States [positions, layers, H] from `position` on; those that were heard before are passed over.

        Raises `DraftError` if some before are not known.
        """
        new = new_hidden_states(self.known, position, states)
        self._waiting.extend(new)
        self.known += len(new)

    def take(self, count: int) -> list[Tensor]:
        """The first so many of them, [layers, H] each."""
        return [self._waiting.popleft() for _ in range(count)]


@dataclass(slots=True, eq=False)
class CachedDraft:
    """One request: its replica of the tree, and what of its tokens the network has computed."""

    opening: Opening
    tokens: list[int]
    """Those that the network is run over."""
    tree: TokenTree
    history: History
    limit: int
    """No node stands at or beyond this position."""
    floor: float
    """Log-probability of a path, above which guesses are made."""
    slot_table: SlotTable = field(default_factory=SlotTable)
    """Slots of all tokens, computed or not."""
    computed: int = 0
    states: HiddenStateQueue = field(default_factory=HiddenStateQueue)
    """For tokens that are not computed, where the network is fed with them."""

    @property
    def missing(self) -> int:
        """Committed tokens, the root among them, that are not computed."""
        return len(self.tokens) - self.computed

    @property
    def computable(self) -> int:
        """How many of them can be computed now."""
        return self.missing

    @property
    def all_slots(self) -> Sequence[int]:
        """All its slots."""
        return self.slot_table.slots

    @property
    def nodes_left(self) -> int:
        """How many more guesses are wanted."""
        return max(0, self.opening.max_nodes - self.tree.size)

    def to_draft_tokens(self, tokens: Sequence[int]) -> list[int]:
        """What the network is run over for these of the target's tokens: one token for each that it can guess."""
        return list(tokens)

    def root_moved(self, committed: CommitResult) -> list[int]:
        """The tree has another root. Slots of guesses that were committed may become those of the tokens; returned are
        those of guesses that are of no use any more."""
        return []

    def refresh_frontier(self) -> None:
        """Find out what may be guessed, after anything but growth."""


class CachedSpeculator(Speculator, Generic[F]):
    """Keeps a replica of each request and slots for its tokens; a subclass computes and guesses."""

    def __init__(self, slots: int, least_path_probability: float) -> None:
        """`slots`: positions for which there is room. Guesses on paths that are not likelier are not made."""
        self.slots = slots
        self._min_path_probability = least_path_probability
        self._free = list(range(slots, 0, -1))
        self._drafts: dict[int, F] = {}
        self._next_link = 0
        """What was divided so far: the next one goes to the next owner."""
        self._computed = False
        """Whether the last round ran the network; if not, there was nothing worth it."""

    @abstractmethod
    def begin(self, opening: Opening, tree: TokenTree, history: History, floor: float) -> F:
        """A draft of this request, nothing of which is computed."""

    @property
    def behind(self) -> bool:
        return self._computed

    def open(self, opening: Opening) -> None:
        self.close(opening.request_id)
        tokens = list(opening.tokens)
        self._check_known(tokens)
        history = request_history(opening, self.vocabulary_size, self.grammars)
        tree = TokenTree(len(tokens) - 1, tokens[-1])
        draft = self.begin(opening, tree, history, self._floor(opening.least_path_probability))
        self._check_length(len(draft.tokens))
        draft.slot_table.slots.extend(self._take(len(draft.tokens)))
        self._drafts[opening.request_id] = draft

    def context(self, context: Context) -> None:
        if draft := self._drafts.get(context.request_id):
            draft.states.add(context.base_position, context.hidden_states)

    def commit(self, commit: Commit) -> None:
        draft = self._drafts.get(commit.request_id)
        if draft is None:
            return
        if draft.tree.position != commit.base_position:
            raise DraftError(f"the root is at {draft.tree.position}, the commit at {commit.base_position}")
        self._check_known(commit.tokens)
        written = draft.to_draft_tokens(commit.tokens)
        self._check_length(len(draft.tokens) + len(written))
        self._free += draft.root_moved(draft.tree.commit(commit.tokens))
        draft.tokens += written
        draft.history.extend(commit.tokens)
        draft.slot_table.slots.extend(self._take(len(draft.tokens) - len(draft.slot_table)))
        if commit.hidden_states is not None:
            draft.states.add(commit.base_position, commit.hidden_states)
        self._moved(draft, len(commit.tokens))

    def limit(self, limit: Limit) -> None:
        draft = self._drafts.get(limit.request_id)
        if draft is not None:
            draft.opening = replace(
                draft.opening,
                max_depth=limit.max_depth,
                max_nodes=limit.max_nodes,
                least_path_probability=limit.least_path_probability,
            )
            self._refresh(draft)

    def close(self, request_id: int) -> None:
        draft = self._drafts.pop(request_id, None)
        if draft is not None:
            self._free += draft.all_slots

    def check_integrity(self) -> None:
        """Prove that every slot is free, or has one holder. Raises AssertionError."""
        held = [slot for draft in self._drafts.values() for slot in draft.all_slots]
        if sorted([*self._free, *held]) != list(range(1, self.slots + 1)):
            raise AssertionError(f"{len(self._free)} slots free and {len(held)} held, of {self.slots}")

    def _moved(self, draft: F, tokens: int) -> None:
        """So many tokens were committed."""
        self._refresh(draft)

    def _refresh(self, draft: F) -> None:
        draft.floor = self._floor(draft.opening.least_path_probability)
        draft.refresh_frontier()

    def _floor(self, wanted: float) -> float:
        least = max(wanted, self._min_path_probability)
        return math.log(least) if least else -math.inf

    def _check_length(self, length: int) -> None:
        """Raises `DraftError` unless the network can be run over so many tokens, and one more."""
        if length >= self.position_limit:
            raise DraftError(f"{length} tokens; the draft's positions end at {self.position_limit}")

    def _check_known(self, tokens: Sequence[int]) -> None:
        if not all(0 <= token < self.vocabulary_size for token in tokens):
            raise DraftError(f"a token id is outside the draft's vocabulary of {self.vocabulary_size}")

    @property
    def _reclaimable_slots(self) -> int:
        """Slots that committed tokens can have."""
        return len(self._free)

    def _take(self, count: int) -> list[int]:
        """Slots for committed tokens. Raises `DraftError` if there are not so many."""
        if count > len(self._free):
            raise DraftError(f"out of slots: {count} needed, {self._reclaimable_slots} of {self.slots} free")
        return [self._free.pop() for _ in range(count)]

    def _by_link(self) -> list[list[F]]:
        """The requests of each owner, first of the one whose turn it is."""
        owned: defaultdict[int, list[F]] = defaultdict(list)
        for draft in self._drafts.values():
            owned[draft.opening.link].append(draft)
        turn = self._next_link % max(1, len(owned))
        whole = list(owned.values())
        return whole[turn:] + whole[:turn]

    def _context(self, owned: Sequence[Sequence[F]]) -> Iterator[tuple[F, range]]:
        """Which committed tokens this round computes; from then on they count as computed."""
        shares = Counter(itertools.islice(round_robin(map(_missing_tokens, owned)), PREFILL_ROWS))
        for key, count in shares.items():
            draft = self._drafts[key]
            start = draft.computed
            draft.computed += count
            yield draft, range(start, draft.computed)


def round_robin(hands: Iterable[Iterator[Item]]) -> Iterator[Item]:
    """One of each in turn, for as long as it has any: every beginning is a max-min fair share of the whole."""
    turns = deque(hands)
    while turns:
        hand = turns.popleft()
        for each in itertools.islice(hand, 1):
            yield each
            turns.append(hand)


def _missing_tokens(drafts: Iterable[CachedDraft]) -> Iterator[int]:
    """The request of each token that can be computed. Few missing ones first: a prompt takes several rounds anyway.

    Nothing is computed for requests that are paused: most of them end before they go on.
    """
    drafting = [draft for draft in drafts if draft.opening.max_nodes]
    for draft in sorted(drafting, key=lambda draft: draft.computable):
        yield from itertools.repeat(draft.opening.request_id, draft.computable)
