"""From a request's text or messages to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from paceline.text import ChatTemplateError, Tokenizer
from services.gateway.bodies import ChatFields
from services.gateway.errors import InvalidRequestError

LONG_TEXT = 16_384
"""Characters from which on texts are encoded in a thread: they would hold up every stream for milliseconds."""
CALL = 64
"""Characters that take as long as the call itself."""

T = TypeVar("T")


async def encode(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text that may be long."""
    return await aside(len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))


async def encode_prompts(
    prompts: Sequence[str | list[int]], tokenizer: Tokenizer, *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of prompts that may be many, and are texts or token ids already."""

    def encoded(prompt: str | list[int]) -> list[int]:
        return tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt

    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return await aside(_effort(texts), lambda: list(map(encoded, prompts)))


async def aside(characters: int, work: Callable[[], T]) -> T:
    """Does what takes as long as to encode so many characters: in a thread if they are many."""
    return work() if characters < LONG_TEXT else await asyncio.to_thread(work)


async def encode_chat(fields: ChatFields, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a conversation as the model's template writes it. Raises `InvalidRequestError`."""
    if tokenizer.chat_template is None:
        raise InvalidRequestError("this model has no chat template; use completions", param="messages")
    try:
        text = tokenizer.chat_template.render(
            [message.model_dump(exclude_unset=True) for message in fields.messages],
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            variables=fields.chat_template_kwargs,
        )
    except ChatTemplateError as error:
        raise InvalidRequestError(f"the chat template refused it: {error}", param="messages") from error
    return await encode(text, tokenizer, add_special_tokens=fields.add_special_tokens)


async def bad_sequences(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell bad words, at the start of a line and, if as long, after a space."""
    return await aside(_effort(words), lambda: tuple(_spelled(words, tokenizer)))


def check_ids(name: str, ids: Iterable[int], vocabulary_size: int) -> None:
    """Raises `InvalidRequestError`, which blames the field of this name, unless the vocabulary has them all."""
    largest = max(ids, default=0)
    if largest >= vocabulary_size:
        message = f"{name}: token id {largest} is not below the vocabulary's {vocabulary_size}"
        raise InvalidRequestError(message, param=name)


def _effort(texts: Sequence[str]) -> int:
    """In characters."""
    return sum(len(text) + CALL for text in texts)


def _spelled(words: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    for word in words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        yield tuple(bare)
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            yield tuple(spaced)
