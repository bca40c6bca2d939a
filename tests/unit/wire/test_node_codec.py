"""Packed nodes: they round-trip, take the bytes of the contract, and invalid bits are refused."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.core.tree import MIN_LOG_PROB
from paceline.wire.draft_codec import MAX_NODES
from paceline.wire.link_errors import WireError
from paceline.wire.node_codec import LOG_ODDS, PackedNodes, log_probability, pack_nodes, unpack_nodes

HALF_STEP = 0.25
CERTAIN = log_probability(LOG_ODDS[-1])
EVEN = log_probability(0.0)


def log_odds(log_prob: float) -> float:
    if log_prob in (0.0, -math.inf):
        return math.copysign(math.inf, log_prob + 1)
    return log_prob - math.log(-math.expm1(log_prob))


@st.composite
def some_nodes(draw: st.DrawFn) -> PackedNodes:
    """Nodes of narrow and wide fields, with parents near the previous node's parent and far from it."""
    count = draw(st.integers(0, 40))
    tokens = st.integers(0, 2 ** draw(st.integers(1, 32)) - 1)
    anywhere = st.integers(0, 2 ** draw(st.integers(0, 32)) - 1)
    log_probs = st.floats(max_value=0.0) | st.floats(-5.0, 0.0)
    distances = [draw(anywhere)] if count else []
    while len(distances) < count:
        distances.append(draw(st.integers(max(distances[-1] - 2, 0), min(distances[-1] + 2, 2**32 - 1)) | anywhere))
    return PackedNodes(
        draw(st.lists(tokens, min_size=count, max_size=count)),
        distances,
        draw(st.lists(log_probs, min_size=count, max_size=count)),
    )


@given(some_nodes())
@example(PackedNodes([1], [32], [-1.0]))
@example(PackedNodes([1, 1], [1, 0], [-1.0, -1.0]))
def test_round_trip(nodes: PackedNodes) -> None:
    """Ids are exact. Log-odds are within half a step, or at the nearer end of the range."""
    data = pack_nodes(nodes)
    found = unpack_nodes(data, len(nodes.tokens))
    assert (found.tokens, found.distances) == (nodes.tokens, nodes.distances)
    for before, after in zip(nodes.log_probs, found.log_probs, strict=True):
        nearest = min(max(log_odds(before), LOG_ODDS[0]), LOG_ODDS[-1])
        assert abs(log_odds(after) - nearest) <= HALF_STEP + 1e-9
        assert MIN_LOG_PROB < after < 0.0
    assert pack_nodes(found) == data


def bits(*fields: str) -> bytes:
    """Return these digits as bytes, padded with zeros."""
    text = "".join(fields).replace(" ", "")
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8))


def test_the_layout_of_a_growth() -> None:
    """Two children of the committed token, a child of the first, every step from there, the committed token again."""
    log_probs = [EVEN, CERTAIN, log_probability(LOG_ODDS[0]), EVEN, EVEN, EVEN, EVEN]
    nodes = PackedNodes([5, 2, 7, 1, 6, 0, 4], [0, 0, 2, 2, 3, 2, 0], log_probs)
    data = bytes([3, 2]) + bits(
        "101 01101 111 00",
        "010 11111 10",
        "111 00000 111 10",
        "001 01101 0",
        "110 01101 10",
        "000 01101 110",
        "100 01101 111 00",
    )
    assert data == bytes.fromhex("03 02 ad e2 fd c1 e2 d6 6c 1b a3 78")
    assert pack_nodes(nodes) == data
    assert unpack_nodes(data, 7) == nodes
    wide = PackedNodes([300, 5], [2, 5], [0.0, -math.inf])  # certainty and impossibility
    assert pack_nodes(wide) == bytes([9, 3]) + bits("100101100 11111 111 010", "000000101 00000 111 101")


def test_log_odds_codes() -> None:
    """They are 0.5 apart, and reach from about 0.1 % to practical certainty."""
    log_probs = list(map(log_probability, LOG_ODDS))
    assert unpack_nodes(pack_nodes(PackedNodes([0] * 32, [0] * 32, log_probs)), 32).log_probs == log_probs
    assert [high - low for low, high in pairwise(LOG_ODDS)] == [0.5] * 31
    assert math.exp(log_probs[0]) < 0.002
    assert math.exp(log_probs[-1]) > 0.9998


IN_ORDER = [id_ - parent for id_, parent in enumerate([1, 1, 2, 3, 5, 5, 6, 7, 7, 7, 8], start=9)]
SIZES = {
    "none": ([], [], 2),
    "one": ([0], [0], 2 + 2),
    "roots": ([1] * 8, [0] * 8, 2 + 11),
    "small": ([7, 1], [0, 1], 2 + 3),
    "siblings": ([1] * 10, list(range(1, 11)), 2 + 13),
    "large tokens": ([2**17 - 1] * 3, [0] * 3, 2 + 10),
    "largest": ([2**32 - 1], [2**32 - 1], 2 + 9),
    # 6 bits per token, 5 per probability, 7 for the first parent, then 2 for a sibling, 1 for the next parent and 3
    # for the one after a node without children: 23 for all parents, and no bit is left over
    "in the order of their parents": ([63] * 11, IN_ORDER, 2 + (11 * (6 + 5) + 23) // 8),
    "a chain of most": (list(range(MAX_NODES)), [0, *[1] * (MAX_NODES - 1)], 2 + MAX_NODES * 18 // 8 + 1),
    "most and largest": ([2**32 - 1] * MAX_NODES, [2**32 - 1, 1] * (MAX_NODES // 2), 2 + MAX_NODES * 72 // 8),
}


@pytest.mark.parametrize(("tokens", "distances", "size"), SIZES.values(), ids=SIZES)
def test_sizes(tokens: Sequence[int], distances: Sequence[int], size: int) -> None:
    nodes = PackedNodes(tokens, distances, [CERTAIN] * len(tokens))
    data = pack_nodes(nodes)
    assert len(data) == size
    assert unpack_nodes(data, MAX_NODES) == nodes


@given(st.integers(3, 32), st.integers(1, 32), st.lists(st.sampled_from(["0", "10", "111"]), max_size=64))
@example(3, 1, ["0"] * 64)
def test_the_length_gives_the_number_of_nodes(token_bits: int, distance_bits: int, forms: list[str]) -> None:
    """Also with longer widths and forms than necessary."""
    token, far = "0" * token_bits + "01101", f"111{1:0{distance_bits}b}"
    distances = [1]
    for form in forms:
        distances.append({"0": distances[-1], "10": distances[-1] + 1, "111": 1}[form])
    parents = [far, *(form if form != "111" else far for form in forms)]
    data = bytes([token_bits, distance_bits]) + bits(*(token + parent for parent in parents))
    count = len(parents)
    assert unpack_nodes(data, count) == PackedNodes([0] * count, distances, [EVEN] * count)


TWO = pack_nodes(PackedNodes([300, 5], [0, 3], [EVEN, EVEN]))
BAD = {
    "nothing": (b"", "hold no widths"),
    "one width": (b"\x03", "hold no widths"),
    "token ids without bits": (bytes([0, 0]), "0 bits per token id"),
    "nodes of a byte": (bytes([2, 0]) + bytes(7), "2 bits per token id"),
    "token ids too wide": (bytes([33, 0]) + bytes(20), "33 bits per token id"),
    "distances too wide": (bytes([3, 33]) + bytes(20), "33 bits per parent distance"),
    "cut": (TWO[:-1], "6 bits of the last one are missing"),
    "a byte too many": (TWO + b"\0", "9 bits of the last one are missing"),
    "eight bits too many": (
        bytes([3, 1]) + bits("000 01101 111 0", "000 01101 111 1", "00000000"),
        "4 bits of the last one are missing",
    ),
    "less than a node": (bytes([17, 0, 0, 0]), "9 bits of the last one are missing"),
    "cut after 1": (bytes([3, 4]) + bits("000 01101 111 0001", "000 01101 1"), "6 bits of the last one are missing"),
    "cut after 11": (bytes([3, 3]) + bits("000 01101 111 001", "000 01101 11"), "4 bits of the last one are missing"),
    "padding ends in one": (bytes([3, 0]) + bits("000 01101 111", "00001"), "5 bits after the last one"),
    "padding begins with one": (bytes([8, 1]) + bits("00000000 01101 111 0", "1000000"), "7 bits after the last one"),
    "a first next": (bytes([3, 1]) + bits("000 01101 0"), "the first one's parent"),
    "a first same": (bytes([3, 1]) + bits("000 01101 10"), "the first one's parent"),
    "a first next but one": (bytes([3, 1]) + bits("000 01101 110"), "the first one's parent"),
    "next after the root": (bytes([3, 0]) + bits("000 01101 111", "000 01101 0"), "number 2 steps"),
    "next but one after the root": (bytes([3, 0]) + bits("000 01101 111", "000 01101 110"), "number 2 steps"),
    "its own parent": (bytes([3, 1]) + bits("000 01101 111 1", "000 01101 110"), "number 2 steps"),
    "one node too many": (
        pack_nodes(PackedNodes([0] * (MAX_NODES + 1), [0] * (MAX_NODES + 1), [EVEN] * (MAX_NODES + 1))),
        f"more than {MAX_NODES}",
    ),
    "bytes for more nodes": (bytes([3, 0]) + bytes(2 * MAX_NODES), f"{2 + 2 * MAX_NODES} bytes have more than"),
}


@pytest.mark.parametrize(("data", "complaint"), BAD.values(), ids=BAD)
def test_invalid_bits_are_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(WireError, match=f"^nodes: .*{complaint}"):
        unpack_nodes(data, MAX_NODES)


@st.composite
def half_valid(draw: st.DrawFn) -> bytes:
    """Valid widths and a valid first node, then any bits."""
    token_bits, distance_bits = draw(st.integers(3, 8)), draw(st.integers(0, 4))
    return bytes([token_bits, distance_bits]) + bits("0" * token_bits, "01101 111", draw(st.text("01", max_size=150)))


@given(st.binary(max_size=40) | half_valid())
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        nodes = unpack_nodes(data, 8)
    except WireError:
        return
    assert len(nodes.tokens) == len(nodes.distances) == len(nodes.log_probs) <= 8
    assert min(nodes.distances, default=0) >= 0
    again = pack_nodes(nodes)
    assert len(again) <= len(data)
    assert unpack_nodes(again, 8) == nodes


def test_a_byte_after_the_last_possible_node_is_refused() -> None:
    data = bytes([3, 1]) + bits("000 01101 111 1", *["000 01101 0"] * 4)
    assert unpack_nodes(data, 5).distances == [1] * 5
    with pytest.raises(WireError, match="more than 5"):
        unpack_nodes(data + b"\0", 5)


def test_too_many_nodes_are_refused_before_they_are_decoded() -> None:
    data = bytes([3, 0]) + bytes(2**20)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="more than"):
            unpack_nodes(data, MAX_NODES)
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("tokens", "distances"), [([-1], [0]), ([5], [-1]), ([5, 5], [0, -1]), ([5, 5], [1, -1])])
def test_negative_values_are_not_packed(tokens: list[int], distances: list[int]) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        pack_nodes(PackedNodes(tokens, distances, [-1.0] * len(tokens)))
