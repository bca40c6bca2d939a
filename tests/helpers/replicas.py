"""A speculator that keeps a replica of each request's tree: what it guesses is a subclass's."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.growth import Growth
from paceline.core.tree import TokenTree
from paceline.drafting.speculator import Commit, DraftDescription, Opening, Speculator


class Replicas(Speculator):
    description = DraftDescription("custom")

    def __init__(self) -> None:
        self.trees: dict[int, TokenTree] = {}

    def open(self, opening: Opening) -> None:
        self.trees[opening.request_id] = TokenTree(len(opening.tokens) - 1, opening.tokens[-1])

    def commit(self, commit: Commit) -> None:
        self.trees[commit.request_id].commit(commit.tokens)

    def close(self, request_id: int) -> None:
        self.trees.pop(request_id, None)

    def grow(self) -> dict[int, Growth]:
        return {key: tree.growth(list(self.guesses(key, tree))) for key, tree in self.trees.items()}

    def guesses(self, request_id: int, tree: TokenTree) -> Iterator[int]:
        """Add nodes to the tree, and yield them."""
        raise NotImplementedError
