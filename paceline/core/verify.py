"""Verification: which draft tokens the target's own draws confirm.

    draw        the token that the target itself draws at one position, by `paceline.core.sampling`
    verified    a node that had a row in the forward pass, so that the draw *after* it is known
    accepted    a verified node whose token equals the draw after its parent, all along the path from the root
    bonus       the draw after the last accepted node; it ends every commit, so a commit is never empty
    committed   the accepted tokens and the bonus token: final, sent to the user, up to where the request ends

The target draws after the root and after every verified node as if there were no draft. Verification follows those
draws down the tree while they lead to verified nodes. Draft tokens decide only how many tokens one step commits; each
committed token is the target's draw at its position.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.tree import ROOT, TokenTree


def follow_draws(tree: TokenTree, verified: Sequence[int], draws: Sequence[int]) -> list[int]:
    """Follow the target's draws from the root down the tree; return the tokens to commit. `coupled` is this rule.

    In: the tree, its `verified` nodes, and one draw for the root and each of them: `draws[0]` comes after the root,
    `draws[i + 1]` after `verified[i]`. Out: the accepted tokens, then the bonus token; never empty. A verified node
    whose parent was not verified is never reached. Raises ValueError unless there is one draw for each.
    """
    draw_after = dict(zip((ROOT, *verified), draws, strict=True))
    committed: list[int] = []
    node: int | None = ROOT
    while node is not None and node in draw_after:
        draw = draw_after[node]
        committed.append(draw)
        node = tree.child(node, draw)
    return committed
