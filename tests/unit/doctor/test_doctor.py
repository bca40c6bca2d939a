"""`paceline doctor`: each cause is named exactly when its figures show it, and advice follows from measurements.

Figures are made by hand: which output tokens were draft tokens, and how many verifications accepted how deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from typer.testing import CliRunner

from paceline.cli import main, served_measurement
from paceline.cli.doctor_command import bar, columns
from paceline.cli.http_client import HttpCompletion
from paceline.config import SamplingParams, SpeculativeConfig
from paceline.core.policy.step_cost import FREE_ROWS, RowCost
from paceline.doctor import diagnosis
from paceline.doctor.candidates import CandidateMethod, candidates, combined_candidate, named
from paceline.doctor.causes import causes
from paceline.doctor.diagnosis import DiagnosedMethod, RejectedMethod, advice, config_json, examined, pays_up_to
from paceline.doctor.measurement import (
    DraftMemory,
    MeasurementSettings,
    PairedRun,
    TimedCompletions,
    batch_seconds,
    facts_of,
    forecast_tokens_per_s,
    groups,
    need,
    speed,
)
from paceline.doctor.measurements import MeasuredAcceptance, MeasuredCompletion, MethodFacts, MethodMeasurement, Speed
from paceline.doctor.prompt_file import PromptsError, encoded, lack_chat_template, read
from paceline.llm import LLM
from paceline.memory_plan import cached_numbers
from paceline.messages import SpeculationStats
from paceline.model.attention import SPARE_SLOTS, Heads
from paceline.model.device_memory import available
from paceline.model.native.native_network import head_width
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


def guessed_at(*completions: tuple[int, Sequence[bool]], first: float = 0.8) -> MeasuredAcceptance:
    """`first`: acceptance at depth 1; by completion, prompt tokens and which output tokens were draft tokens."""
    return MeasuredAcceptance(0.0, [MeasuredCompletion(prompt, tokens, stats(first)) for prompt, tokens in completions])


def guessed(share: float, count: int) -> list[bool]:
    """`share` of so many tokens, evenly."""
    return [int((i + 1) * share) > int(i * share) for i in range(count)]


EVEN = guessed(0.5, 80)
FALLING = [*guessed(0.5, 40), *guessed(0.2, 40)]
OTHER_BOS = MethodFacts(other_special_tokens=("bos_token",))
SHORT = MethodFacts(position_limit=50)
CAUSES: list[tuple[list[MeasuredAcceptance], MethodFacts, list[str]]] = [
    # By acceptance at depth 1.
    ([accepted(0.8), accepted(0.7, 0.8)], replace(OTHER_BOS, bare_prompts=True), []),
    ([accepted(0.04)], TRAINED, ["wrong head"]),
    ([accepted(0.06)], TRAINED, []),
    ([accepted(0.04, verifications=15, steps=90)], TRAINED, []),
    ([accepted(0.04, 0.8), accepted(0.8)], TRAINED, ["temperature"]),
    ([accepted(0.04)], MethodFacts(bare_prompts=True), ["wrong head"]),
    ([accepted(0.39)], MethodFacts(same_vocabulary=False), ["tokenizer"]),
    ([accepted(0.41)], MethodFacts(same_vocabulary=False), []),
    ([accepted(0.39)], OTHER_BOS, ["special tokens"]),
    ([accepted(0.41)], OTHER_BOS, []),
    ([accepted(0.39)], MethodFacts(bare_prompts=True), ["chat template"]),
    ([accepted(0.41)], MethodFacts(bare_prompts=True), []),
    ([accepted(0.39)], MethodFacts(bare_prompts=True, trained=False), []),
    ([accepted(0.8), accepted(0.49, 0.7)], TRAINED, []),
    ([accepted(0.8), accepted(0.7, 0.4), accepted(0.48, 1.0)], TRAINED, ["temperature"]),
    ([accepted(0.49), accepted(0.1, 0.7)], TRAINED, []),
    ([accepted(0.8, 0.2), accepted(0.1, 0.7)], TRAINED, []),
    ([accepted(0.8, steps=401)], LOOKED_UP, ["no repetition"]),
    ([accepted(0.8, steps=399)], LOOKED_UP, []),
    ([accepted(0.8, verifications=1, steps=20)], LOOKED_UP, ["no repetition"]),
    ([accepted(0.0, verifications=0, steps=15)], LOOKED_UP, []),
    ([], TRAINED, []),
    # By positions in the text.
    ([guessed_at((10, FALLING))], TRAINED, ["stale state"]),
    ([guessed_at((10, FALLING), first=0.1)], LOOKED_UP, ["no repetition"]),
    ([guessed_at((10, [*guessed(0.5, 40), *guessed(0.35, 40)]))], TRAINED, []),
    ([guessed_at((10, [*guessed(0.5, 30), *guessed(0.2, 30)]))], TRAINED, []),  # too short to say
    ([guessed_at((10, [*guessed(0.15, 40), *guessed(0.0, 40)]))], TRAINED, []),  # hardly anything that could fall
    ([guessed_at((10, FALLING))], SHORT, ["context limit"]),
    ([guessed_at((10, EVEN))], SHORT, []),
    ([guessed_at((100, EVEN), (260, guessed(0.2, 80)))], TRAINED, ["context limit"]),
    ([guessed_at((100, EVEN), (250, guessed(0.2, 80)))], TRAINED, []),  # not long
    ([guessed_at((200, EVEN), (390, guessed(0.2, 80)))], TRAINED, []),  # hardly longer
    ([guessed_at((100, guessed(0.2, 80)), (400, EVEN))], TRAINED, []),
    ([guessed_at((100, EVEN), (300, guessed(0.9, 80)), (400, guessed(0.2, 80)))], TRAINED, ["context limit"]),
]


@pytest.mark.parametrize(("acceptances", "facts", "named"), CAUSES)
def test_a_cause_is_named_exactly_where_figures_show_it(
    acceptances: Sequence[MeasuredAcceptance], facts: MethodFacts, named: list[str]
) -> None:
    assert [cause.name for cause in causes(acceptances, facts)] == named


def test_a_cause_says_its_figures() -> None:
    [stale] = causes([guessed_at((10, FALLING))], TRAINED)
    [limit] = causes([guessed_at((10, FALLING))], SHORT)
    [sampled] = causes([accepted(0.8), accepted(0.3, 0.7)], TRAINED)
    assert "50% of tokens are accepted draft tokens in the first half of the output, 20% in" in stale.says
    assert "positions end at 50: 50% of tokens before were accepted draft tokens, 20% beyond" in limit.says
    assert "80% of first draft tokens are accepted at temperature 0, 30% at 0.7" in sampled.says


def test_acceptance_is_summed_over_completions() -> None:
    one, other = SpeculationStats([4, 2], [3, 1], 9, 4, 6), SpeculationStats([2], [1], 3, 2, 2)
    both = MeasuredAcceptance(0.0, [MeasuredCompletion(1, [], one), MeasuredCompletion(1, [], other)])
    assert both.by_depth == [4 / 6, 1 / 6]
    assert (both.first, both.length, both.per_step) == (4 / 6, 5 / 6, 5 / 8)
    assert (both.steps, both.verifications, both.nodes) == (8, 6, 12)
    assert MeasuredAcceptance(0.0, []).length == 0


def drafted(first: float, deeper: float = 0.0, steps: int | None = None) -> MeasuredAcceptance:
    return MeasuredAcceptance(0.0, [MeasuredCompletion(1, [], stats(first, steps=steps, deeper=deeper))])


WIDE = MeasuredAcceptance(0.0, [MeasuredCompletion(1, [], SpeculationStats([100], [80], 300, 100, 100))])
DEAR = RowCost([8, 16, 17, 24, 1024], [1.0, 1.5, 3.0, 3.0, 128.0])
PER_ROW = RowCost([8, 1024], [1.0, 128.0])


@pytest.mark.parametrize(
    ("acceptance", "requests", "rows", "cost", "tokens_per_s"),
    [
        (drafted(0.8, 0.5), 4, 256, FREE_ROWS, 4 * 2.3),
        (drafted(0.8, 0.5, steps=200), 10, 256, FREE_ROWS, 10 * (1 + 1.3 / 2)),  # half of the steps without draft
        (drafted(0.8, 0.5, steps=400), 1, 256, FREE_ROWS, 1 + 1.3 / 4),  # few draft tokens are not rounded away
        (drafted(0.8, 0.05), 8, 256, DEAR, (8 + 8 * 0.8) / 1.5),  # rows that cost more than they gain are left out
        (WIDE, 8, 256, PER_ROW, 8),  # a tree needs more rows for the same tokens
        (WIDE, 8, 256, FREE_ROWS, 8 * 1.8),
        (drafted(1.0, 1.0), 8, 12, FREE_ROWS, 8 + 4),  # a pass has at most so many rows
        (MeasuredAcceptance(0.0, []), 4, 256, FREE_ROWS, 4),
    ],
)
def test_a_forecast_follows_from_acceptance_and_the_cost_of_rows(
    acceptance: MeasuredAcceptance, requests: int, rows: int, cost: RowCost, tokens_per_s: float
) -> None:
    assert forecast_tokens_per_s(acceptance, requests, rows, cost) == pytest.approx(tokens_per_s)


def test_prompts_are_computed_first_and_requests_end_one_by_one() -> None:
    """Three passes over 20 tokens of prompts. Of 3 and 7 tokens one is drawn with them, 2 by both, 4 by the longer:
    at 2 seconds a pass for up to 8 rows, with 1.8 tokens for each request that draws."""
    cost = RowCost([8, 1024], [2.0, 2.0])
    assert batch_seconds(drafted(0.8), [(12, 7), (8, 3)], 8, cost) == pytest.approx(2 * (3 + 2 / 1.8 + 4 / 1.8))
    assert batch_seconds(drafted(0.8), [(16, 1)], 8, cost) == 2 * 2


def test_a_finished_request_leaves_a_cheaper_pass() -> None:
    """Nine rows take 3 seconds, eight take 2: one pass for the prompts, two for nine requests, four for eight."""
    cost, plain = RowCost([8, 9, 16], [2.0, 3.0, 3.0]), MeasuredAcceptance(0.0, [])
    assert batch_seconds(plain, [*[(1, 7)] * 8, (1, 3)], 16, cost) == pytest.approx(3 + 2 * 3 + 4 * 2)


def measured(
    name: str, *speedups: float, identical: bool | None = True, facts: MethodFacts = TRAINED, per_step: float = 0.5
) -> MethodMeasurement:
    speeds = [Speed(4**i, 100.0, 100 * speedup) for i, speedup in enumerate(speedups)]
    config = SpeculativeConfig.model_validate({"method": name, "model": "m"})
    return MethodMeasurement(name, config, [accepted(per_step)], speeds, identical, facts)


ELSEWHERE = SpeculativeConfig(method="ngram", draft_placement="worker")
STACK = SpeculativeConfig.model_validate({"method": ["ngram", "eagle3"], "model": "m"})


@pytest.mark.parametrize(
    ("cases", "method", "placement"),
    [
        ([measured("ngram", 2.5, 0.5), measured("eagle3", 1.8, 1.2), measured("suffix", 1.1, 1.1)], "eagle3", "target"),
        ([replace(measured("ngram", 1.8), config=ELSEWHERE)], "ngram", "worker"),  # where it was measured
        ([measured("eagle3", 3.0, identical=False), measured("ngram", 1.2)], "ngram", "target"),
        ([measured("eagle3", 3.0, identical=None), measured("ngram", 1.2)], "eagle3", "target"),
        ([measured("ngram", 1.01)], "none", "worker"),
        ([measured("ngram", 0.7, 0.9)], "none", "worker"),
    ],
)
def test_the_fastest_method_that_keeps_the_output_is_advised(
    cases: list[MethodMeasurement], method: str, placement: str
) -> None:
    config = advice(cases).config
    assert (config.method, config.draft_placement) == (method, placement)


def test_advice_names_the_speed_up_and_the_last_load_where_it_pays() -> None:
    why = advice([measured("ngram", 2.5, 0.5), measured("eagle3", 1.8, 1.2)]).why
    assert why == "eagle3 is the fastest: 1.80 × with one request at a time; it pays with up to 4 requests at once"
    assert pays_up_to(measured("ngram", 1.5, 1.03, 0.9)) == 4
    assert pays_up_to(measured("ngram", 1.0)) == 0


@pytest.mark.parametrize(
    "written", [{"method": ["suffix", "eagle3"], "model": "m", "tree_width": 2}, {"method": "none"}]
)
def test_the_advised_configuration_can_be_pasted(written: dict[str, Any]) -> None:
    assert config_json(SpeculativeConfig.model_validate(written)) == written


def test_candidates_are_what_fits_the_target_and_what_is_given(tmp_path: Path) -> None:
    assert [each.name for each in candidates("table:64", [])] == ["ngram", "suffix"]
    assert candidates("table:64", [])[1].config.num_speculative_tokens > 5
    assert "draft_model" in [each.name for each in candidates("pydoc", [])]
    target = save_target(tmp_path, "mimo", layer_tensors("mimo"))
    assert [each.name for each in candidates(str(target), [])] == ["ngram", "suffix", "mtp"]
    given = [SpeculativeConfig(method="ngram", tree_width=1), SpeculativeConfig()]
    assert [each.name for each in candidates("table:64", given)] == ["ngram", "suffix", "ngram (2)"]


def test_every_candidate_has_a_name_of_its_own() -> None:
    configs: list[dict[str, object]] = [
        {"method": "eagle3", "model": "/a/one"},
        {"method": "eagle3", "model": "/a/two"},
        {"method": "eagle3", "model": "/b/two"},
        {"method": ["suffix", "eagle3"], "model": "/a/one"},
        {"model": "/a/some"},
    ]
    found = named(SpeculativeConfig.model_validate(config) for config in configs)
    assert [each.name for each in found] == ["eagle3", "eagle3 two", "eagle3 two (2)", "suffix + eagle3", "some"]


SUFFIX = measured("suffix", 1.2, facts=LOOKED_UP)


@pytest.mark.parametrize(
    ("cases", "name"),
    [
        ([SUFFIX, measured("eagle", 1.3), measured("eagle3", 1.5), measured("ngram", 2, facts=LOOKED_UP)], "eagle3"),
        ([SUFFIX, replace(measured("eagle3", 1.9), config=STACK)], None),  # together already
        ([measured("suffix", 1.0, facts=LOOKED_UP, per_step=0.05), measured("eagle3", 1.5)], None),  # no gain of one
        ([SUFFIX], None),
        ([measured("eagle3", 1.5)], None),
    ],
)
def test_the_best_draft_is_combined_with_suffix(cases: list[MethodMeasurement], name: str | None) -> None:
    best = combined_candidate(cases)
    found = best and (best.name, best.config.method, best.config.beside)
    assert found == (name and (f"suffix + {name}", name, ("suffix",)))


SHAPE = {"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}


def test_free_memory_is_what_linux_says_is_available() -> None:
    assert available("MemTotal:  9 kB\nMemFree:   1 kB\nMemAvailable:    3 kB\n") == 3072
    assert available("MemTotal:  9 kB\n") is None
    assert [DraftMemory(1, 2, 3).fits(free) for free in (6, None, 5)] == [True, True, False]


@pytest.mark.parametrize(
    ("method", "numbers"), [("draft_model", 12 * 2 * 2 * 32), ("eagle3", 2 * 2 * 32), ("medusa", 0)]
)
def test_keys_and_values_by_slot(method: str, numbers: int) -> None:
    """A head of 8 numbers is padded to 32."""
    target = dict.fromkeys(SHAPE, 99) | {"head_dim": 99}
    assert cached_numbers(method, SHAPE, target) == numbers
    assert cached_numbers(method, {"transformer_layer_config": SHAPE}, target) == numbers
    assert cached_numbers(method, {}, SHAPE) == numbers


def test_a_head_needs_its_weights_its_cache_and_hidden_states(tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", eagle3_tensors(), llama_config())
    target = LLM(str(save_small_target(tmp_path / "target")), None, SMALL)
    found = need(target, SpeculativeConfig(model=str(head)))
    weights, config = target.model.target_weights(), llama_config()
    size = weights.dtype.itemsize
    width = head_width(Heads.of(SimpleNamespace(**config)))
    assert found.weights == sum(tensor.numel() for tensor in eagle3_tensors().values()) * size
    assert found.states == 3 * weights.hidden_size * (512 + 1) * size
    assert found.cache == (512 + SPARE_SLOTS) * 2 * config["num_key_value_heads"] * width * size


def test_a_draft_that_does_not_fit_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = LLM(str(save_target(tmp_path, "mimo", layer_tensors("mimo"))), None, SMALL)
    config = SpeculativeConfig(method="mtp")
    size = target.model.target_weights().dtype.itemsize
    assert need(target, config).weights == sum(each.numel() for each in layer_tensors("mimo").values()) * size
    assert need(target, SpeculativeConfig(method="ngram")) == DraftMemory()
    monkeypatch.setattr(diagnosis, "free_bytes", lambda device: 1000)
    found = examined(target, CandidateMethod("mtp", config), MeasurementSettings([[1]], 4, (0.0,)))
    assert isinstance(found, RejectedMethod)
    assert (found.name, found.cause) == ("mtp", "memory")
    assert "lower `slots`" in found.says


CHAT = [{"role": "user", "content": "What?"}]


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("p.txt", 'one\n\n{"prompt": "two"}\n', ["one", '{"prompt": "two"}']),
        ("p.jsonl", f'{{"prompt": "one"}}\n\n{json.dumps({"messages": CHAT, "id": 3})}\n', ["one", CHAT]),
    ],
)
def test_prompts_are_lines_of_text_or_json(tmp_path: Path, name: str, content: str, prompts: list[Any]) -> None:
    (tmp_path / name).write_text(content)
    assert read(tmp_path / name) == prompts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", None, "cannot be read"),
        ("p.txt", "\n \n", "holds no prompts"),
        ("p.jsonl", '{"prompt": "a"}\n{', "line 2 is no JSON"),
        ("p.jsonl", '\n{"text": "a"}', 'line 2 has neither {"prompt": "..."} nor'),
        ("p.jsonl", "[1]", "line 1 has neither"),
        ("p.jsonl", '{"messages": []}', "line 1 has neither"),
        ("p.jsonl", '{"messages": ["hi"]}', "line 1 has neither"),
        ("p.jsonl", '{"prompt": ""}', "line 1 has neither"),
    ],
)
def test_errors_of_prompts_name_the_line(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(PromptsError, match=re.escape(message)):
        read(tmp_path / name)


def test_prompts_are_encoded_as_by_a_server() -> None:
    tokenizer = Tokenizer.load("pydoc")
    assert tokenizer.chat_template is not None
    written = tokenizer.chat_template.render(CHAT)
    tokens = [tokenizer.encode("def f"), tokenizer.encode(written, add_special_tokens=False)]
    assert encoded(["def f", CHAT], tokenizer) == tokens
    assert lack_chat_template(["def f"], tokenizer)
    assert not lack_chat_template(["def f", CHAT], tokenizer)
    assert not lack_chat_template(["def f", written], tokenizer)


def test_a_bos_before_every_text_is_no_template() -> None:
    backend = Backend(models.WordLevel({"0": 0, "1": 1, "<s>": 2}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer = Tokenizer(backend, {"bos_token": "<s>"}, "{{ messages[0].content }}")
    assert encoded(["1"], tokenizer) == [[2, 1]]
    assert lack_chat_template(["1"], tokenizer)


def test_a_model_without_a_template_takes_no_conversation(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(save_checkpoint(tmp_path)))
    assert not lack_chat_template(["1 2"], tokenizer)
    with pytest.raises(PromptsError, match="has no chat template"):
        encoded([CHAT], tokenizer)
    with pytest.raises(PromptsError, match="no token in this model's vocabulary"):
        encoded([" "], tokenizer)


def test_a_draft_model_is_compared_with_the_target(tmp_path: Path) -> None:
    def checkpoint(name: str, **special: str) -> str:
        folder = save_checkpoint(tmp_path / name)
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
        return str(folder)

    target = LLM(checkpoint("target", bos_token="1"), None, SMALL)

    def facts(draft: str) -> MethodFacts:
        return facts_of(target, SpeculativeConfig(method="draft_model", model=draft), 99, bare=True)

    alike = MethodFacts(bare_prompts=True, position_limit=99)
    assert facts(checkpoint("alike", bos_token="1", eos_token="3")) == alike, (
        "a token that the target lacks does not differ"
    )
    assert facts(checkpoint("other", bos_token="2")) == replace(alike, other_special_tokens=("bos_token",))
    assert facts("table:64") == replace(alike, same_vocabulary=False)
    assert facts_of(target, SpeculativeConfig(method="ngram"), 0, bare=False) == LOOKED_UP


def test_the_fastest_repetition_counts_and_the_prediction_covers_all_groups() -> None:
    llm = LLM("table:64", None, SMALL)
    llm.cost = RowCost([8, 1024], [2.0, 256.0])
    completions = llm.generate([[1, 2, 3], [4], [5], [6]], SamplingParams(temperature=0.0, max_tokens=4))
    side = TimedCompletions()
    for repetition in ((3.0, 1.0), (2.0, 5.0)):
        for group, seconds in enumerate(repetition):
            side.add(group, completions[2 * group : 2 * group + 2], seconds)
    assert side.seconds == [2.0, 1.0]
    assert side.tokens == [each.tokens for each in completions]
    this = speed(llm, 2, PairedRun(side, side), MeasuredAcceptance(0.0, []))
    assert this.plain == 16 / 3
    assert this.predicted == 16 / (2 * (2 + 3 * 2)), "a pass for two prompts and three for the rest, twice"


def test_ctrl_c_keeps_the_results_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def examined(target: object, candidate: CandidateMethod, settings: object) -> DiagnosedMethod:
        if candidate.name == last:
            raise KeyboardInterrupt
        speeds = [Speed(1, 100.0, 150.0)]
        return DiagnosedMethod(MethodMeasurement(candidate.name, candidate.config, [], speeds, True, TRAINED))

    monkeypatch.setattr(diagnosis, "examined", examined)
    target, settings = LLM("table:64", None, SMALL), MeasurementSettings([[1, 2, 3]], 4, (0.0,), True)
    chosen = named([SpeculativeConfig(method=each) for each in ("ngram", "suffix")])
    last = "suffix"
    found = diagnosis.diagnose(target, chosen, settings)
    assert [case.measured.name for case in found.cases] == ["ngram"]
    assert found.left == ["suffix"]
    assert found.as_json()["recommended"] is not None
    last = "ngram"
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
    by_depth = {"drafted_by_depth": [2], "accepted_by_depth": [1]}
    statistics = by_depth | {"drafted_tokens": 4, "verifications": 2, "steps": 3}
    completion.take({"choices": [], "speculation": statistics | {"acceptance_length": 0.5}})
    measured = served_measurement.measured_completion(completion)
    assert (measured.prompt_tokens, measured.accepted) == (7, [True, False])
    assert measured.stats == SpeculationStats([2], [1], 4, 2, 3)


def test_a_shared_model_has_its_own_drafts() -> None:
    target = LLM("table:64", None, SMALL)
    one = target.with_speculation({"method": "draft_model", "model": "table:64"})
    [drafted], [plain] = one.generate(["1 2 3"]), target.generate(["1 2 3"])
    assert drafted.tokens == plain.tokens
    assert drafted.speculation.accepted_tokens == sum(drafted.accepted) > 0
    assert plain.speculation.drafted_tokens == 0
    assert plain.accepted == [False] * len(plain.tokens)


def test_accepted_has_an_entry_for_each_token_up_to_a_stop() -> None:
    llm = LLM("table:64", {"method": "draft_model", "model": "table:64"}, SMALL)
    [whole] = llm.generate(["1 2 3"])
    for text in whole.text.split():  # some of them are in the middle of one step's commit
        [stopped] = llm.generate(["1 2 3"], stop=text)
        assert len(stopped.accepted) == len(stopped.tokens)


def test_cached_prompts_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="set enable_prefix_caching to false"):
        LLM("table:64", None, {"slots": 512}).with_speculation({"method": "ngram"})


def test_all_that_fits_a_tiny_checkpoint_is_measured_on_two_prompts(tmp_path: Path) -> None:
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
