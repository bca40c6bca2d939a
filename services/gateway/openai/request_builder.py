"""From a request body to the completions that it asks for. Every error of a client is found here at the latest."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

from pydantic import ValidationError

from paceline.config import SamplingParams, SpeculativeOptions
from paceline.core.messages import GenerationRequest, TargetDescription
from paceline.target_labels import parse_labels
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.auth import ApiClient
from paceline_services.gateway.openai.bodies import SHARED_FIELDS, ChatBody, CompletionBody, GenerationBody
from paceline_services.gateway.openai.prompt_encoding import bad_word_tokens, check_ids, encode_chat, encode_prompts
from paceline_services.gateway.served_model import ServedModel

SESSION_HEADER = "x-session-id"
"""Names the request's conversation, in place of the body's `prompt_cache_key`: its requests go to the same target."""
LABELS_HEADER = "x-target-labels"
"""Labels that the request's target must have."""


async def build_requests(
    body: GenerationBody, model: ServedModel, request_id: str, client: ApiClient, headers: Mapping[str, str]
) -> list[GenerationRequest]:
    """`n` completions for each prompt, in OpenAI's order; their ids are `request_id` with an index.

    `headers`: of the HTTP request, or the metadata of the gRPC call. Raises `InvalidRequestError`, `OverloadedError` or
    `UnavailableError`.
    """
    labels = client.target_labels | _labels(headers.get(LABELS_HEADER, ""))
    with model.counting_rejections():
        description = model.description(labels)
        _check_count(body, model)
        grammar = await model.grammars.grammar_of(body)
        bad_words = await bad_word_tokens(body.bad_words or (), model.tokenizer)
        sampling = build_sampling(body, description, grammar, bad_words)
        prompts = await _encode(body, model, description.max_model_len)
    base = GenerationRequest(
        request_id,
        (),
        sampling,
        speculative_options(body),
        cache_salt=client.cache_salt_for(body.cache_salt),
        client=client.name,
        group=request_id,
        return_tree=body.return_tree,
        session=headers.get(SESSION_HEADER) or body.prompt_cache_key or "",
        target_labels=labels,
        stop=body.stop or (),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        eos_token_ids=_eos_token_ids(body, description),
    )
    return [
        request
        for index, prompt in enumerate(prompts)
        for request in build_choices(body, description, base, prompt, index * body.choices)
    ]


def _labels(text: str) -> frozenset[str]:
    try:
        return parse_labels(text)
    except ValueError as error:
        raise InvalidRequestError(f"{LABELS_HEADER}: {error}", param=LABELS_HEADER) from None


def build_sampling(
    body: GenerationBody, description: TargetDescription, grammar: str, bad_words: Sequence[Sequence[int]]
) -> SamplingParams:
    """The sampling parameters of all completions, but for `max_tokens` and `seed`. Raises `InvalidRequestError`."""
    given = body.model_dump(include=set(SHARED_FIELDS), exclude_none=True)
    given |= {"grammar": grammar, "bad_words": bad_words, "logprobs": body.top_log_probs}
    given["stop_token_ids"] = (*(body.stop_token_ids or ()), *_eos_token_ids(body, description))
    try:
        sampling = SamplingParams(**given, max_tokens=max(1, given.get("min_tokens", 0)))
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error
    check_ids("logit_bias", sampling.logit_bias, description.vocabulary_size)
    check_ids("stop_token_ids", sampling.stop_token_ids, description.vocabulary_size)
    return sampling


def build_choices(
    body: GenerationBody, description: TargetDescription, base: GenerationRequest, prompt: Sequence[int], first: int = 0
) -> list[GenerationRequest]:
    """The `n` completions of one prompt: copies of `base`, numbered from `first` on. Raises `InvalidRequestError`."""
    _check_prompt(body, description, prompt)
    max_tokens = _max_tokens(body, description, len(prompt), base.sampling.min_tokens)
    seed = base.sampling.seed if "seed" in base.sampling.model_fields_set else secrets.randbits(63)
    return [
        replace(
            base,
            request_id=f"{base.request_id}-{first + index}",
            prompt=prompt,
            sampling=base.sampling.model_copy(update={"max_tokens": max_tokens, "seed": choice_seed(seed, index)}),
            choice=index,
        )
        for index in range(body.choices)
    ]


def choice_seed(seed: int, index: int) -> int:
    """The seed of the index-th of `n` completions, unsigned 64-bit; the first one has the request's own."""
    if index == 0:
        return seed
    source = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(source, digest_size=8).digest(), "little")


def speculative_options(body: GenerationBody) -> SpeculativeOptions:
    options = body.speculative.model_dump() if body.speculative else {}
    return SpeculativeOptions(**options, report=body.speculation_stats)


async def _encode(body: GenerationBody, model: ServedModel, context: int) -> list[list[int]]:
    if isinstance(body, ChatBody):
        return [await encode_chat(body, model.tokenizer, context)]
    assert isinstance(body, CompletionBody)
    return await encode_prompts(body.prompt, model.tokenizer, context, add_special_tokens=body.add_special_tokens)


def _check_count(body: GenerationBody, model: ServedModel) -> None:
    """Raises `OverloadedError` for more completions than are admitted now, `InvalidRequestError` if they never are."""
    completions, limit = body.prompts * body.choices, model.capacity.limits.max_in_flight
    if completions > limit:
        param = "n" if body.choices > 1 else body.prompt_field
        message = f"{param}: {completions} completions in one request, at most {limit} are generated at once"
        raise InvalidRequestError(message, param=param)
    model.queue.check(completions)


def _eos_token_ids(body: GenerationBody, description: TargetDescription) -> list[int]:
    """The model's end-of-text tokens that the client does not name itself."""
    return [] if body.ignore_eos else list(set(description.eos_token_ids) - set(body.stop_token_ids or ()))


def _check_prompt(body: GenerationBody, description: TargetDescription, prompt: Sequence[int]) -> None:
    context = description.max_model_len
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param=body.prompt_field)
    if len(prompt) >= context:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens, but prompt and output share a context of {context}",
            param=body.prompt_field,
            code="context_length_exceeded",
        )
    check_ids(body.prompt_field, prompt, description.vocabulary_size)


def _max_tokens(body: GenerationBody, description: TargetDescription, prompt_tokens: int, min_tokens: int) -> int:
    """Most tokens of the output: as the client says, else the endpoint's default within the context."""
    available = description.max_model_len - prompt_tokens
    name, limit = body.output_limit
    if limit is not None and limit < 1:
        raise InvalidRequestError(f"{name}: must be at least 1, not {limit}", param=name)
    if limit is not None and limit > available:
        raise InvalidRequestError(
            f"{name}: the prompt's {prompt_tokens} tokens and {limit} more exceed the context of "
            f"{description.max_model_len} tokens",
            param=name,
            code="context_length_exceeded",
        )
    if limit is None:
        default = available if body.default_max_tokens is None else body.default_max_tokens
        limit = min(available, max(default, min_tokens))
    if min_tokens > limit:
        message = f"min_tokens: {min_tokens} exceed the {limit} tokens that the output may have"
        raise InvalidRequestError(message, param="min_tokens")
    return limit
