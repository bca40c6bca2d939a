"""Products with quantised weights: the file's numbers, int8 or float rows, and bits that depend on the row alone."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from paceline.model.attention import AttentionOptions, Heads, KVCache
from paceline.model.layer_weights import QuantizedWeight
from paceline.model.native import native_library
from paceline.model.native.build import ISAS, SOURCES, compile_library, find_compiler, native_description
from paceline.model.native.native_attention import NativeAttention
from paceline.model.native.native_library import NativeLibrary, NativeProduct, dequantize
from paceline.model.packed_integers import IntegerMatrix
from paceline.model.rows import SlotTable
from tests.exactness.quantized_weights import (
    E4M3_WIDTHS,
    INTEGER_TYPES,
    PACKED_TYPES,
    meant_integers,
    numbers_of,
    random_float8,
    random_integers,
    random_weight,
)

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_NATIVE") == "0", reason="native code is switched off")

COLUMNS = 80
"""Five panels, which two threads cannot share equally."""
ROWS = (*range(1, 20), 31, 32, 33, 48, 64)
BLOCK = 32
ALL_TYPES = pytest.mark.parametrize("name", [*PACKED_TYPES, *INTEGER_TYPES, *E4M3_WIDTHS])


def width_of(name: str) -> int:
    """With an odd number of blocks, where the format allows it: a unit of two blocks is then not full."""
    if name in INTEGER_TYPES:
        return INTEGER_TYPES[name].width
    if name in E4M3_WIDTHS:
        return E4M3_WIDTHS[name]
    return 768 if PACKED_TYPES[name].size > BLOCK else 17 * BLOCK


def weight_of(name: str) -> QuantizedWeight:
    if name in INTEGER_TYPES:
        return integers_of(name).packed()
    if name in E4M3_WIDTHS:
        return random_float8(name, COLUMNS)[0]
    return random_weight(PACKED_TYPES[name], COLUMNS, width_of(name))


def integers_of(name: str) -> IntegerMatrix:
    return random_integers(INTEGER_TYPES[name], COLUMNS)


def meant_by(name: str) -> npt.NDArray[np.float32]:
    if name in E4M3_WIDTHS:
        return random_float8(name, COLUMNS)[1]
    return meant_integers(integers_of(name)) if name in INTEGER_TYPES else numbers_of(weight_of(name))


def rows_of(count: int, width: int) -> Tensor:
    """Rows of several sizes: an empty one, one with outliers, and one of the largest codes, whose sums are large."""
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(1))
    rows[3 % count] = 0
    if count > 5:
        rows[5] = 1
    rows[7 % count] *= 1000 * torch.randn(width, generator=torch.Generator().manual_seed(2)).exp()
    return rows


def quantized(rows: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Codes [rows, blocks, 32] and scales [rows, blocks] by the formula: round(x · 127 / largest), largest / 127."""
    blocks = rows.reshape(len(rows), -1, BLOCK)
    largest = np.abs(blocks).max(-1)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(blocks.astype(np.float64) * inverse[..., None]).astype(np.int64)
    return codes, (largest / np.float32(127)).astype(np.float64)


@ALL_TYPES
def test_dequantized_weights_are_those_of_the_gguf_package_and_of_the_formula(name: str) -> None:
    np.testing.assert_array_equal(dequantize(weight_of(name)).numpy(), meant_by(name))


@pytest.mark.parametrize("name", INTEGER_TYPES)
def test_integers_have_the_layout_that_their_groups_allow(name: str) -> None:
    assert weight_of(name).type == INTEGER_TYPES[name].type


@pytest.mark.parametrize("name", [*PACKED_TYPES, *INTEGER_TYPES])
def test_a_product_is_that_of_int8_rows_with_the_numbers_of_the_file(name: str) -> None:
    """Up to float32 rounding: 17 or 24 blocks add at most as many units of 2^-24 of the sum of magnitudes."""
    weight = weight_of(name)
    rows = rows_of(32, width_of(name)).numpy()
    codes, scales = quantized(rows)
    taken = (codes * scales[..., None]).reshape(rows.shape)
    numbers = meant_by(name).astype(np.float64)
    magnitudes = np.abs(taken) @ np.abs(numbers.T)
    result = NativeProduct(weight)(torch.from_numpy(rows)).numpy()
    assert np.all(np.abs(result - taken @ numbers.T) <= 2**-24 * 24 * magnitudes)


@pytest.mark.parametrize("name", E4M3_WIDTHS)
@pytest.mark.parametrize("count", [1, 2, 3, 32])
def test_a_product_with_e4m3_is_that_of_float_rows(name: str, count: int) -> None:
    """Up to float32 rounding: a unit has 64 steps, and there are 5 of them."""
    rows, numbers = rows_of(count, width_of(name)), meant_by(name).astype(np.float64)
    magnitudes = np.abs(rows.numpy()) @ np.abs(numbers.T)
    result = NativeProduct(weight_of(name))(rows).numpy()
    assert np.all(np.abs(result - rows.numpy() @ numbers.T) <= 2**-24 * 70 * magnitudes)


@ALL_TYPES
def test_a_row_has_the_same_bits_beside_any_other_rows(name: str) -> None:
    product = NativeProduct(weight_of(name))
    rows = rows_of(max(ROWS) + 9, width_of(name))
    alone = torch.cat([product(row.unsqueeze(0)) for row in rows])
    for count in ROWS:
        for first in (0, 9):
            assert torch.equal(product(rows[first : first + count]), alone[first : first + count]), (count, first)


@pytest.fixture
def pools() -> Iterator[dict[int, NativeLibrary]]:
    before = NativeLibrary.instance()
    yield {threads: NativeLibrary(threads) for threads in (1, 2, 3)}
    NativeLibrary.set_instance(before)


@ALL_TYPES
def test_bits_do_not_depend_on_the_number_of_threads(name: str, pools: dict[int, NativeLibrary]) -> None:
    weight, rows = weight_of(name), rows_of(21, width_of(name))
    results = []
    for pool in pools.values():
        NativeLibrary.set_instance(pool)
        results.append(NativeProduct(weight)(rows))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.fixture(scope="module")
def other_isa(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The same sources for AVX2, whose byte products saturate, or without an instruction for dot products."""
    mine, compiler = native_description().split(",")[0], find_compiler()
    known = {isa.name: isa for isas in ISAS.values() for isa in isas}
    if compiler is None or mine not in known or mine in ("avx2", "neon"):
        pytest.skip("this machine compiles for one instruction set alone")
    other = known["neon" if mine.startswith("neon") else "avx2"]
    folder: Path = tmp_path_factory.mktemp("other")
    return ctypes.CDLL(str(compile_library(SOURCES, other, compiler, folder, "test")))


def test_attention_to_a_cache_in_8_bits_has_the_same_bits_on_each_instruction_set(
    other_isa: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    heads = [torch.randn(72, count, 96, generator=generator) for count in (6, 2, 2)]
    table = SlotTable(range(100, 28, -1))
    options = AttentionOptions(96**-0.5, window=40, softcap=5.0, sinks=torch.arange(6.0))

    def attended() -> Tensor:
        cache = KVCache(1, 128, Heads(2, 3, 96), torch.float32, torch.device("cpu"), 96, "int8")
        this = NativeAttention(cache)([table.row(0, position) for position in range(72)])
        return this.attend(heads[0], heads[1], heads[2], 0, options)

    mine = attended()
    monkeypatch.setattr(native_library, "native_library", lambda: other_isa)
    monkeypatch.setattr(NativeLibrary, "_instance", None)
    assert torch.equal(attended(), mine)


@ALL_TYPES
def test_bits_do_not_depend_on_the_instruction_set(name: str, other_isa: ctypes.CDLL) -> None:
    weight, rows = weight_of(name), rows_of(9, width_of(name)).contiguous()
    expected, result = NativeProduct(weight)(rows), torch.empty(9, COLUMNS)
    for function in ("thread_pool_create", "product_create"):
        getattr(other_isa, f"paceline_{function}").restype = ctypes.c_void_p
    pool = ctypes.c_void_p(other_isa.paceline_thread_pool_create(1))
    data = ctypes.c_void_p(weight.data.ctypes.data)
    product = ctypes.c_void_p(
        other_isa.paceline_product_create(0, data, weight.type, None, COLUMNS, width_of(name), pool)
    )
    addresses = ctypes.c_void_p(rows.data_ptr()), 9, ctypes.c_void_p(result.data_ptr())
    other_isa.paceline_product_run(product, pool, *addresses)
    other_isa.paceline_product_destroy(product)
    other_isa.paceline_thread_pool_destroy(pool)
    assert torch.equal(expected, result)
