"""`paceline bench peers`: this engine beside other engines, on the same weights and prompts, in one run.

- `paceline`      plain, and with every drafting method that needs no second core, all in one process
- `llama.cpp`     plain, and the prompt lookup of its Python package (ten draft tokens, and two)
- `vllm`          for CPUs, compiled: plain, n-gram, draft model and our EAGLE-3 head, five draft tokens each
- `transformers`  generate, assisted generation with the draft, and prompt lookup

Each engine runs in a process and an environment of its own (`paceline_lab.peers`). This command makes the
environments; the first time that takes ten minutes. An engine that cannot be installed or started is left out, with
the reason in one line. Threads: one, or one per core, whichever makes the engine's plain decoding faster. The engines
take turns prompt by prompt and are stopped between their turns, so other load on the machine slows all alike.

Two sizes: the shipped family, and the same model widened to 188 million parameters
(`paceline_lab.training.family.widened_family`), which keeps its acceptance at the cost of a larger model. Both are
given no end-of-text token, so every engine computes the same MAX_TOKENS. Batch 8 is the four prompts of a workload
twice. Prefix caches are off: an engine that reused the KV of the repeated prompts would compute less.

Speeds are medians over prompts and repetitions of new tokens per second of the whole call, prompt included. `equal`
counts the prompts whose output is, every time, that of the engine's own plain decoding; at temperature 0.8 both draw
with the same seed. A method that decodes one request at a time is missing from batch 8.

`paceline bench baseline` is this command with the engines `paceline` and `transformers` at the shipped size.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.status import Status
from rich.table import Table

from paceline import family
from paceline_lab.bench.bench_measurement import PLAIN, Measurement, check_names, results_kept_on_interrupt
from paceline_lab.bench.method_comparison import LIMITS, methods, prompts_of
from paceline_lab.bench.svg_chart import Bar, BarPart, Panel, draw_chart
from paceline_lab.bench.workloads import repetitive_workloads, workloads
from paceline_lab.peers import peer_worker
from paceline_lab.peers.peer_environments import NotInstalledError, python_of
from paceline_lab.peers.peer_process import PeerError, PeerProcess
from paceline_lab.training.family.widened_family import widened_family

MAX_TOKENS = 96
SEED = 7
REPEATS = 3
BATCHES = (1, 8)
OURS = "paceline"
METHODS = {
    OURS: (PLAIN, "ngram", "suffix", "draft_model", "eagle3", "suffix + eagle3"),
    "llama.cpp": (PLAIN, "prompt_lookup", "prompt_lookup_2"),
    "vllm": (PLAIN, "ngram", "draft_model", "eagle3"),
    "transformers": (PLAIN, "assisted", "prompt_lookup"),
}
ONE_METHOD_EACH = ("vllm",)
"""Engines that need a process for every method."""
SIZES = ("shipped", "widened")
CODE, CODE_SAMPLED, QUESTIONS = "code", "code-0.8", "questions"
LOADS = {
    CODE: ("code completion", 0.0),
    CODE_SAMPLED: ("code completion", 0.8),
    QUESTIONS: ("question answering", 0.0),
    "edits": ("code editing", 0.0),
    "json": ("JSON extraction", 0.0),
}
"""Workload and temperature, by the load's name on the command line."""
HEADLINE = (CODE, QUESTIONS)
"""Loads over which an engine's single figure is the geometric mean."""

Key = tuple[str, str, int, str, str]
"""Size, load, batch, engine, method."""
Processes = dict[tuple[str, str], PeerProcess]
"""By engine and method."""


@dataclass(frozen=True, slots=True)
class PeerBenchOptions:
    """What to measure. `folder` holds environments, models, logs and compiled code, and is kept for the next run."""

    engines: Collection[str] = tuple(METHODS)
    sizes: Collection[str] = SIZES
    loads: Collection[str] = tuple(LOADS)
    repeats: int = REPEATS
    folder: Path = Path(".venv-peers")

    def __post_init__(self) -> None:
        """Raises `StartError` for an unknown name."""
        check_names(self.engines, METHODS)
        check_names(self.sizes, SIZES)
        check_names(self.loads, LOADS)


@dataclass(slots=True)
class PeerResult:
    """Measurements so far."""

    console: Console
    measured: dict[Key, Measurement] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def leave_out(self, reason: str) -> None:
        self.left_out.append(reason)
        self.console.print(f"[yellow]left out[/]: {reason}", soft_wrap=True)

    def rows(self) -> list[dict[str, Any]]:
        """One row per method."""
        rows = []
        for (size, load, batch, engine, method), this in self.measured.items():
            workload, temperature = LOADS[load]
            plain = self.measured.get((size, load, batch, engine, PLAIN), Measurement())
            rows.append(
                {"size": size, "load": load, "workload": workload, "temperature": temperature, "batch": batch}
                | {"engine": engine, "method": method, "tokens_per_s": round(this.median_speed, 1)}
                | {"equal": this.equal_prompts(plain), "outputs": len(this.outputs)}
            )
        return rows

    def summary(self) -> dict[str, Any]:
        rows = self.rows()
        return {"ratios": ratios(rows), "threads": self.threads, "left_out": self.left_out, "rows": rows}


def run(console: Console, options: PeerBenchOptions) -> dict[str, Any]:
    """Measure and show; return the JSON document. Ctrl-C ends the run with what was measured so far."""
    result = PeerResult(console)
    with results_kept_on_interrupt(console):
        pythons = _pythons(options, result)
        for size in SIZES:
            if size in options.sizes:
                _measure_size(size, options, pythons, result)
    summary = result.summary()
    table = Table("figure", "ratio")
    for name, value in summary["ratios"].items():
        table.add_row(name, f"{value:.2f}")
    console.print(table)
    return summary


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The headline ratios of this engine, as far as they were measured.

    `best` is the fastest method of an engine. A name tells the load unless it is HEADLINE, and the batch unless it
    is 1.
    """
    found: dict[str, float | None] = {}
    for size in SIZES:
        speeds = _Speeds([row for row in rows if row["size"] == size])
        found[f"{size}: plain / llama.cpp plain"] = _ratio(speeds.of(OURS, PLAIN), speeds.of("llama.cpp", PLAIN))
        found[f"{size}: best / llama.cpp best"] = _ratio(speeds.best(OURS), speeds.best("llama.cpp"))
        for load in LOADS:
            own, other = speeds.best(OURS, [load]), speeds.best("llama.cpp", [load])
            found[f"{size}: best / llama.cpp best, {load}"] = _ratio(own, other)
        for batch in BATCHES:
            own, other = speeds.best(OURS, batch=batch), speeds.best("vllm", batch=batch)
            found[f"{size}: best / vllm best, batch {batch}"] = _ratio(own, other)
        for load in LOADS:
            own = max(speeds.speculative(OURS, [load]).values(), default=None)
            found[f"{size}: speculative / plain, {load}"] = _ratio(own, speeds.of(OURS, PLAIN, [load]))
        slowest = min(speeds.speculative(OURS, [CODE_SAMPLED]).values(), default=None)
        plain = speeds.of(OURS, PLAIN, [CODE_SAMPLED])
        found[f"{size}: slowest method / plain, {CODE_SAMPLED}"] = _ratio(slowest, plain)
    return {name: round(value, 2) for name, value in found.items() if value is not None}


class _Speeds:
    """Tokens per second of one size: geometric means over loads. None where a load was not measured."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = {
            (row["engine"], row["method"], row["load"], row["batch"]): float(row["tokens_per_s"]) for row in rows
        }

    def of(self, engine: str, method: str, loads: Sequence[str] = HEADLINE, batch: int = 1) -> float | None:
        speeds = [self._rows.get((engine, method, load, batch)) for load in loads]
        known = [speed for speed in speeds if speed is not None]
        return prod(known) ** (1 / len(known)) if known and len(known) == len(speeds) else None

    def speculative(self, engine: str, loads: Sequence[str] = HEADLINE, batch: int = 1) -> dict[str, float]:
        """By method, plain decoding excluded."""
        speeds = {name: self.of(engine, name, loads, batch) for name in METHODS[engine] if name != PLAIN}
        return {name: speed for name, speed in speeds.items() if speed is not None}

    def best(self, engine: str, loads: Sequence[str] = HEADLINE, batch: int = 1) -> float | None:
        """The fastest method, plain decoding included."""
        plain = self.of(engine, PLAIN, loads, batch)
        speculative = self.speculative(engine, loads, batch).values()
        return max([*speculative, *([] if plain is None else [plain])], default=None)


def _ratio(own: float | None, other: float | None) -> float | None:
    return None if own is None or other is None else own / other


def picture(summary: Mapping[str, Any]) -> str:
    """An SVG of tokens per second by engine, plain and with its best method, over the HEADLINE loads measured."""
    measured = list(dict.fromkeys(row["load"] for row in summary["rows"]))
    loads = [load for load in HEADLINE if load in measured] or measured[:1]
    panels = []
    for size in SIZES:
        bars = list(_bars(_Speeds([row for row in summary["rows"] if row["size"] == size]), loads))
        if bars:
            panels.append(Panel(f"{size} family", bars))
    title = f"Tokens per second, one request: {' and '.join(loads)}"
    return draw_chart(title, panels, {PLAIN: PLAIN, "best": "with the engine's best method"})


def _bars(speeds: _Speeds, loads: Sequence[str]) -> Iterator[Bar]:
    for engine in METHODS:
        plain, others = speeds.of(engine, PLAIN, loads), speeds.speculative(engine, loads)
        if plain is not None:
            yield Bar(engine, [BarPart(PLAIN, plain)], f"{plain:,.0f}")
        if others:
            name = max(others, key=lambda method: others[method])
            label = "" if plain is not None else engine
            yield Bar(label, [BarPart("best", others[name])], f"{others[name]:,.0f} {name}")


# Engines and models.


def _pythons(options: PeerBenchOptions, result: PeerResult) -> dict[str, Path]:
    """The interpreter of each engine's environment."""
    options.folder.mkdir(parents=True, exist_ok=True)
    pythons = {}
    for engine in METHODS:
        if engine in options.engines:
            try:
                with result.console.status(f"environment of {engine}: the first build of llama.cpp takes six minutes"):
                    pythons[engine] = python_of(engine, options.folder)
            except NotInstalledError as error:
                result.leave_out(str(error))
    return pythons


def models(size: str, folder: Path) -> dict[str, str]:
    """Checkpoints of one size without an end-of-text token, written anew: their paths, as a worker's setup names them.

    The paths are the same in every run, because vLLM caches compiled code by path.
    """
    shutil.rmtree(folder, ignore_errors=True)
    target, draft = (folder / name for name in family.NAMES)
    head = folder / family.HEADS["eagle3"]
    shutil.copytree(family.path(draft.name), draft)
    if size == "widened":
        target, head = widened_family(folder)
    else:
        shutil.copytree(family.path(target.name), target)
        shutil.copytree(family.path(head.name), head)
    for name in ("config.json", "generation_config.json"):
        for checkpoint in (target, draft):
            config = json.loads((checkpoint / name).read_text())
            (checkpoint / name).write_text(json.dumps(config | {"eos_token_id": None}, indent=2))
    paths = {"target": target, "draft": draft, "head": head, "gguf": folder / "target.gguf"}
    return {name: str(path.absolute()) for name, path in paths.items()}


def speculation(paths: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """How this engine drafts: as in `bench methods`, with the models of one size."""
    models = {"draft_model": paths["draft"], "eagle3": paths["head"], "suffix + eagle3": paths["head"]}
    known = methods()
    return {
        name: {**LIMITS, **known[name]} | ({"model": models[name]} if name in models else {})
        for name in METHODS[OURS]
        if name != PLAIN
    }


def engine_environment(threads: int, folder: Path) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "OMP_NUM_THREADS": str(threads),
        "NUMBA_NUM_THREADS": str(threads),  # vLLM looks n-grams up with it, and leaves as many threads to torch
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder.absolute() / "cache" / "inductor"),
        "VLLM_CACHE_ROOT": str(folder.absolute() / "cache" / "vllm"),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


@dataclass(slots=True)
class _EngineStarter:
    """Starts the engines of one size; `stack` ends them."""

    options: PeerBenchOptions
    result: PeerResult
    paths: Mapping[str, str]
    size: str
    stack: ExitStack

    def start(self, engine: str, python: Path, prompts: Sequence[Sequence[int]]) -> Processes:
        """Processes by engine and method, with the number of threads that makes plain decoding fastest.

        Methods that do not start are left out. Raises `PeerError` if plain decoding does not start.
        """
        together = (PLAIN,) if engine in ONE_METHOD_EACH else METHODS[engine]
        best, process = fastest(lambda threads: self._process(engine, python, threads, together), PLAIN, prompts)
        processes = {(engine, method): process for method in together}
        for method in METHODS[engine][len(together) :]:
            try:
                processes[engine, method] = self._process(engine, python, best, (method,))
            except PeerError as error:
                self.result.leave_out(f"{method}: {error}")
        self.result.threads[f"{engine}, {self.size}"] = best
        return processes

    def _process(self, engine: str, python: Path, threads: int, methods: Sequence[str]) -> PeerProcess:
        logs = self.options.folder.absolute() / "logs"
        logs.mkdir(exist_ok=True)
        process = PeerProcess(
            f"{engine}, {self.size}",
            [str(python), str(peer_worker.__file__), engine],
            engine_environment(threads, self.options.folder),
            logs / f"{engine}-{self.size}-{methods[0]}-{threads}.log",
        )
        self.stack.callback(process.close)
        own = {"speculation": speculation(self.paths)} if engine == OURS else {}
        process.start({**self.paths, "threads": threads, "methods": list(methods), **own})
        return process


def fastest(
    start: Callable[[int], PeerProcess], method: str, prompts: Sequence[Sequence[int]]
) -> tuple[int, PeerProcess]:
    """The number of threads, one or all, with which a process is fastest, and that process; the other is ended.

    `start` takes a number of threads. Compared are greedy requests, one at a time and in turns: the better of two runs
    of each prompt, after one of all that does not count. Raises `PeerError`.
    """
    tried = {threads: start(threads) for threads in sorted({1, len(os.sched_getaffinity(0))})}
    runs: list[dict[int, list[float]]] = [
        {
            threads: [process.generate(request(method, [prompt], 0.0))[1] for prompt in prompts]
            for threads, process in tried.items()
        }
        for _ in range(3)
    ]
    best = min(tried, key=lambda threads: sum(map(min, *(run[threads] for run in runs[1:]))))
    for threads, process in tried.items():
        if threads != best:
            process.close()
    return best, tried[best]


def request(method: str, prompts: Sequence[Sequence[int]], temperature: float) -> dict[str, Any]:
    sampling = {"temperature": temperature, "seed": SEED, "max_tokens": MAX_TOKENS}
    return {"method": method, "prompts": [list(prompt) for prompt in prompts], **sampling}


# Measuring.


def _measure_size(size: str, options: PeerBenchOptions, pythons: Mapping[str, Path], result: PeerResult) -> None:
    known = {each.name: prompts_of(each) for each in (*workloads(), *repetitive_workloads())}
    loads = {load: known[LOADS[load][0]] for load in LOADS if load in options.loads}
    first_load_prompts = next(iter(loads.values()))
    with ExitStack() as stack:
        starter = _EngineStarter(options, result, models(size, options.folder / "models" / size), size, stack)
        processes: Processes = {}
        for engine, python in pythons.items():
            try:
                with result.console.status(f"{size}: starting {engine}; vLLM compiles for minutes the first time"):
                    processes |= starter.start(engine, python, first_load_prompts)
            except PeerError as error:
                result.leave_out(str(error))
        with result.console.status("") as status:
            for batch in BATCHES:
                able = warmed_up(processes, first_load_prompts[0], batch, result)
                for load, prompts in loads.items():
                    measure_load((size, load, batch), able, prompts, options.repeats, result, status)
        for load in loads:
            _show(size, load, result)


def warmed_up(processes: Processes, prompt: Sequence[int], batch: int, result: PeerResult) -> Processes:
    """Decode once greedily and once sampled. Returns the processes that can decode such a batch."""
    able = {}
    for (engine, method), process in processes.items():
        try:
            for temperature in (0.0, 0.8):
                process.generate(request(method, [prompt] * batch, temperature))
            able[engine, method] = process
        except PeerError as error:
            result.leave_out(f"{error} ({method}, batch {batch})")
    return able


def measure_load(
    cell: tuple[str, str, int],
    able: Processes,
    prompts: Sequence[Sequence[int]],
    repeats: int,
    result: PeerResult,
    status: Status,
) -> None:
    """Measure every method at one size, load and batch, in turns. A method that fails is left out from then on.

    A repetition is as many calls as there are prompts, at every batch.
    """
    size, load, batch = cell
    calls = [(number, [prompt]) for number, prompt in enumerate(prompts)]
    if batch > 1:
        calls = [(0, (list(prompts) * batch)[:batch])] * len(prompts)
    running = dict(able)
    for repeat in range(repeats):
        for first, group in calls:
            status.update(f"{size}, {load}, batch {batch}, repetition {repeat + 1} of {repeats}")
            for (engine, method), process in list(running.items()):
                try:
                    tokens, seconds = process.generate(request(method, group, LOADS[load][1]))
                except PeerError as error:
                    del running[engine, method]
                    result.leave_out(f"{error} ({method}, {load}, batch {batch})")
                else:
                    result.measured.setdefault((*cell, engine, method), Measurement()).add(first, tokens, seconds)


# What is shown.


def _show(size: str, load: str, result: PeerResult) -> None:
    rows = {
        (row["engine"], row["method"], row["batch"]): row
        for row in result.rows()
        if (row["size"], row["load"]) == (size, load)
    }
    workload, temperature = LOADS[load]
    title = f"{size} family, {workload}, T {temperature}: tokens/s, over our plain"
    table = Table("engine", "method", title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for batch in BATCHES:
        for heading in (f"batch {batch}", "ratio", "equal"):
            table.add_column(heading, justify="right")
    for engine, names in METHODS.items():
        for method in names:
            if any((engine, method, batch) in rows for batch in BATCHES):
                cells = (_cells(rows, engine, method, batch) for batch in BATCHES)
                table.add_row(engine, method, *chain(*cells))
    result.console.print(table)


def _cells(
    rows: Mapping[tuple[str, str, int], Mapping[str, Any]], engine: str, method: str, batch: int
) -> tuple[str, str, str]:
    row, plain = rows.get((engine, method, batch)), rows.get((OURS, PLAIN, batch))
    if row is None:
        return "", "", ""
    ratio = f"{row['tokens_per_s'] / plain['tokens_per_s']:.2f}" if plain else ""
    return f"{row['tokens_per_s']:,.0f}", ratio, f"{row['equal']}/{row['outputs']}"
