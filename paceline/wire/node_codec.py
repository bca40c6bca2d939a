"""`GrowthFrame.Growth.nodes`: a growth's nodes as one string of bits, each as wide as this growth needs.

    1 byte   t, the bits of a token id: 3 to 32
    1 byte   p, the bits of a parent distance: 0 to 32
    per node, most significant bit first:
        t bits   token id
        5 bits   c, which stands for log-odds of (c - 13) / 2
        parent, by a step from that of the node before:
            0              to the next id; only from a node
            10             to the same again, be it a node or the committed token
            110            to the next id but one; only from a node
            111, p bits    by none, as the first node's always: how many ids before its own; 0: the committed token
    zero bits up to a whole byte

Nodes in the order of their parents' ids step by 0 or more, and mostly by 0 or 1: about 2 bits for a parent.

A node is longer than a byte and padding is shorter, so the length alone tells how many nodes there are.

Log-odds, because it matters whether a guess comes true with 90 or 99 %, and not whether with 50 or 51 %.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from paceline.wire.link_errors import WireError

HEADER_BYTES = 2
MIN_TOKEN_BITS = 3
"""So that a node is longer than a byte."""
MAX_BITS = 32
CODE_BITS = 5
LOG_ODDS = [(code - 13) / 2 for code in range(2**CODE_BITS)]
"""By code. The ends, 0.15 and 99.988 %, stand for everything beyond, too."""

_SAME = "10"
_STEPS = {0: "0", 1: _SAME, -1: "110"}
"""Between two nodes, by how much the parent's distance changes: as ids count up, that to the same one rises by 1."""
_NO_STEP = 0b111
_STEP_BITS = 3
"""At most."""


def log_probability(log_odds: float) -> float:
    """Of what has these log-odds."""
    return -math.log1p(math.exp(-log_odds))


_LOG_PROBS = list(map(log_probability, LOG_ODDS))
_BORDERS = [log_probability((low + high) / 2) for low, high in pairwise(LOG_ODDS)]
"""Code c is for what lies from border c - 1 to border c."""


class PackedNodes(NamedTuple):
    """Parallel lists over nodes."""

    tokens: Sequence[int]
    distances: Sequence[int]
    """How many ids before its own that of each node's parent is; 0: the committed token."""
    log_probs: Sequence[float]


def pack_nodes(nodes: PackedNodes) -> bytes:
    """With the smallest widths and shortest forms that do. Log-probabilities are rounded to the nearest code's, by
    log-odds."""
    token_bits = max(max(nodes.tokens, default=0).bit_length(), MIN_TOKEN_BITS)
    steps = _steps(nodes.distances)
    far = [distance for distance, step in zip(nodes.distances, steps, strict=True) if not step]
    distance_bits = max(far, default=0).bit_length()
    width, no_step = token_bits + CODE_BITS, _NO_STEP << distance_bits
    digits = "".join(
        f"{token << CODE_BITS | bisect(_BORDERS, log_prob):0{width}b}{step or f'{no_step | distance:b}'}"
        for token, distance, log_prob, step in zip(*nodes, steps, strict=True)
    )
    size = -(-len(digits) // 8)
    bits = int("0" + digits, 2) << 8 * size - len(digits)
    return bytes((token_bits, distance_bits)) + bits.to_bytes(size)


def _steps(distances: Sequence[int]) -> list[str]:
    """Empty for a parent that no step leads to."""
    return [
        _STEPS.get(distance - before, "") if before and distance else _SAME if before == distance else ""
        for before, distance in pairwise((None, *distances))
    ]


def unpack_nodes(data: bytes, most: int) -> PackedNodes:
    """Raises `WireError` for what `pack_nodes` cannot have written, but for widths and parents that are longer than
    need be, and for more than `most` nodes, before it looks at those."""
    token_bits, distance_bits = _widths(data)
    width = token_bits + CODE_BITS
    place, end = 8 * HEADER_BYTES, 8 * len(data)
    if end - place >= most * (width + _STEP_BITS + distance_bits) + 8:
        raise WireError(f"nodes: {len(data)} bytes have more than {most}")
    # Shifts of one long number would take time in proportion to the square of its length; slices of its digits do not.
    digits = f"{int.from_bytes(data):0{end}b}"
    if "0" in digits[place + width : place + width + _STEP_BITS]:
        raise WireError("nodes: the first one's parent is a step from none")
    values: list[int] = []
    distances: list[int] = []
    distance = 0
    for _ in range(most):
        if end - place < 8:
            break
        form = place + width
        values.append(int(digits[place:form], 2))
        after = form + _STEP_BITS
        zero = digits.find("0", form, after)  # its place tells the form
        place = zero + 1
        if zero == form + 1:
            distance += distance > 0
        elif zero < 0:
            place = after + distance_bits
            distance = int(digits[after:place] or "0", 2)
        else:
            distance -= zero > form
            if distance < 1:
                raise WireError(f"nodes: number {len(values)} steps to a parent that is no node before it")
        distances.append(distance)
    if end - place >= 8:
        raise WireError(f"nodes: more than {most}")
    if place > end:
        raise WireError(f"nodes: {place - end} bits of the last one are missing")
    if "1" in digits[place:]:
        raise WireError(f"nodes: {end - place} bits after the last one are no padding")
    code_mask = (1 << CODE_BITS) - 1
    return PackedNodes(
        tokens=[value >> CODE_BITS for value in values],
        distances=distances,
        log_probs=[_LOG_PROBS[value & code_mask] for value in values],
    )


def _widths(data: bytes) -> tuple[int, int]:
    """Of a token id and of a parent distance."""
    if len(data) < HEADER_BYTES:
        raise WireError(f"nodes: {len(data)} bytes do not tell the widths")
    token_bits, distance_bits = data[:HEADER_BYTES]
    if not MIN_TOKEN_BITS <= token_bits <= MAX_BITS:
        raise WireError(f"nodes: {token_bits} bits per token id")
    if distance_bits > MAX_BITS:
        raise WireError(f"nodes: {distance_bits} bits per parent distance")
    return token_bits, distance_bits
