"""Which prefixes one target has computed for this gateway lately, and so is likely to hold in its prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

BLOCK = 32
"""Tokens per block: prefixes are known in whole blocks."""


def block_hashes(tokens: Sequence[int], known: Sequence[int] = (), salt: str = "") -> list[int]:
    """A hash per full block, of all tokens up to the block's end: equal hashes stand for equal prefixes.

    `known`: the hashes of the first blocks. `salt`: texts with different salts share no block, as at the target.
    Python's own hash is fast and enough: the hashes stay in this process, and a collision only costs time.
    """
    hashes = list(known)
    for start in range(len(hashes) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        hashes.append(hash((hashes[-1] if hashes else salt, *tokens[start : start + BLOCK])))
    return hashes


class PrefixIndex:
    """Holds `max_tokens` at most: drops the blocks that were not used for longest, and the end of a text first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = max_tokens // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """The target has computed a text with these block hashes."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def cached_tokens(self, blocks: Sequence[int]) -> int:
        """Tokens of the longest known prefix of a text with these block hashes."""
        return BLOCK * sum(1 for _ in takewhile(self._blocks.__contains__, blocks))
