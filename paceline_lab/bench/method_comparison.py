"""`paceline bench methods`: acceptance and speed-up of every drafting method on a shipped model.

One request at a time, in this process, with one thread per core and without prefix caching. All methods share the
target and the limits DEPTH and NODES, and draft inside the target's process, so a draft has no core of its own. The
methods take turns prompt by prompt, plain decoding among them, so other load on the machine slows all alike. The
fastest repetition of each prompt counts, its acceptance too. `speedup` is the time of plain decoding over all prompts
of a workload divided by the method's time, prompts included. A speed-up is shown only where the output equals that of
plain decoding, token for token; otherwise the benchmark fails. Suffix decoding keeps no finished requests: it would
copy each repetition from the first.

`acceptance_length` is accepted tokens per verification, without the bonus token; `by_depth[d]` is the share of
verifications that accepted more than d tokens.

`paceline bench grammar` is the same for JSON extraction with a schema that binds every output, of plain decoding too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product, zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline import family
from paceline.cli.progress import progress
from paceline.config import SamplingParams
from paceline.drafting.auto_method import has_mtp_layer, shipped_drafts
from paceline.grammar import grammar_from_schema
from paceline.llm import LLM
from paceline.messages import SpeculationStats
from paceline.model_names import resolve_model
from paceline.text import Tokenizer
from paceline_lab.bench.bench_measurement import PLAIN, Measurement, check_names, results_kept_on_interrupt
from paceline_lab.bench.workloads import (
    Workload,
    extraction_schema,
    extraction_workload,
    repetitive_workloads,
    workloads,
)

TARGET = family.NAMES[0]
TEMPERATURES = (0.0, 0.8)
MAX_TOKENS = 160
REPETITIONS = 5
DEPTH = 12
NODES = 24
LIMITS = {"draft_placement": "target", "num_speculative_tokens": DEPTH, "max_tree_nodes": NODES}
ENGINE = {"threads": os.cpu_count() or 1, "slots": 4096, "enable_prefix_caching": False}
SUFFIX_WITHOUT_HISTORY = {"suffix_decoding_max_cached_requests": 0}


@dataclass(slots=True)
class ComparedMethod(Measurement):
    """One method on one workload at one temperature."""

    stats: dict[int, SpeculationStats] = field(default_factory=dict)
    """By prompt, of the fastest repetition."""

    @property
    def acceptance_length(self) -> float:
        return sum(self._accepted()) / self._verifications

    def by_depth(self) -> list[float]:
        """Share of verifications that accepted the token at each depth."""
        return [round(count / self._verifications, 3) for count in self._accepted()]

    @property
    def _verifications(self) -> int:
        return max(1, sum(stats.verifications for stats in self.stats.values()))

    def _accepted(self) -> list[int]:
        """Accepted tokens by depth, over all prompts."""
        by_prompt = (stats.accepted_by_depth for stats in self.stats.values())
        return [sum(counts) for counts in zip_longest(*by_prompt, fillvalue=0)]


def methods(target: str = TARGET) -> dict[str, dict[str, Any]]:
    """Configuration of every drafting method that ships for a target, by its name in the rows."""
    folder = resolve_model(target)
    models: dict[str, dict[str, Any]] = {name: {"model": model} for name, model in shipped_drafts(folder).items()}
    models |= {"mtp": {}} if has_mtp_layer(folder) else {}
    alone = {method: {"method": method, **model} for method, model in models.items()}
    best = "eagle3" if "eagle3" in models else next(iter(models), None)
    both = {f"suffix + {best}": {"method": ["suffix", best], **models[best], **SUFFIX_WITHOUT_HISTORY}} if best else {}
    return {"ngram": {"method": "ngram"}, "suffix": {"method": "suffix", **SUFFIX_WITHOUT_HISTORY}, **alone, **both}


def run_with_grammar(console: Console, only: Collection[str] = ()) -> dict[str, Any]:
    """As `run`, for JSON extraction under a schema."""
    loads, grammar = [extraction_workload()], grammar_from_schema(extraction_schema())
    return run(console, only, loads=loads, grammar=grammar)


def run(
    console: Console,
    only: Collection[str] = (),
    device: str = "cpu",
    *,
    target: str = TARGET,
    loads: Sequence[Workload] = (),
    grammar: str = "",
) -> dict[str, Any]:
    """Measure and show; return the JSON document. Ctrl-C ends the run with the workloads measured so far.

    `only` names the methods to measure; empty means all. `device`: of the target and of drafts, as torch names it.
    `target`: a model that ships, or has the shipped tokenizer.
    `loads`: the workloads; empty: all four. `grammar`: of every output. Raises `StartError` for an unknown name.
    """
    known = methods(target)
    check_names(only, known)
    chosen = {name: config for name, config in known.items() if not only or name in only}
    rows: list[dict[str, Any]] = []
    with console.status("loading"):
        llms = load_methods(chosen, device, target)
    cells = list(product(loads or (*workloads(), *repetitive_workloads()), TEMPERATURES))
    prompts = sum(len(workload.bodies) for workload, _ in cells)
    with (
        results_kept_on_interrupt(console),
        progress(console, "prompts, every method in turns", REPETITIONS * prompts) as done,
    ):
        for workload, temperature in cells:
            measured = measure(llms, prompts_of(workload), temperature, done, grammar)
            these = [row(name, workload.name, temperature, measured) for name in llms]
            _show(console, measured[PLAIN], these)
            rows += these
    return {"rows": rows}


def measure(
    llms: Mapping[str, LLM],
    prompts: Sequence[Sequence[int]],
    temperature: float,
    done: Callable[[], None] = lambda: None,
    grammar: str = "",
    repetitions: int = REPETITIONS,
) -> dict[str, ComparedMethod]:
    """Measurements by method, PLAIN among them. `done` is called after each prompt of each repetition."""
    sampling = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=7, grammar=grammar)
    plain = next(iter(llms.values()))
    measured = {name: ComparedMethod() for name in (PLAIN, *llms)}
    for llm in llms.values():
        llm.generate([prompts[0]], sampling)  # fills the operators' caches, and what a method learns while serving
    for _ in range(repetitions):
        for number, prompt in enumerate(prompts):
            for name, this in measured.items():
                llm = llms.get(name, plain)
                start = time.perf_counter()
                [completion] = llm.generate([prompt], sampling, speculative=name != PLAIN)
                seconds = time.perf_counter() - start
                this.add(number, [completion.tokens], seconds)
                if seconds == min(this.seconds[number]):
                    this.stats[number] = completion.speculation
            done()
    return measured


def row(name: str, workload: str, temperature: float, measured: Mapping[str, ComparedMethod]) -> dict[str, Any]:
    """One row of the JSON document."""
    this, plain = measured[name], measured[PLAIN]
    return {
        "method": name,
        "workload": workload,
        "temperature": temperature,
        "acceptance_length": round(this.acceptance_length, 2),
        "by_depth": this.by_depth(),
        "tokens_per_s": round(this.fastest_speed, 1),
        "speedup": round(plain.fastest_s / this.fastest_s, 2),
        "identical": this.equal_prompts(plain) == len(plain.outputs),
    }


def prompts_of(workload: Workload) -> list[list[int]]:
    """A workload's prompts as token ids of the shipped model, chats rendered with its template."""
    tokenizer = Tokenizer.load(TARGET)
    template = tokenizer.chat_template
    assert template is not None, "the shipped model has a chat template"
    texts = [
        body["prompt"] if "prompt" in body else template.render(body["messages"], add_generation_prompt=True)
        for body in workload.bodies
    ]
    return [tokenizer.encode(text) for text in texts]


def load_methods(configs: Mapping[str, Mapping[str, Any]], device: str, target: str = TARGET) -> dict[str, LLM]:
    """One LLM per method, over one loaded target."""
    loaded = LLM(target, engine_config={**ENGINE, "device": device})
    return {name: loaded.with_speculation({**LIMITS, **config}) for name, config in configs.items()}


def _show(console: Console, plain: Measurement, rows: Sequence[Mapping[str, Any]]) -> None:
    title = f"{rows[0]['workload']}, T {rows[0]['temperature']}"
    table = Table("method", "accepted", "by depth", "tokens/s", "speed-up", "output", title=title)
    table.add_row(PLAIN, "", "", f"{plain.fastest_speed:.0f}", "1", "")
    for each in rows:
        speedup, output = (f"{each['speedup']:.2f}", "identical") if each["identical"] else ("", "[bold red]DIFFERS")
        table.add_row(
            each["method"],
            f"{each['acceptance_length']:.2f}",
            " ".join(f"{share:.2f}" for share in each["by_depth"][:6]),
            f"{each['tokens_per_s']:.0f}",
            speedup,
            output,
        )
    console.print(table)
