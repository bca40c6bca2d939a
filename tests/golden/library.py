"""Requests to `paceline.llm.LLM`: every way to draft, to verify and to sample, in one process.

Table models have no weights: their answers are the same on every machine. Models with weights run in float32: another
machine rounds otherwise, by less than what two tokens differ by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline import family
from paceline.config import SamplingParams
from paceline.llm import LLM, Completion
from tests.exactness.architectures import VOCABULARY, tiny
from tests.helpers.checkpoints import save_tokenizer

TABLE, OTHER_TABLE = "table:64", "table:64:0.3"
TARGET, DRAFT = family.NAMES
RANDOM = "random:"
"""Before the name of an architecture: a tiny network of it, with random weights of a fixed seed."""
TOKENS = 24
NUMBERS = ([1, 2, 3, 1, 2, 3, 1, 2], [5, 9, 13, 17, 5, 9, 13, 17, 5], list(range(40)))
TEXTS = ("def area(width, height):\n    return", "import json\n\ndef load(path):\n", "class Stack:\n    def push(self,")
STEADY = {"row_budget": False, "draft_schedule": "lockstep"}
"""No choice depends on how long a pass takes: outputs of strategies that depend on guesses repeat."""
DRAWN = {"temperature": 0.8, "seed": 7}

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": DRAWN,
    "hot": {"temperature": 2.5, "seed": -3},
    "top_k": DRAWN | {"top_k": 2},
    "top_p": DRAWN | {"top_p": 0.6},
    "min_p": DRAWN | {"min_p": 0.2},
    "all filters": DRAWN | {"top_k": 3, "top_p": 0.9, "min_p": 0.01},
    "repetition": DRAWN | {"repetition_penalty": 1.7},
    "repetition, greedy": {"repetition_penalty": 2.5},
    "presence": DRAWN | {"presence_penalty": 1.5},
    "frequency": DRAWN | {"frequency_penalty": 1.5},
    "frequency below zero": DRAWN | {"frequency_penalty": -0.7},
    "bias": DRAWN | {"logit_bias": {3: 8.0, 5: -100.0}},
    "bad words": DRAWN | {"bad_words": ((3,), (5, 7), (1, 2, 3))},
    "stop tokens": DRAWN | {"stop_token_ids": (3, 11, 19, 27, 35, 43, 51, 59)},
    "stop tokens, late": DRAWN | {"stop_token_ids": (3, 11, 19, 27, 35, 43, 51, 59), "min_tokens": 9},
    "one token": DRAWN | {"max_tokens": 1},
    "log-probabilities": DRAWN | {"logprobs": 3},
    "log-probability alone": {"logprobs": 0},
}


@dataclass(frozen=True)
class Setup:
    model: str
    speculation: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> LLM:
        engine = {"slots": 1024, "threads": 1, "max_num_batched_rows": 64}
        engine |= {} if self.model.startswith("table:") else {"dtype": "float32"}
        engine |= self.engine
        if not self.model.startswith(RANDOM):
            return LLM(self.model, dict(self.speculation), engine)
        with TemporaryDirectory() as folder:
            tiny(self.model.removeprefix(RANDOM)).save_pretrained(folder)
            save_tokenizer(Path(folder), range(VOCABULARY))
            return LLM(folder, dict(self.speculation), engine)


@dataclass(frozen=True)
class Call:
    """One call of `LLM.generate`."""

    prompts: Sequence[Any]
    sampling: Mapping[str, Any]
    stop: Sequence[str] = ()
    speculative: bool = True

    def run(self, llm: LLM) -> list[Any]:
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS} | dict(self.sampling))
        return [
            trace(each) for each in llm.generate(self.prompts, sampling, stop=self.stop, speculative=self.speculative)
        ]


def trace(completion: Completion) -> dict[str, Any]:
    """Log-probabilities are rounded to what machines agree on."""
    said = {
        "text": completion.text,
        "tokens": completion.tokens,
        "reason": completion.finish_reason.name,
        "prompt_tokens": completion.prompt_tokens,
    }
    if completion.log_probs:
        said["log_probs"] = [[each.log_prob, *map(list, each.top)] for each in completion.log_probs]
    return said


def calls() -> Iterator[tuple[str, Setup, dict[str, Call]]]:
    """Name, and what is asked of one loaded model."""
    table_methods: dict[str, dict[str, Any]] = {
        "plain": {},
        "ngram": {"method": "ngram"},
        "suffix": {"method": "suffix"},
        "draft model": {"method": "draft_model", "model": OTHER_TABLE, "num_speculative_tokens": 4},
        "chain": {"method": "draft_model", "model": OTHER_TABLE, "tree_width": 1, "num_speculative_tokens": 6},
        "three": {"method": ["ngram", "suffix", "draft_model"], "model": OTHER_TABLE},
    }
    for name, method in table_methods.items():
        local = method | ({"draft_placement": "target"} if method else {})
        rules = SAMPLING if name in ("plain", "three") else {key: SAMPLING[key] for key in ("greedy", "drawn")}
        yield f"table, {name}", Setup(TABLE, local), {rule: Call(NUMBERS[:2], law) for rule, law in rules.items()}
    yield from _strategies()
    yield from _loads()
    yield from _family()
    yield from _states()


def _strategies() -> Iterator[tuple[str, Setup, dict[str, Call]]]:
    chain = {"method": "draft_model", "model": OTHER_TABLE, "tree_width": 1, "draft_placement": "target", **STEADY}
    thinking = {"begin_thinking_phase_token": 2, "end_thinking_phase_token": 3}
    strategies: dict[str, dict[str, Any]] = {
        "greedy": {"rejection_sampling_strategy": "greedy"},
        "residual": {"rejection_sampling_strategy": "residual"},
        "residual, by blocks": {"rejection_sampling_strategy": "residual", "block_verification": True},
        "typical": {"rejection_sampling_strategy": "typical-acceptance", "posterior_threshold": 0.2},
        "logit comparison": {"rejection_sampling_strategy": "logit-comparison", "logit_comparison_eps": 0.01},
        "relaxed": {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 3, **thinking},
        "synthetic": {"synthetic_acceptance_rate": 0.7},
    }
    for name, strategy in strategies.items():
        yield f"strategy {name}", Setup(TABLE, chain | strategy), {"drawn": Call(NUMBERS[:2], DRAWN)}


def _loads() -> Iterator[tuple[str, Setup, dict[str, Call]]]:
    """Slots that run out, prompts that are computed in parts, prompts that are cached."""
    many = [[number, *NUMBERS[number % 3]] for number in range(8)]
    drafted = {"method": "draft_model", "model": OTHER_TABLE, "draft_placement": "target"}
    yield "preemption", Setup(TABLE, drafted, {"slots": 256}), {"eight at once": Call(many, DRAWN | {"max_tokens": 40})}
    yield "prefill in parts", Setup(TABLE, drafted, {"max_num_batched_rows": 8}), {"eight at once": Call(many, DRAWN)}
    cached = {"first": Call(NUMBERS[2:], {}), "again": Call([NUMBERS[2] + [1, 2]] * 2, DRAWN)}
    yield "cached prompts", Setup(TABLE, drafted), cached


def _family() -> Iterator[tuple[str, Setup, dict[str, Call]]]:
    methods: dict[str, dict[str, Any]] = {"plain": {}, "ngram": {"method": "ngram"}}
    methods |= {
        name: {"method": name, "model": model} for name, model in {"draft_model": DRAFT, **family.HEADS}.items()
    }
    methods |= {"suffix + eagle3": {"method": ["suffix", "eagle3"], "model": family.HEADS["eagle3"]}}
    for name, method in methods.items():
        local = method | ({"draft_placement": "target"} if method else {})
        asked = {"greedy": Call(TEXTS[:2], {"logprobs": 2}), "drawn": Call(TEXTS[:2], DRAWN)}
        if name in ("plain", "draft_model"):
            asked |= {
                "stop string": Call(TEXTS, {"max_tokens": 48}, stop=("\n", "self.")),
                "stop string, late": Call(TEXTS, {"max_tokens": 48, "min_tokens": 16}, stop=("\n",)),
                "speculation off": Call(TEXTS[2:], DRAWN, speculative=False),
            }
        yield f"{TARGET}, {name}", Setup(TARGET, local), asked


def _states() -> Iterator[tuple[str, Setup, dict[str, Call]]]:
    """Targets whose layers keep states: gated delta rule, and Mamba-2."""
    lookups: dict[str, dict[str, Any]] = {"plain": {}, "ngram": {"method": "ngram"}, "suffix": {"method": "suffix"}}
    drafts = {"mtp": {"method": "mtp"}, "draft_model": {"method": "draft_model", "model": DRAFT}}
    for model, methods, prompts in (
        (family.HYBRID, lookups | drafts, TEXTS[:2]),
        (f"{RANDOM}nemotron_h", lookups, NUMBERS[:2]),
    ):
        for name, method in methods.items():
            local = method | ({"draft_placement": "target"} if method else {})
            asked = {"greedy": Call(prompts, {"logprobs": 2}), "drawn": Call(prompts, DRAWN)}
            yield f"{model}, {name}", Setup(model, local), asked
