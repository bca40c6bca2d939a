"""Measures methods on prompts in this process, each in turns with plain decoding.

The target is loaded once. Every run begins with new drafts, so that none looks up output of an earlier run. A forecast
of the speed, from acceptance by depth and the cost of rows, stands beside each: it leaves out the draft's own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from paceline.config import LOOKUP_METHODS, MODEL_METHODS, SamplingParams, SpeculativeConfig
from paceline.core.policy.step_cost import RowCost, StepCost, nodes_to_verify
from paceline.doctor.candidates import CandidateMethod
from paceline.doctor.measurements import MeasuredAcceptance, MeasuredCompletion, MethodFacts, MethodMeasurement, Speed
from paceline.drafting import complete_config
from paceline.llm import LLM, Completion
from paceline.memory_plan import draft_memory
from paceline.model.attention import SPARE_SLOTS
from paceline.model_names import is_fake_model
from paceline.text import Tokenizer

T = TypeVar("T")

CONCURRENCIES = (4, 16)
"""Numbers of requests at once, besides 1."""
REPETITIONS = 2
"""Of timed runs; the fastest counts."""
SEED = 7
SPECIAL_ROLES = ("bos_token", "eos_token")


@dataclass(frozen=True, slots=True)
class MeasurementSettings:
    """Prompts as token ids, and how their output is drawn."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    temperatures: Sequence[float]
    without_chat_template: bool = False
    """Whether the prompts lack the model's chat template."""
    concurrencies: Sequence[int] = CONCURRENCIES

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=SEED)


@dataclass(slots=True)
class TimedCompletions:
    """Completions of all groups of prompts. `seconds`: by group, of its fastest repetition."""

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
    """The same prompts, decoded plainly and with speculation in turns."""

    plain: TimedCompletions = field(default_factory=TimedCompletions)
    speculative: TimedCompletions = field(default_factory=TimedCompletions)
    position_limit: int = 0
    """Of the draft."""

    @property
    def identical(self) -> bool:
        return self.plain.tokens == self.speculative.tokens

    @property
    def exactness_promised(self) -> bool:
        """Whether the verification strategy promises identical output."""
        return all(completion.speculation.drafter_invariant for completion in self.speculative.completions)


def measure(target: LLM, candidate: CandidateMethod, settings: MeasurementSettings) -> MethodMeasurement:
    """Measure one method. `target` must not cache prompts.

    Raises ValueError or `ModelNotFoundError` if the method cannot draft for it.
    """

    def fresh() -> LLM:
        return target.with_speculation(candidate.config)

    first, *others = settings.temperatures
    at_once = {count: run(fresh, settings, first, count, REPETITIONS) for count in (1, *settings.concurrencies)}
    alone = {first: at_once[1]} | {temperature: run(fresh, settings, temperature, 1) for temperature in others}
    acceptances = [acceptance(temperature, each.speculative.completions) for temperature, each in alone.items()]
    runs = [*alone.values(), *at_once.values()]
    same = all(each.identical for each in runs) if all(each.exactness_promised for each in runs) else None
    speeds = [speed(target, count, each, acceptances[0]) for count, each in at_once.items()]
    facts = facts_of(target, candidate.config, runs[0].position_limit, bare=settings.without_chat_template)
    return MethodMeasurement(candidate.name, candidate.config, acceptances, speeds, same, facts)


def run(
    fresh: Callable[[], LLM],
    settings: MeasurementSettings,
    temperature: float,
    requests: int,
    repetitions: int = 1,
) -> PairedRun:
    """Decode all prompts, `requests` at once. `fresh` returns the target with new drafts, once per repetition."""
    this = PairedRun()
    sampling = settings.sampling(temperature)
    for _ in range(repetitions):
        llm = fresh()
        this.position_limit = llm.position_limit
        for number, group in enumerate(groups(settings.prompts, requests)):
            for side in (this.plain, this.speculative):
                began = time.perf_counter()
                completions = llm.generate(group, sampling, speculative=side is this.speculative)
                side.add(number, completions, time.perf_counter() - began)
    return this


def speed(target: LLM, requests: int, measured: PairedRun, alone: MeasuredAcceptance) -> Speed:
    """`alone`: the acceptance of prompts decoded one by one, from which the speed is predicted."""
    completions = measured.speculative.completions
    together = groups([(each.prompt_tokens, len(each.tokens)) for each in completions], requests)
    most = target.config.max_num_batched_rows
    seconds = sum(batch_seconds(alone, sizes, most, target.cost) for sizes in together)
    predicted = sum(len(each.tokens) for each in completions) / seconds
    return Speed(requests, measured.plain.tokens_per_s, measured.speculative.tokens_per_s, predicted)


def groups(prompts: Sequence[T], size: int) -> list[list[T]]:
    """Groups of `size` prompts. Prompts repeat only if they are too few for one group."""
    if len(prompts) < size:
        return [[prompts[i % len(prompts)] for i in range(size)]]
    return [list(prompts[at : at + size]) for at in range(0, len(prompts) - size + 1, size)]


def acceptance(temperature: float, completions: Sequence[Completion]) -> MeasuredAcceptance:
    measured = [MeasuredCompletion(each.prompt_tokens, each.accepted, each.speculation) for each in completions]
    return MeasuredAcceptance(temperature, measured)


def facts_of(target: LLM, config: SpeculativeConfig, position_limit: int, *, bare: bool) -> MethodFacts:
    """`bare`: whether the prompts lack the model's chat template."""
    config = complete_config(config, target.model.name)
    trained = config.method not in LOOKUP_METHODS
    if config.method not in MODEL_METHODS or config.model is None:
        return MethodFacts(trained, bare_prompts=bare, position_limit=position_limit)
    draft = Tokenizer.load(config.model)
    same = draft.fingerprint == target.tokenizer.fingerprint
    roles = other_special_tokens(draft, target.tokenizer) if same else ()
    return MethodFacts(trained, same, roles, bare, position_limit)


def other_special_tokens(draft: Tokenizer, target: Tokenizer) -> Sequence[str]:
    """Roles for which both have a token, and not the same one."""
    tokens = {role: (draft.special_tokens.get(role), target.special_tokens.get(role)) for role in SPECIAL_ROLES}
    return tuple(role for role, (one, other) in tokens.items() if one and other and one != other)


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """What a draft in the target's process needs beside the target, in bytes. `states`: the target's hidden states,
    kept by slot."""

    weights: int = 0
    cache: int = 0
    states: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.states

    def fits(self, free: int | None) -> bool:
        """`free`: None if unknown."""
        return free is None or self.total <= free


def need(target: LLM, config: SpeculativeConfig) -> DraftMemory:
    """The memory that a method needs beside this target. Raises as `measure` does."""
    if is_fake_model(target.model.name):
        return DraftMemory()
    config, slots = complete_config(config, target.model.name), target.config.slot_count
    draft, states = draft_memory(config, target.config, target.model.target_weights())
    return DraftMemory(draft.weights, draft.bytes_per_slot * (slots + SPARE_SLOTS), states.bytes_per_slot * (slots + 1))


def forecast_tokens_per_s(acceptance: MeasuredAcceptance, requests: int, most_rows: int, cost: RowCost) -> float:
    """Tokens per second of all requests together, if each step verifies the nodes that pay.

    `cost`: seconds of a pass by rows. `most_rows`: rows that a pass can have.
    """
    gains = sorted(node_gains(acceptance, requests), reverse=True)
    count = nodes_to_verify(gains, requests, requests, most_rows - requests, StepCost(cost))
    return (requests + sum(gains[:count])) / cost(requests + count)


def batch_seconds(
    acceptance: MeasuredAcceptance, sizes: Sequence[tuple[int, int]], most_rows: int, cost: RowCost
) -> float:
    """Seconds until all requests that arrive together are finished. `sizes`: prompt and output tokens of each.

    Prompts are computed first, in full passes; a prompt's pass draws the first token. Each request that finishes
    leaves fewer requests to share a pass.
    """
    passes, rest = divmod(sum(prompt for prompt, _ in sizes), most_rows)
    seconds = passes * cost(most_rows) + (cost(rest) if rest else 0.0)
    lengths, drawn = sorted(output for _, output in sizes), 1
    for finished, length in enumerate(lengths):
        running = len(lengths) - finished
        if length > drawn:
            seconds += running * (length - drawn) / forecast_tokens_per_s(acceptance, running, most_rows, cost)
            drawn = length
    return seconds


def node_gains(acceptance: MeasuredAcceptance, requests: int) -> list[float]:
    """Expected accepted tokens of each node that a step of so many requests could verify.

    All nodes of one depth share the depth's acceptance equally. Each depth has as many nodes as were verified there on
    average, and at least one, so that a draft with few draft tokens is not rounded away.
    """
    reached, accepted = acceptance.drafted_by_depth, acceptance.accepted_by_depth
    width = acceptance.nodes / max(1, sum(reached))
    nodes: list[float] = []
    for verified, accepted_here in zip(reached, accepted, strict=True):
        count = max(1, round(requests * width * verified / max(1, acceptance.steps)))
        each = requests * accepted_here / max(1, acceptance.steps) / count
        nodes += [each] * count
    return nodes
