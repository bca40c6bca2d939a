"""Verification: which draft tokens the target's own draws confirm.

    draw        the token that the target itself draws at one position, by `paceline.core.sampling`
    verified    a node that had a row in the forward pass, so that the draw *after* it is known
    accepted    a verified node whose token equals the draw after its parent, all along the path from the root
    bonus       the draw after the last accepted node; it ends every commit, so a commit is never empty
    committed   the accepted tokens and the bonus token: final, sent to the user, up to where the request ends
    verdict     what a strategy decides about one request of a step: the accepted nodes and the bonus token

The target draws after the root and after every verified node as if there were no draft. Verification follows those
draws down the tree while they lead to verified nodes. Draft tokens decide only how many tokens one step commits; each
committed token is the target's draw at its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.tree import ROOT, TokenTree


class Verdict(NamedTuple):
    """`accepted`: a path of verified nodes, from below the root down. `bonus`: the token that ends the commit."""

    accepted: Sequence[int]
    bonus: int

    def tokens(self, tree: TokenTree) -> list[int]:
        """The tokens to commit, never empty. `tree`: not committed yet."""
        return [*map(tree.tokens.__getitem__, self.accepted), self.bonus]


def follow_draws(tree: TokenTree, verified: Sequence[int], draws: Sequence[int]) -> Verdict:
    """Follow the target's draws from the root down the tree. `coupled` is this rule.

    In: the tree, its `verified` nodes, and one draw for the root and each of them: `draws[0]` comes after the root,
    `draws[i + 1]` after `verified[i]`. A verified node whose parent was not verified is never reached. Raises
    ValueError unless there is one draw for each.
    """
    draw_after = dict(zip((ROOT, *verified), draws, strict=True))
    accepted: list[int] = []
    node = ROOT
    while (child := tree.child(node, draw_after[node])) in draw_after:
        accepted.append(node := child)
    return Verdict(accepted, draw_after[node])
