"""From a request body to the choices it asks for; what a client can get wrong is found here at the latest."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from pydantic import ValidationError

from paceline.config import SamplingParams, SpeculativeOptions
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.auth import ANONYMOUS, ApiClient
from paceline_services.gateway.generation import GenerationRequest
from paceline_services.gateway.openai.bodies import ChatBody, CompletionBody, GenerationBody
from paceline_services.gateway.openai.prompt_encoding import bad_word_tokens, check_ids, encode_chat, encode_prompts
from paceline_services.gateway.served_model import ModelLimits, ServedModel

DEFAULT_COMPLETION_TOKENS = 16
TRANSLATED = {"max_tokens", "stop_token_ids", "bad_words"}
SHARED_FIELDS = frozenset(SamplingParams.model_fields) & frozenset(GenerationBody.model_fields) - TRANSLATED
"""Fields that go from a body into the sampling parameters as they are, if given."""


async def build_completion_requests(
    body: CompletionBody, gateway: ServedModel, caller: ApiClient = ANONYMOUS
) -> list[GenerationRequest]:
    """`n` choices for each prompt, in OpenAI's order."""
    planner = RequestBuilder(body, gateway, gateway.model_limits(), "prompt", DEFAULT_COMPLETION_TOKENS, caller)
    planner.admit(len(body.prompt))
    sampling = await planner.sampling()
    context = planner.limits.max_model_len
    with gateway.counting_rejections():
        prompts = await encode_prompts(
            body.prompt, gateway.tokenizer, context, add_special_tokens=body.add_special_tokens
        )
    return [choice for prompt in prompts for choice in planner.requests(prompt, sampling)]


async def build_chat_requests(
    body: ChatBody, gateway: ServedModel, caller: ApiClient = ANONYMOUS
) -> list[GenerationRequest]:
    """`n` choices that continue one conversation, by default as far as the context reaches."""
    served = gateway.model_limits()
    planner = RequestBuilder(body, gateway, served, "messages", served.max_model_len, caller)
    planner.admit(1)
    sampling = await planner.sampling()
    with gateway.counting_rejections():
        prompt = await encode_chat(body, gateway.tokenizer, served.max_model_len)
    return planner.requests(prompt, sampling)


def choice_seed(seed: int, index: int) -> int:
    """The seed of the index-th of `n` choices, unsigned 64-bit; the first one has the request's own."""
    if index == 0:
        return seed
    source = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(source, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Plans the choices of one body. `prompt_field` is to blame for prompts that do not fit."""

    body: GenerationBody
    gateway: ServedModel
    limits: ModelLimits
    prompt_field: str
    default_tokens: int
    client: ApiClient = ANONYMOUS
    group: str = field(default_factory=lambda: uuid.uuid4().hex)

    def admit(self, prompts: int) -> None:
        """Raises `OverloadedError` if there is no room for so many now, `InvalidRequestError` if there never is."""
        choices, most = prompts * self._count, self.gateway.limits.max_in_flight
        if choices > most:
            param = "n" if self._count > 1 else self.prompt_field
            message = f"{param}: {choices} completions in one request, at most {most} are generated at once"
            raise InvalidRequestError(message, param=param)
        self.gateway.admit(choices)

    async def sampling(self) -> SamplingParams:
        """What the choices of all prompts have in common. Raises `InvalidRequestError` or `OverloadedError`."""
        grammar = await self.gateway.grammar_of(self.body)
        return self.build_sampling(grammar, await bad_word_tokens(self.body.bad_words or (), self.gateway.tokenizer))

    def build_sampling(self, grammar: str, bad_words: Sequence[Sequence[int]]) -> SamplingParams:
        """What the choices have in common, if the body makes sense. `max_tokens` and `seed` are each prompt's."""
        body = self.body
        given: dict[str, Any] = body.model_dump(include=set(SHARED_FIELDS), exclude_none=True)
        given |= {"grammar": grammar, "bad_words": bad_words, "logprobs": body.top_log_probs}
        given["stop_token_ids"] = (*(body.stop_token_ids or ()), *self._eos)
        try:
            sampling = SamplingParams(**given, max_tokens=max(1, body.min_tokens or 0))
        except ValidationError as error:
            raise InvalidRequestError.of(error) from error
        check_ids("logit_bias", sampling.logit_bias, self.limits.vocabulary_size)
        check_ids("stop_token_ids", sampling.stop_token_ids, self.limits.vocabulary_size)
        return sampling

    def requests(self, prompt: Sequence[int], sampling: SamplingParams) -> list[GenerationRequest]:
        """The `n` choices for one prompt. Raises `InvalidRequestError`."""
        body = self.body
        self._check_prompt(prompt)
        max_tokens = self._max_tokens(len(prompt))
        seed = secrets.randbits(63) if body.seed is None else sampling.seed
        eos = self._eos
        limits = body.speculative.model_dump() if body.speculative else {}
        return [
            GenerationRequest(
                prompt=prompt,
                sampling=sampling.model_copy(update={"max_tokens": max_tokens, "seed": choice_seed(seed, index)}),
                eos_token_ids=eos,
                stop=tuple(body.stop or ()),
                include_stop=body.include_stop_str_in_output,
                skip_special_tokens=body.skip_special_tokens,
                speculative=SpeculativeOptions(**limits, report=body.speculation_stats),
                client=self.client,
                cache_salt=self.client.cache_salt_for(body.cache_salt),
                session=body.prompt_cache_key or "",
                counts_prompt=index == 0,
                group=self.group,
            )
            for index in range(self._count)
        ]

    @property
    def _count(self) -> int:
        return self.body.n or 1

    @property
    def _eos(self) -> list[int]:
        """Those of the model that the client does not name as its own."""
        own = set(self.body.stop_token_ids or ())
        return [] if self.body.ignore_eos else list(set(self.limits.eos_token_ids) - own)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        limit = self.limits.max_model_len
        if not prompt:
            raise InvalidRequestError("the prompt is empty", param=self.prompt_field)
        if len(prompt) >= limit:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens, but prompt and output share a context of {limit}",
                param=self.prompt_field,
                code="context_length_exceeded",
            )
        check_ids(self.prompt_field, prompt, self.limits.vocabulary_size)

    def _max_tokens(self, prompt_tokens: int) -> int:
        """How many tokens the output may have."""
        room = self.limits.max_model_len - prompt_tokens
        least = self.body.min_tokens or 0
        name, asked = self.body.output_limit
        if asked is not None and asked < 1:
            raise InvalidRequestError(f"{name}: must be at least 1, not {asked}", param=name)
        if asked is not None and asked > room:
            raise InvalidRequestError(
                f"{name}: the prompt's {prompt_tokens} tokens and {asked} more exceed the context of "
                f"{self.limits.max_model_len} tokens",
                param=name,
                code="context_length_exceeded",
            )
        most = min(room, max(self.default_tokens, least)) if asked is None else asked
        if least > most:
            message = f"min_tokens: {least} exceed the {most} tokens that the output may have"
            raise InvalidRequestError(message, param="min_tokens")
        return most
