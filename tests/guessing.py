"""A request in a step, as strategies see it: a tree of guesses made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.config import SamplingParams
from paceline.growth import CERTAIN, Law
from paceline.sampling import History, Row
from paceline.strategies.base import Guessed
from paceline.tree import ROOT, TokenTree


def guessed(
    params: SamplingParams,
    vocabulary: int,
    *paths: Sequence[int],
    laws: Mapping[int, Law] | None = None,
    prompt: Sequence[int] = (0,),
    unverified: int = 0,
    history: History | None = None,
) -> Guessed:
    """Guesses on these paths below the root, in this order; the last `unverified` have no rows.

    `laws`: what a guess at each depth below the root, from 1, was drawn from.
    """
    history = history or History(params, prompt, (), vocabulary)
    tree = TokenTree(len(prompt) - 1, prompt[-1])
    nodes: list[int] = []
    for path in paths:
        node = ROOT
        for depth, token in enumerate(path, 1):
            child = tree.child(node, token)
            if child is None:
                nodes.append(child := tree.add(node, token, -0.1, (laws or {}).get(depth, CERTAIN)))
            node = child
    verified = nodes[: len(nodes) - unverified]
    rows = [Row(params, tree.position + 1, history)]
    for node in verified:
        rows.append(Row(params, tree.position + tree.depths[node] + 1, history, tree.path_tokens(node)))
    return Guessed(tree, verified, rows, prompt)
