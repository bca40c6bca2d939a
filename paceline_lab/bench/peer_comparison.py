"""`paceline bench peers`: this engine beside others, on the same weights and prompts, in one run.

- `paceline`      plain, and with every way to draft that needs no second core, all within one process
- `llama.cpp`     plain, and the prompt lookup of its Python package (ten guesses, and two)
- `vllm`          for CPUs, compiled: plain, n-gram, draft model and our EAGLE-3 head, five guesses each
- `transformers`  generate, assisted by the draft, and prompt lookup

Each engine is a process in an environment of its own (`paceline_lab.peers`), which this command makes: the first time
that
takes ten minutes. What cannot be had is named in one line and left out. Threads: one, or one per core, whichever makes
the engine's plain decoding faster. Engines take turns prompt by prompt, and are stopped while it is not their turn, so
whatever else the machine does hits all alike.

Two sizes: the shipped family, and the same widened to 188 million parameters
(`paceline_lab.training.family.widened_family`), which
drafts foresee as well and which costs what a larger model costs. Both are given no token that ends a text, so every
engine computes the same MAX_TOKENS. Batch 8 is the four prompts of a workload twice. Prefix caches are off: an engine
that reused the keys and values of the repeated prompts would compute less.

Speeds are medians over prompts and repetitions of new tokens per second of the whole call, prompt included. `equal`
counts the outputs that are, every time, those of the engine's own plain decoding; at temperature 0.8 both draw with
the same seed. Where an engine decodes only one request at a time with a method, that method is missing in batch 8.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.status import Status
from rich.table import Table

from paceline import family
from paceline.cli.supervised_process import StartError
from paceline_lab import peers
from paceline_lab.bench.method_comparison import LIMITS, PLAIN, methods, prompts_of
from paceline_lab.bench.svg_chart import Bar, BarPart, Panel, draw_chart
from paceline_lab.bench.workloads import repetitive_workloads, workloads
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
"""By the name that the command line has for it, a workload and its temperature."""
HEADLINE = (CODE, QUESTIONS)
"""What a single figure for an engine is the geometric mean of."""

Key = tuple[str, str, int, str, str]
"""Size, load, batch, engine, method."""


@dataclass(frozen=True, slots=True)
class PeerBenchOptions:
    """What to measure. `folder`: for environments, models, logs and compiled code; kept for the next run."""

    engines: Collection[str] = tuple(METHODS)
    sizes: Collection[str] = SIZES
    loads: Collection[str] = tuple(LOADS)
    repeats: int = REPEATS
    folder: Path = Path(".venv-peers")

    def __post_init__(self) -> None:
        """Raises `ServiceStartError` for a name that is none."""
        for chosen, known in ((self.engines, METHODS), (self.sizes, SIZES), (self.loads, LOADS)):
            if unknown := sorted(set(chosen) - set(known)):
                raise StartError(f"there is no {unknown[0]!r}: choose of {', '.join(known)}")


@dataclass(slots=True)
class PeerRow:
    """One method of one engine, on one load. `outputs`: by prompt, one for each repetition."""

    speeds: list[float] = field(default_factory=list)
    outputs: dict[int, list[list[int]]] = field(default_factory=dict)

    def add(self, first: int, tokens: Sequence[list[int]], seconds: float) -> None:
        """An answer to the prompts from number `first` on."""
        self.speeds.append(sum(map(len, tokens)) / seconds)
        for number, each in enumerate(tokens, first):
            self.outputs.setdefault(number, []).append(each)

    def equal(self, plain: PeerRow) -> int:
        """How many prompts' outputs are, every time, what `plain` said every time."""
        return sum(
            all(output == expected for output in outputs for expected in plain.outputs.get(number, [[]]))
            for number, outputs in self.outputs.items()
        )


@dataclass(slots=True)
class PeerMeasurements:
    lines: dict[Key, PeerRow] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """What the last line says of each method."""
        rows = []
        for (size, load, batch, engine, method), line in self.lines.items():
            workload, temperature = LOADS[load]
            plain = self.lines.get((size, load, batch, engine, PLAIN), PeerRow())
            rows.append(
                {"size": size, "load": load, "workload": workload, "temperature": temperature, "batch": batch}
                | {"engine": engine, "method": method, "tokens_per_s": round(median(line.speeds), 1)}
                | {"equal": line.equal(plain), "outputs": len(line.outputs)}
            )
        return rows

    def summary(self) -> dict[str, Any]:
        rows = self.rows()
        return {"ratios": ratios(rows), "threads": self.threads, "left_out": self.left_out, "rows": rows}


def run(console: Console, wish: PeerBenchOptions) -> dict[str, Any]:
    """Measure, show, and return what the last line says; after Ctrl-C, what had been measured by then."""
    measured = PeerMeasurements()
    try:
        pythons = _pythons(console, wish, measured)
        for size in SIZES:
            if size in wish.sizes:
                _measure_size(console, size, wish, pythons, measured)
    except KeyboardInterrupt:
        _leave_out(console, measured, "interrupted: what follows is what was measured")
    summary = measured.summary()
    _show_ratios(console, summary["ratios"])
    return summary


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures that this engine is judged by, as far as they were measured. `best`: of an engine's methods, that
    with the highest speed; loads are named where it is not HEADLINE, batches where it is not 1."""
    told: dict[str, float | None] = {}
    for size in SIZES:
        speeds = _Speeds([row for row in rows if row["size"] == size])
        told |= {
            f"{size}: plain / llama.cpp plain": _ratio(speeds.of(OURS, PLAIN), speeds.of("llama.cpp", PLAIN)),
            f"{size}: best / llama.cpp best": _ratio(speeds.best(OURS), speeds.best("llama.cpp")),
        }
        for load in LOADS:
            own, other = speeds.best(OURS, [load]), speeds.best("llama.cpp", [load])
            told[f"{size}: best / llama.cpp best, {load}"] = _ratio(own, other)
        for batch in BATCHES:
            own, other = speeds.best(OURS, batch=batch), speeds.best("vllm", batch=batch)
            told[f"{size}: best / vllm best, batch {batch}"] = _ratio(own, other)
        for load in LOADS:
            own, other = speeds.best(OURS, [load], but=[PLAIN]), speeds.of(OURS, PLAIN, [load])
            told[f"{size}: speculative / plain, {load}"] = _ratio(own, other)
        told[f"{size}: slowest method / plain, {CODE_SAMPLED}"] = _ratio(
            speeds.worst(OURS, [CODE_SAMPLED]), speeds.of(OURS, PLAIN, [CODE_SAMPLED])
        )
    return {name: round(value, 2) for name, value in told.items() if value is not None}


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

    def all(
        self, engine: str, loads: Sequence[str] = HEADLINE, batch: int = 1, but: Collection[str] = ()
    ) -> dict[str, float]:
        """By method."""
        speeds = {name: self.of(engine, name, loads, batch) for name in METHODS[engine] if name not in but}
        return {name: speed for name, speed in speeds.items() if speed is not None}

    def best(
        self, engine: str, loads: Sequence[str] = HEADLINE, batch: int = 1, but: Collection[str] = ()
    ) -> float | None:
        return max(self.all(engine, loads, batch, but).values(), default=None)

    def worst(self, engine: str, loads: Sequence[str]) -> float | None:
        """Of the ways to draft."""
        return min(self.all(engine, loads, but=[PLAIN]).values(), default=None)


def _ratio(own: float | None, other: float | None) -> float | None:
    return None if own is None or other is None else own / other


def picture(summary: Mapping[str, Any]) -> str:
    """Tokens per second by engine, plain and with its best method, as SVG: over HEADLINE, or what of it there is."""
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
        plain, others = speeds.of(engine, PLAIN, loads), speeds.all(engine, loads, but=[PLAIN])
        if plain is not None:
            yield Bar(engine, [BarPart(PLAIN, plain)], f"{plain:,.0f}")
        if others:
            name = max(others, key=lambda method: others[method])
            yield Bar(
                "" if plain is not None else engine, [BarPart("best", others[name])], f"{others[name]:,.0f} {name}"
            )


# Engines and models come and go.


def _pythons(console: Console, wish: PeerBenchOptions, measured: PeerMeasurements) -> dict[str, Path]:
    """By engine, the interpreter of its environment."""
    wish.folder.mkdir(parents=True, exist_ok=True)
    pythons = {}
    for engine in METHODS:
        if engine in wish.engines:
            try:
                with console.status(f"environment of {engine}: llama.cpp is built in six minutes, the first time"):
                    pythons[engine] = python_of(engine, wish.folder)
            except NotInstalledError as error:
                _leave_out(console, measured, str(error))
    return pythons


def models(size: str, folder: Path) -> dict[str, str]:
    """Checkpoints of one size without a token that ends a text, written again: places as a worker wants to know them.

    The places stay the same from run to run, since what vLLM compiles is cached by them.
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
            said = json.loads((checkpoint / name).read_text())
            (checkpoint / name).write_text(json.dumps(said | {"eos_token_id": None}, indent=2))
    places = {"target": target, "draft": draft, "head": head, "gguf": folder / "target.gguf"}
    return {what: str(place.absolute()) for what, place in places.items()}


def speculation(places: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """How this engine drafts: as in `bench methods`, with the models of one size."""
    models = {"draft_model": places["draft"], "eagle3": places["head"], "suffix + eagle3": places["head"]}
    known = methods()
    return {
        name: {**LIMITS, **known[name]} | ({"model": models[name]} if name in models else {})
        for name in METHODS[OURS]
        if name != PLAIN
    }


def _environment(threads: int, folder: Path) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "OMP_NUM_THREADS": str(threads),
        "NUMBA_NUM_THREADS": str(threads),  # vLLM looks n-grams up with it, and leaves as many threads to torch
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder.absolute() / "cache" / "inductor"),
        "VLLM_CACHE_ROOT": str(folder.absolute() / "cache" / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


@dataclass(slots=True)
class _Starting:
    """Starts the engines of one size; `stack` ends them."""

    wish: PeerBenchOptions
    setup: Mapping[str, str]
    size: str
    stack: ExitStack

    def engine(self, engine: str, python: Path, prompt: Sequence[int]) -> tuple[dict[str, PeerProcess], int, list[str]]:
        """By method its process, with the number of threads that suits plain decoding; and what failed."""
        choices = sorted({1, len(os.sched_getaffinity(0))})
        together = METHODS[engine] if engine not in ONE_METHOD_EACH else (PLAIN,)
        tried = {threads: self._process(engine, python, threads, together) for threads in choices}
        seconds = {threads: _seconds(process, prompt) for threads, process in tried.items()}
        best = min(seconds, key=lambda threads: seconds[threads])
        for threads, process in tried.items():
            if threads != best:
                process.close()
        started, failed = dict.fromkeys(together, tried[best]), []
        for method in METHODS[engine]:
            if method not in started:
                try:
                    started[method] = self._process(engine, python, best, (method,))
                except PeerError as error:
                    failed.append(f"{method}: {error}")
        return started, best, failed

    def _process(self, engine: str, python: Path, threads: int, methods: Sequence[str]) -> PeerProcess:
        logs = self.wish.folder.absolute() / "logs"
        logs.mkdir(exist_ok=True)
        [package] = peers.__path__
        process = PeerProcess(
            f"{engine}, {self.size}",
            [str(python), str(Path(package) / "worker.py"), engine],
            _environment(threads, self.wish.folder),
            logs / f"{engine}-{self.size}-{methods[0]}-{threads}.log",
        )
        self.stack.callback(process.close)
        own = {"speculation": speculation(self.setup)} if engine == OURS else {}
        process.start({**self.setup, "threads": threads, "methods": list(methods), **own})
        return process


def _seconds(process: PeerProcess, prompt: Sequence[int]) -> float:
    """Of plain decoding, at its second time."""
    return [process.generate(_wish(PLAIN, [prompt], 0.0))[1] for _ in range(2)][-1]


def _wish(method: str, prompts: Sequence[Sequence[int]], temperature: float) -> dict[str, Any]:
    law = {"temperature": temperature, "seed": SEED, "max_tokens": MAX_TOKENS}
    return {"method": method, "prompts": [list(prompt) for prompt in prompts], **law}


# Measuring.


def _measure_size(
    console: Console, size: str, wish: PeerBenchOptions, pythons: Mapping[str, Path], measured: PeerMeasurements
) -> None:
    known = {each.name: prompts_of(each) for each in (*workloads(), *repetitive_workloads())}
    loads = {load: known[LOADS[load][0]] for load in LOADS if load in wish.loads}
    first = next(iter(loads.values()))[0]
    with ExitStack() as stack:
        starting = _Starting(wish, models(size, wish.folder / "models" / size), size, stack)
        processes: dict[tuple[str, str], PeerProcess] = {}
        for engine, python in pythons.items():
            try:
                with console.status(f"{size}: starting {engine}; what vLLM compiles takes minutes the first time"):
                    started, threads, failed = starting.engine(engine, python, first)
            except PeerError as error:
                _leave_out(console, measured, str(error))
                continue
            processes |= {(engine, method): process for method, process in started.items()}
            measured.threads[f"{engine}, {size}"] = threads
            for reason in failed:
                _leave_out(console, measured, reason)
        with console.status("") as status:
            for batch in BATCHES:
                able = _warmed(console, processes, first, batch, measured)
                for load, prompts in loads.items():
                    status.update(f"{size}, {load}, batch {batch}")
                    _measure_load(console, status, (size, load, batch), able, prompts, wish.repeats, measured)
        for load in loads:
            _show(console, size, load, measured)


def _warmed(
    console: Console,
    processes: Mapping[tuple[str, str], PeerProcess],
    prompt: Sequence[int],
    batch: int,
    measured: PeerMeasurements,
) -> dict[tuple[str, str], PeerProcess]:
    """Those that can decode so many at once, greedily and not, having done so once."""
    able = {}
    for (engine, method), process in processes.items():
        try:
            for temperature in (0.0, 0.8):
                process.generate(_wish(method, [prompt] * batch, temperature))
            able[engine, method] = process
        except PeerError as error:
            _leave_out(console, measured, f"{error} ({method}, batch {batch})")
    return able


def _measure_load(
    console: Console,
    status: Status,
    where: tuple[str, str, int],
    able: Mapping[tuple[str, str], PeerProcess],
    prompts: Sequence[Sequence[int]],
    repeats: int,
    measured: PeerMeasurements,
) -> None:
    size, load, batch = where
    groups = [[prompt] for prompt in prompts] if batch == 1 else [(list(prompts) * batch)[:batch]]
    running = dict(able)
    for repeat in range(repeats):
        for first, group in enumerate(groups):
            status.update(f"{size}, {load}, batch {batch}, repetition {repeat + 1} of {repeats}, prompt {first + 1}")
            for (engine, method), process in list(running.items()):
                try:
                    tokens, seconds = process.generate(_wish(method, group, LOADS[load][1]))
                except PeerError as error:
                    del running[engine, method]
                    _leave_out(console, measured, f"{error} ({method}, {load}, batch {batch})")
                else:
                    measured.lines.setdefault((*where, engine, method), PeerRow()).add(first, tokens, seconds)


def _leave_out(console: Console, measured: PeerMeasurements, reason: str) -> None:
    measured.left_out.append(reason)
    console.print(f"[yellow]left out[/]: {reason}", soft_wrap=True)


# What is shown.


def _show(console: Console, size: str, load: str, measured: PeerMeasurements) -> None:
    rows = [row for row in measured.rows() if (row["size"], row["load"]) == (size, load)]
    plain = {row["batch"]: row["tokens_per_s"] for row in rows if (row["engine"], row["method"]) == (OURS, PLAIN)}
    workload, temperature = LOADS[load]
    title = f"{size} family, {workload}, T {temperature}: tokens/s, over our plain"
    table = Table("engine", "method", title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for batch in BATCHES:
        table.add_column(f"batch {batch}", justify="right")
        table.add_column("ratio", justify="right")
        table.add_column("equal", justify="right")
    for engine, names in METHODS.items():
        for method in names:
            cells = [_cells(rows, engine, method, batch, plain.get(batch)) for batch in BATCHES]
            if any(map(any, cells)):
                table.add_row(engine, method, *chain(*cells))
    console.print(table)


def _cells(
    rows: Sequence[Mapping[str, Any]], engine: str, method: str, batch: int, plain: float | None
) -> tuple[str, str, str]:
    for row in rows:
        if (row["engine"], row["method"], row["batch"]) == (engine, method, batch):
            speed = row["tokens_per_s"]
            return f"{speed:,.0f}", f"{speed / plain:.2f}" if plain else "", f"{row['equal']}/{row['outputs']}"
    return "", "", ""


def _show_ratios(console: Console, told: Mapping[str, float]) -> None:
    table = Table("figure", "ratio")
    for name, value in told.items():
        table.add_row(name, f"{value:.2f}")
    console.print(table)
