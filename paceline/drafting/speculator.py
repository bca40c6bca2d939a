"""The interface of everything that grows trees.

A speculator keeps a replica of each open request's tree. It is told what the target committed and is asked, as
often as somebody has time, to grow: one round of drafting over the requests where a guess is worth most. It may
run inside the target's process or in a draft worker; it cannot tell, and neither place can change a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.config import SamplingParams
from paceline.core.growth import Growth
from paceline.core.messages import reduce_slots

if TYPE_CHECKING:  # links know these words, and run where nothing is computed and no torch is loaded
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
    """Guesses on less likely paths are not wanted."""
    link: int = 0
    """Whose request it is, where one speculator serves many. Whoever opens it there says so; links do not know."""
    cache_salt: str = ""
    """What a speculator learns of this request may serve others of the same salt alone."""


@dataclass(frozen=True, slots=True)
class Context:
    """Hidden states of positions `base_position` and on: [positions, layers, hidden size], the target's dtype."""

    request_id: int
    base_position: int
    hidden_states: torch.Tensor


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that the target drew after the root at `base_position`; the last one is the new root.

    The first `accepted` of them had been guessed. `hidden_states`, where the speculator asks for them, are
    [tokens, layers, hidden size] of the positions `base_position` and on: those that the tokens were drawn from.
    """

    request_id: int
    base_position: int
    tokens: Sequence[int]
    accepted: int
    hidden_states: torch.Tensor | None = None

    __reduce__ = reduce_slots


@dataclass(frozen=True, slots=True)
class Limit:
    """From now on a tree has at most so many nodes, none deeper, none less likely. With 0 nodes it is paused."""

    request_id: int
    max_depth: int
    max_nodes: int
    least_path_probability: float = 0.0


class Speculator(ABC):
    """Grows trees for many requests. Called from one thread."""

    method: str
    model: str = ""
    vocabulary_fingerprint: str = ""
    """Empty for speculators that know only ids."""
    vocabulary_size: int = 0
    """Token ids it can be told of are below this; 0: any."""
    hidden_state_layers: Sequence[int] = ()
    """Target layers whose output it wants: 0 is the embedding, n the output of layer n."""
    position_limit: int = 0
    """It drafts no position at or beyond this one; 0: no limit."""
    grammars: GrammarCompiler | None = None
    """Of the target's vocabulary, to predict draws under a grammar. None: it guesses as if there were none."""

    @property
    def behind(self) -> bool:
        """Whether `grow` is worth calling again although it brought nothing."""
        return False

    @abstractmethod
    def open(self, opening: Opening) -> None:
        """Start drafting for a request, afresh if it is open. Raises `DraftError` if that cannot be."""

    def context(self, context: Context) -> None:
        """Take in hidden states. Only called if `hidden_state_layers` names some.

        A target that had to compute positions again sends theirs again. May raise `DraftError`.
        """

    @abstractmethod
    def commit(self, commit: Commit) -> None:
        """Move a request's root; unknown ids are ignored.

        Raises `DraftError` if its root is not at `commit.base_position`, or if drafting cannot go on. The caller then
        closes the request.
        """

    def limit(self, limit: Limit) -> None:
        """Change how far a request's tree may grow; unknown ids are ignored.

        A paused request goes on being told of commits. What is sent all the same is not looked at.
        """

    @abstractmethod
    def close(self, request_id: int) -> None:
        """Forget a request. Unknown ids are ignored."""

    @abstractmethod
    def grow(self) -> dict[int, Growth]:
        """One round of drafting: the new nodes by request.

        If there are none and nothing is `behind`, no open request is worth another guess until more is said.
        """


class DraftError(Exception):
    """A speculator cannot draft for this request; the request itself goes on without."""


def new_hidden_states(known: int, position: int, states: torch.Tensor) -> torch.Tensor:
    """Of the states of positions from `position` on [positions, ...], those after the first `known` positions.

    Targets tell states in order, and some of them twice. Raises `DraftError` if some between are missing.
    """
    if position > known:
        raise DraftError(f"hidden states of position {position}, but not of {known} before it")
    return states[known - position :]
