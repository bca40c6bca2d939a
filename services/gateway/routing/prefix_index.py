"""Which beginnings of texts one target was sent lately: what its prefix cache is likely to hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

BLOCK = 32
"""Tokens that are known or not known together."""


def block_hashes(tokens: Sequence[int], begun: Sequence[int] = (), salt: str = "") -> list[int]:
    """A hash for each full block, of all tokens up to its end: equal ones stand for equal beginnings.

    `begun`: the chain of a text that `tokens` begin with. `salt`: texts with another one share no block, as at the
    target. Python's own hash will do: it is quick, the chain stays in this process, and a collision costs one request
    some time.
    """
    hashes = list(begun)
    for start in range(len(hashes) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        hashes.append(hash((hashes[-1] if hashes else salt, *tokens[start : start + BLOCK])))
    return hashes


class PrefixIndex:
    """Bounded: beyond `most_tokens`, blocks that were not used for longest are forgotten, ends before beginnings."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """The target has computed a text with this chain."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def cached_tokens(self, blocks: Sequence[int]) -> int:
        """How many tokens the longest known beginning of a text has, by its chain."""
        return BLOCK * sum(1 for _ in takewhile(self._blocks.__contains__, blocks))
