"""`paceline bench peers --sizes real`: published models beside llama.cpp as its users run it, in one run.

The models are GGUF files, `PUBLISHED` of `paceline.model_names`. llama.cpp is built for this machine
(`paceline_lab.peers.llama_cpp_build`): `llama-server` plain, with the 0.5B drafting for the 1.5B (`draft-simple`), and
with its lookups (`ngram-simple`, `ngram-mod`). Ours: plain, suffix lookups, the same 0.5B, both, and the head of a
model that has one. Each way to draft of llama.cpp is a process; ours share one, over one loaded target. transformers
runs the same weights, dequantised to bfloat16, on the loads in REFERENCE; it is no part of a quick run.

The engines take turns call by call and are stopped between their turns. Prompts are token ids of the model's own
tokenizer; no prompt's KV is reused, no request ends early, suffix lookups keep no finished request. Speeds are medians
over calls of new tokens per second of the whole call, prompt included; of `prompt_*`, of its prompt's tokens until one
new one. `equal` counts the prompts whose output is, every time, that of the engine's own plain decoding.

`start` is the time from the command to the first token over HTTP, of `paceline serve` over `llama-server`, file in the
page cache. `memory` is the most that the target's process took, over the file and the keys and values of START_SLOTS
positions. All ratios but these two are ours over llama.cpp's; `speculative_*` is our best method over our plain.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from paceline.cli.model_download import NotAvailableError, download
from paceline.family import PUBLISHED_HEADS
from paceline.gguf.gguf_config import transformers_config
from paceline.gguf.gguf_file import GgufFile
from paceline.model.numerics import cpu_name
from paceline.model_names import PUBLISHED, QWEN_05B, QWEN_15B
from paceline.text import Tokenizer
from paceline_lab.bench import start_time
from paceline_lab.bench.bench_measurement import PLAIN, Measurement, check_names, results_kept_on_interrupt
from paceline_lab.bench.method_comparison import LIMITS, SUFFIX_WITHOUT_HISTORY
from paceline_lab.bench.workloads import Workload, repetitive_workloads, workloads
from paceline_lab.peers import peer_worker
from paceline_lab.peers.llama_cpp_build import llama_cpp_programs
from paceline_lab.peers.llama_server import LlamaServer
from paceline_lab.peers.peer_environments import NotInstalledError
from paceline_lab.peers.peer_process import PeerError, PeerProcess
from paceline_lab.training.family.stdlib_corpus import held_out_files, read_source

OURS, LLAMA, TRANSFORMERS = "paceline", "llama.cpp", "transformers"
SEED = 7
BATCH = 8
CONTEXT = {1: 8192, BATCH: 2048}
"""Positions of each request of a llama-server, by how many it takes at once."""
SHORT = 8
"""Tokens of a prompt that takes hardly any time."""
LONG = (512, 4096)
REFERENCE = ("short", f"prompt_{LONG[0]}")
"""Loads of transformers, which takes a third of a second for a token of the 1.5B."""
START_SLOTS = 4096
LOOKUPS = {"ngram-simple": ("--spec-type", "ngram-simple"), "ngram-mod": ("--spec-type", "ngram-mod")}
DRAFTS = {QWEN_15B: QWEN_05B}
"""By target, the model that drafts for it."""
N_MAX = (3, 2, 4, 8)
"""Draft tokens of `draft-simple`, llama.cpp's default first; a quick run measures that alone."""


class Load(NamedTuple):
    """Calls of one kind."""

    prompts: Sequence[Sequence[int]]
    temperature: float = 0.0
    batch: int = 1
    max_tokens: int | None = None
    """None: the run's."""
    plain_only: bool = False


class Runner(NamedTuple):
    """One method of one engine, and how many requests it takes at once."""

    engine: str
    method: str
    process: PeerProcess | LlamaServer
    batch: int | None = None
    """None: any."""

    def takes(self, name: str, load: Load) -> bool:
        """Whether it is measured with this load."""
        if self.engine == TRANSFORMERS and name not in REFERENCE:
            return False
        return self.batch in (None, load.batch) and (self.method == PLAIN or not load.plain_only)


@dataclass(frozen=True, slots=True)
class RealBenchOptions:
    """What to measure. `quick`: fewer loads, prompts and methods. `folder`: for llama.cpp's programs, and logs."""

    models: Collection[str] = tuple(PUBLISHED)
    quick: bool = False
    repeats: int = 3
    folder: Path = Path(".venv-peers")

    def __post_init__(self) -> None:
        """Raises `StartError` for an unknown name."""
        check_names(self.models, PUBLISHED)

    @property
    def prompts(self) -> int:
        return 2 if self.quick else 4

    @property
    def max_tokens(self) -> int:
        return 64 if self.quick else 96


@dataclass(slots=True)
class RealResult:
    """Measurements so far: by model, load, engine and method; starts by model and engine."""

    console: Console
    measured: dict[tuple[str, str, str, str], Measurement] = field(default_factory=dict)
    starts: dict[tuple[str, str], start_time.Start] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def leave_out(self, reason: str) -> None:
        self.left_out.append(reason)
        self.console.print(f"[yellow]left out[/]: {reason}", soft_wrap=True)

    def rows(self) -> list[dict[str, Any]]:
        """One row per method and load."""
        rows = []
        for (model, load, engine, method), this in self.measured.items():
            plain = self.measured.get((model, load, engine, PLAIN), Measurement())
            rows.append(
                {"model": model, "load": load, "engine": engine, "method": method}
                | {"tokens_per_s": round(this.median_speed, 2)}
                | {"equal": this.equal_prompts(plain), "outputs": len(this.outputs)}
            )
        return rows

    def summary(self) -> dict[str, Any]:
        rows = self.rows()
        starts = {
            f"{model}, {engine}": {"first_token_s": round(each.first_token_s, 2), "peak_mb": each.peak_bytes // 10**6}
            for (model, engine), each in self.starts.items()
        }
        return {
            "real": {model: self._ratios(model, rows) for model in dict.fromkeys(row["model"] for row in rows)},
            **{"cpu": cpu_name(), "threads": _threads(), "starts": starts},
            **{"left_out": self.left_out, "rows": rows},
        }

    def _ratios(self, model: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        found = ratios([row for row in rows if row["model"] == model])
        ours, theirs = self.starts.get((model, OURS)), self.starts.get((model, LLAMA))
        if ours is not None and theirs is not None:
            found["start"] = round(ours.first_token_s / theirs.first_token_s, 2)
        if model in self.memory:
            found["memory"] = round(self.memory[model], 2)
        return found


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The headline ratios of one model, as far as they were measured."""
    speeds = {(row["load"], row["engine"], row["method"]): float(row["tokens_per_s"]) for row in rows}

    def plain(load: str, engine: str) -> float | None:
        return speeds.get((load, engine, PLAIN))

    def best(load: str, engine: str) -> float | None:
        return max((speed for (a, b, _), speed in speeds.items() if (a, b) == (load, engine)), default=None)

    def drafted(load: str) -> float | None:
        known = [speed for (a, b, c), speed in speeds.items() if (a, b) == (load, OURS) and c != PLAIN]
        return max(known, default=None)

    prompts = {f"prompt_{length}": f"prompt_{length}" for length in LONG}
    found = {
        name: _ratio(plain(load, OURS), plain(load, LLAMA))
        for name, load in {"plain": "short", "batch8": "batch8", **prompts}.items()
    }
    found |= {f"best_{load}": _ratio(best(load, OURS), best(load, LLAMA)) for load in ("code", "edits")}
    found |= {
        f"speculative_{load.replace('.', '')}": _ratio(drafted(load), plain(load, OURS))
        for load in ("code", "chat", "chat_0.8", "edits", "json")
    }
    return {name: round(value, 2) for name, value in found.items() if value is not None}


def _ratio(own: float | None, other: float | None) -> float | None:
    return None if own is None or other is None else own / other


def run(console: Console, options: RealBenchOptions) -> dict[str, Any]:
    """Measure and show; return the JSON document. Ctrl-C ends the run with what was measured so far."""
    result = RealResult(console)
    with results_kept_on_interrupt(console):
        programs = _programs(options, result)
        for model in PUBLISHED:
            if model in options.models:
                try:
                    _measure_model(model, options, programs, result)
                except (NotAvailableError, PeerError) as error:
                    result.leave_out(str(error))
    summary = result.summary()
    _show_ratios(console, summary["real"])
    return summary


def _programs(options: RealBenchOptions, result: RealResult) -> Path | None:
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        with result.console.status("llama.cpp: the first build takes ten minutes"):
            return llama_cpp_programs(options.folder)
    except NotInstalledError as error:
        result.leave_out(str(error))
        return None


def _measure_model(model: str, options: RealBenchOptions, programs: Path | None, result: RealResult) -> None:
    with result.console.status(f"downloading {model}"):
        path = download(model)
        draft = download(DRAFTS[model]) if model in DRAFTS else None
    _measure_starts(model, path, programs, result)
    loads = loads_of(path, options)
    with ExitStack() as stack:
        runners = list(_runners(model, path, draft, options, programs, result, stack))
        _warm_up(runners, loads["code"].prompts[0])
        with result.console.status("") as status:
            for repeat in range(options.repeats):
                for name, load in loads.items():
                    status.update(f"{model}, {name}, repetition {repeat + 1} of {options.repeats}")
                    _measure_load(model, name, load, runners, options, result)
    _show(model, list(loads), result)


def _measure_starts(model: str, path: Path, programs: Path | None, result: RealResult) -> None:
    """The better of two of each, in turns; the first reads the file into the page cache."""
    with result.console.status(f"{model}: starts"):
        for _ in range(2):
            _keep_faster(result, (model, OURS), start_time.our_start(path, _threads(), START_SLOTS))
            if programs is not None:
                program = programs / "llama-server"
                _keep_faster(
                    result, (model, LLAMA), start_time.llama_server_start(program, path, _threads(), START_SLOTS)
                )
    needed = path.stat().st_size + START_SLOTS * _slot_bytes(path)
    result.memory[model] = result.starts[model, OURS].peak_bytes / needed


def _keep_faster(result: RealResult, key: tuple[str, str], start: start_time.Start) -> None:
    if key not in result.starts or start.first_token_s < result.starts[key].first_token_s:
        result.starts[key] = start


def _slot_bytes(path: Path) -> int:
    """Of keys and values of one position in 16 bits."""
    config = transformers_config(GgufFile.open(path))
    return int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2 * 2)


def loads_of(path: Path, options: RealBenchOptions) -> dict[str, Load]:
    """By name. Chats are rendered with the model's own template."""
    tokenizer = Tokenizer.load(str(path))
    known = {each.name: each for each in (*workloads(), *repetitive_workloads())}
    code, questions, edits, extraction = (
        _prompts(tokenizer, known[name])[: options.prompts]
        for name in ("code completion", "question answering", "code editing", "JSON extraction")
    )
    text = tokenizer.encode("\n".join(read_source(each) for each in held_out_files()))
    loads = {
        "short": Load([prompt[:SHORT] for prompt in code], plain_only=True),
        "code": Load(code),
        "chat_0.8": Load(questions, 0.8),
        "edits": Load(edits),
        "batch8": Load((code * BATCH)[:BATCH], batch=BATCH, plain_only=options.quick),
        **{f"prompt_{length}": Load([text[:length]], max_tokens=1, plain_only=True) for length in LONG},
    }
    more = {"code_0.8": Load(code, 0.8), "chat": Load(questions), "json": Load(extraction)}
    return loads if options.quick else {**loads, **more}


def _prompts(tokenizer: Tokenizer, workload: Workload) -> list[list[int]]:
    template = tokenizer.chat_template
    assert template is not None, "published models have chat templates"
    return [
        tokenizer.encode(body["prompt"])
        if "prompt" in body
        else tokenizer.encode(template.render(body["messages"], add_generation_prompt=True), add_special_tokens=False)
        for body in workload.bodies
    ]


def _runners(
    model: str,
    path: Path,
    draft: Path | None,
    options: RealBenchOptions,
    programs: Path | None,
    result: RealResult,
    stack: ExitStack,
) -> Iterator[Runner]:
    """Started, and stopped until their turns. What does not start is left out."""
    logs = options.folder.absolute() / "logs"
    logs.mkdir(exist_ok=True)
    with result.console.status(f"{model}: starting the engines"):
        if programs is not None:
            for batch, ways in ((BATCH, {PLAIN: ()}), (1, _ways(draft, options))):
                for method, more in ways.items():
                    log = logs / f"llama-server-{model}-{method}-{batch}.log"
                    server = LlamaServer(programs, path, log, _threads(), batch, CONTEXT[batch], more)
                    stack.callback(server.close)
                    try:
                        server.start()
                    except PeerError as error:
                        result.leave_out(f"{model}, {method}: {error}")
                    else:
                        yield Runner(LLAMA, method, server, batch)
        setup = {"target": str(path), "threads": _threads()}
        ours = {"ends": True, "speculation": our_methods(model, draft)}
        yield from _peer_runners(OURS, model, {**setup, **ours}, logs, stack)
        if not options.quick:
            yield from _peer_runners(TRANSFORMERS, model, {**setup, "draft": None}, logs, stack, {PLAIN})


def _ways(draft: Path | None, options: RealBenchOptions) -> dict[str, Sequence[str]]:
    """How llama.cpp decodes one request: options by method."""
    ways: dict[str, Sequence[str]] = {PLAIN: (), **LOOKUPS}
    if draft is not None:
        base = (
            "--spec-type",
            "draft-simple",
            "--spec-draft-model",
            str(draft),
            "--spec-draft-threads",
            str(_threads()),
        )
        counts = N_MAX[:1] if options.quick else N_MAX
        ways |= {f"draft-simple {n}": (*base, "--spec-draft-n-max", str(n)) for n in counts}
    return ways


def our_methods(model: str, draft: Path | None) -> dict[str, dict[str, Any]]:
    """How ours drafts: configurations by method."""
    suffix = {"method": "suffix", **SUFFIX_WITHOUT_HISTORY}
    methods: dict[str, dict[str, Any]] = {"suffix": suffix}
    for name, checkpoint in (("draft_model", draft), ("eagle3", PUBLISHED_HEADS.get(model))):
        if checkpoint is not None:
            methods[name] = {"method": name, "model": str(checkpoint)}
            methods[f"suffix + {name}"] = {**suffix, "method": ["suffix", name], "model": str(checkpoint)}
    return {name: {**LIMITS, **config} for name, config in methods.items()}


def _peer_runners(
    engine: str,
    model: str,
    setup: Mapping[str, Any],
    logs: Path,
    stack: ExitStack,
    wanted: Collection[str] | None = None,
) -> Iterator[Runner]:
    """A process of `peer_worker`, and its methods; None: all."""
    argv = [sys.executable, str(peer_worker.__file__), engine]
    log = logs / f"{engine}-{model}.log"
    process = PeerProcess(f"{engine}, {model}", argv, {"OMP_NUM_THREADS": str(_threads())}, log)
    stack.callback(process.close)
    for method in process.start(dict(setup)):
        if wanted is None or method in wanted:
            yield Runner(engine, method, process)


def _warm_up(runners: Sequence[Runner], prompt: Sequence[int]) -> None:
    """One call of each that does not count: servers start without one. Raises `PeerError`."""
    for runner in runners:
        prompts = [list(prompt)] * (runner.batch or 1)
        sampling = {"temperature": 0.0, "seed": SEED, "max_tokens": SHORT}
        runner.process.generate({"method": runner.method, "prompts": prompts, **sampling})


def _measure_load(
    model: str, name: str, load: Load, runners: Sequence[Runner], options: RealBenchOptions, result: RealResult
) -> None:
    """One repetition, in turns."""
    calls = [load.prompts] if load.batch > 1 else [[prompt] for prompt in load.prompts]
    for number, prompts in enumerate(calls):
        for runner in runners:
            if not runner.takes(name, load):
                continue
            count = load.max_tokens or options.max_tokens
            request = {
                **{"method": runner.method, "prompts": [list(prompt) for prompt in prompts]},
                **{"temperature": load.temperature, "seed": SEED, "max_tokens": count},
            }
            key = (model, name, runner.engine, runner.method)
            try:
                tokens, seconds = runner.process.generate(request)
            except PeerError as error:
                result.leave_out(f"{error} ({runner.method}, {name})")
                continue
            this = result.measured.setdefault(key, Measurement())
            this.add(number, tokens, seconds)
            if load.max_tokens == 1:
                this.speeds[-1] = len(prompts[0]) / seconds


def _threads() -> int:
    return len(os.sched_getaffinity(0))


def _show(model: str, loads: Sequence[str], result: RealResult) -> None:
    table = Table("engine", "method", title=f"{model}: tokens/s (equal outputs)", box=SIMPLE, padding=(0, 1, 0, 0))
    for load in loads:
        table.add_column(load, justify="right")
    cells = {(row["engine"], row["method"], row["load"]): row for row in result.rows() if row["model"] == model}
    for engine, method in dict.fromkeys((engine, method) for engine, method, _ in cells):
        table.add_row(engine, method, *(_cell(cells.get((engine, method, load))) for load in loads))
    result.console.print(table)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    equal = "" if row["method"] == PLAIN else f" ({row['equal']}/{row['outputs']})"
    return f"{row['tokens_per_s']:,.0f}{equal}"


def _show_ratios(console: Console, real: Mapping[str, Mapping[str, float]]) -> None:
    table = Table("ratio", *real, box=SIMPLE)
    for name in dict.fromkeys(name for each in real.values() for name in each):
        table.add_row(name, *(f"{each[name]:.2f}" if name in each else "" for each in real.values()))
    console.print(table)
