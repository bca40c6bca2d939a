"""Measures ways to draft on prompts, in this process, each beside plain decoding.

The target is loaded once. Every run begins with drafts that know nothing: none looks up what an earlier run said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, get_args

from paceline.config import ModelFree, SamplingParams, SpeculativeConfig
from paceline.doctor.candidates import CandidateMethod
from paceline.doctor.draft_memory import MemoryNeed, memory_need
from paceline.doctor.measurements import MeasuredAcceptance, MeasuredCompletion, MethodFacts, MethodMeasurement, Speed
from paceline.doctor.speed_forecast import batch_seconds
from paceline.drafting import complete_config, hidden_state_layers
from paceline.llm import LLM, Completion
from paceline.model_names import is_fake_model
from paceline.text import Tokenizer

Asked = TypeVar("Asked")

CONCURRENCIES = (4, 16)
"""Requests at once, beside one alone."""
REPETITIONS = 2
"""Of what is timed; the fastest counts."""
SEED = 7
SPECIAL_ROLES = ("bos_token", "eos_token")


@dataclass(frozen=True, slots=True)
class MeasurementSettings:
    """What everything is measured on: prompts as token ids, and how they are answered."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    temperatures: Sequence[float]
    without_chat_template: bool = False
    """Whether they lack the model's chat template."""
    concurrencies: Sequence[int] = CONCURRENCIES

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=SEED)


@dataclass(slots=True)
class TimedCompletions:
    """Prompts answered in one of two ways. `seconds`: by group of prompts, the fastest of its repetitions."""

    seconds: list[float] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    """Of the first repetition."""

    def add(self, group: int, completions: Sequence[Completion], seconds: float) -> None:
        if group == len(self.seconds):
            self.seconds.append(seconds)
            self.completions += completions
        self.seconds[group] = min(self.seconds[group], seconds)

    @property
    def tokens(self) -> list[list[int]]:
        return [completion.tokens for completion in self.completions]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / sum(self.seconds)


@dataclass(slots=True)
class PairedRun:
    """Some prompts, answered plainly and with speculation in turns."""

    plain: TimedCompletions = field(default_factory=TimedCompletions)
    speculative: TimedCompletions = field(default_factory=TimedCompletions)
    position_limit: int = 0
    """Of the draft."""

    @property
    def identical(self) -> bool:
        return self.plain.tokens == self.speculative.tokens

    @property
    def exactness_promised(self) -> bool:
        """Whether it has to be, as the output is verified."""
        return all(completion.speculation.drafter_invariant for completion in self.speculative.completions)


def measure(target: LLM, candidate: CandidateMethod, trial: MeasurementSettings) -> MethodMeasurement:
    """`target`: without cached prompts. Raises ValueError, or `ModelNotFoundError`, if this cannot draft for it."""

    def fresh() -> LLM:
        return target.with_speculation(candidate.config)

    first, *others = trial.temperatures
    at_once = {count: run(fresh, trial, first, count, REPETITIONS) for count in (1, *trial.concurrencies)}
    alone = {first: at_once[1]} | {temperature: run(fresh, trial, temperature, 1) for temperature in others}
    acceptances = [acceptance(temperature, each.speculative.completions) for temperature, each in alone.items()]
    runs = [*alone.values(), *at_once.values()]
    same = all(each.identical for each in runs) if all(each.exactness_promised for each in runs) else None
    speeds = [speed(target, count, each, acceptances[0]) for count, each in at_once.items()]
    facts = facts_of(target, candidate.config, runs[0].position_limit, bare=trial.without_chat_template)
    return MethodMeasurement(candidate.name, candidate.config, acceptances, speeds, same, facts)


def run(
    fresh: Callable[[], LLM], trial: MeasurementSettings, temperature: float, requests: int, repetitions: int = 1
) -> PairedRun:
    """All prompts, so many at once. `fresh` gives a target with drafts that know nothing, for each repetition."""
    this = PairedRun()
    sampling = trial.sampling(temperature)
    for _ in range(repetitions):
        llm = fresh()
        this.position_limit = llm.position_limit
        for number, group in enumerate(groups(trial.prompts, requests)):
            for side in (this.plain, this.speculative):
                began = time.perf_counter()
                completions = llm.generate(group, sampling, speculative=side is this.speculative)
                side.add(number, completions, time.perf_counter() - began)
    return this


def speed(target: LLM, requests: int, measured: PairedRun, alone: MeasuredAcceptance) -> Speed:
    """`alone`: what is accepted of prompts decoded one by one."""
    answers = measured.speculative.completions
    together = groups([(each.prompt_tokens, len(each.tokens)) for each in answers], requests)
    most = target.config.max_num_batched_rows
    seconds = sum(batch_seconds(alone, sizes, most, target.cost) for sizes in together)
    predicted = sum(len(each.tokens) for each in answers) / seconds
    return Speed(requests, measured.plain.tokens_per_s, measured.speculative.tokens_per_s, predicted)


def groups(prompts: Sequence[Asked], size: int) -> list[list[Asked]]:
    """Of `size` prompts each; some are asked again if there are too few for one, none if not."""
    if len(prompts) < size:
        return [[prompts[i % len(prompts)] for i in range(size)]]
    return [list(prompts[at : at + size]) for at in range(0, len(prompts) - size + 1, size)]


def acceptance(temperature: float, completions: Sequence[Completion]) -> MeasuredAcceptance:
    answers = [MeasuredCompletion(each.prompt_tokens, each.accepted, each.speculation) for each in completions]
    return MeasuredAcceptance(temperature, answers)


def facts_of(target: LLM, config: SpeculativeConfig, position_limit: int, *, bare: bool) -> MethodFacts:
    config = complete_config(config, target.model.name)
    trained = config.method not in get_args(ModelFree)
    if config.method not in ("draft_model", "pard") or config.model is None:
        return MethodFacts(trained, bare_prompts=bare, position_limit=position_limit)
    draft = Tokenizer.load(config.model)
    same = draft.fingerprint == target.tokenizer.fingerprint
    roles = other_special_tokens(draft, target.tokenizer) if same else ()
    return MethodFacts(trained, same, roles, bare, position_limit)


def other_special_tokens(draft: Tokenizer, target: Tokenizer) -> Sequence[str]:
    """Roles that both name, differently."""
    tokens = {role: (draft.special_tokens.get(role), target.special_tokens.get(role)) for role in SPECIAL_ROLES}
    return tuple(role for role, (one, other) in tokens.items() if one and other and one != other)


def need(target: LLM, config: SpeculativeConfig) -> MemoryNeed:
    """Memory that it takes beside this target. Raises as `measure` does."""
    if is_fake_model(target.model.name):
        return MemoryNeed()
    config = complete_config(config, target.model.name)
    layers = hidden_state_layers(config, target.config, target.model.target_weights)
    return memory_need(config, target.model.target_weights(), target.config.slots, len(layers))
