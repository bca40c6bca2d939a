"""From a request body to the completions that it asks for. Every error of a client is found here at the latest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from paceline.config import SamplingParams, SpeculativeOptions
from paceline.config.sampling_params import TOKEN_ID_FIELDS
from paceline.grammar.reasoning_matcher import ALWAYS, ReasoningGate
from paceline.messages import TargetDescription
from paceline.output_processor import OutputOptions
from paceline.target_features import FULL_PROMPT, NO_OUTPUT, needed_features, parse_labels
from paceline.telemetry.tracing import NO_SPAN, TraceSpan
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.auth import ApiClient
from paceline_services.gateway.generation.bodies import SHARED_FIELDS, ChatBody, CompletionBody, GenerationBody
from paceline_services.gateway.generation.chat_prompt import render_chat
from paceline_services.gateway.generation.completion_request import LABELS_HEADER, SESSION_HEADER, CompletionRequest
from paceline_services.gateway.generation.prompt_encoding import (
    bad_word_tokens,
    check_ids,
    check_length,
    encode,
    encode_prompts,
)
from paceline_services.gateway.generation.served_model import ServedModel
from paceline_services.gateway.generation.tool_choice import OutputParsing, forced_grammar, forced_tools, output_parsing
from paceline_services.gateway.http.http_metrics import REQUEST_ID_HEADER
from paceline_services.gateway.structured.output import ANY_TEXT

GRAMMAR_START = ("grammar_begins_after", "grammar_waits_if")
"""Parameters of a grammar behind a model's reasoning. No body has them."""
MAX_PROMPT_LOG_PROBS = 262_144
"""Log-probabilities of the tokens of prompts that one response may hold. A million of them are a body of some 70 MB."""


async def build_requests(
    body: GenerationBody,
    model: ServedModel,
    request_id: str,
    client: ApiClient,
    headers: Mapping[str, str],
    span: TraceSpan = NO_SPAN,
) -> list[CompletionRequest]:
    """`n` completions for each prompt, in OpenAI's order; their ids are `request_id` with an index.

    `headers`: of the HTTP request, or the metadata of the gRPC call. `span`: of the API request. Raises
    `InvalidRequestError`, `OverloadedError` or `UnavailableError`.
    """
    labels = client.target_labels | _labels(headers.get(LABELS_HEADER, ""))
    with model.counting_rejections():
        description = model.description(labels)
        _check_count(body, model)
        with span.child("grammar_check"):
            calls = await forced_grammar(body, model) if isinstance(body, ChatBody) else ANY_TEXT
            grammar = calls if calls.text else await model.grammars.grammar_of(body, model.tokenizer)
        bad_words = await bad_word_tokens(body.bad_words or (), model.tokenizer)
        with span.child("tokenize"):
            prompts, parsing = await _encode(body, model, description.max_model_len, calls=bool(calls.text))
        sampling = build_sampling(body, description, grammar.text, bad_words, parsing.gate, model.sampling_defaults)
        capabilities = _capabilities(body, sampling, labels, prompts, description.max_model_len, model)
        _check_special_spaces(body, model)
        _check_prompt_log_probs(body, prompts)
    base = replace(
        _base_request(body, request_id, sampling, client, headers, span.trace_parent),
        output=_output_options(body, parsing, description),
        needed_capabilities=capabilities,
        left_out_keywords=grammar.left_out,
    )
    longest, choices = model.sampling_defaults.get("max_tokens"), body.choice_count
    of_prompts = (build_choices(body, description, base, each, n * choices, longest) for n, each in enumerate(prompts))
    return list(chain.from_iterable(of_prompts))


def _base_request(
    body: GenerationBody,
    request_id: str,
    sampling: SamplingParams,
    client: ApiClient,
    headers: Mapping[str, str],
    trace_parent: str,
) -> CompletionRequest:
    """What body, client and headers say alone."""
    return CompletionRequest(
        request_id,
        (),
        sampling,
        speculative_options(body),
        cache_salt=client.cache_salt_for(body.cache_salt),
        client=client.name,
        group=request_id,
        priority=body.priority or 0,
        trace_parent=trace_parent,
        return_tree=body.return_tree,
        session=headers.get(SESSION_HEADER) or body.prompt_cache_key or "",
        client_request_id=body.request_id or headers.get(REQUEST_ID_HEADER, ""),
    )


def _output_options(body: GenerationBody, parsing: OutputParsing, description: TargetDescription) -> OutputOptions:
    return OutputOptions(
        stop=body.stop or (),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        parser=parsing.parser,
        shown_tokens=parsing.shown_tokens,
        eos_token_ids=_eos_token_ids(body, description),
    )


def _labels(text: str) -> frozenset[str]:
    try:
        return parse_labels(text)
    except ValueError as error:
        raise InvalidRequestError(f"{LABELS_HEADER}: {error}", param=LABELS_HEADER) from None


def build_sampling(
    body: GenerationBody,
    description: TargetDescription,
    grammar: str,
    bad_words: Sequence[Sequence[int]],
    gate: ReasoningGate = ALWAYS,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> SamplingParams:
    """The sampling parameters of all completions, but for `max_tokens` and `seed`. Raises `InvalidRequestError`.

    `defaults`: the model's, for fields that the client leaves out.
    """
    given = {name: each for name, each in defaults.items() if name in SHARED_FIELDS}
    given |= body.model_dump(include=set(SHARED_FIELDS), exclude_none=True)
    given |= {"grammar": grammar, "bad_words": bad_words, "logprobs": body.top_log_probs}
    if grammar:
        given |= {"grammar_begins_after": gate.closing, "grammar_waits_if": gate.opening}
    given["prompt_logprobs"] = body.prompt_top_log_probs
    if body.choice_count > body.kept_count and body.top_log_probs is None:
        given["logprobs"] = 0  # by which the best choices are found
    given["stop_token_ids"] = (*(body.stop_token_ids or ()), *_eos_token_ids(body, description))
    try:
        sampling = SamplingParams(**given, max_tokens=max(1, given.get("min_tokens", 0)))
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error
    for name in TOKEN_ID_FIELDS:
        check_ids(name, getattr(sampling, name), description.vocabulary_size)
    return sampling


def build_choices(
    body: GenerationBody,
    description: TargetDescription,
    base: CompletionRequest,
    prompt: Sequence[int],
    first: int = 0,
    default_max_tokens: int | None = None,
) -> list[CompletionRequest]:
    """The `n` completions of one prompt: copies of `base`, numbered from `first` on. Raises `InvalidRequestError`.

    `default_max_tokens`: the model's, where neither the client nor the endpoint has a limit.

    Only the first one asks for the prompt's log-probabilities. Without a seed of the client's, the seed follows from
    the request id, which nobody can foretell: a request that is built again has the same one.
    """
    _check_prompt(body, description, prompt)
    default = default_max_tokens if body.default_max_tokens is None else body.default_max_tokens
    max_tokens = _max_tokens(body, description, len(prompt), base.sampling.min_tokens, default)
    seeded = "seed" in base.sampling.model_fields_set
    seed = base.sampling.seed if seeded else _drawn_seed(f"{base.request_id}-{first}")
    requests = []
    for index in range(body.choice_count):
        changed: dict[str, int | None] = {"max_tokens": max_tokens, "seed": choice_seed(seed, index)}
        changed |= {"prompt_logprobs": None} if index else {}
        request_id, sampling = f"{base.request_id}-{first + index}", base.sampling.model_copy(update=changed)
        requests.append(replace(base, request_id=request_id, prompt=prompt, sampling=sampling, choice=index))
    return requests


def _drawn_seed(request_id: str) -> int:
    """63 bits, as OpenAI's clients have room for."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little") >> 1


def choice_seed(seed: int, index: int) -> int:
    """The seed of the index-th of `n` completions, unsigned 64-bit; the first one has the request's own."""
    if index == 0:
        return seed
    source = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(source, digest_size=8).digest(), "little")


def speculative_options(body: GenerationBody) -> SpeculativeOptions:
    options = body.speculative.model_dump() if body.speculative else {}
    return SpeculativeOptions(**options, report=body.speculation_stats)


async def _encode(
    body: GenerationBody, model: ServedModel, context: int, *, calls: bool
) -> tuple[list[list[int]], OutputParsing]:
    """The prompts, and how to read what follows them. `calls`: whether a grammar forces calls.

    Raises `InvalidRequestError`.
    """
    kept, parsing = _truncated_length(body, context), OutputParsing()
    longest = context if kept is None else None
    if isinstance(body, ChatBody):
        text = render_chat(body, model.tokenizer)
        check_length("messages", text, model.tokenizer, longest)
        prompts = [await encode(text, model.tokenizer, add_special_tokens=body.add_special_tokens)]
        parsing = output_parsing(body, text, model, calls=calls)
    else:
        assert isinstance(body, CompletionBody)
        special = body.add_special_tokens
        prompts = await encode_prompts(body.prompt, model.tokenizer, longest, add_special_tokens=special)
    return (prompts if kept is None else [prompt[-kept:] for prompt in prompts]), parsing


def _truncated_length(body: GenerationBody, context: int) -> int | None:
    """Tokens to keep of each prompt's end; None: all. With -1, what the wanted output leaves of the context."""
    if body.truncate_prompt_tokens != -1:
        return body.truncate_prompt_tokens
    limit = body.output_limit[1]
    return max(1, context - (max(1, body.min_tokens or 0) if limit is None else limit))


def _check_special_spaces(body: GenerationBody, model: ServedModel) -> None:
    """Raises `InvalidRequestError` if the request wants no spaces where the model's tokenizer itself has them."""
    if body.spaces_between_special_tokens is False and model.tokenizer.spaces_special_tokens:
        name = "spaces_between_special_tokens"
        raise InvalidRequestError(f"{name}: this model's tokenizer always has them", param=name)


def _capabilities(
    body: GenerationBody,
    sampling: SamplingParams,
    labels: frozenset[str],
    prompts: Sequence[Sequence[int]],
    context: int,
    model: ServedModel,
) -> frozenset[str]:
    """What the targets of these prompts must have: the labels, and features. Raises `InvalidRequestError`."""
    features = _features(body, sampling, labels, model)
    if body.output_limit[1] == 0 and context in map(len, prompts):
        features |= _full_prompt(body, labels | features, model)
    return labels | features


def _features(
    body: GenerationBody, sampling: SamplingParams, labels: frozenset[str], model: ServedModel
) -> frozenset[str]:
    """What the target of a request must be able to do. Raises `InvalidRequestError` if none with these labels can."""
    length, limit = body.output_limit
    needed = needed_features(sampling) | ({NO_OUTPUT} if limit == 0 else frozenset())
    if needed and not model.fleet.has_capable_target(labels | needed):
        lacking = [each for each in sorted(needed) if not model.fleet.has_capable_target(labels | {each})] or sorted(
            needed
        )
        fields = {NO_OUTPUT: length, "prompt_logprobs": _prompt_log_probs_field(body)}
        name = _grammar_field(body) if lacking[0] in GRAMMAR_START else fields.get(lacking[0], lacking[0])
        message = f"{name}: no target that is up can do it: its build is too old, or its engine does not have it"
        raise InvalidRequestError(message, param=name)
    return needed


def _full_prompt(body: GenerationBody, needed: frozenset[str], model: ServedModel) -> frozenset[str]:
    """What the target of a prompt that fills the context must be able to do beside what is needed anyway.

    Raises `InvalidRequestError` if none can.
    """
    if not model.fleet.has_capable_target(needed | {FULL_PROMPT}):
        raise InvalidRequestError(
            "the prompt fills the context: no target that is up can compute it without room for one token more",
            param=body.prompt_field,
            code="context_length_exceeded",
        )
    return frozenset({FULL_PROMPT})


def _grammar_field(body: GenerationBody) -> str:
    """The field that asks for the grammar."""
    if isinstance(body, ChatBody) and forced_tools(body):
        return "tool_choice"
    return "structured_outputs" if body.response_format is None else "response_format"


def _check_prompt_log_probs(body: GenerationBody, prompts: Sequence[Sequence[int]]) -> None:
    """Raises `InvalidRequestError` if the prompts' log-probabilities are too many for one response."""
    if (top := body.prompt_top_log_probs) is None:
        return
    count, name = sum(map(len, prompts)) * body.choice_count * (1 + top), _prompt_log_probs_field(body)
    if count > MAX_PROMPT_LOG_PROBS:
        message = f"{name}: {count} log-probabilities of prompts in one response, at most {MAX_PROMPT_LOG_PROBS}"
        raise InvalidRequestError(message, param=name)


def _prompt_log_probs_field(body: GenerationBody) -> str:
    """The field that asks for log-probabilities of the prompt: `logprobs` asks for them with `echo`."""
    return "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"


def _check_count(body: GenerationBody, model: ServedModel) -> None:
    """Raises `OverloadedError` for more completions than are admitted now, `InvalidRequestError` if they never are."""
    completions, limit = body.prompts * body.choice_count, model.capacity.limits.max_in_flight
    if completions > limit:
        param = (
            ("n" if body.choice_count == body.kept_count else "best_of") if body.choice_count > 1 else body.prompt_field
        )
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
    if len(prompt) + (body.output_limit[1] != 0) > context:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens, but prompt and output share a context of {context}",
            param=body.prompt_field,
            code="context_length_exceeded",
        )
    check_ids(body.prompt_field, prompt, description.vocabulary_size)


def _max_tokens(
    body: GenerationBody, description: TargetDescription, prompt_tokens: int, min_tokens: int, default: int | None
) -> int:
    """Most tokens of the output: as the client says, else the default within the context."""
    available = description.max_model_len - prompt_tokens
    name, limit = body.output_limit
    if limit is not None and limit < 0:
        raise InvalidRequestError(f"{name}: must be at least 0, not {limit}", param=name)
    if limit is not None and body.cuts_output:
        limit = min(limit, available)
    if limit is not None and limit > available:
        raise InvalidRequestError(
            f"{name}: the prompt's {prompt_tokens} tokens and {limit} more exceed the context of "
            f"{description.max_model_len} tokens",
            param=name,
            code="context_length_exceeded",
        )
    if limit is None:
        limit = available if default is None else min(available, max(default, min_tokens))
    if min_tokens > limit:
        message = f"min_tokens: {min_tokens} exceed the {limit} tokens that the output may have"
        raise InvalidRequestError(message, param="min_tokens")
    return limit
