"""A request in a step, as strategies see it: a tree of guesses made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.config import SamplingParams
from paceline.core.growth import CERTAIN_TOKEN, DraftDistribution
from paceline.core.logits_rules import History, SamplingRow
from paceline.core.strategies.verifier import VerificationInput
from paceline.core.tree import ROOT, TokenTree


def verification_input(
    params: SamplingParams,
    vocabulary: int,
    *paths: Sequence[int],
    distributions: Mapping[int, DraftDistribution] | None = None,
    prompt: Sequence[int] = (0,),
    unverified: int = 0,
    history: History | None = None,
) -> VerificationInput:
    """Guesses on these paths below the root, in this order; the last `unverified` have no rows.

    `distributions`: what a guess at each depth below the root, from 1, was drawn from.
    """
    history = history or History(params, prompt, (), vocabulary)
    tree = TokenTree(len(prompt) - 1, prompt[-1])
    nodes: list[int] = []
    for path in paths:
        node = ROOT
        for depth, token in enumerate(path, 1):
            child = tree.child(node, token)
            if child is None:
                nodes.append(child := tree.add(node, token, -0.1, (distributions or {}).get(depth, CERTAIN_TOKEN)))
            node = child
    verified = nodes[: len(nodes) - unverified]
    rows = [SamplingRow(params, tree.position + 1, history)]
    for node in verified:
        rows.append(SamplingRow(params, tree.position + tree.depths[node] + 1, history, tree.path_tokens(node)))
    return VerificationInput(tree, verified, rows, prompt)
