"""Verification: which guesses the target's own draws confirm.

    draw        the token that the target itself draws at one place, by `paceline.sampling`
    verified    a node that had a row in the forward pass, so that the draw *after* it is known
    accepted    a verified node whose token equals the draw after its parent, all along the path from the root
    bonus       the draw after the last accepted node; it ends every commit, so a commit is never empty
    committed   the accepted tokens and the bonus token: final, sent to the user

The target draws after the root and after every verified node, as if nobody had guessed. Verification follows
those draws down the tree for as long as they lead to verified nodes. Guesses decide only how far one step
gets; what is committed at each place is the target's draw there, whatever was guessed, by whomever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.config import SamplingParams
from paceline.tree import Node


def walk(root: Node, verified: Sequence[Node], draws: Sequence[int]) -> list[int]:
    """The tokens to commit: the accepted ones, then the bonus token. Never empty.

    `draws[0]` is the target's draw after `root`, `draws[i + 1]` its draw after `verified[i]`. A verified node
    whose parent was not verified is never reached. Raises ValueError unless there is one draw for each.
    """
    draw_after = dict(zip([root, *verified], draws, strict=True))
    committed: list[int] = []
    node: Node | None = root
    while node is not None and node in draw_after:
        draw = draw_after[node]
        committed.append(draw)
        node = node.children.get(draw)
    return committed


@dataclass(frozen=True, slots=True)
class Strategy:
    """A named way to verify: what the target draws with, given what the request asks for.

    `exact` says whether the output has the law that the request's own parameters describe.
    """

    exact: bool
    law: Callable[[SamplingParams], SamplingParams]


def _as_asked(params: SamplingParams) -> SamplingParams:
    return params


def _largest_logit(params: SamplingParams) -> SamplingParams:
    return params.model_copy(update={"temperature": 0.0})


STRATEGIES: Mapping[str, Strategy] = {
    "coupled": Strategy(exact=True, law=_as_asked),
    "greedy": Strategy(exact=False, law=_largest_logit),
}
"""By their names in `SpeculativeConfig.rejection_sampling_strategy`."""
