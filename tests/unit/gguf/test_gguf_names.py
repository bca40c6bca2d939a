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
from paceline.gguf.gguf_names import grouped_rows, tensor_sources, unpermuted_rows
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.gguf_weights import dequantized
from tests.helpers.gguf_files import KINDS, SCALES, random_network, stored_tensors, tiny_config, write_gguf
from tests.helpers.gguf_states import STATE_KINDS

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
    return path, stored_tensors(network)


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


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "qwen3_5_text"])
def test_gemmas_and_qwens_norms_are_stored_plus_one(model_type: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_5_moe_text"])
def test_or_a_matrix_of_one_row_as_llama_cpp_b11434_writes_it(model_type: str, tmp_path: Path) -> None:
    def one_row(name: str, data: np.ndarray) -> np.ndarray:
        return data[None] if name.endswith("ffn_gate_inp_shexp.weight") else data

    network = write_gguf(tmp_path / "model.gguf", tiny_config(model_type), "F32", change=one_row)
    assert GgufFile(tmp_path / "model.gguf").tensor("blk.0.ffn_gate_inp_shexp.weight").shape == (1, 64)
    name = "model.layers.0.mlp.shared_expert_gate.weight"
    checkpoint = Checkpoint(tmp_path / "model.gguf")
    assert checkpoint.shape(name) == (1, 64)
    assert torch.equal(checkpoint.tensor(name), network.get_parameter(name))


def test_value_heads_of_one_key_head_are_apart_in_qwen_3_5_files(tmp_path: Path) -> None:
    config = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 2}
    assert grouped_rows(6, config).tolist() == [0, 2, 4, 1, 3, 5]
    assert grouped_rows(12, config).tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert grouped_rows(15, config).tolist()[:7] == [0, 1, 2, 3, 4, 7, 8]  # after three rows of keys
    path, weights = written(tmp_path, "qwen3_5_text")
    heads = torch.tensor([0, 2, 4, 1, 3, 5])
    rows = (heads[:, None] * 16 + torch.arange(16)).flatten()
    layer = "model.layers.0.linear_attn"
    joint, convolution = weights[f"{layer}.in_proj_qkv.weight"], weights[f"{layer}.conv1d.weight"]
    for name, expected, order in (
        ("attn_gate.weight", weights[f"{layer}.in_proj_z.weight"], rows),
        ("ssm_alpha.weight", weights[f"{layer}.in_proj_a.weight"], heads),
        ("ssm_beta.weight", weights[f"{layer}.in_proj_b.weight"], heads),
        ("ssm_dt.bias", weights[f"{layer}.dt_bias"], heads),
        ("ssm_out.weight", weights[f"{layer}.out_proj.weight"].mT, rows),
        ("attn_qkv.weight", joint, torch.cat([torch.arange(64), 64 + rows])),
        ("ssm_conv1d.weight", convolution[:, 0], torch.cat([torch.arange(64), 64 + rows])),
    ):
        found = stored(path, f"blk.0.{name}")
        assert torch.equal((found.mT if name == "ssm_out.weight" else found)[order], expected), name
        assert not torch.equal(found.mT if name == "ssm_out.weight" else found, expected), name


@pytest.mark.parametrize(
    ("model_type", "name"), [("qwen3_5_text", "linear_attn"), ("nemotron_h", "mixer")], ids=["qwen35", "nemotron_h"]
)
def test_a_decay_is_stored_as_its_negative_exponential(model_type: str, name: str, tmp_path: Path) -> None:
    path, weights = written(tmp_path, model_type)
    decay = weights[f"model.layers.0.{name}.A_log"]
    found = stored(path, "blk.0.ssm_a")
    assert found.max() < 0
    assert torch.allclose(found.flatten().sort().values, (-decay.exp()).sort().values)
    # The logarithm before it is rounded, not after: a bfloat16 that was stored so comes back.
    rounded = Checkpoint(path).tensor(f"model.layers.0.{name}.A_log", torch.bfloat16)
    assert torch.equal(rounded, decay.bfloat16())


def test_rows_of_queries_and_keys_are_reordered_in_nemotron_files_although_nothing_turns(tmp_path: Path) -> None:
    path, weights = written(tmp_path, "nemotron_h")
    for name, heads in (("q", 4), ("k", 2)):
        rows = stored(path, f"blk.1.attn_{name}.weight")
        assert torch.equal(rows[unpermuted_rows(heads, 32)], weights[f"model.layers.1.mixer.{name}_proj.weight"])


def test_shapes_of_mamba_2_in_files(tmp_path: Path) -> None:
    path, weights = written(tmp_path, "nemotron_h")
    shapes = {"ssm_a": (8, 1), "ssm_d": (8, 1), "ssm_norm.weight": (2, 64), "ssm_conv1d.weight": (192, 4)}
    for name, shape in shapes.items():
        assert GgufFile(path).tensor(f"blk.0.{name}").shape == shape
    assert torch.equal(stored(path, "blk.0.ssm_norm.weight").flatten(), weights["model.layers.0.mixer.norm.weight"])


def test_lfm2s_last_norm_has_the_name_of_an_embeddings(tmp_path: Path) -> None:
    path, weights = written(tmp_path, "lfm2")
    assert torch.equal(stored(path, "token_embd_norm.weight"), weights["model.embedding_norm.weight"])


@pytest.mark.parametrize("model_type", STATE_KINDS)
def test_what_is_read_is_what_was_there_before_the_file(model_type: str, tmp_path: Path) -> None:
    path, weights = written(tmp_path, model_type)
    original = stored_tensors(random_network(tiny_config(model_type), seed=0))
    assert original.keys() == weights.keys() == set(Checkpoint(path).names)
    for name, tensor in original.items():
        assert torch.allclose(Checkpoint(path).tensor(name), tensor, rtol=1e-6, atol=1e-6), name


def test_layers_for_drafting_after_the_last_are_not_read(tmp_path: Path) -> None:
    states = {"qwen35.block_count": 4, "qwen35.attention.recurrent_layers": [True, False, True, False]}
    extra = {"blk.3.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
    path = tmp_path / "model.gguf"
    counted = {**states, "qwen35.nextn_predict_layers": 1}
    network = write_gguf(path, tiny_config("qwen3_5_text"), "F32", extra_tensors=extra, metadata=counted)
    assert set(Checkpoint(path).names) == {name for name, _ in network.named_parameters()}
    write_gguf(path, tiny_config("qwen3_5_text"), "F32", extra_tensors=extra)
    assert "has the tensor blk.3.nextn.eh_proj.weight, which a qwen3_5_text does not have" in fault_of(path)


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
