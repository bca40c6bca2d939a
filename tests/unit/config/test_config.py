"""Settings: keys of other servers work, errors name the key, and a file holds the options of a command."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from paceline.cli import main
from paceline.config import EngineConfig, SamplingParams, Settings, SpeculativeConfig, SpeculativeOptions
from paceline.config.config_file import ConfigFileError, as_arguments, read
from paceline.config.engine_config import ENGINE_OPTIONS
from paceline.config.method_names import METHODS, DraftMethod
from paceline_services.draft.__main__ import parse_options as draft
from paceline_services.gateway.__main__ import parse as gateway
from paceline_services.target.__main__ import parse_options as target

DRAFT = {"method": "draft_model", "model": "d"}
CUSTOM = {"method": "custom_class", "speculator": "a.B"}
TOGETHER = "methods that draft together are ngram, suffix and at most one other, none of them twice"
RELAXED = {
    "use_relaxed_acceptance_for_thinking": True,
    "begin_thinking_phase_token": 128798,
    "end_thinking_phase_token": 128799,
}


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
    ({"speculative_algorithm": "DSPARK", "speculative_draft_model_path": "d"}, {"method": "dspark", "model": "d"}),
    ({"speculative_algorithm": "ngram"}, {"method": "ngram"}),
    ({"speculative_num_steps": 7}, {"num_speculative_tokens": 7}),
    ({"speculative_eagle_topk": 4}, {"tree_width": 4}),
    ({"speculative_num_draft_tokens": 9}, {"max_tree_nodes": 9}),
    ({"prompt_lookup_max": 4}, {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
    ({"prompt_lookup_max": 1}, {"prompt_lookup_min": 1, "prompt_lookup_max": 1}),
    ({"prompt_lookup_min": 7}, {"prompt_lookup_min": 7, "prompt_lookup_max": 7}),
    ({"prompt_lookup_min": 3}, {"prompt_lookup_min": 3, "prompt_lookup_max": 5}),
    *(({"method": f"{kind}mtp"}, {"method": "mtp"}) for kind in ("deepseek_", "glm4_moe_", "mimo_", "qwen3_5_")),
    (DRAFT | {"parallel_drafting": True}, {"method": "pard", "model": "d"}),
    (DRAFT | {"parallel_drafting": False}, DRAFT),
    ({"speculative_method": "standalone", "parallel_drafting": True, "model": "d"}, {"method": "pard", "model": "d"}),
    ({"method": "pard", "parallel_drafting": True, "model": "d"}, {"method": "pard", "model": "d"}),
    (
        {"method": ["suffix", "eagle3"], "parallel_drafting": True, "model": "d"},
        {"method": "peagle", "model": "d", "beside": ["suffix"]},
    ),
]


@pytest.mark.parametrize(("given", "meant"), OTHER_WORDS)
def test_names_of_other_engines_mean_ours(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert SpeculativeConfig.model_validate(given) == SpeculativeConfig.model_validate(meant)


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


MISTAKES: dict[type[Settings], list[tuple[dict[str, Any], str]]] = {
    SpeculativeConfig: [
        ({"num_speculative_token": 5}, "num_speculative_token"),
        ({"num_speculative_tokens": 5, "speculative_num_steps": 4}, "speculative_num_steps"),
        ({"speculative_num_steps": -1}, "speculative_num_steps"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens"),
        ({"tree_width": 0}, "tree_width"),
        ({"max_tree_nodes": "many"}, "max_tree_nodes"),
        ({"method": "warp"}, "method"),
        ({"method": []}, TOGETHER),
        ({"method": ["ngram", {}]}, "method"),
        ({"method": ["ngram", "warp"]}, "method"),
        ({"method": ["ngram", "ngram"]}, TOGETHER),
        ({"method": ["ngram", "prompt_lookup", "suffix"]}, TOGETHER),
        ({"method": ["draft_model", "custom"], "model": "d"}, TOGETHER),
        ({"method": ["ngram", "none"]}, TOGETHER),
        ({"beside": ["ngram"]}, TOGETHER),
        (DRAFT | {"beside": ["suffix", "suffix"]}, TOGETHER),
        ({"method": ["suffix", "draft_model"], "model": "d", "beside": ["ngram"]}, "leave out `beside`"),
        ({"method": "ngram", "beside": ["draft_model"]}, "beside"),
        ({"method": "draft_model"}, "model"),
        ({"method": "custom_class"}, "speculator"),
        ({"suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": -1}, "suffix_decoding_max_tree_depth"),
        ({"suffix_decoding_max_cached_requests": -1}, "suffix_decoding_max_cached_requests"),
        ({"suffix_decoding_max_spec_factor": -0.5}, "suffix_decoding_max_spec_factor"),
        ({"suffix_decoding_max_spec_factor": math.nan}, "suffix_decoding_max_spec_factor"),
        ({"suffix_decoding_min_token_prob": 1.1}, "suffix_decoding_min_token_prob"),
        ({"speculative_algorithm": "HOPE"}, "speculative_algorithm is one of DFLASH, DSPARK, EAGLE, EAGLE3, NEXTN"),
        ({"speculative_algorithm": "NGRAM", "method": "suffix"}, "contradict"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": {"1": 5}}, "max_tree_nodes"),
        ({"method": "ngram", "synthetic_acceptance_rates": [0.8]}, "set synthetic_acceptance_rate to"),
        ({"method": "pard"}, "method pard needs `model`"),
        ({"method": "dflash"}, "method dflash needs `model`"),
        ({"method": "ngram", "parallel_drafting": True}, "goes with draft_model and eagle3, not with"),
        (DRAFT | {"parallel_drafting": "no"}, "parallel_drafting is true or false"),
        ({"method": {}, "parallel_drafting": True}, "goes with draft_model and eagle3, not with {}"),
        (DRAFT | {"vocabulary_mapping": "guess"}, "vocabulary_mapping"),
        (DRAFT | {"use_heterogeneous_vocab": "yes"}, "use_heterogeneous_vocab"),
        (DRAFT | {"use_heterogeneous_vocab": True, "vocabulary_mapping": "strings"}, "contradict"),
        ({"method": "ngram", "vocabulary_mapping": "strings"}, "vocabulary_mapping"),
        ({"rejection_sampling_strategy": "synthetic"}, "Input should be 'coupled'"),
        ({"block_verification": True}, "block_verification means nothing to"),
        ({"posterior_threshold": 0.1, "rejection_sampling_strategy": "residual"}, "posterior_threshold means nothing"),
        ({"posterior_alpha": 0.1}, "posterior_alpha means nothing"),
        ({"logit_comparison_eps": 0.1}, "logit_comparison_eps means nothing"),
        (RELAXED | {"rejection_sampling_strategy": "residual"}, "use_relaxed_acceptance_for_thinking"),
        ({"use_relaxed_acceptance_for_thinking": True}, "needs begin_thinking_phase_token and end_"),
        ({"use_relaxed_acceptance_for_thinking": True, "begin_thinking_phase_token": 3}, "needs begin_thinking"),
        (RELAXED | {"end_thinking_phase_token": 128798}, "are both 128798"),
        ({"relaxed_topk": 5}, "relaxed_topk means nothing without use_relaxed"),
        ({"end_thinking_phase_token": 5}, "end_thinking_phase_token means nothing without use_relaxed"),
        (
            {"method": "ngram", "synthetic_acceptance_rate": 0.5, "rejection_sampling_strategy": "residual"},
            "synthetic_acceptance_rate means nothing to rejection_sampling_strategy residual",
        ),
        (
            RELAXED | {"method": "ngram", "synthetic_acceptance_rate": 0.5},
            "leaves use_relaxed_acceptance_for_thinking nothing",
        ),
        ({"method": "ngram", "synthetic_acceptance_rate": 1.5}, "less than or equal to 1"),
        ({"relaxed_delta": 1.5}, "less than or equal to 1"),
        ({"prompt_lookup_max": "x"}, "prompt_lookup_max"),
        ({"prompt_lookup_max": None}, "prompt_lookup_max"),
        ({"prompt_lookup_max": [4]}, "prompt_lookup_max"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min 4"),
        ({"draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size"),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, "the draft of ngram is too small"),
        (DRAFT | {"draft_tensor_parallel_size": 2, "draft_placement": "target"}, "draft_placement"),
        ({"draft_placement": "moon"}, "draft_placement"),
    ],
    SamplingParams: [
        ({"temprature": 1.0}, "temprature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"logit_bias": {3: 101.0}}, "logit_bias"),
        ({"logit_bias": {-3: 1.0}}, "logit_bias"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"grammar": "start: /a/", "grammar_begins_after": [5], "stop_token_ids": [4, 5]}, "token 5 delimits"),
        ({"grammar": "start: /a/", "grammar_waits_if": 5, "stop_token_ids": [4, 5]}, "token 5 delimits"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens 17 exceeds max_tokens 16"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ],
    EngineConfig: [
        ({"slots": 10}, "slots"),
        ({"dtype": "float64"}, "dtype"),
        ({"max_num_batched_rows": 7}, "max_num_batched_rows"),
        ({"gpu_memory": 1}, "gpu_memory"),
    ],
    SpeculativeOptions: [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ],
}


def test_a_method_says_what_its_missing_key_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The explanation stands in the method's row, so that a new key has one."""
    monkeypatch.setattr("paceline.config.speculative_config.METHODS", {"ngram": DraftMethod("lookup", {"model": "X"})})
    with pytest.raises(ValidationError, match="method ngram needs `model`: X"):
        SpeculativeConfig(method="ngram")
    for method in METHODS.values():
        assert method.needs.keys() <= SpeculativeConfig.model_fields.keys()


WRONG = [(kind, settings, named) for kind, mistakes in MISTAKES.items() for settings, named in mistakes]


@pytest.mark.parametrize(("kind", "settings", "named"), WRONG, ids=[f"{w[0].__name__}-{w[1]}" for w in WRONG])
def test_what_is_wrong_is_named(kind: type[Settings], settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(settings)
    [error] = caught.value.errors()
    field = ".".join(map(str, error["loc"]))
    assert named in f"{field}: {error['msg']}"


@pytest.mark.parametrize(
    "keys",
    [
        {"rejection_sampling_strategy": "residual", "block_verification": True},
        {"rejection_sampling_strategy": "typical-acceptance", "posterior_threshold": 0.1, "posterior_alpha": 0.2},
        {"rejection_sampling_strategy": "logit-comparison", "logit_comparison_eps": 0.1},
        {**RELAXED, "relaxed_topk": 5, "relaxed_delta": 0.5},
        {**RELAXED, "rejection_sampling_strategy": "greedy"},
        {"method": "ngram", "synthetic_acceptance_rate": 0.7},
        {"method": ["suffix", "ngram", "draft_model"], "model": "d"},
    ],
)
def test_keys_survive_the_command_line(keys: dict[str, Any]) -> None:
    """With every key given, the other keys at their defaults."""
    config = SpeculativeConfig.model_validate(keys)
    assert SpeculativeConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(("given", "unsigned"), [(0, 0), (-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)])
def test_signed_seeds_are_the_unsigned_ones_of_the_same_bits(given: int, unsigned: int) -> None:
    assert SamplingParams(seed=given).seed == unsigned


def test_top_k_minus_one_keeps_all() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


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


FILES = {
    "yaml": """
model: table:64   # a comment
speculative-config:
  method: ngram
  prompt_lookup_max: 4
port: 8123
""",
    "toml": """
model = "table:64"
port = 8123

[speculative_config]
method = "ngram"
prompt_lookup_max = 4
""",
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_has_the_options_of_a_command_and_the_command_line_overrides_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"paceline.{kind}"
    path.write_text(FILES[kind])
    options = target(["--config", str(path)])
    assert (options.model, options.port, options.speculative_config.prompt_lookup_max) == ("table:64", 8123, 4)
    assert target(["--config", str(path), "--port", "9"]).port == 9
    plans: list[Any] = []

    def stop(options: Any) -> None:
        plans.append(options)
        raise typer.Exit

    monkeypatch.setattr("paceline.cli.serve_command.plan_deployment", stop)
    for more in ([], ["--port", "9"]):
        result = CliRunner().invoke(main, ["serve", "--config", str(path), *more])
        assert result.exit_code == 0, result.output
    served = [(each.model, each.port, each.speculation.prompt_lookup_max) for each in plans]
    assert served == [("table:64", 8123, 4), ("table:64", 9, 4)]


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", "port: 1\n\nmodle: x\n"), ("a.toml", 'port = 1\n\nmodle = "x"\n')]
)
def test_an_unknown_key_is_refused_with_its_line(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    for parse in (target, draft, gateway):
        with pytest.raises(SystemExit) as left:
            parse(["--config", str(path)])
        assert left.value.code == 2
        assert f"{path}, line 3: modle is no option of this command" in capsys.readouterr().err
    result = CliRunner().invoke(main, ["serve", "--config", str(path)])
    assert result.exit_code == 2
    assert "line 3: modle is no option" in " ".join(result.output.replace("│", "").split())


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n- b\n", "a mapping of options"), ("a: [\n", "cannot be read"), (None, "cannot be read: No such file")],
)
def test_an_unreadable_file_is_an_error(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigFileError, match=message):
        read(path, {"a"})


def test_switches_and_lists_become_arguments() -> None:
    values = {"trust_remote_code": True, "quiet": False, "model": ["a", "b"], "engine_config": {"slots": 512}}
    arguments = ["--trust-remote-code", "--model=a", "--model=b", '--engine-config={"slots": 512}']
    assert as_arguments(values) == arguments


def test_a_worker_takes_fields_of_the_engine_as_options() -> None:
    options = target(["--model=pydoc", "--verify", "--quantization=q8_0"])
    assert {name: getattr(options, name) for name in ENGINE_OPTIONS} == {
        "trust_remote_code": False,
        "quantization": "q8_0",
        "verify": True,
    }
    with pytest.raises(SystemExit):
        target(["--model=pydoc", "--quantization=q9"])
