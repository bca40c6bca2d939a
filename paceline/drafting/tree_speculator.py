"""The bookkeeping of open requests, which all methods share that keep a replica of each request's token tree."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from paceline.core.growth import Growth
from paceline.core.tree import TokenTree
from paceline.drafting.speculator import Commit, DraftError, Limit, Opening, Speculator


@dataclass(slots=True, eq=False)
class TreeRequest:
    """An open request and the replica of its tree."""

    opening: Opening
    """With the latest limits."""
    tree: TokenTree

    @property
    def nodes_left(self) -> int:
        """How many more nodes the tree may have."""
        return max(0, self.opening.max_nodes - self.tree.size)


D = TypeVar("D", bound=TreeRequest)


class TreeSpeculator(Speculator, Generic[D]):
    """Opens, moves, limits and closes requests; a subclass adds nodes to their trees."""

    def __init__(self) -> None:
        self._requests: dict[int, D] = {}

    @abstractmethod
    def new_request(self, opening: Opening, tree: TokenTree) -> D:
        """The state of a new request. `tree` has only the root. Raises `DraftError`."""

    @abstractmethod
    def advance(self, request: D, commit: Commit) -> None:
        """Move the tree's root along the tokens of `commit`, which begins at the root. Raises `DraftError`."""

    def limits_changed(self, request: D) -> None:
        """The limits in `request.opening` are new."""

    def release(self, request: D) -> None:
        """Free what a request holds. It is no longer open."""

    def open(self, opening: Opening) -> None:
        self._discard(opening.request_id)
        self._check_tokens(opening.tokens)
        tree = TokenTree(len(opening.tokens) - 1, opening.tokens[-1])
        self._requests[opening.request_id] = self.new_request(opening, tree)

    def commit(self, commit: Commit) -> None:
        request = self._requests.get(commit.request_id)
        if request is None:
            return
        if request.tree.position != commit.base_position:
            raise DraftError(f"the root is at {request.tree.position}, the commit at {commit.base_position}")
        self._check_tokens(commit.tokens)
        self.advance(request, commit)

    def limit(self, limit: Limit) -> None:
        request = self._requests.get(limit.request_id)
        if request is not None:
            request.opening = replace(
                request.opening,
                max_depth=limit.max_depth,
                max_nodes=limit.max_nodes,
                least_path_probability=limit.least_path_probability,
            )
            self.limits_changed(request)

    def close(self, request_id: int) -> None:
        self._discard(request_id)

    def _discard(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.release(request)

    def _growths(self, new_nodes: Mapping[int, Sequence[int]]) -> dict[int, Growth]:
        """The growth of each request that has new nodes."""
        return {key: self._requests[key].tree.growth(nodes) for key, nodes in new_nodes.items() if nodes}

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises `DraftError` if a token id is outside the vocabulary."""
        if self.vocabulary_size and tokens and (min(tokens) < 0 or max(tokens) >= self.vocabulary_size):
            raise DraftError(f"a token id is outside the vocabulary of {self.vocabulary_size} tokens")


@dataclass(slots=True, eq=False)
class LookupRequest(TreeRequest):
    """A request of a method that looks up its last tokens."""

    tokens: list[int]
    """Prompt and output."""
    fresh: bool = True
    """Whether tokens were committed since the tree grew."""


L = TypeVar("L", bound=LookupRequest)


class LookupSpeculator(TreeSpeculator[L]):
    """Grows each tree once after every commit. It serves every vocabulary while all its tokens come from the requests;
    one that also reads tokens elsewhere sets `vocabulary_fingerprint`."""

    @abstractmethod
    def index(self, request: L, tokens: Sequence[int]) -> None:
        """Make `tokens`, which are appended to the request, available for look-ups."""

    @abstractmethod
    def add_nodes(self, request: L) -> list[int]:
        """Add what followed the last tokens to the tree, within the request's limits; return the new nodes."""

    def advance(self, request: L, commit: Commit) -> None:
        request.tree.commit(commit.tokens)
        self.index(request, commit.tokens)
        request.fresh = True

    def grow(self) -> dict[int, Growth]:
        fresh = {key: request for key, request in self._requests.items() if request.fresh}
        for request in fresh.values():
            request.fresh = False
        return self._growths({key: self.add_nodes(request) for key, request in fresh.items()})
