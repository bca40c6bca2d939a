"""`paceline bench profile`: a step taken apart, beside what the machine could do.

The real engine over the real model, with 1, 8, 32 and 100 requests at once, plain and with a draft. Everything runs in
one thread, one thing after another, so each part's time is what it costs; in a deployment draft, services and engine
have processes of their own, and the draft's rounds hide behind the pass. Frames and messages are those of a deployment:
what the engine tells its draft goes through a pickle, a protobuf frame, and a pickle again, and growth comes back in
the same way. The draft makes as many rounds per step as fit into a pass, and one at least.

- `pass`         the model: rows in, logits out
- `draw`, `walk` from logits to tokens, and down the tree
- `guesses`      grafting what drafts sent, and reading it
- `schedule`     choosing rows
- `bookkeeping`  all else that the engine does in a step
- `pipe`         pickles between the processes of a worker: target and draft
- `wire`         protobuf: deltas to the gateway, commits to the draft, growth from it
- `draft`        rounds of the draft, and what it does with commits; not in the step's sum, for it hides behind the pass

The draft is not paused where it does not pay, as it would be in a deployment.

Figures are medians over steps, in milliseconds: of the clock, or, with one thread, of that thread's CPU time, which
other programs hardly disturb. `engine_ms` is draw, walk, guesses, schedule and bookkeeping, and `round_ms` one round of
the draft for all requests together.
`floor_ms` is the longer of two: reading the weights once, at the bandwidth measured for as many bytes, and
multiplying each row with every weight, at the peak measured for matrix products. Attention is not in it.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
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
from paceline.cli.progress import progress, results_kept_on_interrupt
from paceline.cli.supervised_process import StartError
from paceline.config import SamplingParams, SpeculativeConfig
from paceline.core.growth import Growth, GrowthBatch
from paceline.core.messages import Submission
from paceline.core.policy.draft_gate import DraftGate
from paceline.core.strategies import coupled
from paceline.drafting import build_model_free, build_speculator, complete_config
from paceline.drafting.draft_loop import DraftUpdate
from paceline.drafting.speculator import Commit, Context, Limit, Opening, Speculator
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.engine.engine_messages import StepResult
from paceline.ipc.gc_heap import freeze_gc_heap
from paceline.ipc.pipe import MessageDecoder, MessageDispatcher, pack
from paceline.llm import LLM
from paceline.model.checkpoint import Checkpoint
from paceline.model_names import resolve_model
from paceline.telemetry.step_stats import StepStats
from paceline.wire.draft_codec import encode_growth_frame, parse_draft_frame, parse_growth_frame
from paceline.wire.remote_drafting import RemoteDrafting
from paceline.wire.session_messages import SendDraftFrame, SessionUp, SessionUpdate
from paceline.wire.target_codec import encode_delta
from paceline_lab.bench.method_comparison import LIMITS, methods, prompts_of
from paceline_lab.bench.svg_chart import Bar, BarPart, Panel, draw_chart
from paceline_lab.bench.workloads import workloads
from paceline_lab.training.family.widened_family import widened_family

Answer = TypeVar("Answer")
Clock = Callable[[], float]
"""Seconds."""
STEP = {
    "pass": ("P", "white"),
    "draw": ("d", "blue"),
    "walk": ("k", "cyan"),
    "guesses": ("g", "green"),
    "schedule": ("s", "yellow"),
    "bookkeeping": ("b", "red"),
    "pipe": ("|", "magenta"),
    "wire": ("w", "bright_blue"),
}
"""Parts of a target's step, with letter and colour."""
PARTS = (*STEP, "draft")
ENGINE = ("draw", "walk", "guesses", "schedule", "bookkeeping")
"""Parts that a target's engine does itself, beside the pass."""
REQUESTS = (1, 8, 32, 100)
METHOD = "draft_model"
SIZES = ("shipped", "widened")
STEPS = 24
PROMPT = 48
"""Tokens of a prompt that are kept: to take in a hundred long ones would take longer than all that is measured."""
SLOTS = 2**15
BAR = 60
LINK, ADDRESS = 0, "draft"


class Stopwatch:
    """Adds up seconds by part. What runs within another part counts for itself alone."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._since = clock()
        self._running: list[str] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        self._running.append(name)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def watching(self, owner: object, verb: str, name: str) -> Any:
        """A context in which calls of `owner.verb` count as this part."""
        original = getattr(owner, verb)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return original(*args, **kwargs)

        return patch.object(owner, verb, watched)

    def taken(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def _turn(self) -> None:
        """Add the time since the last turn to the innermost part that is running."""
        now = self.clock()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now


class Loopback(MessageDispatcher):
    """In place of an engine's pipe: its other end is a draft in the same thread, frames and pickles included."""

    def __init__(self, stopwatch: Stopwatch, speculator: Speculator | None, vocabulary_size: int) -> None:
        super().__init__()
        self._stopwatch = stopwatch
        self._speculator = speculator
        self._vocabulary_size = vocabulary_size
        self.pass_s = 0.0
        """Of the last step: as long may the draft take for the next one."""
        self.rounds = 0

    def connect(self) -> None:
        """The draft is up."""
        assert self._speculator is not None
        self.dispatch(SessionUp(LINK, ADDRESS, ADDRESS, tuple(self._speculator.hidden_state_layers)))

    def send(self, message: object) -> None:
        with self._stopwatch.part("pipe"):
            message = piped(message)
        match message:
            case SendDraftFrame(_, frame):
                with self._stopwatch.part("wire"):
                    said = parse_draft_frame(frame.SerializeToString())
                with self._stopwatch.part("pipe"):
                    said = piped(said)
                with self._stopwatch.part("draft"):
                    for each in said:
                        self._tell(each)
            case StepResult(deltas):
                with self._stopwatch.part("wire"):
                    for delta in deltas:
                        encode_delta(delta, delta.request_id).SerializeToString()

    def receive(self, timeout_s: float | None) -> None:
        with self._stopwatch.part("draft"):
            growths = self._rounds()
        if not growths:
            return
        with self._stopwatch.part("pipe"):
            growths = piped(growths)
        with self._stopwatch.part("wire"):
            grown = parse_growth_frame(
                encode_growth_frame(DraftUpdate(growths)).SerializeToString(), self._vocabulary_size
            )
        with self._stopwatch.part("pipe"):
            news = piped(SessionUpdate(LINK, grown))
        self.dispatch(news)

    def _rounds(self) -> GrowthBatch:
        assert self._speculator is not None
        growths: list[tuple[int, Growth]] = []
        until = self._stopwatch.clock() + self.pass_s
        while grown := self._speculator.grow():
            self.rounds += 1
            growths += grown.items()
            if self._stopwatch.clock() >= until:
                break
        return GrowthBatch.of(growths)

    def _tell(self, said: object) -> None:
        assert self._speculator is not None
        match said:
            case Opening():
                self._speculator.open(said)
            case Commit():
                self._speculator.commit(said)
            case Context():
                self._speculator.context(said)
            case Limit():
                self._speculator.limit(said)


def piped(message: Answer) -> Answer:
    """What the other end of a pipe gets."""
    [answer] = MessageDecoder().feed(pack(message))
    return answer  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class HardwareFloor:
    """What the machine could do. `weights`: numbers in matrices that a pass multiplies with."""

    weights: int
    weight_bytes: int
    bytes_per_s: float
    macs_per_s: float

    def ms(self, rows: float) -> float:
        return 1e3 * max(self.weight_bytes / self.bytes_per_s, rows * self.weights / self.macs_per_s)


@dataclass(slots=True)
class ProfileCase:
    """A step of so many requests; `parts_ms` by PARTS."""

    size: str
    requests: int
    method: str
    rows: float = 0.0
    tokens: float = 0.0
    """Committed by a step."""
    parts_ms: dict[str, float] = field(default_factory=dict)
    engine_ms: float = 0.0
    round_ms: float = 0.0
    floor_ms: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.size}, {self.requests} request{'s' * (self.requests > 1)}, {self.method}"

    @property
    def total_ms(self) -> float:
        """Of the target's step."""
        return sum(self.parts_ms[part] for part in STEP)


def run(
    console: Console,
    sizes: Sequence[str] = SIZES,
    requests: Sequence[int] = REQUESTS,
    method: str = METHOD,
    threads: int | None = None,
) -> dict[str, Any]:
    """Measure, show, and return what the last line says; after Ctrl-C, what was measured by then. `threads`: None: one
    per core.

    Raises `ServiceStartError` for a name that is none.
    """
    threads = threads or os.cpu_count() or 1
    clock = time.thread_time if threads == 1 else time.perf_counter
    _refuse_unknown(sizes, SIZES)
    _refuse_unknown([method], list(methods()))
    floors: dict[str, HardwareFloor] = {}
    cases: list[ProfileCase] = []
    with (
        results_kept_on_interrupt(console),
        progress(console, "kinds of steps", 2 * len(sizes) * len(requests)) as done,
    ):
        for size in sizes:
            with TemporaryDirectory() as folder:
                target, speculation = _models(size, method, Path(folder))
                engine = {"threads": threads, "slots": SLOTS, "max_num_seqs": max(requests)}
                llm = LLM(target, engine_config={**engine, "enable_prefix_caching": False})
                floors[size] = measured_floor(target, clock)
                freeze_gc_heap()
                for name, config in (("plain", SpeculativeConfig(method="none")), (method, speculation)):
                    for count in requests:
                        cases.append(measure(llm, ProfileCase(size, count, name), config, floors[size], clock))
                        done()
    show(console, cases)
    return {
        "threads": threads,
        "floors": {size: asdict(floor) for size, floor in floors.items()},
        "cases": [asdict(case) for case in cases],
    }


def measure(
    llm: LLM, case: ProfileCase, config: SpeculativeConfig, floor: HardwareFloor, clock: Clock = time.perf_counter
) -> ProfileCase:
    """`case` with its figures."""
    stopwatch = Stopwatch(clock)
    engine, loopback = _engine(llm, config, stopwatch)
    for number in range(case.requests):
        prompt = _prompts()[number % len(_prompts())][-PROMPT:]
        sampling = SamplingParams(temperature=0.0, max_tokens=llm.model.max_model_len - PROMPT)
        engine.submit(Submission(f"r{number}", prompt, sampling, drafts=[ADDRESS]))
    steps: list[dict[str, float]] = []
    stats: list[StepStats] = []
    rounds: list[int] = []
    with ExitStack() as stack:
        stack.enter_context(patch.object(DraftGate, "PAUSE_BELOW", -inf))
        for owner, verb, part in verbs(engine):
            stack.enter_context(stopwatch.watching(owner, verb, part))
        while len(steps) < STEPS:
            deltas = engine.step()
            loopback.send(StepResult(deltas, engine.load, [engine.last_step]))
            taken = stopwatch.taken()
            loopback.pass_s, made, loopback.rounds = taken.get("pass", 0.0), loopback.rounds, 0
            if len(deltas) == case.requests:  # all prompts are in
                steps.append(taken)
                stats.append(engine.last_step)
                rounds.append(made)
    engine.reset()
    case.parts_ms = {part: round(1e3 * median(step.get(part, 0.0) for step in steps), 4) for part in PARTS}
    case.engine_ms = round(sum(case.parts_ms[part] for part in ENGINE), 4)
    case.round_ms = round(1e3 * sum(step.get("draft", 0.0) for step in steps) / max(1, sum(rounds)), 4)
    case.rows = median(each.rows for each in stats)
    case.tokens = round(sum(each.generation_tokens for each in stats) / STEPS, 2)
    case.floor_ms = round(floor.ms(case.rows), 4)
    return case


def verbs(engine: Engine) -> list[tuple[object, str, str]]:
    """Whose calls count as which part: the engine's own verbs, each within `step`."""
    drafting = engine._draft_manager._drafting
    told = ("open", "context", "commit", "limit", "close", "flush")
    return [
        (engine, "step", "bookkeeping"),
        (engine.model, "run", "pass"),
        (coupled, "draw", "draw"),
        (coupled, "walk", "walk"),
        (engine._draft_manager, "receive_growth", "guesses"),
        (engine._scheduler, "schedule", "schedule"),
        *((drafting, verb, "wire") for verb in told if isinstance(drafting, RemoteDrafting)),
    ]


def measured_floor(target: str, clock: Clock = time.perf_counter, repeats: int = 50) -> HardwareFloor:
    """Of a checkpoint, with as many threads as torch has. The best of some tries counts."""
    checkpoint = Checkpoint(resolve_model(target))
    weights = sum(prod(checkpoint.shape(name)) for name in checkpoint.names if len(checkpoint.shape(name)) == 2)
    weight_bytes = 2 * weights
    many = torch.ones(weight_bytes // 8, dtype=torch.float64)
    reading_s = min(_timed(many.sum, clock) for _ in range(repeats))
    left, right = torch.ones(512, 1024, dtype=torch.bfloat16), torch.ones(1024, 1024, dtype=torch.bfloat16)
    product_s = min(_timed(lambda: left @ right, clock) for _ in range(repeats))
    return HardwareFloor(weights, weight_bytes, weight_bytes / reading_s, left.numel() * right.shape[1] / product_s)


def picture(result: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> str:
    """Each case's step as a bar of its parts, beside that of an earlier run, as SVG."""
    earlier = {(case["size"], case["requests"], case["method"]): case for case in (before or {}).get("cases", ())}
    panels = []
    for each in result["cases"]:
        case = ProfileCase(**each)
        was = earlier.get((case.size, case.requests, case.method))
        bars = [_bar("before", ProfileCase(**was))] if was else []
        bars.append(_bar("now", case))
        floor = Bar("floor", [BarPart("pass", case.floor_ms)], f"{case.floor_ms:.2f} ms")
        panels.append(Panel(case.name, [*bars, floor]))
    return draw_chart("A step taken apart, in milliseconds", panels, {part: part for part in STEP})


def _bar(label: str, case: ProfileCase) -> Bar:
    return Bar(label, [BarPart(part, case.parts_ms[part]) for part in STEP], f"{case.total_ms:.2f} ms")


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
    legend = [Text(f"{letter} {part}", f"reverse {colour}") for part, (letter, colour) in STEP.items()]
    console.print(Text("  ").join(legend))
    for case in cases:
        console.print(Text.assemble(blocks(case), f" {case.name}: {case.total_ms:.2f} ms"), soft_wrap=True)


def blocks(case: ProfileCase, width: int = BAR) -> Text:
    """The step as `width` letters of its parts."""
    text, done = Text(), 0.0
    for part, (letter, colour) in STEP.items():
        done += case.parts_ms[part]
        end = round(width * done / case.total_ms) if case.total_ms else 0
        text.append(letter * (end - len(text)), f"reverse {colour}")
    return text


def _engine(llm: LLM, config: SpeculativeConfig, stopwatch: Stopwatch) -> tuple[Engine, Loopback]:
    """One over the loaded model, whose draft, if any, is at the other end of a loopback."""
    speculator = (
        build_speculator(config, llm.config, llm.model.target_weights, llm.model.name) if config.enabled else None
    )
    loopback = Loopback(stopwatch, speculator, llm.model.vocabulary_size)
    drafting: DraftClient = NoDraftClient()
    if speculator is not None:
        drafting = RemoteDrafting(loopback)  # type: ignore[arg-type]
        loopback.connect()
    beside = [LocalDraftClient(each) for each in build_model_free(config)]
    engine = Engine(llm.model, llm.config, config, drafting, llm.cost, beside=beside)
    return engine, loopback


def _models(size: str, method: str, folder: Path) -> tuple[str, SpeculativeConfig]:
    """The target, and how to draft for it."""
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


def _timed(work: Callable[[], object], clock: Clock) -> float:
    began = clock()
    work()
    return clock() - began


def _refuse_unknown(chosen: Sequence[str], known: Sequence[str]) -> None:
    if unknown := sorted(set(chosen) - set(known)):
        raise StartError(f"there is no {unknown[0]!r}: choose of {', '.join(known)}")


def read(path: Path) -> dict[str, Any]:
    """The last line of an earlier run, or a file that holds nothing else. Raises `ServiceStartError`."""
    try:
        lines = path.read_text().strip().splitlines()
        told = json.loads(lines[-1])
        return {"cases": [asdict(ProfileCase(**case)) for case in told["cases"]]}
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise StartError(f"{path} holds no earlier run of bench profile: {error}") from error
