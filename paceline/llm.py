"""Generate from Python, without any server: `LLM("pydoc").generate(["def area("])`."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.config import MAPPING_HINT, EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.config.sampling_params import GenerationConfig
from paceline.drafting import build_lookups, build_speculator, complete_config
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.memory_plan import plan_memory
from paceline.messages import Delta, FinishReason, GenerationRequest, LogProbs, SpeculationStats, Timings
from paceline.model import limit_torch_threads, load
from paceline.model.kept_row_cost import model_row_cost
from paceline.model_defaults import sampling_defaults
from paceline.output_processor import OutputOptions, OutputProcessor, TextDelta
from paceline.text import Tokenizer

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


class VocabularyMismatchError(ValueError):
    """The vocabularies of draft and target differ."""


@dataclass(slots=True)
class Completion:
    """One request, finished or, with `LLM.stream_chat`, so far.

    `text` ends before the stop string or stop token; `tokens` include the stop token, or end with the token that
    completes the stop string. `accepted[i]`: token i was drafted. `offsets[i]`: characters of the text before token i.
    """

    text: str
    tokens: list[int]
    accepted: list[bool]
    offsets: list[int]
    finish_reason: FinishReason | None
    """None before the end."""
    log_probs: list[LogProbs]
    prompt_log_probs: list[LogProbs]
    """Of the prompt's tokens from the second one on; empty unless `SamplingParams.prompt_logprobs` is set."""
    prompt_tokens: int
    speculation: SpeculationStats
    timings: Timings


class LLM:
    """A target engine in this process, with its speculators."""

    def __init__(
        self,
        model: str,
        speculative_config: SpeculativeConfig | dict[str, Any] | None = None,
        engine_config: EngineConfig | dict[str, Any] | None = None,
        *,
        generation_config: GenerationConfig = "auto",
    ) -> None:
        """`model`: a folder, or a shipped model's name. The configurations take the command line's keys.

        `generation_config`: whether prompts without `SamplingParams` have the defaults of the model's
        generation_config.json.

        Raises `ModelNotFoundError`, `CheckpointError`, `VocabularyMismatchError`, pydantic's ValidationError, or
        ValueError if memory is short.
        """
        self.config = EngineConfig.model_validate(engine_config or {})
        if "threads" not in self.config.model_fields_set:  # unlike a service, this process does nothing else
            self.config = self.config.model_copy(update={"threads": torch.get_num_threads()})
        speculation = complete_config(SpeculativeConfig.model_validate(speculative_config or {}), model)
        self.config = plan_memory(self.config, speculation, model, target=True, draft=True)
        torch.set_num_threads(self.config.threads)
        self.model = load(model, self.config)
        limit_torch_threads(self.model)
        self.tokenizer = Tokenizer.load(model)
        self.default_sampling = SamplingParams(**sampling_defaults(model, generation_config))
        """Of prompts without any."""
        self.cost = model_row_cost(self.model, self.config.max_num_batched_rows, self.config.threads)
        self._serial = itertools.count()
        self._create_engine(speculation)

    def with_speculation(self, speculative_config: SpeculativeConfig | dict[str, Any]) -> LLM:
        """Another LLM over the same loaded model, with other drafts. Only one of the two may generate at a time.

        Raises as the constructor does, and ValueError with prefix caching: each LLM would overwrite the other's slots.
        """
        if self.config.enable_prefix_caching:
            raise ValueError("LLMs share a model without cached prompts: set enable_prefix_caching to false")
        other = copy.copy(self)
        other._create_engine(complete_config(SpeculativeConfig.model_validate(speculative_config), self.model.name))
        return other

    def _create_engine(self, speculation: SpeculativeConfig) -> None:
        drafting = self._drafting(speculation, self.config)
        lookups = [LocalDraftClient(each) for each in build_lookups(speculation)]
        self.speculation = speculation
        self._engine = Engine(self.model, self.config, speculation, drafting, self.cost, lookup_clients=lookups)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        speculative: bool = True,
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids), in the order of the prompts.

        `sampling`: for all prompts, or one for each; None: `default_sampling`.

        A completion ends before the first string of `stop` after `min_tokens`, or with a token of
        `sampling.stop_token_ids` or the model's own end-of-text tokens. Raises ValueError if any prompt cannot be
        served; then none is completed.
        """
        return _last(self._run(self._encode(prompts), sampling, stop, speculative=speculative))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        speculative: bool = True,
    ) -> list[Completion]:
        """As `generate`, for one conversation or several, rendered by the model's chat template.

        A message is a mapping with "role" and "content". Raises `ChatTemplateError` if the template refuses them.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if single else messages
        prompts = [self._render_chat(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return _last(self._run(prompts, sampling, stop, speculative=speculative))

    def stream_chat(
        self, messages: Conversation, sampling: SamplingParams | None = None, *, stop: str | Sequence[str] = ()
    ) -> Iterator[Completion]:
        """As `chat` for one conversation: the completion so far after each step, the last one finished.

        Closing the iterator cancels the request. Raises as `chat` does.
        """
        for [running] in self._run([self._render_chat(messages)], sampling, stop, speculative=True):
            yield running.completion()

    def _run(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        stop: str | Sequence[str],
        *,
        speculative: bool,
    ) -> Iterator[Collection[_RunningRequest]]:
        """Yield the requests after each step until all are finished; a caller that stops earlier cancels them.

        Raises ValueError if any prompt cannot be served; then none is.
        """
        given = self.default_sampling if sampling is None else sampling
        all_params = [self._with_ends(each) for each in _one_for_each(given, len(prompts))]
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise ValueError("a stop string needs at least one character")
        options = SpeculativeOptions(enabled=None if speculative else False, report=True)
        running: dict[str, _RunningRequest] = {}
        try:
            for prompt, params in zip(prompts, all_params, strict=True):
                request = GenerationRequest(f"llm-{next(self._serial)}", prompt, params, options)
                running[request.request_id] = _RunningRequest(request, OutputOptions(stops), self.tokenizer)
                self._engine.submit(request)
            while self._engine.busy:
                for delta in self._engine.step():
                    if running[delta.request_id].add(delta):
                        self._engine.cancel(delta.request_id)
                yield running.values()
        except BaseException:
            self._engine.reset()
            raise

    def _with_ends(self, params: SamplingParams) -> SamplingParams:
        """Requests end at the model's own ends, too."""
        return params.model_copy(update={"stop_token_ids": (*params.stop_token_ids, *self.model.eos_token_ids)})

    def _drafting(self, speculation: SpeculativeConfig, config: EngineConfig) -> DraftClient:
        self.position_limit = 0
        """The last position that its draft can predict; 0: no limit."""
        if not speculation.enabled:
            return NoDraftClient()
        speculator = build_speculator(speculation, config, self.model.target_weights, self.model.name)
        if speculator.description.vocabulary_fingerprint not in ("", self.model.fingerprint):
            raise VocabularyMismatchError(
                f"the vocabularies of {self.model.name} and {speculator.description.model} differ: "
                f"choose a draft that was trained with the target's tokenizer, {MAPPING_HINT}"
            )
        self.position_limit = speculator.description.position_limit
        return LocalDraftClient(speculator)

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        several: Sequence[Any] = [prompts] if single else prompts
        return [self.tokenizer.encode(each) if isinstance(each, str) else [int(t) for t in each] for each in several]

    def _render_chat(self, conversation: Conversation) -> list[int]:
        template = self.tokenizer.chat_template
        if template is None:
            raise ValueError(f"{self.model.name} has no chat template: use generate")
        return self.tokenizer.encode(template.render(conversation), add_special_tokens=False)


def _last(steps: Iterator[Collection[_RunningRequest]]) -> list[Completion]:
    return [each.completion() for requests in deque(steps, maxlen=1) for each in requests]


def _one_for_each(sampling: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    """Raises ValueError if there are several, but not one for each prompt."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise ValueError(f"sampling has {len(sampling)} entries for {count} prompts: give one, or one for each prompt")
    return sampling


class _RunningRequest:
    """One request's output so far."""

    def __init__(self, request: GenerationRequest, options: OutputOptions, tokenizer: Tokenizer) -> None:
        self._request = request
        self._processor = OutputProcessor(request, options, tokenizer)
        self._output = TextDelta(request.request_id)

    def add(self, delta: Delta) -> bool:
        """Whether a stop string ended the request before the engine did. Raises ValueError if the request failed."""
        if delta.finish_reason is FinishReason.ERROR:
            raise ValueError(delta.error)
        if self._processor.stopped:
            self._output.speculation, self._output.timings = delta.speculation, delta.timings
        else:
            self._output.extend(self._processor.process(delta))
        return self._processor.stopped

    def completion(self) -> Completion:
        """The output so far."""
        output = self._output
        return Completion(
            output.text,
            output.tokens.copy(),
            output.accepted.copy(),
            output.offsets.copy(),
            output.finish_reason,
            output.log_probs,
            [each for part in output.prompt_log_probs for each in part.entries],
            len(self._request.prompt),
            output.speculation or SpeculationStats(),
            output.timings,
        )
