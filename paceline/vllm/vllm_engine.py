"""vLLM as the engine of a target worker: requests in, deltas out, one step after another.

Its tokens are drawn by `CoupledWorker`, so they follow all of our sampling rules and depend on no draft. A request that
another target began goes on after its committed tokens: they join the prompt, and `CoupledDraws` counts them as output.
Under a grammar vLLM has to follow the output from its start, so there they are drawn again, one forced token after
another, and not reported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import SamplingParams as VllmSamplingParams
from vllm import __version__ as vllm_version
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from paceline import __version__
from paceline.drafting.vocabulary.stable_tokens import common_prefix_length
from paceline.engine.request import RequestTimes
from paceline.grammar.lark import PREAMBLE
from paceline.messages import (
    GRAMMAR_ERROR,
    Delta,
    EngineLoad,
    FinishReason,
    GenerationRequest,
    LogProbs,
    PromptLogProbs,
    SpeculationStats,
    TargetDescription,
    Usage,
)
from paceline.target_features import VLLM_LACKS, all_features
from paceline.telemetry.step_stats import StatsTimer, StepStats
from paceline.text import vocabulary_fingerprint
from paceline.text.tokenizer import existing_ends
from paceline.vllm.extra_arguments import ExtraArguments
from paceline.vllm.target_facts import tokenizer_folder

IDLE_STEP_S = 0.001
"""Pause after a step without rows: vLLM waits for something, such as the compilation of a grammar."""
FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCELLED}


class RecordingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, which keeps its last decision: what a step computes of each request."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.preemptions = 0
        self._rows: dict[str, int] = {}
        self._drafts: dict[str, list[int]] = {}

    def schedule(self, *arguments: Any, **others: Any) -> SchedulerOutput:
        decision = super().schedule(*arguments, **others)
        self._rows = dict(decision.num_scheduled_tokens)
        self._drafts = dict(decision.scheduled_spec_decode_tokens)
        self.preemptions += len(decision.preempted_req_ids or ())
        return decision

    def take_scheduled(self) -> tuple[Mapping[str, int], Mapping[str, Sequence[int]]]:
        """By vLLM's id of a request: its rows in the last step, and its draft tokens. Empty when asked again."""
        taken = self._rows, self._drafts
        self._rows, self._drafts = {}, {}
        return taken


@dataclass(slots=True)
class _Running:
    """One request in vLLM."""

    generation_request: GenerationRequest
    id: str
    """vLLM's own."""
    times: RequestTimes
    replayed: int
    """Committed tokens that vLLM still has to draw again."""
    output_tokens: int
    cached_tokens: int = 0
    draws: bool = False
    """Whether it has drawn a token here."""
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def usage(self) -> Usage:
        return Usage(len(self.generation_request.prompt), self.output_tokens, self.cached_tokens)


class VllmEngine:
    """A `SteppedEngine` around vLLM's own engine in this process."""

    def __init__(self, engine: LLMEngine, clock: Callable[[], float] = time.perf_counter) -> None:
        """`engine` has a `RecordingScheduler` and, as workers, `CoupledWorker`s."""
        self.stats_due = False
        self._engine = engine
        self._scheduler: RecordingScheduler = engine.engine_core.engine_core.scheduler
        self._config: VllmConfig = engine.vllm_config
        self._clock = clock
        self._requests: dict[str, _Running] = {}
        self._ended: list[Delta] = []
        """Final deltas of requests that ended between steps."""
        self._stats_timer = StatsTimer()
        self._vocabulary_size: int = self._config.model_config.get_vocab_size()
        end = getattr(engine.get_tokenizer(), "eos_token_id", None)
        self._grammar_ends = () if end is None else (end,)
        """What vLLM's grammars allow where they are complete."""
        cache = self._config.cache_config
        self.slots = (cache.num_gpu_blocks - 1) * cache.block_size  # vLLM keeps one block
        """Positions that the KV cache holds."""
        self.last_step = StepStats(0.0, 0, 0, 0, self.slots)

    def info(self, method: str) -> TargetDescription:
        """`method`: how drafts are made; empty without speculation. Raises `ModelNotFoundError`."""
        model = self._config.model_config
        return TargetDescription(
            worker_id="",
            model="",
            vocabulary_fingerprint=vocabulary_fingerprint(str(tokenizer_folder(model))),
            vocabulary_size=self._vocabulary_size,
            max_model_len=min(model.max_model_len, self.slots),
            slots=self.slots,
            rows_invariant=bool(envs.VLLM_BATCH_INVARIANT) and not current_platform.is_cpu(),
            eos_token_ids=_eos_token_ids(model),
            layers=model.hf_text_config.num_hidden_layers,
            method=method,
            numerics=_numerics(self._config),
            features=all_features(without=VLLM_LACKS),
        )

    @property
    def busy(self) -> bool:
        return bool(self._requests or self._ended)

    @property
    def load(self) -> EngineLoad:
        last = self.last_step
        return EngineLoad(last.running, last.waiting, last.free_slots, last.rows, last.step_s)

    def start_calibration(self, drafted: Sequence[float], accepted: Sequence[float]) -> None:
        """The proposer calibrates drafts by itself."""

    def submit(self, generation_request: GenerationRequest) -> None:
        name = generation_request.request_id
        if name in self._requests:
            self._refuse(name, f"request id {name!r} is in use")
            return
        try:
            self._requests[name] = self._add(generation_request)
        except Exception as error:  # noqa: BLE001 - vLLM's own errors; any of them would end the target
            self._engine.abort_request([name])  # it may know the request already
            grammar = GRAMMAR_ERROR if generation_request.sampling.grammar else ""
            self._refuse(name, f"{grammar}{error}")

    def _refuse(self, request_id: str, error: str) -> None:
        self._ended.append(Delta(request_id, finish_reason=FinishReason.ERROR, error=error))

    def cancel(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._engine.abort_request([request_id])
            delta = Delta(request_id, finish_reason=FinishReason.CANCELLED)
            self._finish(request, delta)
            self._ended.append(delta)

    def overlapped_step(self, deliver: Callable[[list[Delta]], None]) -> None:
        deliver(self.step())

    def step(self) -> list[Delta]:
        start = self._clock()
        self.stats_due = self._stats_timer.due(start)
        deltas, self._ended = self._ended, []
        outputs = self._engine.step() if self._engine.has_unfinished_requests() else []
        seconds = self._clock() - start
        rows, drafted = self._scheduler.take_scheduled()
        for request in self._requests.values():
            if request.id in rows:
                request.times.add(start, seconds)
        total, drawn = SpeculationStats(), 0
        for output in outputs:
            request = self._requests[output.request_id]
            drafts = drafted.get(request.id, ())
            drawn += len(drafts) + request.draws
            deltas += self._delta(request, output, drafts, total)
        if not rows and not deltas:
            time.sleep(IDLE_STEP_S)
        self._record_step(seconds, sum(rows.values()), drawn, deltas, total)
        return deltas

    def _add(self, generation_request: GenerationRequest) -> _Running:
        """Raises ValueError, with the reason, if the request cannot be served."""
        sampling, committed = generation_request.sampling, list(generation_request.committed)
        if committed and (len(committed) >= sampling.max_tokens or committed[-1] in sampling.stop_token_ids):
            raise ValueError(f"the request is over already: {len(committed)} tokens were committed")
        if sampling.grammar and sampling.grammar_begins_after:
            raise ValueError("grammar_begins_after: a grammar of vLLM begins with the output, not after reasoning")
        if any(not 0 <= token < self._vocabulary_size for token in generation_request.tokens):
            raise ValueError(f"a token id is outside the vocabulary of {self._vocabulary_size}")
        again = committed if sampling.grammar else []
        prompt = [*generation_request.prompt, *([] if again else committed)]
        begun = len(prompt) - len(generation_request.prompt)
        left = self._tokens_left(generation_request)
        extra = ExtraArguments(
            sampling=sampling.model_dump(mode="json", exclude={"grammar"}),
            speculative=generation_request.speculative,
            committed=begun,
            cache_salt=generation_request.cache_salt,
            forced=tuple(again),
        )
        params = VllmSamplingParams(
            temperature=0.0 if sampling.greedy else 1.0,
            max_tokens=max(1, min(sampling.max_tokens - begun, left + len(again))),  # it draws a token in any case
            stop_token_ids=[*sampling.stop_token_ids, *(self._grammar_ends if sampling.grammar else ())],
            ignore_eos=True,  # the stop tokens include it, unless the client ignores it
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=_grammar(sampling.grammar),
            extra_args=extra.as_extra_args(),
        )
        salt = {"cache_salt": generation_request.cache_salt} if generation_request.cache_salt else {}
        name = self._engine.add_request(generation_request.request_id, {"prompt_token_ids": prompt, **salt}, params)
        return _Running(generation_request, name, RequestTimes(self._clock()), len(again), len(committed))

    def _tokens_left(self, generation_request: GenerationRequest) -> int:
        """Tokens that can still be drawn. Raises ValueError, with the reason, if there is no room for one."""
        context, committed = self._config.model_config.max_model_len, len(generation_request.committed)
        prompt = len(generation_request.prompt)
        left: int = context - prompt - committed
        if prompt and left > 0:
            return left
        after = f", and {committed} were committed after it" if committed else ""
        raise ValueError(f"the prompt has {prompt} tokens{after}; there is room for 1 to {context - 1}")

    def _delta(
        self, request: _Running, output: RequestOutput, drafts: Sequence[int], total: SpeculationStats
    ) -> list[Delta]:
        """What a step drew for a request; nothing while it only draws committed tokens again."""
        completion, sampling = output.outputs[0], request.generation_request.sampling
        tokens, start = list(completion.token_ids), request.replayed
        cached = min(output.num_cached_tokens or 0, len(request.generation_request.prompt))
        request.cached_tokens = max(request.cached_tokens, cached)
        accepted = common_prefix_length(tokens, drafts)
        if tokens:
            request.draws = True
            for stats in (request.stats, total):
                stats.record(len(drafts), len(drafts), accepted)
            request.replayed = max(0, start - len(tokens))
        if completion.finish_reason == "stop" and self._ends_grammar_only(request, tokens[-1]):
            tokens.pop()
        ended = completion.finish_reason
        reason = None if ended is None else FINISH_REASONS.get(ended, FinishReason.ERROR)
        if not sampling.max_tokens and reason is not None:  # it drew a token that nobody wanted
            tokens, reason = [], FinishReason.LENGTH
        new = tokens[start:]
        request.output_tokens += len(new)
        if new:
            request.times.commit(self._clock())
        prompt_log_probs = _prompt_log_probs(output.prompt_logprobs, request.generation_request)
        if not new and reason is None and not prompt_log_probs:
            return []
        delta = Delta(
            request.generation_request.request_id,
            new,
            [index < accepted for index in range(start, len(tokens))],
            _log_probs(completion.logprobs, tokens, sampling.logprobs)[start:],
            reason,
            error="vLLM ended the request" if reason is FinishReason.ERROR else "",
            speculation=request.stats.snapshot() if self.stats_due else None,
            prompt_log_probs=prompt_log_probs,
        )
        if reason is not None:
            self._finish(request, delta)
        return [delta]

    def _ends_grammar_only(self, request: _Running, token: int) -> bool:
        """Whether this token is not output, but says that vLLM's grammar is complete."""
        sampling = request.generation_request.sampling
        return bool(sampling.grammar) and token in self._grammar_ends and token not in sampling.stop_token_ids

    def _finish(self, request: _Running, delta: Delta) -> None:
        """Complete a final delta, and forget the request."""
        last, stops = delta.tokens[-1:], request.generation_request.sampling.stop_token_ids
        if delta.finish_reason is FinishReason.STOP and last and last[0] in stops:
            delta.stop_token = last[0]
        delta.usage, delta.speculation = request.usage(), request.stats.snapshot()
        delta.timings = request.times.timings(self._clock())
        del self._requests[request.generation_request.request_id]

    def _record_step(
        self,
        seconds: float,
        rows: int,
        drawn: int,
        deltas: Sequence[Delta],
        speculation: SpeculationStats,
    ) -> None:
        """`drawn`: rows that computed no prompt."""
        running, waiting = self._scheduler.get_request_counts()
        free = round((1.0 - self._scheduler.kv_cache_manager.usage) * self.slots)
        self.last_step = StepStats(
            seconds,
            rows=rows,
            running=running,
            waiting=waiting,
            free_slots=free,
            prompt_tokens=max(0, rows - drawn),
            generation_tokens=sum(len(delta.tokens) for delta in deltas),
            preemptions=self._scheduler.preemptions,
            speculation=speculation,
        )
        self._scheduler.preemptions = 0


def _grammar(grammar: str) -> StructuredOutputsParams | None:
    return StructuredOutputsParams(grammar=PREAMBLE + grammar) if grammar else None


def _eos_token_ids(model: ModelConfig) -> tuple[int, ...]:
    """From generation_config.json, else from the model's configuration."""
    found = model.try_get_generation_config().get("eos_token_id")
    found = getattr(model.hf_text_config, "eos_token_id", None) if found is None else found
    named = found if isinstance(found, list) else [] if found is None else [found]
    return tuple(existing_ends(named, model.get_vocab_size()))


def _numerics(config: VllmConfig) -> str:
    """What numbers depend on, apart from weights, rows and their order: one line."""
    model, parallel = config.model_config, config.parallel_config
    parts = [
        f"vllm {vllm_version}",
        f"{model.dtype}".removeprefix("torch.") + (f" {model.quantization}" if model.quantization else ""),
        f"cache {config.cache_config.cache_dtype}",
        os.environ.get("VLLM_ATTENTION_BACKEND", ""),
        current_platform.get_device_name(),
        f"{parallel.tensor_parallel_size} x {parallel.pipeline_parallel_size} ranks",
        "eager" if model.enforce_eager else "compiled",
        "batch invariant" if envs.VLLM_BATCH_INVARIANT else "",
        f"torch {torch.__version__}",
        f"paceline {__version__}",
    ]
    return "; ".join(filter(None, parts))


def _log_probs(found: Any, tokens: Sequence[int], top: int | None) -> list[LogProbs]:
    """`found`: vLLM's, by position a mapping from tokens to their log-probabilities; the last token may be left out."""
    if top is None or found is None:
        return []
    result = []
    for token, by_token in zip(tokens, found, strict=False):
        best = sorted(((each, known.logprob) for each, known in by_token.items()), key=lambda pair: (-pair[1], pair[0]))
        result.append(LogProbs(by_token[token].logprob, tuple(best[:top]), by_token[token].rank or 0))
    return result


def _prompt_log_probs(found: Any, generation_request: GenerationRequest) -> list[PromptLogProbs]:
    """`found`: vLLM's, all at once, also of committed tokens; None for the first token."""
    tokens = generation_request.prompt[1:]
    entries = _log_probs(found[1:] if found else None, tokens, generation_request.sampling.prompt_logprobs)
    return [PromptLogProbs(1, entries)] if entries else []
