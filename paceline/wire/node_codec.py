"""`GrowthFrame.Growth.nodes`: the nodes of one growth as a bit string, with field widths chosen per growth.

    1 byte   t, bits of a token id: 3 to 32
    1 byte   p, bits of a parent distance: 0 to 32
    per node, most significant bit first:
        t bits   token id
        5 bits   c: the log-odds of the node's probability are (c - 13) / 2
        the parent, relative to the previous node's parent:
            0              the next id; only after a node with a parent node
            10             the same parent, which may be the committed token
            110            the next id but one; only after a node with a parent node
            111, p bits    its distance: how many ids before the node's own; 0: the committed token. For the first node
    zero bits up to a whole byte

Nodes are in the order of their parents' ids, so a parent takes about 2 bits. A node is longer than a byte and padding
is shorter, so the length gives the number of nodes.

Probabilities are sent as log-odds: the difference between 90 and 99 % matters, that between 50 and 51 % does not.
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
"""Makes a node longer than a byte."""
MAX_BITS = 32
CODE_BITS = 5
LOG_ODDS = [(code - 13) / 2 for code in range(2**CODE_BITS)]
"""By code. The first and last, 0.15 and 99.988 %, also stand for everything beyond."""

_SAME = "10"
_STEPS = {0: "0", 1: _SAME, -1: "110"}
"""By the change of the parent distance from node to node. Node ids count up, so the same parent is a change of 1."""
_NO_STEP = 0b111
_STEP_BITS = 3
"""Longest form."""


def log_probability(log_odds: float) -> float:
    """Return the log-probability of an event with these log-odds."""
    return -math.log1p(math.exp(-log_odds))


_LOG_PROBS = list(map(log_probability, LOG_ODDS))
_BORDERS = [log_probability((low + high) / 2) for low, high in pairwise(LOG_ODDS)]
"""Code c stands for log-probabilities from border c - 1 to border c."""


class PackedNodes(NamedTuple):
    """Parallel sequences, one entry per node."""

    tokens: Sequence[int]
    distances: Sequence[int]
    """Each node's id minus its parent's; 0: the parent is the committed token."""
    log_probs: Sequence[float]


def pack_nodes(nodes: PackedNodes) -> bytes:
    """Return the bit string with the smallest widths and shortest forms.

    Log-probabilities are rounded to the code with the nearest log-odds.
    """
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
    """Return the short form of each parent, or "" where there is none."""
    return [
        _STEPS.get(distance - before, "") if before and distance else _SAME if before == distance else ""
        for before, distance in pairwise((None, *distances))
    ]


def unpack_nodes(data: bytes, max_nodes: int) -> PackedNodes:
    """Return the nodes. Accepts longer widths and forms than `pack_nodes` writes.

    Raises `WireError` for an invalid bit string, and for more than `max_nodes` nodes before it decodes the rest.
    """
    token_bits, distance_bits = _widths(data)
    width = token_bits + CODE_BITS
    offset, end = 8 * HEADER_BYTES, 8 * len(data)
    if end - offset >= max_nodes * (width + _STEP_BITS + distance_bits) + 8:
        raise WireError(f"nodes: {len(data)} bytes have more than {max_nodes}")
    # Slices of digits take linear time; shifts of one long number take quadratic time.
    digits = f"{int.from_bytes(data):0{end}b}"
    if "0" in digits[offset + width : offset + width + _STEP_BITS]:
        raise WireError("nodes: the first one's parent needs a distance")
    values: list[int] = []
    distances: list[int] = []
    distance = 0
    for _ in range(max_nodes):
        if end - offset < 8:
            break
        form = offset + width
        values.append(int(digits[offset:form], 2))
        after = form + _STEP_BITS
        zero = digits.find("0", form, after)  # its position gives the form
        offset = zero + 1
        if zero == form + 1:
            distance += distance > 0
        elif zero < 0:
            offset = after + distance_bits
            distance = int(digits[after:offset] or "0", 2)
        else:
            distance -= zero > form
            if distance < 1:
                raise WireError(f"nodes: number {len(values)} steps to a parent that is no earlier node")
        distances.append(distance)
    _check_end(digits, offset, max_nodes)
    code_mask = (1 << CODE_BITS) - 1
    return PackedNodes(
        tokens=[value >> CODE_BITS for value in values],
        distances=distances,
        log_probs=[_LOG_PROBS[value & code_mask] for value in values],
    )


def _check_end(digits: str, offset: int, max_nodes: int) -> None:
    """Check what follows the last node, which ends at `offset`."""
    end = len(digits)
    if end - offset >= 8:
        raise WireError(f"nodes: more than {max_nodes}")
    if offset > end:
        raise WireError(f"nodes: {offset - end} bits of the last one are missing")
    if "1" in digits[offset:]:
        raise WireError(f"nodes: {end - offset} bits after the last one are not all 0")


def _widths(data: bytes) -> tuple[int, int]:
    """Return the bits of a token id and of a parent distance."""
    if len(data) < HEADER_BYTES:
        raise WireError(f"nodes: {len(data)} bytes hold no widths")
    token_bits, distance_bits = data[:HEADER_BYTES]
    if not MIN_TOKEN_BITS <= token_bits <= MAX_BITS:
        raise WireError(f"nodes: {token_bits} bits per token id")
    if distance_bits > MAX_BITS:
        raise WireError(f"nodes: {distance_bits} bits per parent distance")
    return token_bits, distance_bits
