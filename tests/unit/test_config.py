"""Settings: keys of other servers work, and errors name the key."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config import EngineConfig, SamplingParams, Settings, SpeculativeConfig, SpeculativeOptions

DRAFT = {"method": "draft_model", "model": "d"}
CUSTOM = {"method": "custom_class", "speculator": "a.B"}
TOGETHER = "methods that draft together are ngram, suffix and at most one other, none of them twice"


OTHER_WORDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"speculative_method": "ngram"}, {"method": "ngram"}),
    ({"method": None}, {"method": "none"}),
    ({"method": "off"}, {"method": "none"}),
    ({"method": "prompt_lookup"}, {"method": "ngram"}),
    ({"method": "standalone", "model": "d"}, DRAFT),
    ({"method": ["ngram", "draft_model"], "model": "d"}, DRAFT | {"beside": ["ngram"]}),
    ({"speculative_method": ["standalone", "prompt_lookup"], "model": "d"}, DRAFT | {"beside": ["ngram"]}),
    ({"method": ["suffix", "draft_model", "ngram"], "model": "d"}, DRAFT | {"beside": ["suffix", "ngram"]}),
    ({"method": ["suffix", "eagle3"], "model": "d"}, {"method": "eagle3", "model": "d", "beside": ["suffix"]}),
    ({"method": ["ngram", "suffix"]}, {"method": "ngram", "beside": ["suffix"]}),
    ({"method": ["suffix", "ngram"]}, {"method": "suffix", "beside": ["ngram"]}),
    ({"method": ["suffix", "custom"], "speculator": "a.B"}, CUSTOM | {"beside": ["suffix"]}),
    ({"method": ["ngram"]}, {"method": "ngram"}),
    ({"method": "custom", "speculator": "a.B"}, CUSTOM),
    ({"method": "draft_model", "draft_model_path": "d"}, DRAFT),
    (DRAFT | {"use_heterogeneous_vocab": True}, DRAFT | {"vocabulary_mapping": "intersection"}),
    (DRAFT | {"use_heterogeneous_vocab": False}, DRAFT),
    ({"method": "ngram", "use_heterogeneous_vocab": False}, {"method": "ngram"}),
    ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "d"}, {"method": "eagle3", "model": "d"}),
    ({"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "d"}, DRAFT),
    ({"speculative_algorithm": "NEXTN"}, {"method": "mtp"}),
    ({"speculative_algorithm": "ngram"}, {"method": "ngram"}),
    ({"speculative_num_steps": 7}, {"num_speculative_tokens": 7}),
    ({"speculative_eagle_topk": 4}, {"tree_width": 4}),
    ({"speculative_num_draft_tokens": 9}, {"max_tree_nodes": 9}),
    ({"prompt_lookup_max": 4}, {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
    ({"prompt_lookup_max": 1}, {"prompt_lookup_min": 1, "prompt_lookup_max": 1}),
    ({"prompt_lookup_min": 7}, {"prompt_lookup_min": 7, "prompt_lookup_max": 7}),
    ({"prompt_lookup_min": 3}, {"prompt_lookup_min": 3, "prompt_lookup_max": 5}),
]


@pytest.mark.parametrize(("given", "meant"), OTHER_WORDS)
def test_names_of_other_engines_mean_ours(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert SpeculativeConfig.model_validate(given) == SpeculativeConfig.model_validate(meant)


def test_what_vllm_users_write() -> None:
    config = SpeculativeConfig.model_validate(
        {"method": "draft_model", "model": "d", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}
    )
    assert config.enabled
    assert config.limits(SpeculativeOptions()) == (3, 32)


def test_suffix_decoding_has_vllm_s_names_and_defaults() -> None:
    config = SpeculativeConfig.model_validate({"method": "suffix"})
    assert config.suffix_decoding_max_tree_depth == config.num_speculative_tokens == 24
    assert config.suffix_decoding_max_cached_requests == 10000
    assert config.suffix_decoding_max_spec_factor == 1.0
    assert config.suffix_decoding_min_token_prob == 0.1


@pytest.mark.parametrize(
    ("given", "depth"),
    [
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 9}, 9),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 200}, 64),
        ({"method": "suffix", "num_speculative_tokens": 3}, 3),
        ({"method": ["suffix", "draft_model"], "model": "d"}, 5),
        ({"method": "ngram"}, 5),
    ],
)
def test_suffix_decoding_drafts_as_deep_as_its_tree_by_default(given: dict[str, Any], depth: int) -> None:
    assert SpeculativeConfig.model_validate(given).num_speculative_tokens == depth


def test_a_custom_class_is_named_as_vllm_does_or_by_a_key_of_its_own() -> None:
    assert SpeculativeConfig.model_validate({"method": "custom_class", "model": "a.B"}).enabled
    assert SpeculativeConfig.model_validate(CUSTOM).enabled


def test_a_suffix_tree_that_is_no_tree_is_refused_by_its_own_name() -> None:
    with pytest.raises(ValidationError, match=r"1 validation error.*\n.*suffix_decoding_max_tree_depth"):
        SpeculativeConfig.model_validate({"method": "suffix", "suffix_decoding_max_tree_depth": -1})


def test_a_stack_survives_the_command_line_of_a_service() -> None:
    config = SpeculativeConfig.model_validate({"method": ["suffix", "ngram", "draft_model"], "model": "d"})
    assert SpeculativeConfig.model_validate_json(config.model_dump_json()) == config


WRONG: list[tuple[type[Settings], dict[str, Any], str]] = [
    (SpeculativeConfig, {"num_speculative_token": 5}, "num_speculative_token"),
    (SpeculativeConfig, {"num_speculative_tokens": 5, "speculative_num_steps": 4}, "speculative_num_steps"),
    (SpeculativeConfig, {"speculative_num_steps": -1}, "speculative_num_steps"),
    (SpeculativeConfig, {"num_speculative_tokens": 65}, "num_speculative_tokens"),
    (SpeculativeConfig, {"tree_width": 0}, "tree_width"),
    (SpeculativeConfig, {"max_tree_nodes": "many"}, "max_tree_nodes"),
    (SpeculativeConfig, {"method": "warp"}, "method"),
    (SpeculativeConfig, {"method": []}, TOGETHER),
    (SpeculativeConfig, {"method": ["ngram", {}]}, "method"),
    (SpeculativeConfig, {"method": ["ngram", "warp"]}, "method"),
    (SpeculativeConfig, {"method": ["ngram", "ngram"]}, TOGETHER),
    (SpeculativeConfig, {"method": ["ngram", "prompt_lookup", "suffix"]}, TOGETHER),
    (SpeculativeConfig, {"method": ["draft_model", "custom"], "model": "d"}, TOGETHER),
    (SpeculativeConfig, {"method": ["ngram", "none"]}, TOGETHER),
    (SpeculativeConfig, {"beside": ["ngram"]}, TOGETHER),
    (SpeculativeConfig, DRAFT | {"beside": ["suffix", "suffix"]}, TOGETHER),
    (SpeculativeConfig, {"method": ["suffix", "draft_model"], "model": "d", "beside": ["ngram"]}, "leave out `beside`"),
    (SpeculativeConfig, {"method": "ngram", "beside": ["draft_model"]}, "beside"),
    (SpeculativeConfig, {"method": "draft_model"}, "model"),
    (SpeculativeConfig, {"method": "custom_class"}, "speculator"),
    (SpeculativeConfig, {"suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth"),
    (SpeculativeConfig, {"suffix_decoding_max_cached_requests": -1}, "suffix_decoding_max_cached_requests"),
    (SpeculativeConfig, {"suffix_decoding_max_spec_factor": -0.5}, "suffix_decoding_max_spec_factor"),
    (SpeculativeConfig, {"suffix_decoding_max_spec_factor": math.nan}, "suffix_decoding_max_spec_factor"),
    (SpeculativeConfig, {"suffix_decoding_min_token_prob": 1.1}, "suffix_decoding_min_token_prob"),
    (SpeculativeConfig, {"speculative_algorithm": "HOPE"}, "speculative_algorithm is one of EAGLE, EAGLE3, NEXTN"),
    (SpeculativeConfig, {"speculative_algorithm": "NGRAM", "method": "suffix"}, "contradict"),
    (SpeculativeConfig, {"method": "ngram", "num_speculative_tokens_per_batch_size": {"1": 5}}, "max_tree_nodes"),
    (SpeculativeConfig, {"method": "ngram", "synthetic_acceptance_rates": [0.8]}, "set synthetic_acceptance_rate to"),
    (SpeculativeConfig, {"method": "pard"}, "method pard needs `model`"),
    (SpeculativeConfig, {"method": "dflash"}, "method dflash needs `model`"),
    (SpeculativeConfig, {"method": "ngram", "parallel_drafting": True}, "goes with draft_model and eagle3, not with"),
    (SpeculativeConfig, DRAFT | {"parallel_drafting": "no"}, "parallel_drafting is true or false"),
    (SpeculativeConfig, {"method": {}, "parallel_drafting": True}, "goes with draft_model and eagle3, not with {}"),
    (SpeculativeConfig, DRAFT | {"vocabulary_mapping": "guess"}, "vocabulary_mapping"),
    (SpeculativeConfig, DRAFT | {"use_heterogeneous_vocab": "yes"}, "use_heterogeneous_vocab"),
    (SpeculativeConfig, DRAFT | {"use_heterogeneous_vocab": True, "vocabulary_mapping": "strings"}, "contradict"),
    (SpeculativeConfig, {"method": "ngram", "vocabulary_mapping": "strings"}, "vocabulary_mapping"),
    (SpeculativeConfig, {"rejection_sampling_strategy": "hope"}, "rejection_sampling_strategy"),
    (SpeculativeConfig, {"prompt_lookup_max": "x"}, "prompt_lookup_max"),
    (SpeculativeConfig, {"prompt_lookup_max": None}, "prompt_lookup_max"),
    (SpeculativeConfig, {"prompt_lookup_max": [4]}, "prompt_lookup_max"),
    (SpeculativeConfig, {"prompt_lookup_max": 0}, "prompt_lookup_max"),
    (SpeculativeConfig, {"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min 4"),
    (SpeculativeConfig, {"draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size"),
    (SpeculativeConfig, {"method": "ngram", "draft_tensor_parallel_size": 2}, "the draft of ngram is too small"),
    (SpeculativeConfig, DRAFT | {"draft_tensor_parallel_size": 2, "draft_placement": "target"}, "draft_placement"),
    (SpeculativeConfig, {"draft_placement": "moon"}, "draft_placement"),
    (SamplingParams, {"temprature": 1.0}, "temprature"),
    (SamplingParams, {"temperature": -0.1}, "temperature"),
    (SamplingParams, {"temperature": math.nan}, "temperature"),
    (SamplingParams, {"temperature": math.inf}, "temperature"),
    (SamplingParams, {"top_p": 0.0}, "top_p"),
    (SamplingParams, {"top_p": 1.1}, "top_p"),
    (SamplingParams, {"top_k": -2}, "top_k"),
    (SamplingParams, {"min_p": 1.5}, "min_p"),
    (SamplingParams, {"repetition_penalty": 0.0}, "repetition_penalty"),
    (SamplingParams, {"presence_penalty": 2.1}, "presence_penalty"),
    (SamplingParams, {"frequency_penalty": math.nan}, "frequency_penalty"),
    (SamplingParams, {"logit_bias": {3: 101.0}}, "logit_bias"),
    (SamplingParams, {"logit_bias": {-3: 1.0}}, "logit_bias"),
    (SamplingParams, {"bad_words": [[]]}, "bad_words"),
    (SamplingParams, {"stop_token_ids": [-1]}, "stop_token_ids"),
    (SamplingParams, {"max_tokens": 0}, "max_tokens"),
    (SamplingParams, {"min_tokens": 17}, "min_tokens 17 exceeds max_tokens 16"),
    (SamplingParams, {"seed": 2**64}, "seed"),
    (SamplingParams, {"seed": -(2**63) - 1}, "seed"),
    (SamplingParams, {"logprobs": 21}, "logprobs"),
    (EngineConfig, {"slots": 10}, "slots"),
    (EngineConfig, {"dtype": "float64"}, "dtype"),
    (EngineConfig, {"max_num_batched_rows": 7}, "max_num_batched_rows"),
    (EngineConfig, {"gpu_memory": 1}, "gpu_memory"),
    (SpeculativeOptions, {"num_speculative_tokens": -1}, "num_speculative_tokens"),
]


@pytest.mark.parametrize(("kind", "settings", "named"), WRONG, ids=[f"{w[0].__name__}-{w[1]}" for w in WRONG])
def test_what_is_wrong_is_named(kind: type[Settings], settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(settings)
    [error] = caught.value.errors()
    field = ".".join(map(str, error["loc"]))
    assert named in f"{field}: {error['msg']}"


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp"])
def test_multi_token_prediction_needs_no_model_but_the_target(name: str) -> None:
    config = SpeculativeConfig.model_validate({"method": name})
    assert (config.method, config.model) == ("mtp", None)


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"method": "draft_model", "parallel_drafting": True}, "pard"),
        ({"speculative_method": "standalone", "parallel_drafting": True}, "pard"),
        ({"method": "eagle3", "parallel_drafting": True}, "peagle"),
        ({"method": ["suffix", "eagle3"], "parallel_drafting": True}, "peagle"),
        ({"method": "pard", "parallel_drafting": True}, "pard"),
        ({"method": "draft_model", "parallel_drafting": False}, "draft_model"),
    ],
)
def test_vllms_parallel_drafting_is_a_method_of_its_own(given: dict[str, Any], method: str) -> None:
    assert SpeculativeConfig.model_validate(given | {"model": "x"}).method == method


RELAXED = {
    "use_relaxed_acceptance_for_thinking": True,
    "begin_thinking_phase_token": 128798,
    "end_thinking_phase_token": 128799,
}


@pytest.mark.parametrize(
    "keys",
    [
        {"rejection_sampling_strategy": "residual", "block_verification": True},
        {
            "rejection_sampling_strategy": "typical-acceptance",
            "posterior_threshold": 0.1,
            "posterior_alpha": 0.2,
        },
        {"rejection_sampling_strategy": "logit-comparison", "logit_comparison_eps": 0.1},
        {**RELAXED, "relaxed_topk": 5, "relaxed_delta": 0.5},
        {**RELAXED, "rejection_sampling_strategy": "greedy"},
        {"method": "ngram", "synthetic_acceptance_rate": 0.7},
    ],
)
def test_keys_of_strategies_survive_the_command_line(keys: dict[str, Any]) -> None:
    """With every key given, the other keys at their defaults."""
    config = SpeculativeConfig.model_validate(keys)
    assert SpeculativeConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"block_verification": True}, "block_verification means nothing to rejection_sampling_strategy coupled"),
        ({"posterior_threshold": 0.1, "rejection_sampling_strategy": "residual"}, "posterior_threshold means nothing"),
        ({"posterior_alpha": 0.1}, "posterior_alpha means nothing"),
        ({"logit_comparison_eps": 0.1}, "logit_comparison_eps means nothing"),
        ({**RELAXED, "rejection_sampling_strategy": "residual"}, "use_relaxed_acceptance_for_thinking means nothing"),
        ({"use_relaxed_acceptance_for_thinking": True}, "needs begin_thinking_phase_token and end_thinking_phase"),
        ({"use_relaxed_acceptance_for_thinking": True, "begin_thinking_phase_token": 3}, "needs begin_thinking"),
        ({**RELAXED, "end_thinking_phase_token": 128798}, "are both 128798"),
        ({"relaxed_topk": 5}, "relaxed_topk means nothing without use_relaxed"),
        ({"end_thinking_phase_token": 5}, "end_thinking_phase_token means nothing without use_relaxed"),
        (
            {"synthetic_acceptance_rate": 0.5, "rejection_sampling_strategy": "residual"},
            "synthetic_acceptance_rate means nothing to rejection_sampling_strategy residual",
        ),
        ({"synthetic_acceptance_rate": 0.5, **RELAXED}, "leaves use_relaxed_acceptance_for_thinking nothing"),
        ({"synthetic_acceptance_rate": 1.5}, "less than or equal to 1"),
        ({"relaxed_delta": 1.5}, "less than or equal to 1"),
        ({"rejection_sampling_strategy": "synthetic"}, "Input should be 'coupled'"),
    ],
)
def test_strategies_that_mean_nothing_are_refused(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        SpeculativeConfig.model_validate({"method": "ngram", **keys})


@pytest.mark.parametrize(("given", "unsigned"), [(0, 0), (-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)])
def test_signed_seeds_are_the_unsigned_ones_of_the_same_bits(given: int, unsigned: int) -> None:
    assert SamplingParams(seed=given).seed == unsigned


def test_top_k_minus_one_keeps_all() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        SamplingParams().temperature = 0.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        (SpeculativeOptions(), (5, 32)),
        (SpeculativeOptions(enabled=True), (5, 32)),
        (SpeculativeOptions(enabled=False), (0, 0)),
        (SpeculativeOptions(num_speculative_tokens=2), (2, 32)),
        (SpeculativeOptions(num_speculative_tokens=50, max_tree_nodes=50), (5, 32)),  # less, never more
        (SpeculativeOptions(max_tree_nodes=4), (5, 4)),
        (SpeculativeOptions(max_tree_nodes=0), (0, 0)),
        (SpeculativeOptions(num_speculative_tokens=0), (0, 0)),
    ],
)
def test_a_request_may_ask_for_less(options: SpeculativeOptions, limits: tuple[int, int]) -> None:
    assert SpeculativeConfig(method="ngram").limits(options) == limits


@pytest.mark.parametrize("off", [{"method": "none"}, {"num_speculative_tokens": 0}, {"max_tree_nodes": 0}])
def test_speculation_that_is_off_stays_off(off: dict[str, Any]) -> None:
    config = SpeculativeConfig.model_validate({"method": "ngram"} | off)
    assert not config.enabled
    assert config.limits(SpeculativeOptions(enabled=True)) == (0, 0)
