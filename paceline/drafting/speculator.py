"""The interface of drafting methods.

A speculator keeps a replica of each open request's token tree. The caller reports what the target committed, and calls
`grow` whenever there is time: one round of drafting over all requests, the likeliest tokens first. A speculator runs in
the target's process or in a draft worker. With the default strategy neither it nor its place can change a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.config import SamplingParams, SpeculativeConfig
from paceline.core.growth import Growth
from paceline.messages import reduce_slots

if TYPE_CHECKING:  # links use these types in processes that do not load torch
    import torch

    from paceline.grammar.grammar_state import GrammarCompiler


@dataclass(frozen=True, slots=True)
class Opening:
    """A request to draft for. The last of `tokens` is the root; the last `output_tokens` of them are output."""

    request_id: int
    tokens: Sequence[int]
    output_tokens: int
    sampling: SamplingParams
    max_depth: int
    max_nodes: int
    strategy: str = "coupled"
    least_path_probability: float = 0.0
    """A network need draft no node on a less likely path. The probabilities of lookups are estimates: they do not
    compare them with it."""
    link: int = 0
    """The link of the request, in a draft worker with several. The draft loop sets it; it is not sent."""
    cache_salt: str = ""
    """What a speculator learns from this request may serve only requests with the same salt."""
    trace_parent: str = ""
    """The target's span of the request; for services, not for speculators."""


@dataclass(frozen=True, slots=True)
class Context:
    """Hidden states of positions `base_position` and on: [positions, layers, hidden size], the target's dtype."""

    request_id: int
    base_position: int
    hidden_states: torch.Tensor


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that the target drew after the root at `base_position`; the last one is the new root.

    The first `accepted` of them are draft tokens; 0 if several steps drew them. `hidden_states`, if the speculator
    needs them, are [tokens, layers, hidden size] of the positions `base_position` and on: the states that the tokens
    were drawn from.
    """

    request_id: int
    base_position: int
    tokens: Sequence[int]
    accepted: int
    hidden_states: torch.Tensor | None = None

    __reduce__ = reduce_slots


@dataclass(frozen=True, slots=True)
class Limit:
    """New limits of a tree: its nodes, their depth, their path probability. 0 nodes pause the request."""

    request_id: int
    max_depth: int
    max_nodes: int
    least_path_probability: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftingLimits:
    """What the configuration allows every tree of a speculator. An `Opening` has the request's own limits."""

    tree_width: int = 1
    """Most children of a node."""
    least_path_probability: float = 0.0
    """A network adds only nodes on likelier paths; 0 admits all."""
    tokens_per_pass: int = 1
    """Most tokens that one pass of a block predicts."""

    @classmethod
    def of(cls, config: SpeculativeConfig) -> DraftingLimits:
        return cls(config.tree_width, config.least_path_probability, config.num_speculative_tokens)


@dataclass(frozen=True, slots=True)
class DraftDescription:
    """What links and targets know of a draft; see `DraftServiceDescribeResponse`."""

    method: str
    model: str = ""
    vocabulary_fingerprint: str = ""
    """Of the target's tokenizer; empty: the speculator serves every vocabulary."""
    vocabulary_size: int = 0
    """The token ids that it accepts are below this; 0: any. Not sent."""
    hidden_state_layers: Sequence[int] = ()
    """The target layers whose output it needs: 0 is the embedding, n the output of layer n."""
    position_limit: int = 0
    """It drafts no position at or beyond this one; 0: no limit."""
    worker_id: str = ""
    """Of a draft worker."""

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises `DraftError` if the draft does not know a token.

        A target's matrices may be padded to more tokens than the draft has, and clients may send their ids.
        """
        if self.vocabulary_size and tokens and (min(tokens) < 0 or max(tokens) >= self.vocabulary_size):
            raise DraftError(f"a token id is outside the vocabulary of {self.vocabulary_size} tokens")


class Speculator(ABC):
    """Grows trees for many requests. Called from one thread."""

    description: DraftDescription
    grammars: GrammarCompiler | None = None
    """Of the target's vocabulary, to predict draws under a grammar. None: grammars are ignored."""

    @property
    def behind(self) -> bool:
        """Whether another call of `grow` may bring nodes although the last one brought none."""
        return False

    @abstractmethod
    def open(self, opening: Opening) -> None:
        """Start drafting for a request; if it is open, start again. Raises `DraftError` if that is impossible."""

    def context(self, context: Context) -> None:
        """Add hidden states. Called only if the description has `hidden_state_layers`.

        Positions may come twice, when the target computes them again. May raise `DraftError`.
        """

    @abstractmethod
    def commit(self, commit: Commit) -> None:
        """Move a request's root; unknown ids are ignored.

        Raises `DraftError` if its root is not at `commit.base_position`, or if drafting cannot go on. The caller then
        closes the request.
        """

    def limit(self, limit: Limit) -> None:
        """Change the limits of a request's tree; unknown ids are ignored.

        Commits of a paused request still arrive, of many steps at a time. Its growth is ignored.
        """

    @abstractmethod
    def close(self, request_id: int) -> None:
        """Forget a request; unknown ids are ignored."""

    @abstractmethod
    def grow(self) -> dict[int, Growth]:
        """Draft one round; return the new nodes by request.

        If there are none and `behind` is False, no request gets more nodes until the next call of another method.
        """


class DraftError(Exception):
    """A speculator cannot draft for this request. The target decodes the request without it."""


def new_hidden_states(known: int, position: int, states: torch.Tensor) -> torch.Tensor:
    """The part of `states` [positions, ...], which begin at `position`, after the first `known` positions.

    Raises `DraftError` if there is a gap.
    """
    if position > known:
        raise DraftError(f"hidden states of position {position}, but not of {known} before it")
    return states[known - position :]
