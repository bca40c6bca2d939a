"""Generate from Python, without any server: `LLM("pydoc").generate(["def area("])`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.engine.drafting import Drafting, LocalDrafting, NoDrafting
from paceline.engine.engine import Engine
from paceline.messages import Delta, FinishReason, LogProbs, SpeculationStats, Submission, Timings
from paceline.model import load
from paceline.model.probe import row_cost
from paceline.speculators import build
from paceline.text import Tokenizer

Prompt = str | Sequence[int]


class VocabularyMismatchError(ValueError):
    """Draft and target do not mean the same by a token id."""


@dataclass(slots=True)
class Completion:
    """One finished request. `text` ends before a stop string; `tokens` and counts include the stop token."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    log_probs: list[LogProbs]
    prompt_tokens: int
    speculation: SpeculationStats
    timings: Timings


class LLM:
    """A target engine in this process, with its speculator, if any, beside it."""

    def __init__(
        self,
        model: str,
        speculative_config: SpeculativeConfig | dict[str, Any] | None = None,
        engine_config: EngineConfig | dict[str, Any] | None = None,
    ) -> None:
        """`model`: a folder, or a shipped model's name. The configurations take the command line's keys.

        Raises `ModelNotFoundError`, `VocabularyMismatchError`, or pydantic's ValidationError.
        """
        config = EngineConfig.model_validate(engine_config or {})
        speculation = SpeculativeConfig.model_validate(speculative_config or {})
        torch.set_num_threads(config.threads)
        self._model = load(model, config)
        self._tokenizer = Tokenizer.load(model)
        cost = row_cost(self._model, config.max_num_batched_rows)
        self._engine = Engine(self._model, config, speculation, self._drafting(speculation, config), cost)
        self._serial = itertools.count()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | None = None, *, speculative: bool = True
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids); the answers stand in the order of the prompts.

        End-of-text tokens of the model end a completion, beside `sampling.stop_token_ids`. Raises ValueError for
        a prompt that cannot be served.
        """
        params = sampling or SamplingParams()
        params = params.model_copy(update={"stop_token_ids": (*params.stop_token_ids, *self._model.eos_token_ids)})
        answers: dict[str, Delta] = {}
        for ids in self._encode(prompts):
            request_id = f"llm-{next(self._serial)}"
            answers[request_id] = Delta(request_id)
            options = SpeculativeOptions(enabled=None if speculative else False, report=True)
            self._engine.submit(Submission(request_id, ids, params, options))
        while self._engine.busy:
            for delta in self._engine.step():
                _extend(answers[delta.request_id], delta)
        return [self._completion(answer) for answer in answers.values()]

    def _drafting(self, speculation: SpeculativeConfig, config: EngineConfig) -> Drafting:
        if not speculation.enabled:
            return NoDrafting()
        speculator = build(speculation, config)
        if speculator.vocabulary_fingerprint not in ("", self._model.fingerprint):
            raise VocabularyMismatchError(
                f"the vocabularies of {self._model.name} and {speculator.model} differ: "
                "choose a draft that was trained with the target's tokenizer"
            )
        return LocalDrafting(speculator)

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        if isinstance(prompts, str):
            return [self._tokenizer.encode(prompts)]
        if prompts and isinstance(prompts[0], int):
            return [[int(t) for t in prompts]]  # type: ignore[arg-type]
        return [
            self._tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]  # type: ignore[union-attr]
            for prompt in prompts
        ]

    def _completion(self, answer: Delta) -> Completion:
        if answer.finish_reason is FinishReason.ERROR or answer.usage is None or answer.finish_reason is None:
            raise ValueError(answer.error)
        shown = answer.tokens[:-1] if answer.stop_token is not None else answer.tokens
        return Completion(
            self._tokenizer.decode(shown),
            answer.tokens,
            answer.finish_reason,
            answer.log_probs,
            answer.usage.prompt_tokens,
            answer.speculation or SpeculationStats(),
            answer.timings,
        )


def _extend(answer: Delta, delta: Delta) -> None:
    answer.tokens += delta.tokens
    answer.log_probs += delta.log_probs
    answer.finish_reason, answer.error = delta.finish_reason, delta.error
    answer.stop_token, answer.usage = delta.stop_token, delta.usage
    answer.speculation, answer.timings = delta.speculation, delta.timings
