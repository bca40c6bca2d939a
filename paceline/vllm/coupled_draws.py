"""Paceline's draws for the requests of a vLLM batch: the same tokens with any drafts and without.

vLLM's rejection sampler gives the right distribution, but which token comes depends on the drafts. Here the target
draws every token itself, with noise that is a hash of seed, position and token, and a draft token is accepted if it is
the one drawn. All sampling rules apply at every draft position, each with its own prefix.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.sampling import MASKED, History, SamplingRow, draw

log = logging.getLogger(__name__)

NO_TOKEN = -1
"""Fills the rows of `verify` after their last token, as in vLLM."""
MIN_P_ARGUMENT, BIAS_ARGUMENT = "paceline_min_p", "paceline_logit_bias"
"""Keys of vLLM's `extra_args` (`vllm_xargs` over HTTP): vLLM refuses `min_p` and `logit_bias` beside speculation. The
bias is JSON, an object of biases by token."""
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


def sampling_params(params: VllmParams, request_id: str) -> SamplingParams:
    """A request without a seed gets one from its id. Raises nothing: vLLM would end by it.

    Numbers beyond our ranges are clamped, an extra argument that makes no sense is ignored with a warning.
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
        min_tokens=params.min_tokens,
        max_tokens=max(1, params.min_tokens),  # vLLM ends requests
        seed=seed,
        stop_token_ids=tuple(sorted(params.all_stop_token_ids)),
    )
    return _with_extra(known, params.extra_args or {})


def _with_extra(params: SamplingParams, extra: Mapping[str, Any]) -> SamplingParams:
    try:
        given: dict[str, Any] = {}
        if MIN_P_ARGUMENT in extra:
            given["min_p"] = extra[MIN_P_ARGUMENT]
        if BIAS_ARGUMENT in extra:
            given["logit_bias"] = json.loads(extra[BIAS_ARGUMENT])
        checked = SamplingParams.model_validate(given)
    except (TypeError, ValueError) as error:
        log.warning("%s and %s are ignored: %s", MIN_P_ARGUMENT, BIAS_ARGUMENT, error)
        return params
    return params.model_copy(update={name: getattr(checked, name) for name in given})


@dataclass(slots=True)
class _Drawn:
    """One request's sampling state."""

    request: VllmRequest
    source: VllmParams
    prompt_tokens: int
    params: SamplingParams
    history: History
    output_tokens: int
    """How many the history has."""
    allowed: Tensor | None
    """Ids of the tokens that may be drawn; None: all."""

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
            accepted = 0
            while accepted < len(draft) and tokens[start + accepted] == draft[accepted]:
                accepted += 1
            result[index, : accepted + 1] = torch.tensor(tokens[start : start + accepted + 1], dtype=torch.int32)
        return result.to(logits.device)

    def keep(self, names: Container[str]) -> None:
        """Forget all requests but these."""
        self._requests = {name: state for name, state in self._requests.items() if name in names}

    def __len__(self) -> int:
        """How many requests are known."""
        return len(self._requests)

    def params(self, request: VllmRequest) -> SamplingParams:
        """The parameters that its draws follow."""
        return self._state(request).params

    def _draw(
        self, logits: Tensor, requests: Sequence[VllmRequest], drafts: Sequence[Sequence[int]]
    ) -> tuple[Tensor, list[int]]:
        """The draws of all rows, and where each request's rows start."""
        rows: list[SamplingRow] = []
        starts: list[int] = []
        limited: list[tuple[int, Tensor]] = []
        for request, draft in zip(requests, drafts, strict=True):
            state = self._state(request)
            position = request.num_prompt_tokens + len(request.output_token_ids)
            starts.append(len(rows))
            for depth in range(len(draft) + 1):
                if state.allowed is not None:
                    limited.append((len(rows), state.allowed))
                rows.append(SamplingRow(state.params, position + depth, state.history, draft[:depth]))
        if limited:
            logits = logits.clone()
            for row, ids in limited:
                allowed = ids.to(logits.device)
                logits[row] = torch.full_like(logits[row], MASKED).index_copy_(0, allowed, logits[row][allowed])
        return draw(logits, rows), starts

    def _state(self, request: VllmRequest) -> _Drawn:
        state, output = self._requests.get(request.req_id), request.output_token_ids
        if state is None or not state.continues(request):
            params = sampling_params(request.sampling_params, request.req_id)
            history = History(params, request.prompt_token_ids or (), output, self._vocabulary_size)
            allowed = request.sampling_params.allowed_token_ids
            ids = None if allowed is None else torch.tensor(sorted(set(allowed)))
            state = self._requests[request.req_id] = _Drawn(
                request, request.sampling_params, request.num_prompt_tokens, params, history, len(output), ids
            )
        elif state.output_tokens < len(output):
            state.history.extend(output[state.output_tokens :])
            state.output_tokens = len(output)
        return state
