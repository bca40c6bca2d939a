"""Paceline's draws for the requests of a vLLM batch: the same tokens with any drafts and without.

vLLM's rejection sampler gives the right distribution, but which token comes depends on the drafts. Here the target
draws every token itself, with noise that is a hash of seed, position and token, and a draft token is accepted if it is
the one drawn. All sampling rules apply at every draft position, each with its own prefix.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.config import SamplingParams, SpeculativeOptions
from paceline.core.logits_rules import History, SamplingRow
from paceline.core.sampling import draw
from paceline.drafting.vocabulary.stable_tokens import common_prefix_length
from paceline.model.native.native_library import draw_candidates
from paceline.vllm.batch import RowDescription
from paceline.vllm.extra_arguments import ExtraArguments

log = logging.getLogger(__name__)

NO_TOKEN = -1
"""Fills the rows of `verify` after their last token, as in vLLM."""
MAX_BIAS = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_TEMPERATURE = 100.0


class VllmParams(Protocol):
    """The attributes of vLLM's `SamplingParams` that are read."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    min_tokens: int
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    extra_args: Mapping[str, Any] | None
    all_stop_token_ids: set[int]
    bad_words_token_ids: Sequence[Sequence[int]] | None


class VllmRequest(Protocol):
    """The attributes of a request of vLLM's model runner that are read."""

    req_id: str
    prompt_token_ids: Sequence[int] | None
    num_prompt_tokens: int
    output_token_ids: Sequence[int]
    sampling_params: VllmParams


def sampling_params(params: VllmParams, request_id: str, fields: Mapping[str, Any]) -> SamplingParams:
    """With `fields` in place of vLLM's. A request without a seed gets one from its id. Raises nothing: vLLM would end.

    Numbers beyond our ranges are clamped. `fields` that make no sense are ignored with a warning.
    """
    seed = params.seed
    if seed is None:
        seed = int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest())
    bias = {token: max(-MAX_BIAS, min(value, MAX_BIAS)) for token, value in (params.logit_bias or {}).items()}
    known = SamplingParams(
        temperature=min(params.temperature, MAX_TEMPERATURE),
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=min(params.repetition_penalty, MAX_REPETITION_PENALTY),
        logit_bias=bias,
        bad_words=tuple(tuple(word) for word in params.bad_words_token_ids or () if word),
        allowed_token_ids=tuple(sorted(set(params.allowed_token_ids or ()))),
        min_tokens=params.min_tokens,
        max_tokens=max(1, params.min_tokens),  # vLLM ends requests
        seed=seed,
        stop_token_ids=tuple(sorted(params.all_stop_token_ids)),
    )
    try:
        return SamplingParams.model_validate({**known.model_dump(), **fields, "grammar": ""})  # vLLM has the grammar
    except ValueError as error:
        log.warning("sampling %s is ignored: %s", dict(fields), error)
        return known


def extra_arguments(params: VllmParams, prompt_tokens: int, vocabulary_size: int) -> ExtraArguments:
    """Raises nothing: what makes no sense is ignored with a warning. Then nothing is drafted: the salt is unknown."""
    try:
        extra = ExtraArguments.read(params.extra_args)
        if extra.committed >= prompt_tokens > 0:
            raise ValueError(f"committed {extra.committed} leaves nothing of a prompt of {prompt_tokens} tokens")
        if any(token >= vocabulary_size for token in extra.forced):
            raise ValueError(f"forced: a token id is outside the vocabulary of {vocabulary_size}")
    except (TypeError, ValueError) as error:
        log.warning("extra arguments are ignored: %s", error)
        return ExtraArguments(speculative=SpeculativeOptions(enabled=False))
    return extra


@dataclass(slots=True)
class _Drawn:
    """One request's sampling state."""

    request: VllmRequest
    source: VllmParams
    prompt_tokens: int
    params: SamplingParams
    extra: ExtraArguments
    history: History
    output_tokens: int
    """Of vLLM's output, how many the history has."""

    def continues(self, request: VllmRequest) -> bool:
        """Whether this is the state of the request: vLLM may give its id to another one."""
        return (
            self.request is request
            and self.source is request.sampling_params
            and self.prompt_tokens == request.num_prompt_tokens
            and self.output_tokens <= len(request.output_token_ids)
        )


class CoupledDraws:
    """Draws for requests of vLLM's model runner."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._requests: dict[str, _Drawn] = {}

    def draw(self, logits: Tensor, requests: Sequence[VllmRequest]) -> Tensor:
        """The next token of each request, int64 [R], of logits [R, V]."""
        return self._draw(logits, requests, [()] * len(requests))[0]

    def verify(self, logits: Tensor, requests: Sequence[VllmRequest], drafts: Sequence[Sequence[int]]) -> Tensor:
        """The accepted draft tokens of each request and one more, int32 [R, 1 + most drafts], filled with `NO_TOKEN`.

        `logits` [rows, V]: for each request the rows after its last token and after each of its draft tokens.
        """
        drawn, starts = self._draw(logits, requests, drafts)
        tokens = drawn.tolist()
        result = torch.full((len(requests), 1 + max(map(len, drafts))), NO_TOKEN, dtype=torch.int32)
        for index, (start, draft) in enumerate(zip(starts, drafts, strict=True)):
            end = start + common_prefix_length(draft, tokens[start : start + len(draft)]) + 1
            result[index, : end - start] = torch.tensor(tokens[start:end], dtype=torch.int32)
        return result.to(logits.device)

    def keep(self, names: Container[str]) -> None:
        """Forget all requests but these."""
        self._requests = {name: state for name, state in self._requests.items() if name in names}

    def __len__(self) -> int:
        """How many requests are known."""
        return len(self._requests)

    def describe(self, request: VllmRequest) -> RowDescription:
        """How its tokens are drawn."""
        state = self._state(request)
        prompt_tokens = state.prompt_tokens - state.extra.committed
        return RowDescription(state.params, prompt_tokens, state.extra.speculative, state.extra.cache_salt)

    def _draw(
        self, logits: Tensor, requests: Sequence[VllmRequest], drafts: Sequence[Sequence[int]]
    ) -> tuple[Tensor, list[int]]:
        """The draws of all rows, and where each request's rows start."""
        rows: list[SamplingRow] = []
        starts: list[int] = []
        forced: dict[int, int] = {}
        for request, draft in zip(requests, drafts, strict=True):
            state, output_tokens = self._state(request), len(request.output_token_ids)
            position = request.num_prompt_tokens + output_tokens
            starts.append(len(rows))
            forced.update(enumerate(state.extra.forced[output_tokens:][: len(draft) + 1], len(rows)))
            for depth in range(len(draft) + 1):
                rows.append(SamplingRow(state.params, position + depth, state.history, draft[:depth]))
        drawn = draw(logits, rows, draw_candidates)
        for row, token in forced.items():
            drawn[row] = token
        return drawn, starts

    def _state(self, request: VllmRequest) -> _Drawn:
        state, output = self._requests.get(request.req_id), request.output_token_ids
        if state is None or not state.continues(request):
            prompt = list(request.prompt_token_ids or ())
            extra = extra_arguments(request.sampling_params, len(prompt), self._vocabulary_size)
            params = sampling_params(request.sampling_params, request.req_id, extra.sampling)
            start = len(prompt) - extra.committed
            history = History(params, prompt[:start], [*prompt[start:], *output], self._vocabulary_size)
            state = self._requests[request.req_id] = _Drawn(
                request, request.sampling_params, request.num_prompt_tokens, params, extra, history, len(output)
            )
        elif state.output_tokens < len(output):
            state.history.extend(output[state.output_tokens :])
            state.output_tokens = len(output)
        return state
