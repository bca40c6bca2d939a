"""Packed matrices on a GPU: their numbers and products in Triton's interpreter, the kernels that a compiler makes for
an H100, the memory of a model, and products on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import EngineConfig
from paceline.gguf.gguf_file import BLOCK_TYPES, GgufFile
from paceline.memory_plan import packed_memory
from paceline.model import loading, packed_model, torch_attention
from paceline.model.gguf_model import load_packed, packed_config
from paceline.model.gpu.memory import MOST_TABLES
from paceline.model.gpu.packed_matrix import PackedMatrix, packed_row_bytes
from paceline.model.gpu.paths import DeviceTables
from paceline.model.layer_weights import QuantizedWeight
from paceline.model.native.native_library import NativeLibrary
from paceline.model.packed_checkpoint import load_packed_checkpoint
from paceline.model.packed_integers import INT4
from paceline.model.packed_model import PackedModel, check_attention
from tests.exactness.quantized_weights import PACKED_TYPES, numbers_of, random_weight
from tests.helpers import gpu_kernels
from tests.helpers.checkpoints import save_tokenizer
from tests.helpers.gguf_files import BASE, tiny_config, write_gguf
from tests.helpers.gpu_kernels import use_stand_ins
from tests.helpers.live_storages import LiveStorages
from tests.helpers.sm_90 import MOST_SHARED, Launch, RecordedKernel, compiled

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not made for it"),
    pytest.mark.timeout(900),  # of the interpreter
]

CPU = torch.device("cpu")
Q4_K, Q6_K, MXFP4, E4M3 = 12, 14, 39, 1005


@cache
def interpreted(cases: str) -> Any:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PACELINE_NATIVE": "0"}
    command = [sys.executable, "-m", "tests.unit.model.packed_product_cases", cases]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def test_kernels_take_the_numbers_that_a_file_means() -> None:
    cases = interpreted("numbers")
    assert len(cases) == 22
    for case in cases:
        assert case["same"], case
        assert case["error"] < 1e-6, case


def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    for case in interpreted("rows"):
        assert case["differing"] == [], case


def test_one_product_of_several_formats_with_biases() -> None:
    case = interpreted("mixed")
    assert case["error"] < 1e-6
    assert case["memories"] == 2


def test_models_compute_what_transformers_computes_with_their_numbers() -> None:
    for case in interpreted("models"):
        assert case["error"] < 1e-5, case
        assert case.get("embedding", 0.0) == 0.0, case


def zeros(kind: int, outputs: int, width: int) -> QuantizedWeight:
    block = BLOCK_TYPES.get(kind)
    size, count = (block.size, block.bytes) if block else (32, {INT4: 21, E4M3: 36}[kind])
    return QuantizedWeight(kind, (outputs, width), np.zeros((outputs, width // size * count), dtype=np.uint8))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    from paceline.model.gpu import packed_products

    found: list[Launch] = []
    for name in ("_product", "_add_parts", "_look_up"):
        monkeypatch.setattr(packed_products, name, RecordedKernel(getattr(packed_products, name), found))
    return found


@pytest.mark.parametrize("kind", [INT4, E4M3, MXFP4, Q4_K, Q6_K])
def test_an_h100_runs_one_kernel_of_tensor_cores_for_any_number_of_rows(
    kind: int, launches: list[Launch], tmp_path: Path
) -> None:
    from paceline.model.gpu.packed_products import PackedProduct

    product = PackedProduct([PackedMatrix.of(zeros(kind, 64, 512), CPU, torch.bfloat16)], None)
    first = launches[0]
    launches.clear()
    for count in (1, 8, 63, 64, 65, 256):
        product(torch.zeros(count, 512, dtype=torch.bfloat16))
    products = [launch for launch in launches if "codes" in launch.arguments]
    assert len(products) == 6
    for launch in products:
        assert _kind(launch) == _kind(first)
    assert "rows" in {each.name for each in first.kernel.params if each.do_not_specialize}
    made = compiled(first, tmp_path)
    assert made.products == {"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"}
    assert made.spills == 0
    assert made.shared < MOST_SHARED / 2  # two programs share a multiprocessor


def test_an_h100_runs_the_other_kernels(launches: list[Launch], tmp_path: Path) -> None:
    from paceline.model.gpu.packed_products import PackedProduct

    matrix = PackedMatrix.of(zeros(Q6_K, 64, 512), CPU, torch.bfloat16)
    PackedProduct([matrix], torch.zeros(64))
    matrix.lookup(torch.tensor([3, 5]))
    assert len(launches) == 3
    for launch in launches[1:]:
        made = compiled(launch, tmp_path)
        assert (made.spills, made.products) == (0, frozenset())


def _kind(launch: Launch) -> dict[str, Any]:
    """What a kernel is compiled for: dtypes, and integers other than the number of rows."""
    arguments = {name: getattr(value, "dtype", value) for name, value in launch.arguments.items() if name != "rows"}
    return arguments | dict(launch.options)


def test_the_split_of_inputs_is_that_of_the_matrix_alone() -> None:
    """8B's shapes: query, key and value; output; gate and up; down; the output matrix."""
    from paceline.model.gpu.packed_products import input_splits

    shapes = {(6144, 4096): 3, (4096, 4096): 4, (28672, 4096): 1, (4096, 14336): 5, (128256, 4096): 1}
    assert {shape: input_splits(shape[0], shape[1] // 256) for shape in shapes} == shapes


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_whole_units_are_hardly_larger_than_the_file_s_blocks(name: str) -> None:
    """Small integers of 4 and 6 bits have 8."""
    weight = random_weight(PACKED_TYPES[name], 16, 1024)
    matrix = PackedMatrix.of(weight, CPU, torch.bfloat16)
    assert matrix.nbytes == 16 * packed_row_bytes(weight.type, 1024)
    assert matrix.nbytes <= weight.data.nbytes * (1.2 if name == "Q2_K" else 1.04)


def test_integers_have_one_scale_for_a_group() -> None:
    """0.25 bits a weight for groups of 128, and none for a row, where blocks repeat them."""
    rows = np.random.default_rng(1).integers(0, 256, (16, 16, 21), dtype=np.uint8)
    rows[:, :, :5] = np.repeat(rows[:, ::4, :5], 4, axis=1)
    grouped = QuantizedWeight(INT4, (16, 512), rows.reshape(16, -1))
    assert PackedMatrix.of(grouped, CPU, torch.bfloat16).nbytes == 16 * 512 * 4.25 / 8
    rows[:, :, :5] = rows[:, :1, :5]
    assert PackedMatrix.of(grouped, CPU, torch.bfloat16).group == 512


def test_a_large_matrix_is_laid_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(PACKED_TYPES["Q4_K"], 50, 512)
    whole = PackedMatrix.of(weight, CPU, torch.bfloat16)
    monkeypatch.setattr("paceline.model.gpu.packed_matrix.CHUNK", 7 * 512)
    parts = PackedMatrix.of(weight, CPU, torch.bfloat16)
    assert all(torch.equal(plane, parts.planes[name]) for name, plane in whole.planes.items())


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU in the place of a GPU, whose kernels compute nothing."""

    def place(model: Any, *given: Any) -> Any:
        model.native = model.has_native_attention = False
        return model._on_gpu(CPU, *given)

    monkeypatch.setenv("PACELINE_NATIVE", "0")
    monkeypatch.setattr(NativeLibrary, "_instance", None)
    monkeypatch.setattr(PackedModel, "_by_native_code", place)
    monkeypatch.setattr(PackedModel, "native", False, raising=False)
    monkeypatch.setattr(PackedMatrix, "product", lambda *given: partial(_nothing, given))
    monkeypatch.setattr(packed_model, "check_attention", lambda *_: None)


def _nothing(kept_alive: object, x: torch.Tensor) -> torch.Tensor:
    return x


CONFIG = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512, "num_hidden_layers": 4}


@pytest.mark.parametrize("quantization", ["Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.usefixtures("as_on_gpu")
def test_a_model_takes_the_memory_of_its_file(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no time is there more than that, the cache, and one layer as it is read. The plan says as much."""
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config("llama", **CONFIG, max_position_embeddings=64), quantization)
    engine = EngineConfig(slots=256, dtype="bfloat16")
    with LiveStorages("cpu") as live:
        model = load_packed(str(path), str(path), engine)
        assert isinstance(model, PackedModel)
        held = live.bytes - model.cache.data.nbytes
    matrices = sum(tensor.size for tensor in GgufFile.open(path).tensors.values() if tensor.type.is_packed)
    assert held < 1.04 * matrices + 50_000  # norms and rotary tables
    monkeypatch.setattr(loading, "use_device", torch.device)
    on_gpu = engine.model_copy(update={"device": "cuda"})
    config = packed_config(str(path), on_gpu)
    assert config is not None
    planned = packed_memory(str(path), config, on_gpu).weights
    assert abs(planned - held) < 50_000


@pytest.fixture
def file(tmp_path: Path) -> str:
    write_gguf(path := tmp_path / "model.gguf", tiny_config("llama"), "Q8_0")
    return str(path)


def loaded(path: str) -> PackedModel:
    model = load_packed(path, path, EngineConfig(slots=256, dtype="float32"))
    assert model is not None
    return model


@pytest.mark.usefixtures("as_on_gpu")
def test_split_sums_are_switched_off_before_the_first_pass(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(packed_model, "use_whole_sums", calls.append)
    monkeypatch.setattr(packed_model, "check_attention", lambda *_: calls.append("pass"))
    loaded(file)
    assert calls == [CPU, "pass"]


@pytest.fixture
def by_numbers(as_on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and attention by torch's operators, from what the packed matrices mean. Attention is checked."""

    def place(weights: list[Any], device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        return [
            torch.from_numpy(np.array(numbers_of(each))) if isinstance(each, QuantizedWeight) else each.to(dtype)
            for each in weights
        ]

    monkeypatch.setattr(packed_model, "on_device", place)
    monkeypatch.setattr(packed_model, "check_attention", check_attention)
    use_stand_ins(monkeypatch)


@pytest.mark.parametrize("off", [1.0, 1.5])
@pytest.mark.usefixtures("by_numbers")
def test_kernels_that_attend_wrong_beside_packed_weights_are_left_out(
    off: float, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gpu_kernels.attend
    monkeypatch.setattr(gpu_kernels, "attend", lambda *given, **options: off * right(*given, **options))
    assert bool(loaded(file).cache.attention_name) == (off == 1.0)


@pytest.mark.usefixtures("by_numbers")
def test_slot_tables_beside_packed_weights_are_as_long_as_the_longest_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's model has rotary tables of all its 256 positions."""
    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, range(BASE["vocab_size"]))
    tables = Mock(wraps=DeviceTables)
    monkeypatch.setattr(torch_attention, "DeviceTables", tables)
    load_packed_checkpoint(str(tmp_path), EngineConfig(slots=256, quantization="q8_0", max_model_len=100))
    tables.assert_called_once_with(MOST_TABLES, 100, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PACKED_TYPES)
def test_a_gpu_computes_the_product_and_rows_do_not_depend_on_others(name: str, dtype: torch.dtype) -> None:
    from paceline.model.gpu.packed_products import PackedProduct

    torch.manual_seed(1)
    weight = random_weight(PACKED_TYPES[name], 328, 2048)
    matrix = PackedMatrix.of(weight, torch.device("cuda"), dtype)
    product, x = PackedProduct([matrix], None), torch.randn(256, 2048, device="cuda").to(dtype)
    numbers = torch.from_numpy(np.array(numbers_of(weight))).to(dtype)
    assert torch.equal(matrix.lookup(torch.arange(328, device="cuda")).cpu(), numbers)
    together, meant = product(x), x.cpu().float() @ numbers.float().T
    assert float((together.cpu().float() - meant).abs().max() / meant.abs().max()) < 2**-8
    for count in (*range(1, 18), 24, 63, 64, 65, 100, 192):
        for first in (0, 256 - count):
            assert torch.equal(product(x[first : first + count]), together[first : first + count]), (count, first)
