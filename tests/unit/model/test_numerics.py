"""The line that names what a target's numbers depend on, and its way to gateways and the registry."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import get_args

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
from paceline.model.loading import build
from paceline.model.native.build import native_description
from paceline.model.native.native_library import NativeLibrary
from paceline.model.numerics import numerics_of, quantization_of
from paceline.v1 import target_pb2
from paceline.wire.target_codec import decode_target_description, encode_target_description
from paceline_services.target.engine_process import model_facts
from paceline_services.target.target_worker import target_description, worker_record
from tests.exactness.test_rows import network
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.flash_attention import use_stand_ins
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
    assert line.startswith("torch operators, flash_attn_3 of an unknown version, CUDA graphs, threads=")


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
