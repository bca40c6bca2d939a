"""`paceline bench methods`, `profile` and `scaling`, and their pictures: what is measured, shown and refused."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from rich.console import Console
from typer.testing import CliRunner

from paceline import family
from paceline.cli import main
from paceline.config import SamplingParams, SpeculativeConfig
from paceline.grammar import grammar_from_schema
from paceline.launcher import StartError
from paceline.llm import Completion
from paceline.messages import FinishReason, SpeculationStats, Timings
from paceline.model import Model, load
from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline.text import Tokenizer
from paceline_lab.bench import method_comparison, pass_times, scaling, step_profile
from paceline_lab.bench.bench_measurement import PLAIN
from paceline_lab.bench.gpu import model_shapes
from paceline_lab.bench.method_comparison import LIMITS, MAX_TOKENS, REPETITIONS, ComparedMethod, measure, methods, row
from paceline_lab.bench.step_profile import PARTS, HardwareFloor, ProfileCase, Stopwatch, blocks, read
from paceline_lab.bench.svg_chart import BAR, COLOURS, LABELS, NOTES, TEXT, WIDTH, Bar, BarPart, Panel, draw_chart
from paceline_lab.bench.workloads import Workload, extraction_schema, repetitive_workloads, workloads
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.simulation.scaling_model import FULL, Costs, CpuPerToken, OutOfReachError, process_counts
from paceline_lab.training.family.edit_chats import edits
from paceline_lab.training.family.extraction_chats import extractions
from paceline_lab.training.family.stdlib_corpus import held_out_files, read_source
from tests.helpers.checkpoints import save_checkpoint

SVG = "{http://www.w3.org/2000/svg}"
PROMPTS = [[1, 2], [3, 4]]


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    perf_counter = __call__


# Methods


def stats(*steps: tuple[int, int]) -> SpeculationStats:
    """Statistics of steps, each a verified depth and a number of accepted tokens."""
    made = SpeculationStats()
    for depth, accepted in steps:
        made.record(depth, depth, accepted)
    return made


@dataclass
class FakeLLM:
    """Takes `seconds` for a speculative completion and 8 s for a plain one; the first time longer, without guesses."""

    clock: Clock
    seconds: float
    stats: SpeculationStats
    wrong: int | None = None
    """The number of the speculative completion that has another last token."""
    requests: list[tuple[Sequence[int], SamplingParams, bool]] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, speculative: bool = True
    ) -> list[Completion]:
        [prompt] = prompts
        first = all(prompt != earlier for earlier, _, _ in self.requests)
        number = sum(speculative for _, _, speculative in self.requests)
        self.requests.append((prompt, sampling, speculative))
        self.clock.now += first + (self.seconds if speculative else 8.0)
        tokens = [*prompt, 5, int(speculative and number == self.wrong)]
        counts = self.stats if speculative and not first else SpeculationStats()
        return [
            Completion("", tokens, [False] * 4, [0] * 4, FinishReason.LENGTH, [], [], 2, counts, Timings(0.0, 0.0, 0.0))
        ]


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two methods of `paceline bench methods`, and two workloads of one and two prompts."""
    clock = Clock()
    made = {"ngram": FakeLLM(clock, 4.0, stats((2, 2))), "suffix": FakeLLM(clock, 2.0, stats((2, 1)))}
    monkeypatch.setattr(method_comparison, "time", clock)
    monkeypatch.setattr(method_comparison, "load_methods", lambda configs, *_: {name: made[name] for name in configs})
    monkeypatch.setattr(method_comparison, "methods", lambda _: {name: {"method": name} for name in made})
    monkeypatch.setattr(method_comparison, "workloads", lambda: [Workload("code", "", [{"prompt": "x"}])])
    chat = {"messages": [{"role": "user", "content": "y"}]}
    monkeypatch.setattr(method_comparison, "repetitive_workloads", lambda: [Workload("copies", "", [chat, chat])])
    return made


def bench(*arguments: str) -> tuple[int, list[str]]:
    """The exit code and the lines of output of `paceline bench`."""
    result = CliRunner().invoke(main, ["bench", *arguments], env={"COLUMNS": "120"})
    return result.exit_code, result.output.splitlines()


def test_acceptance_is_over_all_verifications_of_all_prompts() -> None:
    """A step without draft tokens is no verification; beyond its depth a step accepted nothing."""
    this = ComparedMethod()
    this.stats = dict(enumerate([stats((3, 3), (3, 1), (0, 0)), stats((1, 1), (2, 0)), stats((0, 0))]))
    assert (this.acceptance_length, this.by_depth()) == (5 / 4, [0.75, 0.25, 0.25])
    this.stats = {0: stats((0, 0))}
    assert (this.acceptance_length, this.by_depth()) == (0.0, [])


@pytest.mark.parametrize(
    ("this", "plain", "identical"),
    [
        ([[1, 2], [1, 2]], [[1, 2], [1, 2]], True),
        ([[1, 3], [1, 3]], [[1, 2], [1, 2]], False),
        ([[1, 2], [1, 3]], [[1, 2], [1, 2]], False),
        ([[1, 2], [1, 2]], [[1, 2], [1, 3]], False),
    ],
    ids=["equal", "the method", "a repetition of it", "a repetition of plain"],
)
def test_a_row_is_identical_if_every_repetition_is(
    this: list[list[int]], plain: list[list[int]], identical: bool
) -> None:
    measured = {PLAIN: ComparedMethod(), "m": ComparedMethod(stats={0: stats((2, 1))})}
    for name, repetitions in ((PLAIN, plain), ("m", this)):
        for number, tokens in enumerate(repetitions):
            measured[name].add(0, [tokens], (3.0 if name == PLAIN else 2.0) + 7 * number)  # the fastest counts
    found = row("m", "code", 0.8, measured)
    speeds = {"tokens_per_s": 1.0, "speedup": 1.5, "identical": identical}
    labels = {"method": "m", "workload": "code", "temperature": 0.8}
    assert found == labels | {"acceptance_length": 1.0, "by_depth": [1.0, 0.0]} | speeds


def test_methods_take_turns_prompt_by_prompt(llms: dict[str, Any]) -> None:
    measured = measure(llms, PROMPTS, 0.8)
    assert list(measured) == [PLAIN, *llms]
    turns = {name: [(prompt, speculative) for prompt, _, speculative in llm.requests] for name, llm in llms.items()}
    unmeasured = (PROMPTS[0], True)
    assert turns == {
        "ngram": [unmeasured, *[(prompt, each) for prompt in PROMPTS for each in (False, True)] * REPETITIONS],
        "suffix": [unmeasured, *[(prompt, True) for prompt in PROMPTS] * REPETITIONS],
    }
    samplings = [sampling for llm in llms.values() for _, sampling, _ in llm.requests]
    assert {(each.temperature, each.max_tokens, each.seed) for each in samplings} == {(0.8, MAX_TOKENS, 7)}
    for each in measured.values():
        assert [len(seconds) for seconds in each.seconds.values()] == [REPETITIONS] * 2
    assert measured["suffix"].stats == dict.fromkeys(range(2), llms["suffix"].stats), "of the fastest repetition"


@pytest.mark.usefixtures("llms")
def test_the_last_line_has_a_row_for_each_method_and_workload_and_temperature() -> None:
    code, output = bench("methods")
    rows = json.loads(output[-1])["rows"]
    assert code == 0
    measured = [(each["workload"], each["temperature"], each["method"]) for each in rows]
    assert measured == list(itertools.product(["code", "copies"], [0.0, 0.8], ["ngram", "suffix"]))
    assert [(each["speedup"], each["acceptance_length"]) for each in rows[:2]] == [(2.0, 2.0), (4.0, 1.0)]
    assert not any("DIFFERS" in line for line in output)


def test_other_tokens_fail_the_benchmark(llms: dict[str, Any]) -> None:
    llms["suffix"].wrong = 2
    code, output = bench("methods")
    assert code == 1
    assert [each["identical"] for each in json.loads(output[-1])["rows"]] == [True, False, *[True] * 6]
    [line] = [line for line in output if "DIFFERS" in line]
    assert line.replace("│", " ").split()[-2:] == ["2", "DIFFERS"], "tokens per second, and no speed-up"


def test_a_schema_binds_every_output_of_json_extraction(llms: dict[str, Any]) -> None:
    """Plain decoding's, too; and each right answer keeps to the schema."""
    code, output = bench("grammar", "suffix")
    assert code == 0
    assert [(each["workload"], each["method"]) for each in json.loads(output[-1])["rows"]] == [
        ("JSON extraction", "suffix")
    ] * 2
    assert {sampling.grammar for _, sampling, _ in llms["suffix"].requests} == {
        grammar_from_schema(extraction_schema())
    }
    for chat in extractions(20, seed=1):
        Draft202012Validator(extraction_schema()).validate(json.loads(chat[1]["content"]))


def test_only_named_methods_are_measured(llms: dict[str, Any]) -> None:
    _, output = bench("methods", "suffix")
    assert {each["method"] for each in json.loads(output[-1])["rows"]} == {"suffix"}
    assert llms["ngram"].requests == []


def test_every_configuration_is_valid_and_forgets_finished_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repetition would be copied from the first one."""
    monkeypatch.setattr(family, "HEADS", {"medusa": "pydoc-medusa", "eagle3": "pydoc-eagle3"})
    made = methods()
    assert list(made)[:3] == ["ngram", "suffix", "draft_model"]
    for name, config in made.items():
        forgets = SpeculativeConfig.model_validate(config).suffix_decoding_max_cached_requests == 0
        assert forgets or "suffix" not in name
    assert made["medusa"] == {"method": "medusa", "model": "pydoc-medusa"}
    stacked = made["suffix + eagle3"]
    assert (stacked["method"], stacked["model"]) == (["suffix", "eagle3"], "pydoc-eagle3"), "the best head that ships"


def test_the_hybrids_methods_are_lookups_and_its_own_layer() -> None:
    made = methods(family.HYBRID)
    assert list(made) == ["ngram", "suffix", "mtp", "suffix + mtp"]
    assert made["mtp"] == {"method": "mtp"}
    assert made["suffix + mtp"]["method"] == ["suffix", "mtp"]


def test_prompts_are_written_as_the_gateway_writes_them() -> None:
    chat = {"messages": [{"role": "user", "content": "What is len?"}]}
    prompts = method_comparison.prompts_of(Workload("w", "", [{"prompt": "def f("}, chat]))
    tokenizer = Tokenizer.load(family.NAMES[0])
    assert [tokenizer.decode(each, skip_special_tokens=False) for each in prompts] == [
        "def f(",
        "<|im_start|>user\nWhat is len?<|im_end|>\n<|im_start|>assistant\n",
    ]


def test_repetitive_workloads_are_held_out_first_turns() -> None:
    editing, extraction = repetitive_workloads()
    sources = [read_source(path) for path in held_out_files()]
    for workload, chats in ((editing, edits(sources, 4, seed=101)), (extraction, extractions(4, seed=102))):
        assert [body["messages"] for body in workload.bodies] == [chat[:1] for chat in chats]
        assert [message["role"] for body in workload.bodies for message in body["messages"]] == ["user"] * 4
    assert len({w.name for w in (*workloads(), editing, extraction)}) == 4


# The profile of a step


def case(**figures: Any) -> ProfileCase:
    parts = dict.fromkeys(PARTS, 1.0) | {"pass": 8.0}
    known = {"size": "shipped", "requests": 8, "method": "plain", "parts_ms": parts, "floor_ms": 4.0, "engine_ms": 5.0}
    return ProfileCase(**known | figures)


def test_a_nested_part_counts_alone_and_time_between_parts_not_at_all() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)
    with stopwatch.part("outer"):
        clock.now += 1
        with contextlib.suppress(ValueError), stopwatch.part("inner"):
            clock.now += 10
            raise ValueError
        clock.now += 2
    clock.now += 100
    assert stopwatch.take() == {"outer": 3, "inner": 10}
    assert stopwatch.take() == {}


def test_the_floor_counts_all_matrices_of_the_shipped_model() -> None:
    floor = step_profile.measured_floor(family.NAMES[0], itertools.count(0, 0.5).__next__, repeats=1)
    layer = 256 * (2 * 256 + 2 * 128 + 3 * 512)
    assert floor.weights == 4096 * 256 + 26 * layer
    assert (floor.bytes_per_s, floor.macs_per_s) == (4 * floor.weights, 2 * 512 * 1024 * 1024)
    floor = HardwareFloor(weights=1000, weight_bytes=2000, bytes_per_s=1e6, macs_per_s=1e6)
    assert (floor.ms(1), floor.ms(5)) == (2.0, 5.0), "the longer of reading and multiplying"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama that drafts for itself, in place of the shipped family: every draft token is right."""
    model = str(save_checkpoint(tmp_path / "tiny"))
    config = SpeculativeConfig.model_validate({**LIMITS, "method": "draft_model", "model": model})
    config = config.model_copy(update={"draft_placement": "worker"})
    monkeypatch.setattr(step_profile, "_models", lambda size, method, folder: (model, config))
    monkeypatch.setattr(step_profile, "_prompts", lambda: [[1, 2, 3], [4, 5]])
    monkeypatch.setattr(step_profile, "SLOTS", 1024)


@pytest.mark.usefixtures("tiny")
def test_the_parts_of_a_real_step() -> None:
    """Every part of a step with a draft takes time; a plain step has no draft part."""
    shown = io.StringIO()
    result = step_profile.run(Console(file=shown, width=200), ["shipped"], [2], "draft_model", threads=1)
    plain, drafted = (ProfileCase(**each) for each in result["cases"])
    assert (plain.method, plain.tokens, plain.rows) == ("plain", 2, 2)
    assert plain.parts_ms["draft"] == plain.round_ms == 0
    assert all(plain.parts_ms[part] > 0 for part in PARTS if part != "draft")
    assert all(drafted.parts_ms[part] > 0 for part in PARTS)
    assert min(drafted.tokens, drafted.rows) > 2
    assert min(drafted.round_ms, plain.engine_ms, drafted.engine_ms) > 0
    assert plain.floor_ms > 0
    assert "2 requests, draft_model" in shown.getvalue()


def test_bars_are_as_long_as_their_parts() -> None:
    """15 ms, of which the pass is 8."""
    assert blocks(case(), width=150).plain == "p" * 80 + "e" * 50 + "p" * 10 + "w" * 10
    assert blocks(case(parts_ms=dict.fromkeys(PARTS, 0.0), engine_ms=0.0)).plain == ""


def test_an_earlier_run_is_drawn_too() -> None:
    before = {"cases": [asdict(case(parts_ms=dict.fromkeys(PARTS, 1.0) | {"pass": 23.0}))]}
    drawn = ElementTree.fromstring(step_profile.picture({"cases": [asdict(case())]}, before))
    texts = [each.text for each in drawn.iter(f"{SVG}text")]
    assert {"before", "30.00 ms", "now", "15.00 ms", "floor", "4.00 ms"} <= set(texts)
    passes = sorted(float(each.get("width", 0)) for each in drawn.iter(f"{SVG}rect"))
    assert passes[-1] / passes[-2] == pytest.approx(23 / 8, abs=0.01)
    alone = step_profile.picture({"cases": [asdict(case(requests=1))]}, before)
    assert "before" not in alone, "a case that was not measured before"


@pytest.mark.parametrize("content", [None, "", "no json", "{}", '{"cases": [{"requests": 1, "odd": 2}]}'])
def test_a_file_without_an_earlier_run_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartError, match="no earlier run"):
        read(path)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("profile --sizes huge", "choose from"),
        ("profile --method magic", "choose from"),
        ("profile --before /nowhere.json", "no earlier run"),
        ("methods eagle9", "there is no 'eagle9': choose from ngram, suffix, draft_model"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_loaded(command: str, message: str) -> None:
    code, output = bench(*command.split())
    assert code == 2
    assert message in " ".join(" ".join(output).split())


def test_the_last_line_of_a_profile_can_be_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = {"threads": 1, "floors": {}, "cases": [asdict(case())]}
    calls: list[Any] = []
    monkeypatch.setattr(step_profile, "run", lambda console, *given: calls.append(given) or result)
    svg = tmp_path / "profile.svg"
    _, output = bench("profile", "--sizes", "shipped", "--requests", "8", "--svg", str(svg))
    assert calls == [(["shipped"], [8], "draft_model", None, "cpu")]
    assert svg.read_text().startswith("<svg")
    (tmp_path / "before.json").write_text("\n".join(output))
    assert json.loads(output[-1]) == result
    assert read(tmp_path / "before.json") == {"cases": result["cases"]}


# Pictures


LEGEND = {"a": "alpha", "b": "beta & more"}
PANELS = [
    Panel("one", [Bar("x", [BarPart("a", 10.0), BarPart("b", 30.0)], "40 <ms>"), Bar("y", [BarPart("a", 20.0)], "20")]),
    Panel("two", [Bar("z", [BarPart("b", 0.5)], "0.5")]),
]


def contrast(colour: str, page: tuple[int, int, int]) -> float:
    """By the formula of the WCAG."""

    def luminance(rgb: tuple[int, ...]) -> float:
        parts = [value / 255 for value in rgb]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    own = luminance(tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)))
    lighter, darker = sorted((own, luminance(page)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("page", [(255, 255, 255), (13, 17, 23)], ids=["white", "dark"])
def test_colours_stand_out_on_every_page(page: tuple[int, int, int]) -> None:
    """3 is what the WCAG asks of graphics and of large text."""
    assert min(contrast(colour, page) for colour in (TEXT, *COLOURS)) > 3


def test_bars_are_as_long_as_their_values_and_lie_within_the_picture() -> None:
    drawn = ElementTree.fromstring(draw_chart("a < b", PANELS, LEGEND))
    rects = list(drawn.iter(f"{SVG}rect"))
    assert [each.get("fill") for each in rects] == [*COLOURS[:2], COLOURS[0], COLOURS[1], COLOURS[0], COLOURS[1]]
    x, y, widths, heights = ([float(each.get(key, 0)) for each in rects] for key in ("x", "y", "width", "height"))
    lengths = [length / 40 * (WIDTH - LABELS - NOTES) for length in (10, 30, 20, 40)]
    assert widths[2:] == pytest.approx(lengths, abs=0.1), "after the legend"
    assert (x[3], y[3]) == (pytest.approx(x[2] + widths[2], abs=0.1), y[2]), "parts follow one another"
    assert max(heights) == BAR
    assert max(map(sum, zip(y, heights, strict=True))) <= float(drawn.get("height", 0))
    assert max(map(sum, zip(x, widths, strict=True))) <= WIDTH
    texts = [each.text for each in drawn.iter(f"{SVG}text")]
    assert {"a < b", "one", "two", "x", "y", "z", "40 <ms>", "beta & more"} <= set(texts)


# From measured costs to numbers of processes


TARGET = TimedModelConfig(step_ms=30.0, knee_rows=100)
COSTS = Costs(
    [(1, 1e-3), (100, 10e-3), (1000, 100e-3)], service=CpuPerToken(20e-6, 0.0), gateway=CpuPerToken(60e-6, 1e-3)
)


def test_costs_are_interpolated() -> None:
    assert [COSTS.engine_s(rows) for rows in (1, 550, 5000)] == pytest.approx([1e-3, 55e-3, 0.5])


def test_one_target_is_enough_while_its_step_is_short() -> None:
    found = process_counts(100, COSTS, TARGET, token_ms=45.0, answer_tokens=100)
    assert (found.targets, found.token_ms, found.tokens_per_s) == (1, 40.0, 2500)
    assert (found.engine, found.service) == (0.25, 0.05)
    assert found.gateway == pytest.approx(2500 * 70e-6, abs=1e-3)
    assert process_counts(100, COSTS, TARGET, token_ms=39.0, answer_tokens=100).targets == 2


def test_gateways_and_services_are_at_most_full() -> None:
    found = process_counts(10_000, COSTS, TARGET, token_ms=50.0, answer_tokens=100)
    assert found.token_ms <= 50.0
    assert found.gateway <= FULL
    assert found.gateways == pytest.approx(found.tokens_per_s * 70e-6 / FULL, abs=1)
    slow = Costs(COSTS.engine, service=CpuPerToken(800e-6, 0.0), gateway=COSTS.gateway)
    found = process_counts(100, slow, TARGET, token_ms=1000.0, answer_tokens=100)
    assert found.targets > 1
    assert found.service <= FULL


def test_an_impossible_goal_is_refused() -> None:
    with pytest.raises(OutOfReachError, match=r"one request alone gets a token every 31\.0 ms"):
        process_counts(10, COSTS, TARGET, token_ms=20.0, answer_tokens=100)


def test_the_engine_and_its_frames_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "STREAMED", 8)
    found, beyond = scaling.measure_engine(8), scaling.measure_engine(9)
    assert found.tokens is not None
    assert found.streamed_ms is not None
    assert found.tokens > 1, "draft tokens are accepted"
    assert min(found.plain_ms, found.streamed_ms, beyond.plain_ms) > 0
    assert beyond.streamed_ms is None
    sizes = scaling.frames()
    assert 0 < sizes["delta_of_1_token"] < sizes["delta_of_4_tokens"] < 2 * sizes["delta_of_1_token"]


# GPUs


def test_passes_are_measured_by_their_rows() -> None:
    printed = io.StringIO()
    found = pass_times.run(Console(file=printed), "cpu", ["shipped"])["passes"]["shipped"]
    assert list(found["ms"])[:4] == [1, 2, 3, 4]
    assert max(found["ms"]) == 64
    assert 0 < found["ms"][1] <= found["ms"][64]
    assert "cpu" in found["numerics"]
    assert found["rows_invariant"] is True
    assert ["rows", "invariant", "yes"] in [line.replace("│", " ").split() for line in printed.getvalue().splitlines()]


def test_passes_of_any_model_are_measured_after_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    positions: list[tuple[int, int]] = []
    monkeypatch.setattr(pass_times, "MOST", 2)
    monkeypatch.setattr(pass_times, "load", lambda *given: recorded(load(*given), positions))
    found = pass_times.run(Console(quiet=True), "cpu", ["pydoc-draft"], 600)
    assert found["context"] == 600
    assert list(found["passes"]["pydoc-draft"]["ms"]) == [1, 2]
    assert positions[:3] == [(0, 256), (256, 512), (512, 600)], "the context is computed first"
    assert positions[-1] == (600, 601)
    with pytest.raises(StartError, match=r"pydok is none of shipped, widened, random .*; no model at"):
        pass_times.run(Console(quiet=True), "cpu", ["pydok"])


def recorded(model: Model, positions: list[tuple[int, int]]) -> Model:
    """The model, which notes the first position of each pass, and the one after the last."""
    run = model.run

    def recording(rows: Sequence[Row], *rest: Any) -> Any:
        positions.append((rows[0].position, rows[-1].position + 1))
        return run(rows, *rest)

    model.run = recording  # type: ignore[method-assign]
    return model


def test_passes_of_a_random_model_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {**model_shapes.LLAMA_8B, **model_shapes.TINY}
    monkeypatch.setitem(pass_times.RANDOM, "random 8B", (shape, torch.bfloat16))
    found = pass_times.run(Console(quiet=True), "cpu", ["random 8B"])["passes"]["random 8B"]
    layer = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 256 + 2 * 128
    assert found["weight_bytes"] == 2 * (2 * 4096 * 128 + 8 * layer + 128)
    assert found["ms"][1] > 0


def test_passes_of_a_random_model_that_keeps_states_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "random Qwen3.5-0.8B float32"
    shape = {**model_shapes.QWEN_0_8B, **model_shapes.TINY}
    monkeypatch.setitem(pass_times.RANDOM, name, (shape, torch.float32))
    found = pass_times.run(Console(quiet=True), "cpu", [name])["passes"][name]
    assert found["ms"][9] > 0
    assert found["rows_invariant"]
    assert "float32" in found["numerics"]


def test_a_profile_computes_on_a_device_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device 'nonsense' cannot be used here"):
        step_profile.run(Console(quiet=True), ["shipped"], [1], "ngram", 1, "nonsense")


def test_a_pass_is_measured_until_the_accelerator_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model returns when the pass is started; `finish` waits for its logits."""
    order: list[Any] = []
    logits = torch.zeros(1)
    monkeypatch.setattr(step_profile, "finish", lambda given: order.append(("finished", given is logits)))
    model: Any = SimpleNamespace(run=lambda *_: order.append("started") or ModelOutput(logits), slots=7)
    finished = step_profile.FinishedPasses(model)
    assert finished.run([], []).logits is logits
    assert order == ["started", ("finished", True)]
    assert finished.slots == 7
