"""The target's side of a request whose speculator reads one hidden state: the state before the root."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.tree import TokenTree
from paceline.drafting.speculator import Context, Opening, Speculator
from tests.helpers.dense import HIDDEN
from tests.helpers.head_methods import seeded

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]
ROOT = len(PROMPT) - 1
STATE = seeded(HIDDEN, seed=5) * 8


def opening(
    *, key: int = 1, sampling: SamplingParams = GREEDY, depth: int = 8, nodes: int = 1000, root: int = PROMPT[-1]
) -> Opening:
    return Opening(key, [*PROMPT[:-1], root], 0, sampling, depth, nodes)


def send_states(speculator: Speculator, state: Tensor, key: int = 1) -> None:
    """The states of all positions before the root; the last one is `state`."""
    states = torch.cat((seeded(ROOT - 1, HIDDEN), state[None]))
    speculator.context(Context(key, 0, states.unsqueeze(1)))


def replica() -> TokenTree:
    return TokenTree(ROOT, PROMPT[-1])


def grown(speculator: Speculator, tree: TokenTree, key: int = 1) -> int:
    """Graft growth into `tree` until there is no more. The number of nodes; all are new and have their parents."""
    count = 0
    while (growths := speculator.grow()) or speculator.behind:
        if growth := growths.get(key):
            assert tree.graft(growth, 10_000) == len(growth)
            assert list(growth.parent_ids) == sorted(growth.parent_ids), "the cheapest order on the wire"
            count += len(growth)
    return count
