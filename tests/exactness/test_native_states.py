"""Native states and convolutions are torch's up to rounding, and a token's bits depend on its own path alone: at sizes
that no architecture has, with any number of threads. `test_states.py` has whole models."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.model.native.native_library import NativeLibrary
from paceline.model.rows import GROUP, Row, SlotTable
from paceline.model.states.recurrences import Convolution, Scan
from paceline.model.states.state_cache import StateCache
from paceline.model.states.stored_states import StoredStates
from tests.exactness.test_states import KeptRequest

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_NATIVE") == "0", reason="native code is switched off")

WINDOW = 4
CPU = torch.device("cpu")


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = NativeLibrary.instance()
    NativeLibrary.set_instance(NativeLibrary(request.param))
    yield
    NativeLibrary.set_instance(before)


class Layers:
    """Of tokens whose inputs follow from their texts: a scan's output and then a convolution's."""

    def __init__(self, kind: str, *, native: bool) -> None:
        self.kind = kind
        self.states = StoredStates(StateCache(3, 64, WINDOW, CPU, native=native))

    def run(self, rows: Sequence[Row], texts: Sequence[Sequence[int]]) -> list[Tensor]:
        padded = -(-len(rows) // GROUP) * GROUP
        reader = self.states.reader(rows, padded)
        padding = [[0]] * (padded - len(rows))
        scans = [SCANS[self.kind](generator_of(text)) for text in (*texts, *padding)]
        names = ("decays", "keys", "values", "queries")
        scan = Scan(*(torch.cat([getattr(each, name) for each in scans]) for name in names), rates=scans[0].rates)
        if scans[0].betas is not None:
            scan = replace(scan, betas=torch.cat([each.betas for each in scans]))
        convolution, channels = CONVOLUTIONS[self.kind]
        inputs = torch.stack([torch.randn(channels, generator=generator_of(text)) for text in (*texts, *padding)])
        dtype = convolution.weight.dtype
        parts = reader.scan(scan).flatten(1), reader.convolve(inputs.to(dtype), convolution).float()
        return list(torch.cat(parts, 1)[: len(rows)])

    def path(self, text: Sequence[int]) -> Tensor:
        """A text token by token: the output of its last token."""
        table = SlotTable(range(1, len(text) + 1))
        return [self.run([table.row(0, i)], [text[: i + 1]]) for i in range(len(text))][-1][0]


def generator_of(text: Sequence[int]) -> torch.Generator:
    return torch.Generator().manual_seed(hash(tuple(text)) % 2**31)


def numbers(*shape: int, by: torch.Generator) -> Tensor:
    return torch.randn(1, *shape, generator=by)


def scan(heads: int, groups: int, size: int, channels: int, decays: int, by: torch.Generator, **more: Any) -> Scan:
    decay, query = torch.rand(1, heads, decays, generator=by), numbers(groups, size, by=by)
    return Scan(decay, numbers(groups, size, by=by) / size**0.5, numbers(heads, channels, by=by), query, **more)


RATES = -torch.rand(5, 40, generator=torch.Generator().manual_seed(2))
SCANS = {
    "delta rule": lambda by: scan(6, 3, 24, 40, 1, by, betas=torch.rand(1, 6, 1, generator=by)),
    "delta rule with a decay for each channel": lambda by: scan(
        2, 2, 7, 33, 7, by, betas=torch.rand(1, 2, 1, generator=by)
    ),
    "Mamba-2": lambda by: scan(4, 1, 16, 5, 1, by),
    "Mamba": lambda by: scan(1, 1, 5, 40, 40, by, rates=RATES),
}


def convolution(channels: int, taps: int, dtype: torch.dtype, activation: str | None, *, bias: bool) -> Convolution:
    by = torch.Generator().manual_seed(1)
    weight = torch.randn(channels, taps, generator=by).to(dtype)
    return Convolution(weight, torch.randn(channels, generator=by).to(dtype) if bias else None, activation)


CONVOLUTIONS = {
    "delta rule": (convolution(96, 4, torch.bfloat16, "silu", bias=False), 96),
    "delta rule with a decay for each channel": (convolution(37, 5, torch.float32, "silu", bias=True), 37),
    "Mamba-2": (convolution(13, 3, torch.bfloat16, None, bias=True), 13),
    "Mamba": (convolution(64, 2, torch.float32, "gelu", bias=False), 64),
}
"""With their channels."""


@pytest.mark.parametrize("kind", SCANS)
def test_a_token_s_bits_follow_from_its_path(kind: str) -> None:
    """Trees of two requests, of which parts are accepted."""
    chance, slots = random.Random(4), iter(range(1000, 0, -1))
    native, alone, by_torch = Layers(kind, native=True), Layers(kind, native=True), Layers(kind, native=False)
    paths = [KeptRequest(chance.choices(range(99), k=length), slots) for length in (1, 9)]
    tables = {path: SlotTable() for path in paths}
    for _ in range(5):
        grown = [path.tree(chance) for path in paths]
        rows, texts = ([each for some in grown for each in some[n]] for n in range(2))
        outputs = native.run(rows, texts)
        for path in paths:  # torch's states are in a cache of their own, which marks other tables
            tables[path].slots.extend(path.table.slots[len(tables[path]) :])
        same = {path.table: tables[path] for path in paths}
        expected = by_torch.run([row._replace(slot_table=same[row.slot_table]) for row in rows], texts)
        for output, other, text in zip(outputs, expected, texts, strict=True):
            assert torch.equal(output, alone.path(text))
            torch.testing.assert_close(output, other, atol=2e-2, rtol=2e-2)
        for path in paths:
            path.accept(chance.choice(path.nodes), chance.randrange(99))


@pytest.mark.parametrize("kind", SCANS)
def test_scans_are_exact_to_float32(kind: str) -> None:
    chance = random.Random(5)
    text = chance.choices(range(99), k=50)
    outputs = []
    for native in (True, False):
        table = SlotTable(range(1, len(text) + 1))
        layers = Layers(kind, native=native)
        rows = [table.row(0, i) for i in range(len(text))]
        heads, _, channels = SCANS[kind](generator_of([0])).shape
        outputs.append(torch.stack(layers.run(rows, [text[: i + 1] for i in range(len(text))]))[:, : heads * channels])
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
