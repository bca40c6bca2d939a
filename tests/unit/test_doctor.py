"""`paceline doctor`: each cause is named exactly when its figures show it, and advice follows from measurements.

Figures are made by hand: which output tokens were draft tokens, and how many verifications accepted how deep.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from typer.testing import CliRunner

from paceline.cli import main, served_measurement
from paceline.cli.http_client import HttpCompletion
from paceline.cli.terminal_bars import bar, columns
from paceline.config import SamplingParams, SpeculativeConfig
from paceline.core.messages import SpeculationStats
from paceline.core.policy.step_cost import FREE_ROWS, RowCost
from paceline.doctor import diagnosis
from paceline.doctor.advice import advice, pays_up_to
from paceline.doctor.candidates import CandidateMethod, candidates, combined_candidate, named
from paceline.doctor.causes import causes
from paceline.doctor.diagnosis import DiagnosedMethod, RejectedMethod, config_json, examined
from paceline.doctor.draft_memory import MemoryNeed, available, cache_positions
from paceline.doctor.measurement import (
    MeasurementSettings,
    PairedRun,
    TimedCompletions,
    facts_of,
    groups,
    need,
    other_special_tokens,
    speed,
)
from paceline.doctor.measurements import MeasuredAcceptance, MeasuredCompletion, MethodFacts, MethodMeasurement, Speed
from paceline.doctor.prompt_file import PromptsError, encoded, lack_chat_template, read
from paceline.doctor.speed_forecast import batch_seconds, forecast_tokens_per_s, node_gains
from paceline.llm import LLM
from paceline.text import Tokenizer
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.head_checkpoints import eagle3_tensors, llama_config, save_head
from tests.helpers.head_checkpoints import save_target as save_small_target
from tests.helpers.mtp_checkpoints import layer_tensors, save_target

SMALL = {"slots": 512, "max_num_batched_rows": 64, "enable_prefix_caching": False}
TRAINED, LOOKED_UP = MethodFacts(), MethodFacts(trained=False)


def stats(first: float, verifications: int = 100, steps: int | None = None, deeper: float = 0.0) -> SpeculationStats:
    """`first`, `deeper`: the shares of verifications that accepted a token, and a second one."""
    counts = [round(first * verifications), round(deeper * verifications)]
    return SpeculationStats([verifications] * 2, counts, 2 * verifications, verifications, steps or verifications)


def accepted(
    first: float, temperature: float = 0.0, verifications: int = 100, steps: int | None = None
) -> MeasuredAcceptance:
    """Figures that differ only in acceptance at depth 1."""
    return MeasuredAcceptance(temperature, [MeasuredCompletion(10, [], stats(first, verifications, steps))])


def guessed_at(*completions: tuple[int, Sequence[bool]]) -> MeasuredAcceptance:
    """Good acceptance at depth 1; by completion, prompt tokens and which output tokens were draft tokens."""
    return MeasuredAcceptance(0.0, [MeasuredCompletion(prompt, tokens, stats(0.8)) for prompt, tokens in completions])


def guessed(share: float, count: int) -> list[bool]:
    """`share` of so many tokens, evenly."""
    return [int((i + 1) * share) > int(i * share) for i in range(count)]


def names(acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts = TRAINED) -> list[str]:
    return [cause.name for cause in causes(acceptances, facts)]


@pytest.mark.parametrize(
    ("acceptances", "facts", "named"),
    [
        ([accepted(0.8), accepted(0.7, 0.8)], TRAINED, []),
        ([accepted(0.8), accepted(0.7, 0.8)], MethodFacts(bare_prompts=True, other_special_tokens=("bos_token",)), []),
        ([accepted(0.04)], TRAINED, ["wrong head"]),
        ([accepted(0.06)], TRAINED, []),
        ([accepted(0.04, verifications=15)], TRAINED, []),
        ([accepted(0.04, verifications=15, steps=90)], TRAINED, []),
        ([accepted(0.04, 0.8), accepted(0.8)], TRAINED, ["temperature"]),
        ([accepted(0.04)], MethodFacts(bare_prompts=True), ["wrong head"]),
        ([accepted(0.04)], MethodFacts(same_vocabulary=False), ["tokenizer"]),
        ([accepted(0.39)], MethodFacts(same_vocabulary=False), ["tokenizer"]),
        ([accepted(0.41)], MethodFacts(same_vocabulary=False), []),
        ([accepted(0.39)], MethodFacts(other_special_tokens=("bos_token",)), ["special tokens"]),
        ([accepted(0.41)], MethodFacts(other_special_tokens=("bos_token",)), []),
        ([accepted(0.39)], MethodFacts(bare_prompts=True), ["chat template"]),
        ([accepted(0.41)], MethodFacts(bare_prompts=True), []),
        ([accepted(0.39)], MethodFacts(bare_prompts=True, trained=False), []),
        ([accepted(0.8), accepted(0.48, 0.7)], TRAINED, ["temperature"]),
        ([accepted(0.8), accepted(0.49, 0.7)], TRAINED, []),
        ([accepted(0.8), accepted(0.7, 0.4), accepted(0.3, 1.0)], TRAINED, ["temperature"]),
        ([accepted(0.49), accepted(0.1, 0.7)], TRAINED, []),
        ([accepted(0.8, 0.2), accepted(0.1, 0.7)], TRAINED, []),
        ([accepted(0.8, steps=401)], LOOKED_UP, ["no repetition"]),
        ([accepted(0.8, steps=399)], LOOKED_UP, []),
        ([accepted(0.8, verifications=1, steps=20)], LOOKED_UP, ["no repetition"]),
        ([accepted(0.0, verifications=0, steps=15)], LOOKED_UP, []),
        ([accepted(0.04)], LOOKED_UP, ["no repetition"]),
        ([], TRAINED, []),
    ],
)
def test_a_cause_shown_by_acceptance_at_depth_1(
    acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts, named: list[str]
) -> None:
    assert names(acceptances, facts) == named


EVEN = guessed(0.5, 80)
FALLING = [*guessed(0.5, 40), *guessed(0.2, 40)]


@pytest.mark.parametrize(
    ("acceptance", "facts", "named"),
    [
        (guessed_at((10, EVEN)), TRAINED, []),
        (guessed_at((10, FALLING)), TRAINED, ["stale state"]),
        (guessed_at((10, FALLING)), LOOKED_UP, ["no repetition"]),
        (guessed_at((10, FALLING[::-1])), TRAINED, []),
        (guessed_at((10, [*guessed(0.5, 40), *guessed(0.35, 40)])), TRAINED, []),
        (guessed_at((10, [*guessed(0.5, 30), *guessed(0.2, 30)])), TRAINED, []),  # too short to say
        (guessed_at((10, [*guessed(0.15, 40), *guessed(0.0, 40)])), TRAINED, []),  # hardly anything that could fall
        (guessed_at((10, FALLING)), MethodFacts(position_limit=50), ["context limit"]),
        (guessed_at((10, FALLING)), MethodFacts(position_limit=1000), ["stale state"]),
        (guessed_at((10, EVEN)), MethodFacts(position_limit=50), []),
        (guessed_at((100, EVEN), (260, guessed(0.2, 80))), TRAINED, ["context limit"]),
        (guessed_at((260, guessed(0.2, 80)), (100, EVEN)), TRAINED, ["context limit"]),
        (guessed_at((100, EVEN), (250, guessed(0.2, 80))), TRAINED, []),  # not long
        (guessed_at((200, EVEN), (390, guessed(0.2, 80))), TRAINED, []),  # hardly longer
        (guessed_at((100, guessed(0.2, 80)), (400, EVEN)), TRAINED, []),
        (guessed_at((100, EVEN), (400, EVEN)), TRAINED, []),
        (guessed_at((400, guessed(0.2, 80))), TRAINED, []),
        (guessed_at((100, EVEN), (300, guessed(0.9, 80)), (400, guessed(0.2, 80))), TRAINED, ["context limit"]),
    ],
)
def test_a_cause_shown_by_positions_in_the_text(
    acceptance: MeasuredAcceptance, facts: MethodFacts, named: list[str]
) -> None:
    if not facts.trained:
        acceptance = MeasuredAcceptance(0.0, [replace(each, stats=stats(0.1)) for each in acceptance.completions])
    assert names([acceptance], facts) == named


def test_causes_name_their_figures() -> None:
    [stale] = causes([guessed_at((10, FALLING))], TRAINED)
    assert stale.says.startswith(
        "50% of tokens are accepted draft tokens in the first half of the output, 20% in the second"
    )
    [limit] = causes([guessed_at((10, FALLING))], MethodFacts(position_limit=50))
    assert "positions end at 50: 50% of tokens before were accepted draft tokens, 20% beyond" in limit.says
    [sampled] = causes([accepted(0.8), accepted(0.3, 0.7)], TRAINED)
    assert sampled.says.startswith("80% of first draft tokens are accepted at temperature 0, 30% at 0.7")


def test_acceptance_is_summed_over_completions() -> None:
    one = SpeculationStats([4, 2], [3, 1], 9, 4, 6)
    other = SpeculationStats([2], [1], 3, 2, 2)
    both = MeasuredAcceptance(0.0, [MeasuredCompletion(1, [], one), MeasuredCompletion(1, [], other)])
    assert both.by_depth == [4 / 6, 1 / 6]
    assert (both.first, both.length, both.per_step) == (4 / 6, 5 / 6, 5 / 8)
    assert (both.steps, both.verifications, both.nodes) == (8, 6, 12)
    nothing = MeasuredAcceptance(0.0, [])
    assert (nothing.by_depth, nothing.first, nothing.length, nothing.per_step) == ([], 0.0, 0.0, 0.0)


class TestForecast:
    def test_free_rows_bring_all_that_is_accepted(self) -> None:
        chain = MeasuredAcceptance(0.0, [MeasuredCompletion(1, [], stats(0.8, deeper=0.5))])
        assert forecast_tokens_per_s(chain, 1, 256, FREE_ROWS) == pytest.approx(1 + 0.8 + 0.5)
        assert forecast_tokens_per_s(chain, 4, 256, FREE_ROWS) == pytest.approx(4 * 2.3)

    def test_steps_without_draft_tokens_draw_one_token(self) -> None:
        half = MeasuredAcceptance(0.0, [MeasuredCompletion(1, [], stats(0.8, steps=200, deeper=0.5))])
        assert forecast_tokens_per_s(half, 10, 256, FREE_ROWS) == pytest.approx(10 * (1 + 1.3 / 2))

    def test_few_draft_tokens_are_not_rounded_away(self) -> None:
        seldom = MeasuredAcceptance(0.0, [MeasuredCompletion(1, [], stats(0.8, steps=400, deeper=0.5))])
        assert forecast_tokens_per_s(seldom, 1, 256, FREE_ROWS) == pytest.approx(1 + 1.3 / 4)

    def test_rows_that_cost_more_than_they_gain_are_left_out(self) -> None:
        chain = MeasuredAcceptance(0.0, [MeasuredCompletion(1, [], stats(0.8, deeper=0.05))])
        dear = RowCost([8, 16, 17, 24, 1024], [1.0, 1.5, 3.0, 3.0, 128.0])
        assert forecast_tokens_per_s(chain, 8, 256, dear) == pytest.approx((8 + 8 * 0.8) / 1.5)

    def test_a_tree_needs_more_rows_for_the_same_tokens(self) -> None:
        wide = SpeculationStats([100], [80], 300, 100, 100)
        per_row = RowCost([8, 1024], [1.0, 128.0])
        tree = MeasuredAcceptance(0.0, [MeasuredCompletion(1, [], wide)])
        assert node_gains(tree, 8) == [pytest.approx(0.8 / 3)] * 24
        assert forecast_tokens_per_s(tree, 8, 256, per_row) == pytest.approx(8)
        assert forecast_tokens_per_s(tree, 8, 256, FREE_ROWS) == pytest.approx(8 * 1.8)

    def test_a_pass_has_at_most_so_many_rows(self) -> None:
        chain = MeasuredAcceptance(0.0, [MeasuredCompletion(1, [], stats(1.0, deeper=1.0))])
        assert forecast_tokens_per_s(chain, 8, 12, FREE_ROWS) == pytest.approx(8 + 4)

    def test_prompts_are_computed_first_and_requests_end_one_by_one(self) -> None:
        """Three passes over 20 tokens of prompts. Of 3 and 7 tokens one is drawn with them, 2 by both, 4 by the longer:
        at 2 seconds a pass for up to 8 rows, with 1.8 tokens for each request that draws."""
        drafted = MeasuredAcceptance(0.0, [MeasuredCompletion(1, [], stats(0.8))])
        cost = RowCost([8, 1024], [2.0, 2.0])
        assert batch_seconds(drafted, [(12, 7), (8, 3)], 8, cost) == pytest.approx(2 * (3 + 2 / 1.8 + 4 / 1.8))
        assert batch_seconds(drafted, [(16, 1)], 8, cost) == 2 * 2

    def test_a_finished_request_leaves_a_cheaper_pass(self) -> None:
        """Nine rows take 3 seconds, eight take 2: one pass for the prompts, two for nine requests, four for eight."""
        cost, plain = RowCost([8, 9, 16], [2.0, 3.0, 3.0]), MeasuredAcceptance(0.0, [])
        assert batch_seconds(plain, [(1, 3), *[(1, 7)] * 8], 16, cost) == pytest.approx(3 + 2 * 3 + 4 * 2)

    def test_nothing_drafted_is_plain(self) -> None:
        assert forecast_tokens_per_s(MeasuredAcceptance(0.0, []), 4, 256, FREE_ROWS) == 4


def measured(
    name: str, *speedups: float, identical: bool | None = True, facts: MethodFacts = TRAINED, per_step: float = 0.5
) -> MethodMeasurement:
    speeds = [Speed(4**i, 100.0, 100 * speedup) for i, speedup in enumerate(speedups)]
    config = SpeculativeConfig.model_validate({"method": name, "model": "m"})
    return MethodMeasurement(name, config, [accepted(per_step)], speeds, identical, facts)


class TestAdvice:
    def test_the_fastest_over_all_loads(self) -> None:
        found = advice([measured("ngram", 2.5, 0.5), measured("eagle3", 1.8, 1.2), measured("suffix", 1.1, 1.1)])
        assert found.config.method == "eagle3"
        assert found.why == (
            "eagle3 is the fastest: 1.80 × with one request at a time; it pays with up to 4 requests at once"
        )

    def test_the_draft_runs_where_it_was_measured(self) -> None:
        assert advice([measured("eagle3", 1.8)]).config.draft_placement == "target"
        config = SpeculativeConfig(method="ngram", draft_placement="worker")
        assert advice([replace(measured("ngram", 1.8), config=config)]).config == config

    def test_a_method_that_changes_the_output_is_not_recommended(self) -> None:
        assert advice([measured("eagle3", 3.0, identical=False), measured("ngram", 1.2)]).config.method == "ngram"
        assert advice([measured("eagle3", 3.0, identical=None), measured("ngram", 1.2)]).config.method == "eagle3"

    @pytest.mark.parametrize("cases", [[], [measured("ngram", 1.01)], [measured("ngram", 0.7, 0.9)]])
    def test_none_where_nothing_pays(self, cases: list[MethodMeasurement]) -> None:
        assert advice(cases).config.method == "none"

    def test_it_pays_up_to_the_last_load_where_it_does(self) -> None:
        assert pays_up_to(measured("ngram", 1.5, 1.03, 0.9)) == 4
        assert pays_up_to(measured("ngram", 1.0)) == 0

    def test_the_configuration_can_be_pasted(self) -> None:
        config = SpeculativeConfig.model_validate({"method": ["suffix", "eagle3"], "model": "m", "tree_width": 2})
        written = config_json(config)
        assert written == {"method": ["suffix", "eagle3"], "model": "m", "tree_width": 2}
        assert SpeculativeConfig.model_validate(written) == config
        assert config_json(SpeculativeConfig(method="none")) == {"method": "none"}


class TestCandidates:
    def test_methods_without_checkpoint_always_fit(self) -> None:
        assert [each.name for each in candidates("table:64", [])] == ["ngram", "suffix"]
        suffix = candidates("table:64", [])[1].config
        assert suffix.num_speculative_tokens > 5

    def test_the_shipped_target_has_its_draft(self) -> None:
        assert "draft_model" in [each.name for each in candidates("pydoc", [])]

    def test_a_target_with_an_mtp_layer_has_it(self, tmp_path: Path) -> None:
        target = save_target(tmp_path, "mimo", layer_tensors("mimo"))
        assert [each.name for each in candidates(str(target), [])] == ["ngram", "suffix", "mtp"]

    def test_what_is_given_comes_last_and_what_is_off_not_at_all(self) -> None:
        given = [SpeculativeConfig(method="ngram", tree_width=1), SpeculativeConfig()]
        assert [each.name for each in candidates("table:64", given)] == ["ngram", "suffix", "ngram (2)"]

    def test_every_one_has_a_name_of_its_own(self) -> None:
        configs: list[dict[str, object]] = [
            {"method": "eagle3", "model": "/a/one"},
            {"method": "eagle3", "model": "/a/two"},
            {"method": "eagle3", "model": "/b/two"},
            {"method": ["suffix", "eagle3"], "model": "/a/one"},
            {"model": "/a/some"},
        ]
        found = named(SpeculativeConfig.model_validate(config) for config in configs)
        assert [each.name for each in found] == ["eagle3", "eagle3 two", "eagle3 two (2)", "suffix + eagle3", "some"]

    def test_the_best_draft_is_combined_with_suffix(self) -> None:
        suffix = measured("suffix", 1.2, facts=LOOKED_UP)
        best = combined_candidate(
            [suffix, measured("eagle", 1.3), measured("eagle3", 1.5), measured("ngram", 2, facts=LOOKED_UP)]
        )
        assert best is not None
        assert (best.name, best.config.method, best.config.beside) == ("suffix + eagle3", "eagle3", ("suffix",))

    def test_what_is_together_already_is_not_taken_for_a_draft(self) -> None:
        suffix = measured("suffix", 1.2, facts=LOOKED_UP)
        config = SpeculativeConfig.model_validate({"method": ["ngram", "eagle3"], "model": "m"})
        assert combined_candidate([suffix, replace(measured("eagle3", 1.9), config=config)]) is None

    def test_no_combination_if_one_of_them_gains_nothing(self) -> None:
        idle = measured("suffix", 1.0, facts=LOOKED_UP, per_step=0.05)
        assert combined_candidate([idle, measured("eagle3", 1.5)]) is None
        assert combined_candidate([measured("suffix", 1.2, facts=LOOKED_UP)]) is None
        assert combined_candidate([measured("eagle3", 1.5)]) is None


SHAPE = {"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}


class TestMemory:
    def test_free_is_what_linux_says_is_available(self) -> None:
        assert available("MemTotal:  9 kB\nMemFree:   1 kB\nMemAvailable:    3 kB\n") == 3072
        assert available("MemTotal:  9 kB\n") is None

    def test_unknown_free_memory_is_enough(self) -> None:
        assert MemoryNeed(1, 2, 3).total == 6
        assert MemoryNeed(1, 2, 3).fits(6)
        assert MemoryNeed(1, 2, 3).fits(None)
        assert not MemoryNeed(1, 2, 3).fits(5)

    @pytest.mark.parametrize(
        ("method", "numbers"), [("draft_model", 12 * 2 * 2 * 8), ("eagle3", 2 * 2 * 8), ("medusa", 0)]
    )
    def test_keys_and_values_by_position(self, method: str, numbers: int) -> None:
        target = {"head_dim": 99, "num_attention_heads": 99, "num_hidden_layers": 99, "hidden_size": 99}
        assert cache_positions(method, SHAPE, target) == numbers
        assert cache_positions(method, {"transformer_layer_config": SHAPE}, target) == numbers
        assert cache_positions(method, {}, SHAPE) == numbers

    def test_a_head_needs_its_weights_its_cache_and_hidden_states(self, tmp_path: Path) -> None:
        head = save_head(tmp_path / "head", eagle3_tensors(), llama_config())
        target = LLM(str(save_small_target(tmp_path / "target")), None, SMALL)
        found = need(target, SpeculativeConfig(model=str(head)))
        weights = target.model.target_weights()
        size = weights.dtype.itemsize
        config = llama_config()
        position = 2 * config["num_key_value_heads"] * config["hidden_size"] // config["num_attention_heads"]
        assert found.weights == sum(tensor.numel() for tensor in eagle3_tensors().values()) * size
        assert found.states == 3 * weights.hidden_size * (512 + 1) * size
        assert 512 * position * size < found.cache < 530 * position * size

    def test_an_mtp_layer_needs_its_weights(self, tmp_path: Path) -> None:
        target = LLM(str(save_target(tmp_path, "mimo", layer_tensors("mimo"))), None, SMALL)
        found = need(target, SpeculativeConfig(method="mtp"))
        size = target.model.target_weights().dtype.itemsize
        assert found.weights == sum(tensor.numel() for tensor in layer_tensors("mimo").values()) * size
        assert need(target, SpeculativeConfig(method="ngram")) == MemoryNeed()

    def test_a_draft_that_does_not_fit_is_not_built(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target = LLM(str(save_target(tmp_path, "mimo", layer_tensors("mimo"))), None, SMALL)
        monkeypatch.setattr(diagnosis, "free_bytes", lambda device: 1000)
        found = examined(
            target, CandidateMethod("mtp", SpeculativeConfig(method="mtp")), MeasurementSettings([[1]], 4, (0.0,))
        )
        assert isinstance(found, RejectedMethod)
        assert (found.name, found.cause) == ("mtp", "memory")
        assert "lower `slots`" in found.says


class TestPrompts:
    def test_lines_of_text(self, tmp_path: Path) -> None:
        (tmp_path / "p.txt").write_text('one\n\n{"prompt": "two"}\n')
        assert read(tmp_path / "p.txt") == ["one", '{"prompt": "two"}']

    def test_lines_of_json(self, tmp_path: Path) -> None:
        chat = [{"role": "user", "content": "two"}]
        (tmp_path / "p.jsonl").write_text(f'{{"prompt": "one"}}\n\n{json.dumps({"messages": chat, "id": 3})}\n')
        assert read(tmp_path / "p.jsonl") == ["one", chat]

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("p.txt", "\n \n", "holds no prompts"),
            ("p.jsonl", '{"prompt": "a"}\n{', "line 2 is no JSON"),
            ("p.jsonl", '\n{"text": "a"}', 'line 2 has neither {"prompt": "..."} nor'),
            ("p.jsonl", "[1]", "line 1 has neither"),
            ("p.jsonl", '{"messages": []}', "line 1 has neither"),
            ("p.jsonl", '{"messages": ["hi"]}', "line 1 has neither"),
            ("p.jsonl", '{"prompt": ""}', "line 1 has neither"),
        ],
    )
    def test_errors_name_the_line(self, tmp_path: Path, name: str, content: str, message: str) -> None:
        (tmp_path / name).write_text(content)
        with pytest.raises(PromptsError) as caught:
            read(tmp_path / name)
        assert message in str(caught.value)
        with pytest.raises(PromptsError, match="cannot be read"):
            read(tmp_path / "nowhere.txt")

    def test_prompts_are_encoded_as_by_a_server(self) -> None:
        tokenizer = Tokenizer.load("pydoc")
        assert tokenizer.chat_template is not None
        chat = [{"role": "user", "content": "What?"}]
        written = tokenizer.chat_template.render(chat)
        assert encoded(["def f", chat], tokenizer) == [
            tokenizer.encode("def f"),
            tokenizer.encode(written, add_special_tokens=False),
        ]
        assert lack_chat_template(["def f"], tokenizer)
        assert not lack_chat_template(["def f", chat], tokenizer)
        assert not lack_chat_template(["def f", written], tokenizer)

    def test_a_bos_before_every_text_is_no_template(self, tmp_path: Path) -> None:
        backend = Backend(models.WordLevel({"0": 0, "1": 1, "<s>": 2}, unk_token="0"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.add_special_tokens(["<s>"])
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
        tokenizer = Tokenizer(backend, {"bos_token": "<s>"}, "{{ messages[0].content }}")
        assert encoded(["1"], tokenizer) == [[2, 1]]
        assert lack_chat_template(["1"], tokenizer)

    def test_a_model_without_a_template_takes_no_conversation(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.load(str(save_checkpoint(tmp_path)))
        assert not lack_chat_template(["1 2"], tokenizer)
        with pytest.raises(PromptsError, match="has no chat template"):
            encoded([[{"role": "user", "content": "1"}]], tokenizer)
        with pytest.raises(PromptsError, match="no token in this model's vocabulary"):
            encoded([" "], tokenizer)


def test_a_special_token_that_one_tokenizer_lacks_does_not_differ() -> None:
    def tokenizer(special: dict[str, str]) -> Tokenizer:
        return Tokenizer(Tokenizer.load("table:8")._backend, special, None)

    draft = tokenizer({"bos_token": "1", "eos_token": "2"})
    assert other_special_tokens(draft, tokenizer({"bos_token": "1", "eos_token": "3"})) == ("eos_token",)
    assert other_special_tokens(draft, tokenizer({"bos_token": "1"})) == ()


def test_a_draft_model_is_compared_with_the_target(tmp_path: Path) -> None:
    def checkpoint(name: str, bos: str) -> str:
        folder = save_checkpoint(tmp_path / name)
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
        return str(folder)

    target = LLM(checkpoint("target", "1"), None, SMALL)

    def facts(draft: str) -> MethodFacts:
        return facts_of(target, SpeculativeConfig(method="draft_model", model=draft), 99, bare=True)

    alike = MethodFacts(bare_prompts=True, position_limit=99)
    assert facts(checkpoint("alike", "1")) == alike
    assert facts(checkpoint("other", "2")) == replace(alike, other_special_tokens=("bos_token",))
    assert facts("table:64") == replace(alike, same_vocabulary=False)
    assert facts_of(target, SpeculativeConfig(method="ngram"), 0, bare=False) == LOOKED_UP


def test_the_fastest_repetition_counts() -> None:
    target = LLM("table:64", None, SMALL)
    completions = target.generate(["1", "2"], MeasurementSettings([], 4, ()).sampling(0.0))
    side = TimedCompletions()
    for repetition in ((3.0, 1.0), (2.0, 5.0)):
        for group, seconds in enumerate(repetition):
            side.add(group, [completions[group]], seconds)
    assert side.seconds == [2.0, 1.0]
    assert side.tokens == [each.tokens for each in completions]
    assert side.tokens_per_s == 8 / 3


def test_the_prediction_covers_all_groups() -> None:
    llm = LLM("table:64", None, SMALL)
    llm.cost = RowCost([8, 1024], [2.0, 256.0])
    prompts = [[1, 2, 3], [4], [5], [6]]
    completions = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4))
    side = TimedCompletions()
    for group in range(2):
        side.add(group, completions[2 * group : 2 * group + 2], 1.0)
    this = speed(llm, 2, PairedRun(side, side), MeasuredAcceptance(0.0, []))
    assert this.predicted == 16 / (2 * (2 + 3 * 2)), "a pass for two prompts and three for the rest, twice"


def interrupted_at(name: str) -> Callable[..., DiagnosedMethod]:
    """Results of candidates until Ctrl-C at this one."""

    def examined(target: object, candidate: CandidateMethod, settings: object) -> DiagnosedMethod:
        if candidate.name == name:
            raise KeyboardInterrupt
        return DiagnosedMethod(
            MethodMeasurement(candidate.name, candidate.config, [], [Speed(1, 100.0, 150.0)], True, TRAINED)
        )

    return examined


def test_ctrl_c_keeps_the_results_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    target, settings = LLM("table:64", None, SMALL), MeasurementSettings([[1, 2, 3]], 4, (0.0,), True)
    chosen = named([SpeculativeConfig(method=each) for each in ("ngram", "suffix")])
    monkeypatch.setattr(diagnosis, "examined", interrupted_at("suffix"))
    found = diagnosis.diagnose(target, chosen, settings)
    assert [case.measured.name for case in found.cases] == ["ngram"]
    assert found.left == ["suffix"]
    assert found.as_json()["recommended"] is not None
    monkeypatch.setattr(diagnosis, "examined", interrupted_at("ngram"))
    with pytest.raises(KeyboardInterrupt):
        diagnosis.diagnose(target, chosen, settings)


def test_groups_are_full() -> None:
    """Prompts are only repeated where there are too few for one."""
    assert groups("abcde", 1) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert groups("abcde", 2) == [["a", "b"], ["c", "d"]]
    assert groups("abc", 5) == [["a", "b", "c", "a", "b"]]


def test_bars_are_as_long_as_their_figures() -> None:
    assert bar(10, 10, 4) == "████"
    assert bar(5, 10, 4) == "██"
    assert bar(10 / 32, 10, 4) == "▏"
    assert bar(0, 10, 4) == bar(0, 0, 4) == ""
    assert columns([1.0, 0.5, 0.01, 0.0]) == "██ ▄▄ ▁▁ ··"


def test_statistics_of_a_server_are_read() -> None:
    completion = HttpCompletion(tokens=[1, 2], accepted=[True, False])
    completion.take({"choices": [], "usage": {"prompt_tokens": 7}})
    statistics = {
        "drafted_by_depth": [2],
        "accepted_by_depth": [1],
        "drafted_tokens": 4,
        "verifications": 2,
        "steps": 3,
    }
    completion.take({"choices": [], "speculation": statistics | {"acceptance_length": 0.5}})
    measured = served_measurement.measured_completion(completion)
    assert (measured.prompt_tokens, measured.accepted) == (7, [True, False])
    assert measured.stats == SpeculationStats([2], [1], 4, 2, 3)


class TestSharedModel:
    """`LLM.with_speculation`."""

    def test_each_library_has_its_own_drafts(self) -> None:
        target = LLM("table:64", None, SMALL)
        one = target.with_speculation({"method": "draft_model", "model": "table:64"})
        [drafted], [plain] = one.generate(["1 2 3"]), target.generate(["1 2 3"])
        assert drafted.tokens == plain.tokens
        assert drafted.speculation.accepted_tokens == sum(drafted.accepted) > 0
        assert plain.speculation.drafted_tokens == 0
        assert plain.accepted == [False] * len(plain.tokens)

    def test_accepted_has_an_entry_for_each_token_up_to_a_stop(self) -> None:
        llm = LLM("table:64", {"method": "draft_model", "model": "table:64"}, SMALL)
        [whole] = llm.generate(["1 2 3"])
        for text in whole.text.split():  # some of them are in the middle of one step's commit
            [stopped] = llm.generate(["1 2 3"], stop=text)
            assert len(stopped.accepted) == len(stopped.tokens)

    def test_cached_prompts_cannot_be_shared(self) -> None:
        with pytest.raises(ValueError, match="set enable_prefix_caching to false"):
            LLM("table:64", None, {"slots": 512}).with_speculation({"method": "ngram"})


class TestCommand:
    def test_all_that_fits_a_tiny_checkpoint_is_measured_on_two_prompts(self, tmp_path: Path) -> None:
        target = save_target(tmp_path / "target", "mimo", layer_tensors("mimo"))
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "1 2 3 1 2 3"}\n{"prompt": "5 6"}\n')
        options = ["--model", str(target), "--prompts", str(prompts), "--max-tokens", "12"]
        other = ["--speculative-config", '{"method": "draft_model", "model": "table:64"}']
        engine = ["--engine-config", json.dumps({"slots": 512, "max_num_batched_rows": 32, "threads": 1})]
        result = CliRunner().invoke(main, ["doctor", *options, *other, *engine], env={"COLUMNS": "140"})
        torch.set_num_threads(1)
        assert result.exit_code == 0, result.output
        *shown, last = result.output.splitlines()
        report = json.loads(last)
        assert {"ngram", "suffix", "mtp"} <= {each["method"] for each in report["methods"]}
        for each in report["methods"]:
            assert each["identical"] is True
            assert [at["temperature"] for at in each["acceptance"]] == [0.0, 0.8]
            assert [speed["requests"] for speed in each["speeds"]] == [1, 4, 16]
            assert all(speed["plain"] > 0 and speed["predicted"] > 0 for speed in each["speeds"])
        [mtp] = [each for each in report["methods"] if each["method"] == "mtp"]
        assert mtp["acceptance"][0]["by_depth"]
        assert mtp["memory_bytes"]["weights"] > 0
        assert [(each["name"], each["cause"]) for each in report["refused"]] == [("draft_model", "tokenizer")]
        SpeculativeConfig.model_validate(report["recommended"])
        text = "\n".join(shown)
        assert all(part in text for part in ("mtp", "identical", "was not measured", "--speculative-config"))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--prompts", "/nowhere.txt"], "cannot be read"),
            (["--model", "/nowhere"], "no model at /nowhere"),
            (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        ],
    )
    def test_an_error_is_one_line_and_exit_code_2(self, options: list[str], message: str) -> None:
        result = CliRunner().invoke(main, ["doctor", *options])
        assert result.exit_code == 2
        assert message in result.output
