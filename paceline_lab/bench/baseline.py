"""`paceline bench baseline`: is this engine worth its trouble on the machine at hand?

Decoding one request on a CPU is bound by overhead: a transformers forward of a model this small takes as long for
eight rows as for one, nearly all of it spent between the operators. So a speculative step gets several tokens for
the price of one, for us and for anybody else; what remains to compare is the cost of a step, the cost of drafting,
and the share of guesses that come true.

Same weights, same prompts, greedy, one request at a time, all in this process with the same number of threads (of
one and all cores, the one that suits `transformers.generate` best):

- `generate`        transformers, as in its manual
- `assisted`        the same with `assistant_model`, the draft of the pair
- `prompt_lookup`   the same with `prompt_lookup_num_tokens`
- `plain`           this engine without speculation
- `speculative`     this engine, the same draft inside the process (`draft_placement: target`): like the assisted
                    one it gets no second core

The methods take turns, so whatever else the machine does hits all alike; speeds are medians over prompts and
repetitions of new tokens per second, prompt included. Nobody may reuse a prompt's keys and values. `reproduces_plain`
counts the prompts for which a method gave, every time, exactly the tokens of its own plain decoding.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from paceline.cli.progress import progress, results_kept_on_interrupt
from paceline.config import SamplingParams
from paceline.doctor.default_prompts import QUESTIONS, code_prompts
from paceline.family import NAMES
from paceline.llm import LLM
from paceline.model_names import resolve_model
from paceline.text import Tokenizer

MAX_TOKENS = 96
REPETITIONS = 3
LOOKED_UP_TOKENS = 10

Method = Callable[[Sequence[int]], list[int]]
"""From a prompt to the new tokens."""

PLAIN_OF = {"assisted": "generate", "prompt_lookup": "generate", "speculative": "plain"}
TARGET, DRAFT = NAMES


@dataclass(slots=True)
class BaselineMeasurement:
    """`tokens` and `tokens_per_s` by method; `tokens[method][prompt]` holds one output per repetition."""

    threads: int
    tokens: dict[str, dict[int, list[list[int]]]] = field(default_factory=dict)
    tokens_per_s: dict[str, list[float]] = field(default_factory=dict)

    def add(self, method: str, prompt: int, tokens: list[int], seconds: float) -> None:
        self.tokens.setdefault(method, {}).setdefault(prompt, []).append(tokens)
        self.tokens_per_s.setdefault(method, []).append(len(tokens) / seconds)

    def reproductions(self, method: str) -> int:
        """For how many prompts every output equals every plain one."""
        plain = self.tokens[PLAIN_OF[method]]
        return sum(
            all(output == expected for output in outputs for expected in plain[prompt])
            for prompt, outputs in self.tokens[method].items()
        )

    def summary(self) -> dict[str, Any]:
        return {
            "prompts": len(self.tokens.get("plain", ())),
            "tokens_per_s": {method: round(median(speeds), 1) for method, speeds in self.tokens_per_s.items()},
            "reproduces_plain": {method: self.reproductions(method) for method in PLAIN_OF if method in self.tokens},
            "threads": self.threads,
        }


def run(console: Console) -> dict[str, Any]:
    """Measure, show, and return what the last line says; after Ctrl-C, of the prompts that were measured by then."""
    with console.status("loading"):
        theirs = _Transformers()
        prompts = _prompts()
        threads = _best_threads(theirs, prompts[0])
        methods = theirs.methods() | _ours(threads)
    measured = BaselineMeasurement(threads)
    with (
        results_kept_on_interrupt(console),
        progress(console, "prompts, every method in turns", REPETITIONS * len(prompts)) as done,
    ):
        measure(methods, prompts, measured, done)
    _show(console, measured.summary())
    return measured.summary()


def measure(
    methods: Mapping[str, Method],
    prompts: Sequence[Sequence[int]],
    measured: BaselineMeasurement,
    done: Callable[[], None],
) -> None:
    """`done` is told of each prompt and repetition."""
    for method in methods.values():
        method(prompts[0])  # compiles, fills caches of operators
    for _ in range(REPETITIONS):
        for number, prompt in enumerate(prompts):
            runs = []
            for name, method in methods.items():
                began = time.perf_counter()
                runs.append((name, number, method(prompt), time.perf_counter() - began))
            for run in runs:  # of every method, or of none
                measured.add(*run)
            done()


class _Transformers:
    """What a user would write in five lines."""

    def __init__(self) -> None:
        logging.set_verbosity_error()  # its assisted generation warns of its own calls
        self._target = _pretrained(TARGET)
        self._draft = _pretrained(DRAFT)

    def methods(self) -> dict[str, Method]:
        return {
            "generate": self.generate,
            "assisted": lambda prompt: self.generate(prompt, assistant_model=self._draft),
            "prompt_lookup": lambda prompt: self.generate(prompt, prompt_lookup_num_tokens=LOOKED_UP_TOKENS),
        }

    def generate(self, prompt: Sequence[int], **how: Any) -> list[int]:
        ids = torch.tensor([prompt])
        output = self._target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS, **how
        )
        return [int(token) for token in output[0, len(prompt) :]]


def _pretrained(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype="auto", local_files_only=True).eval()


def _ours(threads: int) -> dict[str, Method]:
    speculation = {
        "method": ["ngram", "draft_model"],
        "model": DRAFT,
        "prompt_lookup_min": 1,
        "draft_placement": "target",
    }
    llm = LLM(TARGET, speculation, {"threads": threads, "enable_prefix_caching": False})
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    return {
        "plain": lambda prompt: llm.generate([prompt], sampling, speculative=False)[0].tokens,
        "speculative": lambda prompt: llm.generate([prompt], sampling)[0].tokens,
    }


def _prompts() -> list[list[int]]:
    """The demo's prompts, chats as the template writes them."""
    tokenizer = Tokenizer.load(TARGET)
    assert tokenizer.chat_template is not None, "the shipped model chats"
    chats = [
        tokenizer.chat_template.render([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in QUESTIONS
    ]
    return [tokenizer.encode(text) for text in (*code_prompts(), *chats)]


def _best_threads(theirs: _Transformers, prompt: Sequence[int]) -> int:
    """One thread or one per core, whichever is faster for `generate`; it stays set."""

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        theirs.generate(prompt)
        began = time.perf_counter()
        theirs.generate(prompt)
        return time.perf_counter() - began

    best = min((1, os.cpu_count() or 1), key=seconds)
    torch.set_num_threads(best)
    return best


def _show(console: Console, summary: Mapping[str, Any]) -> None:
    table = Table("method", "tokens/s", "reproduces its plain output")
    for method, speed in summary["tokens_per_s"].items():
        count = summary["reproduces_plain"].get(method)
        table.add_row(method, f"{speed:.0f}", "" if count is None else f"{count} of {summary['prompts']}")
    console.print(table)
