"""`paceline bench vllm`: vLLM with our draft pool beside vLLM with its own speculation, in one run.

- `plain`, `ngram`, `draft_model`, `eagle3`: vLLM's own methods, as in `bench peers`
- `synchronous plain`: without asynchronous scheduling, which vLLM turns off for `ngram` and all pools
- `draft_model with pool threads`: with as many threads as the pools, as where the draft has a machine of its own
- `pool`: `RemoteDrafts` and a draft worker with the same draft model; `pool + suffix`: and suffix decoding in vLLM
- `coupled pool`: as `pool`, with `CoupledWorker`. At a temperature its draws are ours: `equal` says nothing then.
- `useless pool`: a draft that guesses wrong; `dead pool`: none where it should be

vLLM computes on the CPU, in the environment of `make test-vllm`, beside the draft worker. What a draft computes on
vLLM's cores lengthens vLLM's steps, so the pools may leave it a core: vLLM's own methods have as many threads as make
`plain` fastest, and the pools as many as make `pool` fastest; `useless` and `dead` have those of `plain`. Suffix
decoding keeps no finished requests: it would copy each repetition from the first. Sizes, loads, turns and `equal` are
those of `bench peers`. `propose_ms`: the median time of `RemoteDrafts.propose` with one request, waits for growth left
out.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.cli.deployment import LOOPBACK, free_ports
from paceline.config import SpeculativeConfig
from paceline.launcher import StartError, die_with_parent
from paceline.vllm.remote_drafts_settings import DRAFTS_VARIABLE
from paceline_lab.bench.bench_measurement import PLAIN, check_names, results_kept_on_interrupt
from paceline_lab.bench.method_comparison import SUFFIX_WITHOUT_HISTORY, prompts_of
from paceline_lab.bench.peer_comparison import (
    BATCHES,
    CODE,
    LOADS,
    SIZES,
    PeerResult,
    Processes,
    engine_environment,
    fastest,
    measure_load,
    models,
    warmed_up,
)
from paceline_lab.bench.workloads import repetitive_workloads, workloads
from paceline_lab.peers import peer_worker
from paceline_lab.peers.peer_process import PeerError, PeerProcess

VLLM = "vllm"
DRAFT_MODEL, SYNCHRONOUS = "draft_model", "synchronous plain"
DRAFT_MODEL_POOL_THREADS = "draft_model with pool threads"
OWN = ("ngram", DRAFT_MODEL, "eagle3")
"""vLLM's methods."""
POOL, POOL_SUFFIX, COUPLED = "pool", "pool + suffix", "coupled pool"
POOLS = (POOL, POOL_SUFFIX, COUPLED)
USELESS, DEAD = "useless pool", "dead pool"
METHODS = (PLAIN, SYNCHRONOUS, *OWN, *POOLS, DRAFT_MODEL_POOL_THREADS, USELESS, DEAD)
START_S = 60.0


@dataclass(frozen=True, slots=True)
class VllmBenchOptions:
    """`python`: of an environment with vLLM and paceline. `folder`: models, logs and compiled code."""

    python: Path
    sizes: Collection[str] = SIZES
    loads: Collection[str] = (CODE, "code-0.8", "questions")
    methods: Collection[str] = METHODS
    repeats: int = 3
    eager: bool = False
    folder: Path = Path(".venv-peers")

    def __post_init__(self) -> None:
        """Raises `StartError`."""
        check_names(self.sizes, SIZES)
        check_names(self.loads, LOADS)
        check_names(self.methods, METHODS)
        if not self.python.is_file():
            raise StartError(f"there is no {self.python}: `make test-vllm` installs vLLM")


def run(console: Console, options: VllmBenchOptions) -> dict[str, Any]:
    """Measure and show; return the JSON document. Ctrl-C ends the run with what was measured so far."""
    result = PeerResult(console)
    propose_ms: dict[str, dict[str, float]] = {}
    with results_kept_on_interrupt(console):
        for size in options.sizes:
            _measure_size(size, options, result, propose_ms.setdefault(size, {}))
    rows = result.rows()
    found = {size: figures([row for row in rows if row["size"] == size]) for size in options.sizes}
    _show(console, rows)
    return {
        "ratios": found,
        "propose_ms": propose_ms,
        "threads": result.threads,
        "left_out": result.left_out,
        "rows": rows,
    }


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The ratios of one size, by load and batch, as far as they were measured."""
    speeds = {(row["load"], row["batch"], row["method"]): float(row["tokens_per_s"]) for row in rows}
    found = {}
    for load, batch in dict.fromkeys((row["load"], row["batch"]) for row in rows):
        of = {method: speeds[load, batch, method] for method in METHODS if (load, batch, method) in speeds}
        pool = max((of[name] for name in POOLS if name in of), default=None)
        own = max((of[name] for name in (PLAIN, *OWN) if name in of), default=None)
        ratios = {
            "best pool / vllm best": (pool, own),
            "pool / vllm draft_model": (of.get(POOL), of.get(DRAFT_MODEL)),
            "pool / draft_model with pool threads": (of.get(POOL), of.get(DRAFT_MODEL_POOL_THREADS)),
            "coupled pool / vllm draft_model": (of.get(COUPLED), of.get(DRAFT_MODEL)),
            "best pool / plain": (pool, of.get(PLAIN)),
            "useless pool / plain": (of.get(USELESS), of.get(PLAIN)),
            "dead pool / plain": (of.get(DEAD), of.get(PLAIN)),
            "synchronous plain / plain": (of.get(SYNCHRONOUS), of.get(PLAIN)),
        }
        for name, (ours, other) in ratios.items():
            if ours is not None and other is not None:
                found[f"{name}, {load}, batch {batch}"] = round(ours / other, 2)
    return found


def _measure_size(size: str, options: VllmBenchOptions, result: PeerResult, propose_ms: dict[str, float]) -> None:
    """`propose_ms` gets the figure of each method that drafts from a pool."""
    known = {each.name: prompts_of(each) for each in (*workloads(), *repetitive_workloads())}
    loads = {load: known[LOADS[load][0]] for load in options.loads}
    first_load_prompts = next(iter(loads.values()))
    paths = models(size, options.folder / "models" / size)
    with ExitStack() as stack:
        pools = {
            "useful": stack.enter_context(draft_worker(paths["target"], paths["draft"], options.folder)),
            "useless": stack.enter_context(draft_worker(paths["target"], useless(paths["draft"]), options.folder)),
        }
        start = _Starter(size, options, paths, pools, result, stack)
        processes: Processes = {}
        threads: dict[str, int] = {}
        for method in (name for name in METHODS if name in {PLAIN, *options.methods}):
            group = POOL if method in (*POOLS, DRAFT_MODEL_POOL_THREADS) else PLAIN
            try:
                if group in threads:
                    processes[VLLM, method] = start.process(method, threads[group])
                else:
                    tried = fastest(partial(start.process, method), method, first_load_prompts)
                    threads[group], processes[VLLM, method] = tried
            except PeerError as error:
                result.leave_out(f"{method}: {error}")
        result.threads |= {f"{VLLM}, {size}, {group}": count for group, count in threads.items()}
        with result.console.status("") as status:
            for batch in BATCHES:
                able = warmed_up(processes, first_load_prompts[0], batch, result)
                for load, prompts in loads.items():
                    measure_load((size, load, batch), able, prompts, options.repeats, result, status)
                if batch == 1:
                    propose_ms.update(_propose_ms(able, result))


def _propose_ms(processes: Processes, result: PeerResult) -> dict[str, float]:
    """By method that drafts from a pool."""
    found: dict[str, float] = {}
    for (_, method), process in processes.items():
        try:
            value = process.figures().get("propose_ms")
        except PeerError as error:
            result.leave_out(f"{error} ({method})")
        else:
            if value is not None:
                found[method] = round(value, 3)
    return found


@dataclass(frozen=True, slots=True)
class _Starter:
    """Starts vLLMs; `stack` ends them."""

    size: str
    options: VllmBenchOptions
    paths: Mapping[str, str]
    pools: Mapping[str, str]
    result: PeerResult
    stack: ExitStack

    def process(self, method: str, threads: int) -> PeerProcess:
        """Raises `PeerError`."""
        folder = self.options.folder.absolute()
        (folder / "logs").mkdir(exist_ok=True)
        root = str(Path(__file__).parents[2])
        process = PeerProcess(
            f"vllm, {self.size}",
            [str(self.options.python.absolute()), str(peer_worker.__file__), VLLM],
            engine_environment(threads, self.options.folder) | {"PYTHONPATH": root} | self._drafts(method),
            folder / "logs" / f"bench-vllm-{self.size}-{method}-{threads}.log",
        )
        self.stack.callback(process.close)
        arguments = _engine_arguments(method) | ({"enforce_eager": True} if self.options.eager else {})
        setup = {**self.paths, "threads": threads, "methods": [method], "engine_args": arguments}
        with self.result.console.status(f"{self.size}: starting {method}; vLLM compiles for minutes the first time"):
            process.start(setup | {"vllm_method": _vllm_method(method)})
        return process

    def _drafts(self, method: str) -> dict[str, str]:
        """The draft worker's address as a variable: as an argument, vLLM would compile anew for each address."""
        if method in POOLS:
            return {DRAFTS_VARIABLE: self.pools["useful"]}
        addresses = {USELESS: self.pools["useless"], DEAD: f"{LOOPBACK}:1"}
        return {DRAFTS_VARIABLE: addresses[method]} if method in addresses else {}


def _engine_arguments(method: str) -> dict[str, Any]:
    """More arguments of vLLM's `LLM`."""
    suffix = {"lookups": ["suffix"], "lookup_settings": SUFFIX_WITHOUT_HISTORY}
    arguments: dict[str, dict[str, Any]] = {
        SYNCHRONOUS: {"async_scheduling": False},
        POOL_SUFFIX: {"additional_config": {"paceline": suffix}},
        COUPLED: {"worker_cls": "paceline.vllm.coupled_worker.CoupledWorker"},
    }
    return arguments.get(method, {})


def _vllm_method(method: str) -> str:
    """The method as the process of vLLM knows it."""
    if method in (*POOLS, USELESS, DEAD):
        return POOL
    return {DRAFT_MODEL_POOL_THREADS: DRAFT_MODEL, SYNCHRONOUS: PLAIN}.get(method, method)


@contextmanager
def draft_worker(target: str, draft: str, folder: Path) -> Iterator[str]:
    """A draft worker with one thread; yields its address. Raises `StartError`."""
    [port] = free_ports(LOOPBACK, 0, 1)[1]
    config = SpeculativeConfig(method="draft_model", model=draft)
    command = [sys.executable, "-m", "paceline_services.draft", "--port", str(port), "--target-model", target]
    command += ["--speculative-config", config.model_dump_json(), "--engine-config", '{"threads": 1}']
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with (folder / "logs" / f"draft-{port}.log").open("wb") as log:
        process = subprocess.Popen(die_with_parent(command), stderr=log)
    try:
        _wait_until_listening(process, port)
        yield f"{LOOPBACK}:{port}"
    finally:
        process.terminate()
        process.wait()


def _wait_until_listening(process: subprocess.Popen[bytes], port: int) -> None:
    """Raises `StartError`."""
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection((LOOPBACK, port), timeout=1.0).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise StartError(f"the draft worker did not start within {START_S:g} s")


def useless(draft: str) -> str:
    """The draft's checkpoint with its vocabulary in another order: as fast, and wrong."""
    from safetensors.torch import load_file, save_file

    folder = Path(draft).with_name("useless-draft")
    folder.mkdir(exist_ok=True)
    for file in Path(draft).iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    size = json.loads((Path(draft) / "config.json").read_text())["vocab_size"]
    weights = load_file(Path(draft) / "model.safetensors")
    rolled = {name: weight.roll(7, 0) if weight.shape[0] == size else weight for name, weight in weights.items()}
    save_file(rolled, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def _show(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    for size in dict.fromkeys(row["size"] for row in rows):
        table = Table("load", "batch", *METHODS, title=f"{size} family: tokens/s, and prompts equal to plain")
        for load, batch in dict.fromkeys((row["load"], row["batch"]) for row in rows if row["size"] == size):
            cells = {
                row["method"]: f"{row['tokens_per_s']:,.0f} {row['equal']}/{row['outputs']}"
                for row in rows
                if (row["size"], row["load"], row["batch"]) == (size, load, batch)
            }
            table.add_row(load, str(batch), *(cells.get(method, "") for method in METHODS))
        console.print(table)
