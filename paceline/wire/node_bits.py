"""`GrowthFrame.Growth.nodes`: a growth's nodes as one string of bits, each as wide as this growth needs.

    1 byte   t, the bits of a token id: 3 to 32
    1 byte   p, the bits of a parent distance: 0 to 32
    per node, most significant bit first:
        t bits   token id
        p bits   how many ids before its own that of its parent is; 0: its parent is the committed token
        5 bits   c, which stands for log-odds of (c - 13) / 2
    zero bits up to a whole byte

No node is shorter than a byte and no padding as long as one, so the length alone tells how many nodes there are.

Log-odds, because it matters whether a guess comes true with 90 or 99 %, and not whether with 50 or 51 %.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from paceline.wire.errors import WireError

HEADER_BYTES = 2
LEAST_TOKEN_BITS = 3
"""So that a node has a byte or more."""
MOST_BITS = 32
CODE_BITS = 5
LOG_ODDS = [(code - 13) / 2 for code in range(2**CODE_BITS)]
"""By code. The ends, 0.15 and 99.988 %, stand for everything beyond, too."""


def log_probability(log_odds: float) -> float:
    """Of what has these log-odds."""
    return -math.log1p(math.exp(-log_odds))


_LOG_PROBS = list(map(log_probability, LOG_ODDS))
_BORDERS = [log_probability((low + high) / 2) for low, high in pairwise(LOG_ODDS)]
"""Code c is for what lies from border c - 1 to border c."""


class Nodes(NamedTuple):
    """Parallel lists over nodes."""

    tokens: Sequence[int]
    distances: Sequence[int]
    """How many ids before its own that of each node's parent is; 0: the committed token."""
    log_probs: Sequence[float]


def pack(nodes: Nodes) -> bytes:
    """With the smallest widths that do. Log-probabilities are rounded to the nearest code's, by log-odds."""
    token_bits = max(max(nodes.tokens, default=0).bit_length(), LEAST_TOKEN_BITS)
    distance_bits = max(nodes.distances, default=0).bit_length()
    width = token_bits + distance_bits + CODE_BITS
    digits = "".join(
        f"{(token << distance_bits | distance) << CODE_BITS | bisect(_BORDERS, log_prob):0{width}b}"
        for token, distance, log_prob in zip(*nodes, strict=True)
    )
    size = -(-len(digits) // 8)
    bits = int("0" + digits, 2) << 8 * size - len(digits)
    return bytes((token_bits, distance_bits)) + bits.to_bytes(size)


def unpack(data: bytes, most: int) -> Nodes:
    """Raises `WireError` for what `pack` cannot have written, but for widths that are larger than need be, and for more
    than `most` nodes, before it looks at them."""
    token_bits, distance_bits = _widths(data)
    width = token_bits + distance_bits + CODE_BITS
    count, padding = divmod(8 * (len(data) - HEADER_BYTES), width)
    if count > most:
        raise WireError(f"nodes: {count}, more than {most}")
    # Shifts of one long number would take time in proportion to the square of its length; slices of its digits do not.
    digits = f"{int.from_bytes(data):0{8 * len(data)}b}"
    end = len(digits) - padding
    if padding >= 8 or "1" in digits[end:]:
        raise WireError(f"nodes: {padding} bits after the last one are no padding")
    values = [int(digits[place : place + width], 2) for place in range(8 * HEADER_BYTES, end, width)]
    distance_mask, code_mask = (1 << distance_bits) - 1, (1 << CODE_BITS) - 1
    return Nodes(
        tokens=[value >> distance_bits + CODE_BITS for value in values],
        distances=[value >> CODE_BITS & distance_mask for value in values],
        log_probs=[_LOG_PROBS[value & code_mask] for value in values],
    )


def _widths(data: bytes) -> tuple[int, int]:
    """Of a token id and of a parent distance."""
    if len(data) < HEADER_BYTES:
        raise WireError(f"nodes: {len(data)} bytes do not tell the widths")
    token_bits, distance_bits = data[:HEADER_BYTES]
    if not LEAST_TOKEN_BITS <= token_bits <= MOST_BITS:
        raise WireError(f"nodes: {token_bits} bits per token id")
    if distance_bits > MOST_BITS:
        raise WireError(f"nodes: {distance_bits} bits per parent distance")
    return token_bits, distance_bits
