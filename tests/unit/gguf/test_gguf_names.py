"""GGUF tensors under transformers' names: what llama.cpp changes, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.gguf.gguf_config import transformers_config
from paceline.gguf.gguf_file import GgufError, GgufFile
from paceline.gguf.gguf_names import tensor_sources, unpermuted_rows
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.gguf_weights import dequantized
from tests.helpers.gguf_files import KINDS, SCALES, tiny_config, write_gguf

QUERY = "model.layers.1.self_attn.q_proj.weight"
EVERY_FORMAT = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", *SCALES)


def stored(path: Path, name: str) -> Tensor:
    """A tensor as the file has it."""
    return dequantized(GgufFile(path).tensor(name), torch.float32)


def written(
    tmp_path: Path, model_type: str, quantization: str = "F32", **options: Any
) -> tuple[Path, dict[str, Tensor]]:
    """A file, and the weights of the network that it is of."""
    path = tmp_path / f"{model_type}.gguf"
    network = write_gguf(path, tiny_config(model_type, **options), quantization)
    return path, dict(network.named_parameters())


def test_a_row_of_the_first_half_of_a_head_and_one_of_the_second_alternate_in_a_file() -> None:
    assert unpermuted_rows(2, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    rows = unpermuted_rows(3, 8)
    assert rows[8:16].tolist() == [8, 10, 12, 14, 9, 11, 13, 15]
    assert sorted(rows) == list(range(24))


@pytest.mark.parametrize(
    ("model_type", "permuted"),
    [("llama", True), ("mistral", True), ("ministral3", True), ("granite", True), ("qwen2", False), ("qwen3", False)],
)
def test_rows_of_queries_are_reordered_in_llama_files_only(model_type: str, permuted: bool, tmp_path: Path) -> None:
    path, weights = written(tmp_path, model_type)
    query = stored(path, "blk.1.attn_q.weight")
    size = tiny_config(model_type).head_dim
    assert torch.equal(query[unpermuted_rows(4, size)], weights[QUERY]) is permuted
    assert torch.equal(query, weights[QUERY]) is not permuted
    assert torch.equal(Checkpoint(path).tensor(QUERY), weights[QUERY])


def test_biases_of_queries_are_reordered_like_their_rows(tmp_path: Path) -> None:
    path, weights = written(tmp_path, "llama", attention_bias=True)
    bias = QUERY.replace("weight", "bias")
    assert not torch.equal(stored(path, "blk.1.attn_q.bias"), weights[bias])
    assert torch.equal(Checkpoint(path).tensor(bias), weights[bias])


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_gemmas_norms_are_stored_plus_one(model_type: str, tmp_path: Path) -> None:
    path, weights = written(tmp_path, model_type)
    norm = weights["model.norm.weight"]
    assert torch.allclose(stored(path, "output_norm.weight"), norm + 1)
    assert torch.allclose(Checkpoint(path).tensor("model.norm.weight"), norm, atol=1e-6)
    # Less one before it is rounded, not after.
    rounded = Checkpoint(path).tensor("model.norm.weight", torch.bfloat16)
    assert torch.equal(rounded, (stored(path, "output_norm.weight") - 1).bfloat16())


def test_llama_norms_are_stored_as_they_are(tmp_path: Path) -> None:
    path, weights = written(tmp_path, "llama")
    assert torch.equal(stored(path, "output_norm.weight"), weights["model.norm.weight"])


def test_gates_and_inputs_of_experts_are_two_tensors(tmp_path: Path) -> None:
    path, weights = written(tmp_path, "qwen3_moe")
    both = weights["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(stored(path, "blk.0.ffn_gate_exps.weight"), both[:, :32])
    assert torch.equal(stored(path, "blk.0.ffn_up_exps.weight"), both[:, 32:])


def test_gpt_oss_experts_alternate_in_transformers_and_are_transposed(tmp_path: Path) -> None:
    path, weights = written(tmp_path, "gpt_oss")
    both = weights["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(stored(path, "blk.0.ffn_gate_exps.weight"), both[..., ::2].mT)
    assert torch.equal(stored(path, "blk.0.ffn_up_exps.weight"), both[..., 1::2].mT)
    assert torch.equal(
        stored(path, "blk.0.ffn_up_exps.bias"), weights["model.layers.0.mlp.experts.gate_up_proj_bias"][:, 1::2]
    )


def test_phis_fused_matrices_stay_fused(tmp_path: Path) -> None:
    path, weights = written(tmp_path, "phi3")
    assert torch.equal(stored(path, "blk.0.attn_qkv.weight"), weights["model.layers.0.self_attn.qkv_proj.weight"])
    assert torch.equal(stored(path, "blk.0.ffn_up.weight"), weights["model.layers.0.mlp.gate_up_proj.weight"])


def test_the_gate_of_the_shared_expert_is_a_vector(tmp_path: Path) -> None:
    path, weights = written(tmp_path, "qwen2_moe")
    gate = weights["model.layers.0.mlp.shared_expert_gate.weight"]
    assert torch.equal(stored(path, "blk.0.ffn_gate_inp_shexp.weight"), gate[0])


@pytest.mark.parametrize("model_type", KINDS)
def test_names_shapes_and_numbers_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    path, weights = written(tmp_path, model_type, "Q8_0")
    checkpoint = Checkpoint(path)
    assert set(checkpoint.names) == set(weights)
    for name, weight in weights.items():
        assert checkpoint.shape(name) == weight.shape
        assert torch.equal(checkpoint.tensor(name, torch.float32), weight)


@pytest.mark.parametrize("quantization", EVERY_FORMAT)
def test_every_format_is_dequantised(quantization: str, tmp_path: Path) -> None:
    path, weights = written(tmp_path, "llama", quantization, hidden_size=256, intermediate_size=512)
    assert GgufFile(path).tensor("blk.0.ffn_down.weight").type.name == quantization
    checkpoint = Checkpoint(path)
    for name in ("model.layers.0.mlp.down_proj.weight", QUERY, "model.embed_tokens.weight"):
        assert torch.equal(checkpoint.tensor(name, torch.float32), weights[name])
        assert weights[name].std() > 1e-3


def test_a_stored_dtype_stays_and_blocks_become_bfloat16(tmp_path: Path) -> None:
    dtypes = {}
    for quantization in ("F32", "F16", "BF16", "Q4_0"):
        path, _ = written(tmp_path, "llama", quantization)
        dtypes[quantization] = Checkpoint(path).tensor(QUERY).dtype
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.bfloat16)
    assert tuple(dtypes.values()) == kinds


def fault_of(path: Path) -> str:
    file = GgufFile(path)
    with pytest.raises(GgufError) as caught:
        tensor_sources(file, transformers_config(file))
    with pytest.raises(CheckpointError) as again:
        Checkpoint(path).names  # noqa: B018
    assert str(again.value) == str(caught.value)
    return str(caught.value).removeprefix(str(path)).lstrip(": ")


def test_a_tensor_of_a_wrong_shape_is_named(tmp_path: Path) -> None:
    def shorten(name: str, data: np.ndarray) -> np.ndarray:
        return data[:-2] if name == "blk.1.attn_k.weight" else data

    write_gguf(tmp_path / "model.gguf", tiny_config("llama"), "Q4_0", change=shorten)
    expected = "the tensor blk.1.attn_k.weight has the shape [30, 64], and not [32, 64]"
    assert fault_of(tmp_path / "model.gguf") == expected


@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_config("llama"), "Q4_0", omit=[name])
    assert fault_of(tmp_path / "model.gguf") == f"has no tensor {name}: it is incomplete, or of another kind"


def test_a_tensor_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    write_gguf(tmp_path / "model.gguf", tiny_config("llama"), "Q4_0", extra_tensors=extra)
    assert fault_of(tmp_path / "model.gguf") == (
        "has the tensor blk.0.attn_q_norm.weight, which a llama does not have: without it the output would be wrong"
    )
