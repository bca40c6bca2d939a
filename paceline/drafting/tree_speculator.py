"""The bookkeeping of open requests, which all methods share that keep a replica of each request's token tree."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from paceline.core.growth import Growth
from paceline.core.tree import TokenTree
from paceline.drafting.speculator import Commit, DraftDescription, DraftError, Limit, Opening, Speculator


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


R = TypeVar("R", bound=TreeRequest)


class TreeSpeculator(Speculator, Generic[R]):
    """Opens, moves, limits and closes requests; a subclass adds nodes to their trees."""

    def __init__(self, description: DraftDescription) -> None:
        self.description = description
        self._requests: dict[int, R] = {}

    @abstractmethod
    def new_request(self, opening: Opening, tree: TokenTree) -> R:
        """The state of a new request. `tree` has only the root. Raises `DraftError`."""

    @abstractmethod
    def advance(self, request: R, commit: Commit) -> None:
        """Move the tree's root along the tokens of `commit`, which begins at the root. Raises `DraftError`."""

    def limits_changed(self, request: R) -> None:
        """The limits in `request.opening` are new."""

    def release(self, request: R) -> None:
        """Free what a request holds. It is no longer open."""

    def open(self, opening: Opening) -> None:
        self._discard(opening.request_id)
        self.description.check_tokens(opening.tokens)
        tree = TokenTree(len(opening.tokens) - 1, opening.tokens[-1])
        self._requests[opening.request_id] = self.new_request(opening, tree)

    def commit(self, commit: Commit) -> None:
        request = self._requests.get(commit.request_id)
        if request is None:
            return
        if request.tree.position != commit.base_position:
            raise DraftError(f"the root is at {request.tree.position}, the commit at {commit.base_position}")
        self.description.check_tokens(commit.tokens)
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


class Lookup(Protocol):
    """The tokens of one request, and the text in which its last tokens are looked up."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the request, and make them available for look-ups."""

    def add_nodes(self, request: TreeRequest) -> list[int]:
        """Add what followed the last tokens to the tree, within the request's limits; return the new nodes."""

    def finish(self) -> None:
        """The request is closed."""


@dataclass(slots=True, eq=False)
class LookupRequest(TreeRequest):
    """A request of a method that looks up its last tokens."""

    lookup: Lookup
    fresh: bool = True
    """Whether tokens were committed since the tree grew."""


class LookupSpeculator(TreeSpeculator[LookupRequest]):
    """Methods `ngram` and `suffix`, by their lookups: grows each tree once after every commit.

    It serves every vocabulary while all its tokens come from the requests; one that also reads tokens elsewhere
    describes itself with a `vocabulary_fingerprint`.
    """

    def __init__(self, description: DraftDescription, new_lookup: Callable[[Opening], Lookup]) -> None:
        """`new_lookup`: for a request, without tokens."""
        super().__init__(description)
        self._new_lookup = new_lookup

    def new_request(self, opening: Opening, tree: TokenTree) -> LookupRequest:
        lookup = self._new_lookup(opening)
        lookup.extend(opening.tokens)
        return LookupRequest(opening, tree, lookup)

    def advance(self, request: LookupRequest, commit: Commit) -> None:
        request.tree.commit(commit.tokens)
        request.lookup.extend(commit.tokens)
        request.fresh = True

    def close(self, request_id: int) -> None:
        if request := self._requests.get(request_id):
            request.lookup.finish()
        super().close(request_id)

    def grow(self) -> dict[int, Growth]:
        fresh = {key: request for key, request in self._requests.items() if request.fresh}
        for request in fresh.values():
            request.fresh = False
        return self._growths({key: request.lookup.add_nodes(request) for key, request in fresh.items()})
