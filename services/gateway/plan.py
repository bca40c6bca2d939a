"""From a request body to the choices it asks for; what a client can get wrong is found here at the latest."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from pydantic import ValidationError

from paceline.config import SamplingParams, SpeculativeOptions
from services.gateway.bodies import ChatBody, CompletionBody, GenerationBody
from services.gateway.callers import ANYONE, Caller
from services.gateway.choice import Choice
from services.gateway.errors import InvalidRequestError
from services.gateway.gateway import Gateway, Served
from services.gateway.prompts import bad_sequences, encode, encode_chat

DEFAULT_COMPLETION_TOKENS = 16
TRANSLATED = {"max_tokens", "stop_token_ids", "bad_words"}
SAME = frozenset(SamplingParams.model_fields) & frozenset(GenerationBody.model_fields) - TRANSLATED
"""Fields that go from a body into the sampling parameters as they are, if given."""


async def plan_completion(body: CompletionBody, gateway: Gateway, caller: Caller = ANYONE) -> list[Choice]:
    """`n` choices for each prompt, in OpenAI's order."""
    planner = Planner(body, gateway, gateway.served(), "prompt", DEFAULT_COMPLETION_TOKENS, caller)
    gateway.admit(len(body.prompt) * planner.count)
    grammar = await gateway.grammar_of(body)
    choices: list[Choice] = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            prompt = await encode(prompt, gateway.tokenizer, add_special_tokens=body.add_special_tokens)
        choices += planner.choices(prompt, grammar)
    return choices


async def plan_chat(body: ChatBody, gateway: Gateway, caller: Caller = ANYONE) -> list[Choice]:
    """`n` choices that continue one conversation, by default as far as the context reaches."""
    served = gateway.served()
    planner = Planner(body, gateway, served, "messages", served.max_model_len, caller)
    gateway.admit(planner.count)
    grammar = await gateway.grammar_of(body)
    return planner.choices(await encode_chat(body, gateway.tokenizer), grammar)


def choice_seed(seed: int, index: int) -> int:
    """The seed of the index-th of `n` choices, unsigned 64-bit; the first one has the request's own."""
    if index == 0:
        return seed
    source = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(source, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the choices of one body. `prompt_field` is to blame for prompts that do not fit."""

    body: GenerationBody
    gateway: Gateway
    served: Served
    prompt_field: str
    default_tokens: int
    caller: Caller = ANYONE

    @property
    def count(self) -> int:
        return self.body.n or 1

    def choices(self, prompt: Sequence[int], grammar: str = "") -> list[Choice]:
        """The `n` choices for one prompt. Raises `InvalidRequestError`."""
        body = self.body
        self._check_prompt(prompt)
        eos = [] if body.ignore_eos else list(set(self.served.eos_token_ids) - set(body.stop_token_ids or ()))
        sampling = self._sampling(self._max_tokens(len(prompt)), eos, grammar)
        self.caller.used(len(prompt), "prompt")
        limits = body.speculative.model_dump() if body.speculative else {}
        return [
            Choice(
                prompt=prompt,
                sampling=sampling.model_copy(update={"seed": choice_seed(sampling.seed, index)}),
                eos_token_ids=eos,
                stop=tuple(body.stop or ()),
                include_stop=body.include_stop_str_in_output,
                skip_special_tokens=body.skip_special_tokens,
                speculative=SpeculativeOptions(**limits, report=body.speculation_stats),
                caller=self.caller,
                cache_salt=self.caller.salted(body.cache_salt),
                session=body.prompt_cache_key or "",
            )
            for index in range(self.count)
        ]

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        limit = self.served.max_model_len
        if not prompt:
            raise InvalidRequestError("the prompt is empty", param=self.prompt_field)
        if len(prompt) >= limit:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens, but prompt and output share a context of {limit}",
                param=self.prompt_field,
                code="context_length_exceeded",
            )
        self._check_ids(self.prompt_field, prompt)

    def _max_tokens(self, prompt_tokens: int) -> int:
        room = self.served.max_model_len - prompt_tokens
        name, asked = self.body.output_limit
        if asked is None:
            return min(room, max(self.default_tokens, self.body.min_tokens or 0))
        if asked < 1:
            raise InvalidRequestError(f"{name}: must be at least 1, not {asked}", param=name)
        if asked > room:
            raise InvalidRequestError(
                f"{name}: the prompt's {prompt_tokens} tokens and {asked} more exceed the context of "
                f"{self.served.max_model_len} tokens",
                param=name,
                code="context_length_exceeded",
            )
        return asked

    def _sampling(self, max_tokens: int, eos: Sequence[int], grammar: str) -> SamplingParams:
        body = self.body
        if body.min_tokens is not None and body.min_tokens > max_tokens:
            message = f"min_tokens: {body.min_tokens} exceed the {max_tokens} tokens that the output may have"
            raise InvalidRequestError(message, param="min_tokens")
        given: dict[str, Any] = {"seed": secrets.randbits(63), "grammar": grammar}
        given |= body.model_dump(include=set(SAME), exclude_none=True)
        given["stop_token_ids"] = (*(body.stop_token_ids or ()), *eos)
        given["bad_words"] = tuple(bad_sequences(body.bad_words or (), self.gateway.tokenizer))
        try:
            sampling = SamplingParams(**given, max_tokens=max_tokens, logprobs=body.top_log_probs)
        except ValidationError as error:
            raise InvalidRequestError.of(error) from error
        self._check_ids("logit_bias", sampling.logit_bias)
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        return sampling

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        largest = max(ids, default=0)
        if largest >= self.served.vocabulary_size:
            message = f"{name}: token id {largest} is not below the vocabulary's {self.served.vocabulary_size}"
            raise InvalidRequestError(message, param=name)
