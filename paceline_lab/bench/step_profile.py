"""`paceline bench profile`: the parts of an engine step, beside what the machine could do.

The real engine over the real model, with 1, 8, 32 and 100 requests at once, plain and with a draft. Everything runs in
one thread, one part after another, so each part's time is its cost; in a deployment draft, services and engine have
processes of their own, and the draft's rounds hide behind the pass. Frames and messages are those of a deployment:
what the engine sends its draft goes through a pickle, a protobuf frame, and a pickle again, and growth comes back in
the same way. The draft makes as many rounds per step as fit into a pass, and one at least.

- `pass`    the model: rows in, logits out
- `engine`  everything else in the engine's step: grafting, choosing rows, drawing, verifying, committing
- `pipe`    pickles between the processes of a worker: target and draft
- `wire`    protobuf: deltas to the gateway, commits to the draft, growth from it
- `draft`   rounds of the draft, and its handling of commits; not in the step's sum, because it hides behind the pass

A draft that does not pay is not paused, as it would be in a deployment.

Figures are medians over steps, in milliseconds: wall-clock time, or, with one thread, that thread's CPU time, which
other programs hardly disturb. `round_ms` is one round of the draft for all requests together. `floor_ms` is the longer
of two: reading the weights once, at the bandwidth measured for as many bytes, and multiplying each row with every
weight, at the peak measured for matrix products. Attention is not in it.

On a GPU `pass` ends when the GPU has computed it, so engine and wire never hide behind it as they do in a deployment.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from itertools import groupby
from math import inf, prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline import family
from paceline.cli.progress import progress
from paceline.config import SamplingParams, SpeculativeConfig
from paceline.core.growth import Growth, GrowthBatch
from paceline.drafting import build_lookups, build_speculator, complete_config
from paceline.drafting.draft_loop import LinkUpdate
from paceline.drafting.speculator import Commit, Context, Limit, Opening, Speculator
from paceline.engine.draft_client import LocalDraftClient, NoDraftClient
from paceline.engine.draft_gate import DraftGate
from paceline.engine.engine import Engine
from paceline.engine.engine_loop import StepResult
from paceline.ipc.gc_heap import freeze_gc_heap
from paceline.ipc.pipe import MessageDecoder, MessageDispatcher, pack
from paceline.launcher import StartError
from paceline.llm import LLM
from paceline.messages import GenerationRequest
from paceline.model import Model
from paceline.model.checkpoint import Checkpoint
from paceline.model.model import ModelOutput
from paceline.model.row_probe import finish
from paceline.model_names import resolve_model
from paceline.telemetry.step_stats import StepStats
from paceline.wire.draft_codec import encode_growth_frame, parse_draft_frame, parse_growth_frame
from paceline.wire.draft_stream_messages import SendDraftFrame, StreamUp, StreamUpdate
from paceline.wire.remote_draft_client import RemoteDraftClient
from paceline.wire.target_codec import encode_delta
from paceline_lab.bench.bench_measurement import PLAIN, check_names, results_kept_on_interrupt
from paceline_lab.bench.method_comparison import LIMITS, methods, prompts_of
from paceline_lab.bench.svg_chart import Bar, BarPart, Panel, draw_chart
from paceline_lab.bench.workloads import workloads
from paceline_lab.training.family.widened_family import widened_family

Message = TypeVar("Message")
Clock = Callable[[], float]
"""Seconds."""
STEP = {"pass": "white", "engine": "red", "pipe": "magenta", "wire": "bright_blue"}
"""Parts of a target's step, with their colours; the first letter stands for a part."""
PARTS = ("pass", "pipe", "wire", "draft")
"""Keys of `parts_ms`."""
DRAFT_CALLS = ("open", "context", "commit", "limit", "close", "flush")
"""Methods of a draft client that encode frames."""
REQUESTS = (1, 8, 32, 100)
METHOD = "draft_model"
SIZES = ("shipped", "widened")
STEPS = 24
PROMPT = 48
"""Prompt tokens kept: prefilling a hundred long prompts would take longer than all that is measured."""
SLOTS = 2**15
BAR = 60
LINK, ADDRESS = 0, "draft"


class Stopwatch:
    """Adds up seconds by part. Time within a nested part counts for the nested part alone."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._since = clock()
        self._running: list[str] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._switch()
        self._running.append(name)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def _switch(self) -> None:
        """Add the time since the last switch to the innermost running part."""
        now = self.clock()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now


class TimedCalls:
    """Stands in for `inner`: calls of `methods` count as one part, everything else passes through."""

    def __init__(self, inner: object, methods: Sequence[str], stopwatch: Stopwatch, part: str) -> None:
        self._inner = inner
        for method in methods:
            setattr(self, method, _timed_call(getattr(inner, method), stopwatch, part))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _timed_call(call: Callable[..., Any], stopwatch: Stopwatch, part: str) -> Callable[..., Any]:
    @wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with stopwatch.part(part):
            return call(*args, **kwargs)

    return timed


class FinishedPasses:
    """Stands in for a model: a pass returns when an accelerator has computed it."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def run(self, *args: Any, **kwargs: Any) -> ModelOutput:
        output = self._model.run(*args, **kwargs)
        finish(output.logits)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Loopback(MessageDispatcher):
    """In place of an engine's pipe: its other end is a draft in the same thread, frames and pickles included."""

    def __init__(self, stopwatch: Stopwatch, speculator: Speculator | None) -> None:
        super().__init__()
        self._stopwatch = stopwatch
        self._speculator = speculator
        self.pass_s = 0.0
        """Time of the last pass: the draft's time budget in the next step."""
        self.rounds = 0

    def connect(self, speculator: Speculator) -> None:
        """Announce the draft to the engine."""
        self.dispatch(StreamUp(LINK, ADDRESS, ADDRESS, tuple(speculator.description.hidden_state_layers)))

    def send(self, message: object) -> None:
        with self._stopwatch.part("pipe"):
            piped(message)
        match message:
            case SendDraftFrame(_, frame):
                with self._stopwatch.part("wire"):
                    updates = parse_draft_frame(frame)
                with self._stopwatch.part("pipe"):
                    updates = piped(updates)
                with self._stopwatch.part("draft"):
                    for update in updates:
                        self._update_draft(update)
            case StepResult(deltas):
                with self._stopwatch.part("wire"):
                    for delta in deltas:
                        encode_delta(delta, delta.request_id).SerializeToString()

    def receive(self, timeout_s: float | None) -> None:
        with self._stopwatch.part("draft"):
            growths = self._grow()
        if not growths:
            return
        with self._stopwatch.part("pipe"):
            growths = piped(growths)
        with self._stopwatch.part("wire"):
            frame = encode_growth_frame(LinkUpdate(growths)).SerializeToString()
            update = parse_growth_frame(frame)
        with self._stopwatch.part("pipe"):
            message = piped(StreamUpdate(LINK, update.growths, ()))
        self.dispatch(message)

    def _grow(self) -> GrowthBatch:
        """Rounds of drafting until a pass's time is over, at least one."""
        assert self._speculator is not None
        growths: list[tuple[int, Growth]] = []
        until = self._stopwatch.clock() + self.pass_s
        while grown := self._speculator.grow():
            self.rounds += 1
            growths += grown.items()
            if self._stopwatch.clock() >= until:
                break
        return GrowthBatch.of(growths)

    def _update_draft(self, update: object) -> None:
        assert self._speculator is not None
        match update:
            case Opening():
                self._speculator.open(update)
            case Commit():
                self._speculator.commit(update)
            case Context():
                self._speculator.context(update)
            case Limit():
                self._speculator.limit(update)


def piped(message: Message) -> Message:
    """The message as it arrives at the other end of a pipe."""
    [copy] = MessageDecoder().feed(pack(message))
    return copy  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class HardwareFloor:
    """The machine's limits. `weights`: number of weights in the matrices that a pass multiplies with."""

    weights: int
    weight_bytes: int
    bytes_per_s: float
    macs_per_s: float

    def ms(self, rows: float) -> float:
        return 1e3 * max(self.weight_bytes / self.bytes_per_s, rows * self.weights / self.macs_per_s)


@dataclass(slots=True)
class ProfileCase:
    """The step of `requests` requests at once; `parts_ms` by PARTS."""

    size: str
    requests: int
    method: str
    rows: float = 0.0
    tokens: float = 0.0
    """Committed per step."""
    parts_ms: dict[str, float] = field(default_factory=dict)
    engine_ms: float = 0.0
    round_ms: float = 0.0
    floor_ms: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.size}, {self.requests} request{'s' * (self.requests > 1)}, {self.method}"

    @property
    def step_ms(self) -> dict[str, float]:
        """The target's step, by STEP."""
        return {part: self.engine_ms if part == "engine" else self.parts_ms[part] for part in STEP}

    @property
    def total_ms(self) -> float:
        """The target's step as a whole."""
        return sum(self.step_ms.values())


def run(
    console: Console,
    sizes: Sequence[str] = SIZES,
    requests: Sequence[int] = REQUESTS,
    method: str = METHOD,
    threads: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure and show; return the JSON document. Ctrl-C ends the run with what was measured so far.

    `threads` None: one per core. `device`: of the target and of the draft. Raises `StartError` for an unknown name.
    """
    threads = threads or os.cpu_count() or 1
    clock = time.thread_time if threads == 1 and device == "cpu" else time.perf_counter
    check_names(sizes, SIZES)
    check_names([method], methods())
    floors: dict[str, HardwareFloor] = {}
    cases: list[ProfileCase] = []
    with (
        results_kept_on_interrupt(console),
        progress(console, "kinds of steps", 2 * len(sizes) * len(requests)) as done,
    ):
        for size in sizes:
            with TemporaryDirectory() as folder:
                target, speculation = _models(size, method, Path(folder))
                engine = {"device": device, "threads": threads, "slots": SLOTS, "max_num_seqs": max(requests)}
                llm = LLM(target, engine_config={**engine, "enable_prefix_caching": False})
                floors[size] = measured_floor(target, clock, device=device)
                freeze_gc_heap()
                for name, config in ((PLAIN, SpeculativeConfig(method="none")), (method, speculation)):
                    for count in requests:
                        cases.append(measure(llm, ProfileCase(size, count, name), config, floors[size], clock))
                        done()
    show(console, cases)
    return {
        "device": device,
        "threads": threads,
        "floors": {size: asdict(floor) for size, floor in floors.items()},
        "cases": [asdict(case) for case in cases],
    }


def measure(
    llm: LLM, case: ProfileCase, config: SpeculativeConfig, floor: HardwareFloor, clock: Clock = time.perf_counter
) -> ProfileCase:
    """Fill `case` with its figures and return it."""
    stopwatch = Stopwatch(clock)
    engine, loopback = _engine(llm, config, stopwatch)
    prompts = _prompts()
    for number in range(case.requests):
        prompt = prompts[number % len(prompts)][-PROMPT:]
        sampling = SamplingParams(temperature=0.0, max_tokens=llm.model.max_model_len - PROMPT)
        engine.submit(GenerationRequest(f"r{number}", prompt, sampling, draft_addresses=[ADDRESS]))
    steps: list[dict[str, float]] = []
    stats: list[StepStats] = []
    rounds = 0
    with patch.object(DraftGate, "PAUSE_BELOW", -inf):
        while len(steps) < STEPS:
            with stopwatch.part("engine"):
                deltas = engine.step()
            loopback.send(StepResult(deltas, engine.load, [engine.last_step]))
            parts = stopwatch.take()
            loopback.pass_s, made, loopback.rounds = parts.get("pass", 0.0), loopback.rounds, 0
            if len(deltas) == case.requests:  # all prompts are computed
                steps.append(parts)
                stats.append(engine.last_step)
                rounds += made
    engine.reset()
    case.parts_ms = {part: _median_ms(steps, part) for part in PARTS}
    case.engine_ms = _median_ms(steps, "engine")
    case.round_ms = round(1e3 * sum(step.get("draft", 0.0) for step in steps) / max(1, rounds), 4)
    case.rows = median(each.rows for each in stats)
    case.tokens = round(sum(each.generation_tokens for each in stats) / STEPS, 2)
    case.floor_ms = round(floor.ms(case.rows), 4)
    return case


def _median_ms(steps: Sequence[Mapping[str, float]], part: str) -> float:
    return round(1e3 * median(step.get(part, 0.0) for step in steps), 4)


def measured_floor(
    target: str, clock: Clock = time.perf_counter, repeats: int = 50, device: str = "cpu"
) -> HardwareFloor:
    """The floor of a checkpoint, with torch's number of threads. The fastest of `repeats` tries counts."""
    checkpoint = Checkpoint(resolve_model(target))
    weights = sum(prod(checkpoint.shape(name)) for name in checkpoint.names if len(checkpoint.shape(name)) == 2)
    weight_bytes = 2 * weights
    as_many_bytes = torch.ones(weight_bytes // 8, dtype=torch.float64, device=device)
    reading_s = min(_timed(as_many_bytes.sum, clock) for _ in range(repeats))
    left, right = (torch.ones(n, 1024, dtype=torch.bfloat16, device=device) for n in (512, 1024))
    product_s = min(_timed(lambda: left @ right, clock) for _ in range(repeats))
    return HardwareFloor(weights, weight_bytes, weight_bytes / reading_s, left.numel() * right.shape[1] / product_s)


def picture(result: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> str:
    """An SVG: each case's step as a bar of its parts, beside that of an earlier run."""
    earlier = {(case["size"], case["requests"], case["method"]): case for case in (before or {}).get("cases", ())}
    panels = []
    for each in result["cases"]:
        case = ProfileCase(**each)
        old = earlier.get((case.size, case.requests, case.method))
        bars = [_bar("before", ProfileCase(**old))] if old else []
        bars.append(_bar("now", case))
        floor = Bar("floor", [BarPart("pass", case.floor_ms)], f"{case.floor_ms:.2f} ms")
        panels.append(Panel(case.name, [*bars, floor]))
    return draw_chart("The parts of a step, in milliseconds", panels, {part: part for part in STEP})


def _bar(label: str, case: ProfileCase) -> Bar:
    return Bar(label, [BarPart(part, ms) for part, ms in case.step_ms.items()], f"{case.total_ms:.2f} ms")


def show(console: Console, cases: Sequence[ProfileCase]) -> None:
    for (size, method), group in groupby(cases, lambda case: (case.size, case.method)):
        these = list(group)
        table = Table("ms a step", title=f"{size} family, {method}")
        for case in these:
            table.add_column(f"{case.requests} at once", justify="right")
        for part in PARTS:
            table.add_row(part, *(f"{case.parts_ms[part]:.2f}" for case in these))
        for name, figure in (
            ("a round of the draft", "round_ms"),
            ("engine", "engine_ms"),
            ("floor of the pass", "floor_ms"),
        ):
            table.add_row(name, *(f"{getattr(case, figure):.2f}" for case in these), style="bold")
        for figure in ("rows", "tokens"):
            table.add_row(figure, *(f"{getattr(case, figure):.1f}" for case in these))
        console.print(table)
    legend = [Text(f"{part[0]} {part}", f"reverse {colour}") for part, colour in STEP.items()]
    console.print(Text("  ").join(legend))
    for case in cases:
        console.print(Text.assemble(blocks(case), f" {case.name}: {case.total_ms:.2f} ms"), soft_wrap=True)


def blocks(case: ProfileCase, width: int = BAR) -> Text:
    """The step as `width` letters, each the first of a part's name."""
    text, done = Text(), 0.0
    for part, ms in case.step_ms.items():
        done += ms
        end = round(width * done / case.total_ms) if case.total_ms else 0
        text.append(part[0] * (end - len(text)), f"reverse {STEP[part]}")
    return text


def _engine(llm: LLM, config: SpeculativeConfig, stopwatch: Stopwatch) -> tuple[Engine, Loopback]:
    """An engine over the loaded model. Its draft, if any, is at the other end of the loopback."""
    weights = llm.model.target_weights
    speculator = build_speculator(config, llm.config, weights, llm.model.name) if config.enabled else None
    loopback = Loopback(stopwatch, speculator)
    drafting: Any = NoDraftClient()
    if speculator is not None:
        drafting = TimedCalls(RemoteDraftClient(loopback), DRAFT_CALLS, stopwatch, "wire")  # type: ignore[arg-type]
        loopback.connect(speculator)
    lookups = [LocalDraftClient(each) for each in build_lookups(config)]
    model: Any = TimedCalls(FinishedPasses(llm.model), ["run"], stopwatch, "pass")
    return Engine(model, llm.config, config, drafting, llm.cost, lookup_clients=lookups), loopback


def _models(size: str, method: str, folder: Path) -> tuple[str, SpeculativeConfig]:
    """The target of one size, and its speculative configuration."""
    target = family.NAMES[0]
    config = {**LIMITS, **methods()[method], "draft_placement": "worker"}
    if size == "widened":
        wide, head = widened_family(folder)
        target = str(wide)
        if config.get("model") in family.HEADS.values():
            config["model"] = str(head)
    return target, complete_config(SpeculativeConfig.model_validate(config), target)


def _prompts() -> list[list[int]]:
    return [prompt for workload in workloads() for prompt in prompts_of(workload)]


def _timed(work: Callable[[], torch.Tensor], clock: Clock) -> float:
    began = clock()
    finish(work())
    return clock() - began


def read(path: Path) -> dict[str, Any]:
    """The JSON document that ends an earlier run's output. Raises `StartError`."""
    try:
        lines = path.read_text().strip().splitlines()
        cases = json.loads(lines[-1])["cases"]
        return {"cases": [asdict(ProfileCase(**case)) for case in cases]}
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise StartError(f"{path} holds no earlier run of bench profile: {error}") from error
