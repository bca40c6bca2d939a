"""Generate from Python, without any server: `LLM("pydoc").generate(["def area("])`."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.config import MAPPING_HINT, EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.core.messages import Delta, FinishReason, LogProbs, SpeculationStats, Submission, Timings
from paceline.drafting import build_model_free, build_speculator, complete_config
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.model import limit_torch_threads, load
from paceline.model.row_probe import measure_row_cost
from paceline.text import Detokenizer, StopStrings, Tokenizer

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


class VocabularyMismatchError(ValueError):
    """Draft and target do not mean the same by a token id."""


@dataclass(slots=True)
class Completion:
    """One finished request.

    `text` ends before what stopped it; `tokens` include the stop token, or all up to the end of the stop string.
    `accepted[i]`: token i was guessed.
    """

    text: str
    tokens: list[int]
    accepted: list[bool]
    finish_reason: FinishReason
    log_probs: list[LogProbs]
    prompt_tokens: int
    speculation: SpeculationStats
    timings: Timings


class LLM:
    """A target engine in this process, with its speculators, if any, beside it."""

    def __init__(
        self,
        model: str,
        speculative_config: SpeculativeConfig | dict[str, Any] | None = None,
        engine_config: EngineConfig | dict[str, Any] | None = None,
    ) -> None:
        """`model`: a folder, or a shipped model's name. The configurations take the command line's keys.

        Raises `ModelNotFoundError`, `CheckpointError`, `VocabularyMismatchError`, or pydantic's ValidationError.
        """
        self.config = EngineConfig.model_validate(engine_config or {})
        if "threads" not in self.config.model_fields_set:  # this process has nothing else to do, unlike a service
            self.config = self.config.model_copy(update={"threads": torch.get_num_threads()})
        speculation = complete_config(SpeculativeConfig.model_validate(speculative_config or {}), model)
        torch.set_num_threads(self.config.threads)
        self.model = load(model, self.config)
        limit_torch_threads(self.model)
        self.tokenizer = Tokenizer.load(model)
        self.cost = measure_row_cost(self.model, self.config.max_num_batched_rows)
        self._serial = itertools.count()
        self._create_engine(speculation)

    def with_speculation(self, speculative_config: SpeculativeConfig | dict[str, Any]) -> LLM:
        """Another one over the same loaded model, with drafts of its own. Only one may generate at a time.

        Raises as the constructor does, and ValueError if prompts are cached: what lies in the slots of the one would
        be overwritten by the other.
        """
        if self.config.enable_prefix_caching:
            raise ValueError("LLMs share a model without cached prompts: set enable_prefix_caching to false")
        other = copy.copy(self)
        other._create_engine(complete_config(SpeculativeConfig.model_validate(speculative_config), self.model.name))
        return other

    def _create_engine(self, speculation: SpeculativeConfig) -> None:
        drafting = self._drafting(speculation, self.config)
        beside = [LocalDraftClient(each) for each in build_model_free(speculation)]
        self.speculation = speculation
        self._engine = Engine(self.model, self.config, speculation, drafting, self.cost, beside=beside)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        speculative: bool = True,
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids); the answers stand in the order of the prompts.

        A completion ends before the first of the strings in `stop` (which count from `min_tokens` on), or with one of
        `sampling.stop_token_ids` or the model's own end-of-text tokens. Raises ValueError for what cannot be served;
        no prompt is completed then.
        """
        return self._complete(self._encode(prompts), sampling, stop, speculative=speculative)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        speculative: bool = True,
    ) -> list[Completion]:
        """As `generate`, for one conversation or several, written out by the model's chat template.

        A message is a mapping with "role" and "content". Raises `ChatTemplateError` if the template refuses them.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if single else messages
        prompts = [self._render_chat(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self._complete(prompts, sampling, stop, speculative=speculative)

    def _complete(
        self, prompts: list[list[int]], sampling: SamplingParams | None, stop: str | Sequence[str], *, speculative: bool
    ) -> list[Completion]:
        params = sampling or SamplingParams()
        params = params.model_copy(update={"stop_token_ids": (*params.stop_token_ids, *self.model.eos_token_ids)})
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise ValueError("a stop string needs at least one character")
        options = SpeculativeOptions(enabled=None if speculative else False, report=True)
        answers: dict[str, _CompletionBuilder] = {}
        try:
            for ids in prompts:
                submission = Submission(f"llm-{next(self._serial)}", ids, params, options)
                answers[submission.request_id] = _CompletionBuilder(submission, self.tokenizer, stops)
                self._engine.submit(submission)
            while self._engine.busy:
                for delta in self._engine.step():
                    if answers[delta.request_id].take(delta):
                        self._engine.cancel(delta.request_id)
        except BaseException:
            self._engine.reset()
            raise
        return [answer.completion() for answer in answers.values()]

    def _drafting(self, speculation: SpeculativeConfig, config: EngineConfig) -> DraftClient:
        self.position_limit = 0
        """Its draft guesses nothing beyond; 0: no limit."""
        if not speculation.enabled:
            return NoDraftClient()
        speculator = build_speculator(speculation, config, self.model.target_weights, self.model.name)
        if speculator.vocabulary_fingerprint not in ("", self.model.fingerprint):
            raise VocabularyMismatchError(
                f"the vocabularies of {self.model.name} and {speculator.model} differ: "
                f"choose a draft that was trained with the target's tokenizer, {MAPPING_HINT}"
            )
        self.position_limit = speculator.position_limit
        return LocalDraftClient(speculator)

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        if isinstance(prompts, str):
            return [self.tokenizer.encode(prompts)]
        if prompts and isinstance(prompts[0], int):
            return [[int(t) for t in prompts]]  # type: ignore[arg-type]
        return [
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]  # type: ignore[union-attr]
            for prompt in prompts
        ]

    def _render_chat(self, conversation: Conversation) -> list[int]:
        template = self.tokenizer.chat_template
        if template is None:
            raise ValueError(f"{self.model.name} has no chat template: use generate")
        return self.tokenizer.encode(template.render(conversation), add_special_tokens=False)


class _CompletionBuilder:
    """One request's deltas as they come together. A stop string ends it wherever it stands in them."""

    def __init__(self, submission: Submission, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._submission = submission
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._text = ""
        self._whole = Delta(submission.request_id)

    def take(self, delta: Delta) -> bool:
        """Whether a stop string was met, so that the rest is not wanted. Raises ValueError if the request failed."""
        if delta.finish_reason is FinishReason.ERROR:
            raise ValueError(delta.error)
        whole = self._whole
        if self._stops.found is None:
            self._read(delta)
        whole.finish_reason, whole.speculation, whole.timings = delta.finish_reason, delta.speculation, delta.timings
        return self._stops.found is not None

    def completion(self) -> Completion:
        """Once the last delta was taken."""
        whole = self._whole
        reason = whole.finish_reason if self._stops.found is None else FinishReason.STOP
        assert reason is not None
        return Completion(
            self._text,
            whole.tokens,
            whole.accepted,
            reason,
            whole.log_probs,
            len(self._submission.prompt),
            whole.speculation or SpeculationStats(),
            whole.timings,
        )

    def _read(self, delta: Delta) -> None:
        """Take tokens up to the one that completes a stop string, and their text up to it."""
        whole = self._whole
        shown = delta.tokens[:-1] if delta.stop_token is not None else delta.tokens
        taken = len(delta.tokens)
        for count, token in enumerate(shown, 1):
            self._show(self._detokenizer.feed([token]), len(whole.tokens) + count)
            if self._stops.found is not None:
                taken = count
                break
        whole.tokens += delta.tokens[:taken]
        whole.accepted += delta.accepted[:taken]
        whole.log_probs += delta.log_probs[:taken]
        if delta.finish_reason is not None and self._stops.found is None:
            self._show(self._detokenizer.flush(), len(whole.tokens))
            self._text += self._stops.flush()

    def _show(self, text: str, tokens: int) -> None:
        """`text` was completed by the so-many-th token."""
        free = tokens <= self._submission.sampling.min_tokens
        self._text += text if free else self._stops.feed(text)
