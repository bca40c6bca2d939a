"""A GGUF file's metadata in transformers' terms, against the configuration that the file was written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from paceline.gguf.gguf_config import KINDS as KNOWN
from paceline.gguf.gguf_config import GgufSettings, is_packed_kind, transformers_config
from paceline.gguf.gguf_file import GgufError, GgufFile
from paceline.gguf.gguf_keys import shortest
from paceline.gguf.gguf_rope import llama3_factors
from tests.helpers.gguf_files import KINDS, YARN, tiny_config, write_gguf
from tests.helpers.gguf_states import STATE_ARCHITECTURES

UNTOLD = {"_name_or_path", "architectures", "model_type", "dtype"}
"""GgufSettings that no tensor depends on, or that name the same network."""
LLAMA_ONLY = {"attention_bias", "mlp_bias", "pretraining_tp"}
"""Llama's settings that Mistral does not have; files of both are of the kind llama."""


def read(tmp_path: Path, config: Any, **options: Any) -> dict[str, Any]:
    write_gguf(tmp_path / "model.gguf", config, "F32", **options)
    return transformers_config(GgufFile(tmp_path / "model.gguf"))


def differing(config: Any, read_config: dict[str, Any]) -> set[str]:
    """GgufSettings of which the file says something else."""
    ours, theirs = AutoConfig.for_model(**read_config).to_dict(), config.to_dict()
    return {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}


def refusal(tmp_path: Path, config: Any, **options: Any) -> str:
    with pytest.raises(GgufError) as caught:
        read(tmp_path, config, **options)
    return str(caught.value).removeprefix(str(tmp_path / "model.gguf")).lstrip(": ")


@pytest.mark.parametrize("model_type", KINDS)
def test_a_file_says_what_it_was_written_from(model_type: str, tmp_path: Path) -> None:
    config = tiny_config(model_type)
    allowed = LLAMA_ONLY if model_type == "mistral" else {"original_max_position_embeddings"}  # Phi without LongRoPE
    assert differing(config, read(tmp_path, config)) <= UNTOLD | allowed


def test_every_kind_is_written() -> None:
    assert {kind.model_type for kind in KNOWN.values()} == set(KINDS) - {"mistral"}  # which llama files are, too


def test_numbers_are_the_shortest_that_a_float32_means(tmp_path: Path) -> None:
    assert shortest(9.999999747378752e-06) == 1e-05
    assert read(tmp_path, tiny_config("llama", rms_norm_eps=1e-5))["rms_norm_eps"] == 1e-05


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_factors_become_its_scaling(factor: float, tmp_path: Path) -> None:
    rope = {
        **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    }
    config = tiny_config("llama", head_dim=64, rope_parameters=rope, max_position_embeddings=131072)
    assert read(tmp_path, config)["rope_parameters"] == rope


def test_other_factors_are_refused(tmp_path: Path) -> None:
    other = llama3_factors(16, 10000.0, 8.0).astype("float32") * 2
    fault = refusal(tmp_path, tiny_config("qwen3", head_dim=16), extra_tensors={"rope_freqs.weight": other})
    assert fault == "the tensor rope_freqs.weight has other factors than Llama 3, and is not read here"


def test_linear_scaling_and_yarn(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    assert read(tmp_path, tiny_config("llama", rope_parameters=linear))["rope_parameters"] == linear
    assert read(tmp_path, tiny_config("qwen2", rope_parameters=YARN))["rope_parameters"] == YARN


def test_a_factor_on_yarns_own_becomes_their_product(tmp_path: Path) -> None:
    stored = {"qwen2.rope.scaling.yarn_attn_factor": 0.5}
    rope = read(tmp_path, tiny_config("qwen2", rope_parameters=YARN), metadata=stored)["rope_parameters"]
    assert rope["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * 1.3862944))  # ln 4


def test_long_rope_factors_are_tensors(tmp_path: Path) -> None:
    short, long = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "short_factor": short}
    rope |= {"long_factor": long, "original_max_position_embeddings": 128}
    found = read(tmp_path, tiny_config("phi3", rope_parameters=rope, original_max_position_embeddings=128))
    assert found["original_max_position_embeddings"] == 128
    assert found["rope_parameters"]["short_factor"] == pytest.approx(short)
    assert found["rope_parameters"]["long_factor"] == pytest.approx(long)
    assert found["rope_parameters"]["attention_factor"] == pytest.approx((1 + 0.6931472 / 4.8520303) ** 0.5)


def test_mistral_3_without_scaled_queries_is_mistral(tmp_path: Path) -> None:
    found = read(tmp_path, tiny_config("ministral3", rope_parameters=YARN))
    assert (found["model_type"], found["architectures"]) == ("mistral", ["MistralForCausalLM"])


def test_gemma_3_without_a_pattern_has_five_sliding_layers_of_six_with_their_own_base(tmp_path: Path) -> None:
    found = read(tmp_path, tiny_config("gemma3_text"), omit=["gemma3.rope.freq_base_swa"])
    assert found["layer_types"] == [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    assert found["rope_parameters"]["sliding_attention"]["rope_theta"] == 10000.0


@pytest.mark.parametrize(("model_type", "layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_largest_gemma_scales_queries_by_the_width_per_head(model_type: str, layers: int, tmp_path: Path) -> None:
    config = tiny_config(model_type, hidden_size=32, intermediate_size=32, head_dim=16, num_hidden_layers=layers)
    assert read(tmp_path, config)["query_pre_attn_scalar"] == 32 // 4


def test_an_output_matrix_of_its_own_is_not_tied(tmp_path: Path) -> None:
    assert read(tmp_path, tiny_config("qwen2"))["tie_word_embeddings"] is False
    assert read(tmp_path, tiny_config("qwen2", tie_word_embeddings=True))["tie_word_embeddings"] is True


def test_kinds_that_stay_packed(tmp_path: Path) -> None:
    packed = {kind for kind in KINDS if is_packed_kind(read(tmp_path, tiny_config(kind)))}
    attending = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite"}
    assert packed == {*attending, "qwen3_5_text"}
    odd = {"linear_key_head_dim": 24, "linear_value_head_dim": 24}
    assert not is_packed_kind(read(tmp_path, tiny_config("qwen3_5_text", **odd))), "states of such heads are torch's"
    assert is_packed_kind(read(tmp_path, tiny_config("qwen2", rope_parameters=YARN)))


def test_settings_are_used_as_those_of_transformers() -> None:
    settings = GgufSettings(hidden_size=8)
    assert (settings.get_text_config(decoder=True).hidden_size, settings.to_dict()) == (8, {"hidden_size": 8})


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"omit": ["llama.block_count"]}, "has no llama.block_count: it is incomplete, or no language model"),
        ({"omit": ["general.architecture"]}, "has no general.architecture: it is incomplete, or no language model"),
        ({"omit": ["token_embd.weight"]}, "has no tensor token_embd.weight: it is incomplete, or of another kind"),
        ({"metadata": {"llama.block_count": "two"}}, "llama.block_count is 'two', which is of the wrong type"),
        ({"metadata": {"llama.block_count": 0}}, "llama.block_count is 0, and no positive number"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "head_count_kv is 3, which does not divide the 4 heads"),
        ({"metadata": {"llama.attention.value_length": 8}}, "attention.value_length is not attention.key_length, 16"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "is 8, and not the size of a head, 16"),
        ({"metadata": {"llama.expert_count": 8}}, "expert_count is 8: mixtures of experts in files of this kind"),
        (
            {"metadata": {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}},
            "rope.scaling.type is 'longrope', which is not read here: none, linear and yarn are",
        ),
        ({"tokens": 300}, "tokenizer.ggml.tokens has 300 tokens, but token_embd.weight has 320 rows"),
        ({"metadata": {"general.architecture": "mamba"}}, "is of the kind 'mamba', which is not read here: llama, "),
    ],
)
def test_a_fault_is_a_sentence_that_names_the_key(options: dict[str, Any], fault: str, tmp_path: Path) -> None:
    assert fault in refusal(tmp_path, tiny_config("llama"), **options)


def test_layers_that_keep_states_are_named_or_three_of_four(tmp_path: Path) -> None:
    config = tiny_config("qwen3_5_text", num_hidden_layers=5, layer_types=None)
    every = read(tmp_path, config, omit=["qwen35.attention.recurrent_layers"])["layer_types"]
    assert every == config.layer_types == ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
    both = {"omit": ["qwen35.attention.recurrent_layers"], "metadata": {"qwen35.full_attention_interval": 2}}
    assert read(tmp_path, config, **both)["layer_types"][:3] == [
        "linear_attention",
        "full_attention",
        "linear_attention",
    ]


def test_layers_for_drafting_do_not_count(tmp_path: Path) -> None:
    drafting = {
        **{"qwen35.block_count": 4, "qwen35.nextn_predict_layers": 1},
        "qwen35.attention.recurrent_layers": [True, False, True, False],
    }
    config = read(tmp_path, tiny_config("qwen3_5_text"), metadata=drafting)
    assert (config["num_hidden_layers"], len(config["layer_types"])) == (3, 3)


def test_yarn_turns_the_part_of_a_head_that_is_rotated(tmp_path: Path) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    metadata = {f"qwen35.rope.scaling.{key}": value for key, value in keys.items()}
    rotary = read(tmp_path, tiny_config("qwen3_5_text"), metadata=metadata)["rope_parameters"]
    assert rotary == {**YARN, "partial_rotary_factor": 0.25}


def test_the_root_mean_square_norms_number_wins_over_the_other(tmp_path: Path) -> None:
    both = {"nemotron_h.attention.layer_norm_rms_epsilon": 2.0e-6}
    assert read(tmp_path, tiny_config("nemotron_h"))["layer_norm_epsilon"] == 1e-5
    assert read(tmp_path, tiny_config("nemotron_h"), metadata=both)["layer_norm_epsilon"] == 2e-6


@pytest.mark.parametrize(
    ("model_type", "metadata", "fault"),
    [
        ("lfm2", {"attention.sliding_window": 8}, "sliding_window is 8, which is not read here: without it the output"),
        ("lfm2", {"expert_count": 8}, "expert_count is 8, which is not read here"),
        ("lfm2", {"attention.causal": False}, "attention.causal is False, which is not read here"),
        ("lfm2", {"rope.scaling.attn_factor": 0.5}, "rope.scaling.attn_factor is 0.5, which is not read here"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 1]}, "head_count_kv differs between layers: [1, 2]"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, "head_count_kv has 2 layers, and block_count 3"),
        ("lfm2moe", {"expert_gating_func": 1}, "expert_gating_func is 1, and not 2, for sigmoids"),
        ("lfm2moe", {"expert_weights_scale": 2.0}, "expert_weights_scale is 2.0, which is not read here"),
        ("qwen35", {"attention.head_count_kv": [0, 2, 2]}, "attention.head_count_kv is 0, and no positive number"),
        ("qwen35", {"attention.recurrent_layers": [True]}, "recurrent_layers has 1 layers, and block_count 3"),
        ("qwen35", {"attention.scale": 0.5}, "attention.scale is 0.5, which is not read here"),
        ("qwen35", {"ssm.inner_size": 100}, "inner_size is 100, and not 6 heads of ssm.state_size, 16"),
        ("qwen35", {"ssm.group_count": 4}, "group_count is 4, which does not divide ssm.time_step_rank, 6"),
        ("qwen35", {"rope.dimension_sections": [11, 11]}, "dimension_sections has 2 numbers, and not 4"),
        ("qwen35", {"rope.dimension_sections": [4, 4, 0, 4]}, "which leaves some of 4 pairs at 0"),
        ("qwen35moe", {"expert_weights_scale": 2.0}, "expert_weights_scale is 2.0, which is not read here"),
        ("nemotron_h", {"ssm.group_count": 3}, "group_count is 3, which does not divide ssm.inner_size, 128"),
        ("nemotron_h", {"ssm.time_step_rank": 6}, "time_step_rank is 6, which does not divide ssm.inner_size, 128"),
        ("nemotron_h", {"feed_forward_length": [9, 0, 96, 0]}, "feed_forward_length differs between layers: [9, 96]"),
        ("nemotron_h", {"feed_forward_length": [0, 96, 96, 0]}, "is 96 in layer 1, which attends"),
        ("nemotron_h", {"moe_latent_size": 16}, "moe_latent_size is 16, which is not read here"),
    ],
)
def test_a_key_that_would_change_the_output_is_refused(
    model_type: str, metadata: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    [kind] = [kind for kind, name in STATE_ARCHITECTURES.items() if name == model_type]
    stored = {f"{model_type}.{key}": value for key, value in metadata.items()}
    assert fault in refusal(tmp_path, tiny_config(kind), metadata=stored)


def test_keys_that_change_nothing_are_not_refused(tmp_path: Path) -> None:
    harmless = {"attention.causal": True, "expert_count": 0, "rope.scaling.finetuned": True, "vocab_size": 320}
    assert read(tmp_path, tiny_config("lfm2"), metadata={f"lfm2.{key}": value for key, value in harmless.items()})
