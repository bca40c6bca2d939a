"""`paceline bench methods`: how well each way to draft foresees the shipped model, and what that is worth.

One request at a time, all in this process with one thread per core, no cached prompts. Every method has the same target
and the same limits (DEPTH, NODES), and drafts inside the target's process: a draft gets no core of its own. The methods
take turns prompt by prompt, plain decoding among them, so whatever else the machine does hits all alike; of a prompt's
repetitions the fastest counts. `speedup` is plain decoding's time over all prompts of a workload divided by the
method's, prompts included. A speed-up is only shown for output that equals plain decoding's, token for token; if any
does not, the benchmark fails. Suffix decoding forgets finished requests: it would copy each repetition from the first.

`acceptance_length` is accepted tokens per verification, without the bonus token; `by_depth[d]` is the share of
verifications that accepted more than d tokens.
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
from paceline.cli.progress import progress, results_kept_on_interrupt
from paceline.cli.supervised_process import StartError
from paceline.config import SamplingParams
from paceline.core.messages import SpeculationStats
from paceline.llm import LLM, Completion
from paceline.text import Tokenizer
from paceline_lab.bench.workloads import Workload, repetitive_workloads, workloads

TARGET, DRAFT = family.NAMES
TEMPERATURES = (0.0, 0.8)
MAX_TOKENS = 160
REPETITIONS = 5
DEPTH = 12
NODES = 24
LIMITS = {"draft_placement": "target", "num_speculative_tokens": DEPTH, "max_tree_nodes": NODES}
ENGINE = {"threads": os.cpu_count() or 1, "slots": 4096, "enable_prefix_caching": False}
PLAIN = "plain"
SUFFIX_WITHOUT_HISTORY = {"suffix_decoding_max_cached_requests": 0}


@dataclass(slots=True)
class MethodRun:
    """One method on one workload at one temperature; sequences are by prompt."""

    seconds: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    stats: list[SpeculationStats] = field(default_factory=list)
    reproducible: bool = True

    def add(self, prompt: int, completion: Completion, seconds: float) -> None:
        """A repetition; prompts come in their order the first time."""
        if prompt == len(self.tokens):
            self.seconds.append([])
            self.tokens.append(completion.tokens)
            self.stats.append(completion.speculation)
        self.seconds[prompt].append(seconds)
        self.reproducible &= completion.tokens == self.tokens[prompt]

    @property
    def total_s(self) -> float:
        return sum(map(min, self.seconds))

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.total_s

    @property
    def acceptance_length(self) -> float:
        return sum(self._accepted()) / self._verifications

    def by_depth(self) -> list[float]:
        return [round(count / self._verifications, 3) for count in self._accepted()]

    @property
    def _verifications(self) -> int:
        return max(1, sum(stats.verifications for stats in self.stats))

    def _accepted(self) -> list[int]:
        """By depth, over all prompts."""
        return [sum(counts) for counts in zip_longest(*(s.accepted_by_depth for s in self.stats), fillvalue=0)]


def methods() -> dict[str, dict[str, Any]]:
    """Every way to draft that ships, by what it is called in the rows."""
    with_models = {"draft_model": DRAFT, **family.HEADS}
    alone = {method: {"method": method, "model": model} for method, model in with_models.items()}
    best = "eagle3" if "eagle3" in family.HEADS else "draft_model"
    both = {f"suffix + {best}": {"method": ["suffix", best], "model": with_models[best], **SUFFIX_WITHOUT_HISTORY}}
    return {"ngram": {"method": "ngram"}, "suffix": {"method": "suffix", **SUFFIX_WITHOUT_HISTORY}, **alone, **both}


def run(console: Console, only: Collection[str] = ()) -> dict[str, Any]:
    """Measure, show, and return what the last line says; after Ctrl-C, of the workloads that were measured by then.
    `only`: names of methods; empty: all.

    Raises `ServiceStartError` for a name that is none.
    """
    known = methods()
    if unknown := sorted(set(only) - set(known)):
        raise StartError(f"no method is called {unknown[0]!r}: choose of {', '.join(known)}")
    chosen = {name: config for name, config in known.items() if not only or name in only}
    rows: list[dict[str, Any]] = []
    with console.status("loading"):
        llms = _llms(chosen)
    cells = list(product((*workloads(), *repetitive_workloads()), TEMPERATURES))
    prompts = sum(len(workload.bodies) for workload, _ in cells)
    with (
        results_kept_on_interrupt(console),
        progress(console, "prompts, every method in turns", REPETITIONS * prompts) as done,
    ):
        for workload, temperature in cells:
            measured = measure(llms, prompts_of(workload), temperature, done)
            rows += [row(name, workload.name, temperature, measured) for name in llms]
            _show(console, workload.name, temperature, measured)
    return {"rows": rows}


def measure(
    llms: Mapping[str, LLM],
    prompts: Sequence[Sequence[int]],
    temperature: float,
    done: Callable[[], None] = lambda: None,
) -> dict[str, MethodRun]:
    """By method, and PLAIN: the first one's target alone. `done` is told of each prompt and repetition."""
    sampling = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=7)
    plain = next(iter(llms.values()))
    measured = {name: MethodRun() for name in (PLAIN, *llms)}
    for llm in llms.values():
        llm.generate([prompts[0]], sampling)  # caches of operators; what a method learns as it serves
    for _ in range(REPETITIONS):
        for number, prompt in enumerate(prompts):
            for name, these in measured.items():
                llm = llms.get(name, plain)
                began = time.perf_counter()
                [completion] = llm.generate([prompt], sampling, speculative=name != PLAIN)
                these.add(number, completion, time.perf_counter() - began)
            done()
    return measured


def row(name: str, workload: str, temperature: float, measured: Mapping[str, MethodRun]) -> dict[str, Any]:
    """One row of the last line."""
    this, plain = measured[name], measured[PLAIN]
    return {
        "method": name,
        "workload": workload,
        "temperature": temperature,
        "acceptance_length": round(this.acceptance_length, 2),
        "by_depth": this.by_depth(),
        "tokens_per_s": round(this.tokens_per_s, 1),
        "speedup": round(plain.total_s / this.total_s, 2),
        "identical": this.reproducible and plain.reproducible and this.tokens == plain.tokens,
    }


def prompts_of(workload: Workload) -> list[list[int]]:
    """Its prompts as token ids, chats as the model's template writes them."""
    tokenizer = Tokenizer.load(TARGET)
    template = tokenizer.chat_template
    assert template is not None, "the shipped model chats"
    texts = [
        body["prompt"] if "prompt" in body else template.render(body["messages"], add_generation_prompt=True)
        for body in workload.bodies
    ]
    return [tokenizer.encode(text) for text in texts]


def _llms(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, LLM]:
    """All over one target."""
    target = LLM(TARGET, engine_config=ENGINE)
    return {name: target.with_speculation({**LIMITS, **config}) for name, config in configs.items()}


def _show(console: Console, workload: str, temperature: float, measured: Mapping[str, MethodRun]) -> None:
    table = Table(
        "method", "accepted", "by depth", "tokens/s", "speed-up", "output", title=f"{workload}, T {temperature}"
    )
    for name in measured:
        if name == PLAIN:
            table.add_row(name, "", "", f"{measured[name].tokens_per_s:.0f}", "1", "")
            continue
        this = row(name, workload, temperature, measured)
        depths = " ".join(f"{share:.2f}" for share in this["by_depth"][:6])
        speedup, output = (f"{this['speedup']:.2f}", "identical") if this["identical"] else ("", "[bold red]DIFFERS")
        table.add_row(
            name,
            f"{this['acceptance_length']:.2f}",
            depths,
            f"{this['tokens_per_s']:.0f}",
            speedup,
            output,
        )
    console.print(table)
