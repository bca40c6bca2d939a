"""The line that names what a target's numbers depend on, and its way to gateways and the registry."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import transformers
from transformers import LlamaConfig

from paceline import __version__
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.engine_config import KVCacheDtype
from paceline.engine.draft_client import NoDraftClient
from paceline.engine.engine import Engine
from paceline.model import load
from paceline.model import numerics as numerics_module
from paceline.model.loading import build
from paceline.model.native.build import native_description
from paceline.model.native.native_library import NativeLibrary
from paceline.model.numerics import numerics_of, quantization_of
from paceline.model.packed_model import product_numerics
from paceline.model.torch_attention import source_digest
from paceline.v1 import target_pb2
from paceline.wire.target_codec import decode_target_description, encode_target_description
from paceline_services.target.engine_process import model_facts
from paceline_services.target.target_worker import target_description, worker_record
from tests.exactness.test_rows import network
from tests.helpers import gpu_kernels
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.gpu_kernels import use_stand_ins
from tests.helpers.llamas import peaked_llama
from tests.helpers.targets import FREE

CONFIG = EngineConfig(slots=512)
VERSIONS = f"transformers {transformers.__version__}; paceline {__version__}"
needs_native = pytest.mark.skipif(os.environ.get("PACELINE_NATIVE") == "0", reason="native code is switched off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def numerics(folder: Path, threads: int, dtype: str = "auto") -> str:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return load(str(folder), EngineConfig.model_validate({"slots": 512, "dtype": dtype})).numerics
    finally:
        torch.set_num_threads(before)


@needs_native
def test_a_native_model_s_line_has_library_dtype_and_versions_but_not_threads(folder: Path) -> None:
    line = numerics(folder, 1)
    assert line.startswith(f"native {native_description()}; float32; cpu; torch {torch.__version__} ")
    assert line.endswith(VERSIONS)
    assert numerics(folder, 2) == line
    assert numerics(folder, 1, "bfloat16") == line.replace("float32", "bfloat16")


def test_the_line_of_torch_s_operators_has_cpu_and_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    monkeypatch.setattr(NativeLibrary, "_instance", None)
    line = numerics(folder, 1)
    assert line.startswith(f"torch operators, threads=1, MKL_CBWR={os.environ['MKL_CBWR']}; float32; cpu ")
    assert ", instructions " in line
    assert line.endswith(VERSIONS)
    assert numerics(folder, 2) == line.replace("threads=1", "threads=2")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert ", MKL_CBWR=COMPATIBLE; " in numerics(folder, 1)


@needs_native
def test_the_line_has_native_attention_and_torch_s_operators() -> None:
    line = build(network("olmo2", torch.float32), "olmo2", CONFIG, "", []).numerics
    assert line.startswith(f"torch operators, native attention {native_description()}, threads=")


def test_the_line_has_what_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    monkeypatch.setattr(NativeLibrary, "_instance", None)
    use_stand_ins(monkeypatch)
    line = build(network("llama", torch.float32), "llama", CONFIG, "", []).numerics
    kernels = f"triton {version('triton')}, kernels {source_digest(gpu_kernels)}, CUDA graphs"
    assert line.startswith(f"torch operators, {kernels}, threads=")


def test_the_hash_of_kernels_follows_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for name, split in (("kernels_a", 1), ("kernels_b", 2), ("kernels_c", 1)):
        (tmp_path / f"{name}.py").write_text(f"SPLIT = {split}\n\n\ndef attend(): ...\n\n\nadd_norm = attend\n")
        digests.append(source_digest(importlib.import_module(name)))
    assert digests[0] == digests[2] != digests[1]


def test_the_line_of_packed_products_follows_the_source_of_their_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from paceline.model.gpu import packed_formats, packed_products

    gpu = torch.device("cuda")
    parts = [product_numerics(gpu)]
    for module in (packed_formats, packed_products):
        changed = tmp_path / "changed.py"
        changed.write_text(f"{Path(module.__file__).read_text()}\n")
        with monkeypatch.context() as patch:
            patch.setattr(module, "__file__", str(changed))
            parts.append(product_numerics(gpu))
    assert len(set(parts)) == 3
    assert product_numerics(gpu) == parts[0]
    assert product_numerics(torch.device("cpu")) == ""


class Cublas:
    """A GPU of this machine, and cuBLAS as this process has loaded it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.version = 120804
        maps = folder / "maps"
        maps.write_text(
            "7f00-7f01 r-xp 00000000 08:01 17\n7f01-7f02 r-xp 00000000 08:01 17    /a b/libcublasLt.so.12 (deleted)\n"
        )
        patch.setattr(numerics_module, "MAPS", maps)
        patch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(cublasLtGetVersion=lambda: self.version))
        patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
        for name in os.environ:
            if name.startswith(numerics_module.GPU_VARIABLES):
                patch.delenv(name)

    def line(self) -> str:
        cache = SimpleNamespace(attention_name="triton 3.8.0, kernels 1a2b3c4d", is_int8=False)
        model: Any = SimpleNamespace(
            **{"device": torch.device("cuda:1"), "dtype": torch.bfloat16, "cache": cache},
            **{"native": False, "has_native_attention": False},
        )
        return numerics_of(model, "")


def test_a_gpu_s_line_has_what_multiplies_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two targets with other versions of cuBLAS once had equal lines, and replayed each other's requests."""
    cublas = Cublas(tmp_path, monkeypatch)
    lines = [cublas.line()]
    assert lines[0].startswith(
        "torch operators, triton 3.8.0, kernels 1a2b3c4d; bfloat16; cuda NVIDIA H100, cuBLASLt 120804, "
    )
    cublas.version = 130100
    lines.append(cublas.line())
    for name, value in (
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8"),
        ("CUBLASLT_WORKSPACE_SIZE", "1024"),
        ("NVIDIA_TF32_OVERRIDE", "0"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1"),
    ):
        monkeypatch.setenv(name, value)
        lines.append(cublas.line())
        assert f", {name}={value}" in lines[-1]
    products = torch.backends.cuda.matmul
    for name, other in (("allow_bf16_reduced_precision_reduction", False), ("fp32_precision", "tf32")):
        before = getattr(products, name)
        setattr(products, name, other)
        lines.append(cublas.line())
        setattr(products, name, before)
    monkeypatch.setattr(numerics_module, "MAPS", tmp_path / "none")
    lines.append(cublas.line())
    assert f", cuBLAS of CUDA {torch.version.cuda}, " in lines[-1]
    assert len(set(lines)) == len(lines)


def test_the_line_has_the_quantisation_and_its_parameters() -> None:
    model = build(peaked_llama(), "peaked", CONFIG, "", [])

    def quantised(block: int) -> str:
        given = {"quant_method": "fp8", "weight_block_size": [block, block]}
        return numerics_of(model, quantization_of(LlamaConfig(quantization_config=given)))

    assert "; float32 fp8 " in quantised(128)
    assert quantised(64) != quantised(128) == quantised(128)
    assert "; float32; " in numerics_of(model, quantization_of(LlamaConfig()))


@needs_native
@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_the_line_has_a_cache_in_8_bits(kind: str) -> None:
    lines = [
        build(network(kind, torch.float32), kind, EngineConfig(slots=512, kv_cache_dtype=dtype), "", []).numerics
        for dtype in get_args(KVCacheDtype)
    ]
    assert "; float32; " in lines[0]
    assert lines[1] == lines[0].replace("; float32; ", "; float32, int8 cache; ")


def test_the_line_reaches_gateways_and_the_registry(folder: Path) -> None:
    model, speculation = load(str(folder), CONFIG), SpeculativeConfig()
    engine = Engine(model, CONFIG, speculation, NoDraftClient(), FREE)
    options = argparse.Namespace(worker_id="t", served_model_name=None, model=model.name, labels=[])
    description = target_description(model_facts(engine, speculation), options)
    wire = encode_target_description(description).SerializeToString()
    decoded = decode_target_description(target_pb2.TargetServiceDescribeResponse.FromString(wire))
    assert decoded == description
    assert decoded.numerics == worker_record(description, "h:1").numerics == model.numerics != ""
