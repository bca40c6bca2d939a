"""Nodes as bits: what is packed comes out again, in as few bytes as the contract says, and nonsense is refused."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.tree import LEAST_LOG_PROB
from paceline.wire.draft_frames import MAX_NODES
from paceline.wire.errors import WireError
from paceline.wire.node_bits import LOG_ODDS, Nodes, log_probability, pack, unpack

HALF_A_LEVEL = 0.25
CERTAIN = log_probability(LOG_ODDS[-1])
EVEN = log_probability(0.0)


def log_odds(log_prob: float) -> float:
    if log_prob in (0.0, -math.inf):
        return math.copysign(math.inf, log_prob + 1)
    return log_prob - math.log(-math.expm1(log_prob))


@st.composite
def some_nodes(draw: st.DrawFn) -> Nodes:
    """Of widths that are drawn first, so that narrow ones and wide ones come."""
    count = draw(st.integers(0, 40))
    tokens = st.integers(0, 2 ** draw(st.integers(1, 32)) - 1)
    distances = st.integers(0, 2 ** draw(st.integers(0, 32)) - 1)
    log_probs = st.floats(max_value=0.0) | st.floats(-5.0, 0.0)
    return Nodes(*(draw(st.lists(each, min_size=count, max_size=count)) for each in (tokens, distances, log_probs)))


@given(some_nodes())
def test_what_is_packed_comes_out(nodes: Nodes) -> None:
    """Ids as they were; log-odds within half a level, where there are levels, and at the nearer end elsewhere."""
    data = pack(nodes)
    found = unpack(data, len(nodes.tokens))
    assert (found.tokens, found.distances) == (nodes.tokens, nodes.distances)
    for before, after in zip(nodes.log_probs, found.log_probs, strict=True):
        nearest = min(max(log_odds(before), LOG_ODDS[0]), LOG_ODDS[-1])
        assert abs(log_odds(after) - nearest) <= HALF_A_LEVEL + 1e-9
        assert LEAST_LOG_PROB < after < 0.0
    assert pack(found) == data


def bits(*fields: tuple[int, int]) -> bytes:
    """(value, bits) after (value, bits), as the contract has it."""
    text = "".join(f"{value:0{width}b}" for value, width in fields if width)
    text += "0" * (-len(text) % 8)
    return bytes(int(text[place : place + 8], 2) for place in range(0, len(text), 8))


def test_every_bit_is_where_the_contract_says() -> None:
    """Log-odds 0 is code 13; certainty is 31."""
    nodes = Nodes([300, 5], [0, 3], [EVEN, 0.0])
    assert pack(nodes) == bytes([9, 2]) + bits((300, 9), (0, 2), (13, 5), (5, 9), (3, 2), (31, 5))
    assert pack(Nodes([5], [1], [-math.inf])) == bytes([3, 1]) + bits((5, 3), (1, 1), (0, 5))


def test_levels() -> None:
    """Halves of log-odds, each its own nearest, from about one in a thousand to what is as good as certain."""
    log_probs = list(map(log_probability, LOG_ODDS))
    assert unpack(pack(Nodes([0] * 32, [0] * 32, log_probs)), 32).log_probs == log_probs
    assert [high - low for low, high in pairwise(LOG_ODDS)] == [0.5] * 31
    assert math.exp(log_probs[0]) < 0.002
    assert math.exp(log_probs[-1]) > 0.9998


@pytest.mark.parametrize(
    ("tokens", "distances", "size"),
    [
        ([], [], 2),
        ([0], [0], 2 + 1),
        ([1] * 8, [0] * 8, 2 + 8),
        ([7, 1], [0, 1], 2 + 3),
        ([2**17 - 1] * 3, [0] * 3, 2 + 9),
        ([2**32 - 1], [2**32 - 1], 2 + 9),
        ([2**12 - 1 - i for i in range(20)], [0, *(1 + i % 15 for i in range(19))], 2 + 53),
        (list(range(MAX_NODES)), [0, *[1] * (MAX_NODES - 1)], 2 + MAX_NODES * 18 // 8),
        ([2**32 - 1] * MAX_NODES, [2**32 - 1] * MAX_NODES, 2 + MAX_NODES * 69 // 8),
    ],
    ids=["none", "one", "roots", "small", "large tokens", "largest", "typical", "a chain of most", "most and largest"],
)
def test_sizes(tokens: Sequence[int], distances: Sequence[int], size: int) -> None:
    nodes = Nodes(tokens, distances, [CERTAIN] * len(tokens))
    data = pack(nodes)
    assert len(data) == size
    assert unpack(data, MAX_NODES) == nodes


@given(st.integers(0, 64), st.integers(3, 32), st.integers(0, 32))
@example(1, 3, 0)
@example(1, 4, 0)
def test_the_length_tells_how_many(count: int, token_bits: int, distance_bits: int) -> None:
    """Also in widths that are larger than need be."""
    data = bytes([token_bits, distance_bits]) + bits(*[(0, token_bits), (0, distance_bits), (13, 5)] * count)
    assert unpack(data, 64) == Nodes([0] * count, [0] * count, [EVEN] * count)


BAD = {
    "nothing": (b"", "do not tell the widths"),
    "one width": (b"\x03", "do not tell the widths"),
    "token ids without bits": (bytes([0, 0]), "0 bits per token id"),
    "nodes under a byte": (bytes([2, 0]) + bytes(7), "2 bits per token id"),
    "token ids too wide": (bytes([33, 0]) + bytes(20), "33 bits per token id"),
    "distances too wide": (bytes([3, 33]) + bytes(20), "33 bits per parent distance"),
    "cut": (pack(Nodes([300, 5], [0, 3], [EVEN, EVEN]))[:-1], "8 bits after the last one"),
    "a byte too many": (pack(Nodes([300, 5], [0, 3], [EVEN, EVEN])) + b"\0", "8 bits after the last one"),
    "less than a node": (bytes([17, 0, 0, 0]), "16 bits after the last one"),
    "padding of ones": (bytes([4, 0, 0b00000110, 0b11000000]), "7 bits after the last one"),
    "one node too many": (bytes([3, 0]) + bytes(MAX_NODES + 1), f"{MAX_NODES + 1}, more than"),
}


@pytest.mark.parametrize("bad", BAD, ids=list(BAD))
def test_nonsense_is_refused(bad: str) -> None:
    data, complaint = BAD[bad]
    with pytest.raises(WireError, match=f"^nodes: .*{complaint}"):
        unpack(data, MAX_NODES)


@given(st.binary(max_size=40))
def test_any_bytes_are_nodes_or_refused(data: bytes) -> None:
    try:
        nodes = unpack(data, 8)
    except WireError:
        return
    assert len(nodes.tokens) == len(nodes.distances) == len(nodes.log_probs) <= 8


def test_too_many_nodes_cost_nothing() -> None:
    data = bytes([3, 0]) + bytes(2**20)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="more than"):
            unpack(data, MAX_NODES)
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("nodes", [Nodes([-1], [0], [-1.0]), Nodes([5, 5], [1, -1], [-1.0, -1.0])])
def test_what_is_negative_is_not_packed(nodes: Nodes) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        pack(nodes)
