"""`paceline bench methods`: measurements, rows, and the last line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import family
from paceline.cli import main
from paceline.config import SamplingParams, SpeculativeConfig
from paceline.core.messages import FinishReason, SpeculationStats, Timings
from paceline.llm import Completion
from paceline_lab.bench import method_comparison
from paceline_lab.bench.bench_measurement import PLAIN, Measurement
from paceline_lab.bench.method_comparison import (
    DEPTH,
    MAX_TOKENS,
    NODES,
    REPETITIONS,
    ComparedMethod,
    measure,
    methods,
    row,
)
from paceline_lab.bench.workloads import Workload, repetitive_workloads, workloads
from paceline_lab.training.family.edit_chats import edits
from paceline_lab.training.family.extraction_chats import extractions
from paceline_lab.training.family.stdlib_corpus import held_out_files, read_source

KEYS = ["method", "workload", "temperature", "acceptance_length", "by_depth", "tokens_per_s", "speedup", "identical"]
PROMPTS = [[1, 2], [3, 4]]


def stats(*steps: tuple[int, int]) -> SpeculationStats:
    """Statistics of steps, each a verified depth and a number of accepted tokens."""
    made = SpeculationStats()
    for depth, accepted in steps:
        made.record(depth, depth, accepted)
    return made


def completion(tokens: Sequence[int], speculation: SpeculationStats | None = None) -> Completion:
    found = speculation or SpeculationStats()
    accepted = [False] * len(tokens)
    return Completion("", list(tokens), accepted, FinishReason.LENGTH, [], 2, found, Timings(0.0, 0.0, 0.0))


class Clock:
    """Advanced by `Fake.generate`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class Fake:
    """An LLM that takes `seconds` for a speculative answer and 8 s for a plain one; longer the first time."""

    clock: Clock
    seconds: float
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    changes: Sequence[bool] = ()
    """Whether each speculative answer has another last token."""
    requests: list[tuple[Sequence[int], SamplingParams, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changes = itertools.chain(self.changes, itertools.repeat(False))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, speculative: bool = True
    ) -> list[Completion]:
        [prompt] = prompts
        first = 1.0 if all(prompt != earlier for earlier, _, _ in self.requests) else 0.0
        self.requests.append((prompt, sampling, speculative))
        self.clock.now += first + (self.seconds if speculative else 8.0)
        last = int(speculative and next(self._changes))
        return [completion([*prompt, 5, last], self.stats if speculative else None)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(method_comparison, "time", clock)
    return clock


# Measurements


def method_measurement(*repetitions: Sequence[int], speculation: SpeculationStats | None = None) -> ComparedMethod:
    """Outputs of prompt 0, of 2 s each."""
    this = ComparedMethod(stats={0: speculation or SpeculationStats()})
    for tokens in repetitions:
        this.add(0, [tokens], 2.0)
    return this


def test_acceptance_is_over_all_verifications_of_all_prompts() -> None:
    """A step without draft tokens is no verification; beyond its depth a step accepted nothing."""
    this = ComparedMethod()
    this.stats = dict(enumerate([stats((3, 3), (3, 1), (0, 0)), stats((1, 1), (2, 0)), stats((0, 0))]))
    assert this.acceptance_length == 5 / 4
    assert this.by_depth() == [0.75, 0.25, 0.25]
    this.stats = {0: stats((1, 1), (1, 1), (1, 0))}
    assert this.by_depth() == [0.667]
    this.stats = {0: stats((0, 0))}
    assert (this.acceptance_length, this.by_depth()) == (0.0, [])


def test_the_fastest_repetition_of_each_prompt_counts() -> None:
    this = Measurement()
    for seconds in ([3.0, 4.0], [2.0, 6.0], [5.0, 1.0]):
        for n, each in enumerate(seconds):
            this.add(n, [[1] * (n + 2)], each)
    assert this.fastest_s == 3.0
    assert this.fastest_speed == 5 / 3


def test_a_row() -> None:
    this = method_measurement([1, 2], speculation=stats((2, 1)))
    plain = Measurement()
    plain.add(0, [[1, 2]], 3.0)
    assert row("eagle3", "code", 0.8, {PLAIN: plain, "eagle3": this}) == {  # type: ignore[dict-item]
        "method": "eagle3",
        "workload": "code",
        "temperature": 0.8,
        "acceptance_length": 1.0,
        "by_depth": [1.0, 0.0],
        "tokens_per_s": 1.0,
        "speedup": 1.5,
        "identical": True,
    }


@pytest.mark.parametrize(
    ("this", "plain"),
    [([[1, 3], [1, 3]], [[1, 2], [1, 2]]), ([[1, 2], [1, 3]], [[1, 2], [1, 2]]), ([[1, 2], [1, 2]], [[1, 2], [1, 3]])],
    ids=["the method", "a repetition of it", "a repetition of plain"],
)
def test_other_tokens_are_not_identical(this: list[list[int]], plain: list[list[int]]) -> None:
    measured = {PLAIN: method_measurement(*plain), "m": method_measurement(*this)}
    assert row("m", "w", 0.0, measured)["identical"] is False


# Measuring


def test_methods_take_turns_prompt_by_prompt(clock: Clock) -> None:
    first, second = Fake(clock, 4.0, stats((2, 2))), Fake(clock, 2.0, stats((2, 1)))
    measured = measure({"a": first, "b": second}, PROMPTS, 0.8)  # type: ignore[dict-item]
    assert list(measured) == [PLAIN, "a", "b"]
    assert [(prompt, speculative) for prompt, _, speculative in first.requests] == [
        (PROMPTS[0], True),  # unmeasured
        *[(prompt, speculative) for prompt in PROMPTS for speculative in (False, True)] * REPETITIONS,
    ]
    assert [(prompt, speculative) for prompt, _, speculative in second.requests] == [
        (PROMPTS[0], True),
        *[(prompt, True) for prompt in PROMPTS] * REPETITIONS,
    ]
    assert {(s.temperature, s.max_tokens, s.seed) for _, s, _ in first.requests + second.requests} == {
        (0.8, MAX_TOKENS, 7)
    }
    for each in measured.values():
        assert [len(seconds) for seconds in each.seconds.values()] == [REPETITIONS] * 2


def test_every_method_has_its_own_figures(clock: Clock) -> None:
    llms = {"a": Fake(clock, 4.0, stats((2, 2))), "b": Fake(clock, 2.0, stats((2, 1)))}
    measured = measure(llms, PROMPTS, 0.0)  # type: ignore[arg-type]
    rows = [row(name, "w", 0.0, measured) for name in llms]
    assert [(r["speedup"], r["acceptance_length"], r["identical"]) for r in rows] == [
        (2.0, 2.0, True),
        (4.0, 1.0, True),
    ]
    assert [r["tokens_per_s"] for r in rows] == [1.0, 2.0]


# The command


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> dict[str, Fake]:
    """Two methods and two workloads."""
    made = {"ngram": Fake(clock, 4.0, stats((2, 2))), "suffix": Fake(clock, 2.0)}
    monkeypatch.setattr(method_comparison, "_llms", lambda configs: {name: made[name] for name in configs})
    monkeypatch.setattr(method_comparison, "methods", lambda: {name: {"method": name} for name in made})
    monkeypatch.setattr(method_comparison, "workloads", lambda: [Workload("code", "", [{"prompt": "x"}])])
    chat = {"messages": [{"role": "user", "content": "y"}]}
    monkeypatch.setattr(method_comparison, "repetitive_workloads", lambda: [Workload("copies", "", [chat, chat])])
    return made


def last_line(output: str) -> Any:
    return json.loads(output.splitlines()[-1])


@pytest.mark.usefixtures("few")
def test_the_last_line_is_one_document_with_a_row_for_each_method_and_workload_and_temperature() -> None:
    result = CliRunner().invoke(main, ["bench", "methods"], env={"COLUMNS": "120"})
    document = last_line(result.output)
    assert result.exit_code == 0
    assert list(document) == ["rows"]
    assert [list(each) for each in document["rows"]] == [KEYS] * 8
    assert [(each["workload"], each["temperature"], each["method"]) for each in document["rows"]] == list(
        itertools.product(["code", "copies"], [0.0, 0.8], ["ngram", "suffix"])
    )
    assert "DIFFERS" not in result.output


def test_other_tokens_fail_the_benchmark(few: dict[str, Fake]) -> None:
    few["suffix"].changes = [False, False, True]
    few["suffix"].__post_init__()
    result = CliRunner().invoke(main, ["bench", "methods"], env={"COLUMNS": "120"})
    assert result.exit_code == 1
    assert [each["identical"] for each in last_line(result.output)["rows"]] == [True, False, *[True] * 6]
    [line] = [line for line in result.output.splitlines() if "DIFFERS" in line]
    assert line.replace("│", " ").split() == ["suffix", "0.00", "2", "DIFFERS"]  # and no speed-up


def test_only_named_methods_are_measured(few: dict[str, Fake]) -> None:
    result = CliRunner().invoke(main, ["bench", "methods", "suffix"])
    assert {each["method"] for each in last_line(result.output)["rows"]} == {"suffix"}
    assert few["ngram"].requests == []


def test_an_unknown_method_is_refused_in_one_line() -> None:
    result = CliRunner().invoke(main, ["bench", "methods", "eagle9"])
    assert result.exit_code == 2
    assert "there is no 'eagle9': choose from ngram, suffix, draft_model" in " ".join(result.output.split())


# What is compared


def test_every_configuration_is_valid() -> None:
    for config in methods().values():
        SpeculativeConfig.model_validate(config)
    assert list(methods())[:3] == ["ngram", "suffix", "draft_model"]
    assert "suffix + eagle3" in methods()


def test_no_method_keeps_finished_requests() -> None:
    """A repetition would be copied from the first one."""
    for name, config in methods().items():
        forgets = SpeculativeConfig.model_validate(config).suffix_decoding_max_cached_requests == 0
        assert forgets or "suffix" not in name


def test_the_best_head_that_ships_drafts_with_suffix_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "HEADS", {"medusa": "pydoc-medusa", "eagle3": "pydoc-eagle3"})
    made = methods()
    assert made["medusa"] == {"method": "medusa", "model": "pydoc-medusa"}
    assert made["suffix + eagle3"]["method"] == ["suffix", "eagle3"]
    assert made["suffix + eagle3"]["model"] == "pydoc-eagle3"


def test_all_methods_share_the_target_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, dict[str, Any]]] = []

    class Target:
        def __init__(self, model: str, engine_config: dict[str, Any]) -> None:
            built.append((model, engine_config))

        def with_speculation(self, config: dict[str, Any]) -> dict[str, Any]:
            return config

    monkeypatch.setattr(method_comparison, "LLM", Target)
    made = method_comparison._llms(methods())
    [(target, engine)] = built
    assert target == family.NAMES[0]
    assert engine["enable_prefix_caching"] is False
    limits = {"draft_placement": "target", "num_speculative_tokens": DEPTH, "max_tree_nodes": NODES}
    assert made == {name: {**limits, **config} for name, config in methods().items()}


def test_prompts_are_written_as_the_gateway_writes_them() -> None:
    chat = {"messages": [{"role": "user", "content": "What is len?"}]}
    text, chat_prompt = method_comparison.prompts_of(Workload("w", "", [{"prompt": "def f("}, chat]))
    tokenizer = method_comparison.Tokenizer.load(family.NAMES[0])
    assert tokenizer.decode(text, skip_special_tokens=False) == "def f("
    shown = tokenizer.decode(chat_prompt, skip_special_tokens=False)
    assert shown == "<|im_start|>user\nWhat is len?<|im_end|>\n<|im_start|>assistant\n"


def test_repetitive_workloads_are_held_out_first_turns() -> None:
    editing, extraction = repetitive_workloads()
    sources = [read_source(path) for path in held_out_files()]
    for workload, chats in ((editing, edits(sources, 4, seed=101)), (extraction, extractions(4, seed=102))):
        assert [body["messages"] for body in workload.bodies] == [chat[:1] for chat in chats]
        assert [message["role"] for body in workload.bodies for message in body["messages"]] == ["user"] * 4
    assert len({w.name for w in (*workloads(), editing, extraction)}) == 4
