"""A token tree as nodes that know one another, for tests to look at, and what its guesses count for, by a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Seen:
    """One node, as the tree is when it is asked: a commit gives its number to another."""

    tree: TokenTree
    node: int

    @property
    def token(self) -> int:
        return self.tree.tokens[self.node]

    @property
    def position(self) -> int:
        return self.tree.position + self.tree.depths[self.node]

    @property
    def log_prob(self) -> float:
        return self.tree.log_prob(self.node)

    @property
    def path_log_prob(self) -> float:
        return self.tree.path_log_probs[self.node]

    @property
    def parent(self) -> Seen:
        return Seen(self.tree, self.tree.parents[self.node])

    @property
    def children(self) -> dict[int, Seen]:
        """By token, in the order in which they came."""
        return {self.tree.tokens[child]: Seen(self.tree, child) for child in self.tree.children(self.node)}

    def path(self) -> list[Seen]:
        """Below the root down to this one."""
        return [Seen(self.tree, node) for node in self.tree.path(self.node)]


def root_of(tree: TokenTree) -> Seen:
    return Seen(tree, ROOT)


def nodes_of(tree: TokenTree) -> list[Seen]:
    """All guesses, parents before children."""
    return [Seen(tree, node) for node in tree.nodes()]


class FunctionTable(dict[tuple[float, int, int], tuple[int, float]]):
    """A table of what guesses count for that asks a function, each time."""

    def __init__(self, function: Callable[[float, int, int], tuple[int, float]]) -> None:
        self._function = function

    def __missing__(self, guess: tuple[float, int, int]) -> tuple[int, float]:
        return self._function(*guess)
