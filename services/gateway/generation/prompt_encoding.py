"""Token ids of a request's texts."""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from paceline.text import Tokenizer
from paceline_services.gateway.api_errors import InvalidRequestError, OverloadedError

LONG_TEXT = 16_384
"""Texts of this many characters are encoded in a thread: in the event loop they would delay every stream."""
HUGE_TEXT = 524_288
"""Texts of this many characters are encoded one at a time: each takes seconds, and memory of 100 times its size."""
MAX_WAITING_HUGE = 16
"""Such texts that wait or are being encoded; more are refused."""
CALL_CHARACTERS = 64
"""The cost of one call to the tokenizer, as characters."""

T = TypeVar("T")


class EncodingThreads:
    """Encodes long texts in threads, so that a few of them take neither all cores nor all memory."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(2, "long texts")
        self._huge = ThreadPoolExecutor(1, "huge texts")
        self._waiting = 0

    async def run(self, characters: int, work: Callable[[], T]) -> T:
        """Do work that takes as long as encoding so many characters. Raises `OverloadedError`."""
        if characters < LONG_TEXT:
            return work()
        if characters < HUGE_TEXT:
            return await get_running_loop().run_in_executor(self._long, work)
        if self._waiting >= MAX_WAITING_HUGE:
            raise OverloadedError(f"{self._waiting} texts as large wait to be encoded; try again soon", reason="texts")
        self._waiting += 1
        try:
            return await get_running_loop().run_in_executor(self._huge, work)
        finally:
            self._waiting -= 1


in_encoding_thread = EncodingThreads().run


async def encode(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[int]:
    """Token ids of one text."""
    return await in_encoding_thread(len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))


async def decode(tokens: Sequence[int], tokenizer: Tokenizer, vocabulary_size: int) -> str:
    """Text of token ids, special tokens included. Raises `InvalidRequestError` or `OverloadedError`."""
    check_ids("tokens", tokens, vocabulary_size)
    return await in_encoding_thread(len(tokens), lambda: tokenizer.decode(tokens, skip_special_tokens=False))


async def encode_prompts(
    prompts: Sequence[str | list[int]], tokenizer: Tokenizer, context: int | None, *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of prompts: texts, or token ids already.

    Raises `InvalidRequestError` for a text that cannot fit into `context` tokens.
    """

    def encode_one(prompt: str | list[int]) -> list[int]:
        return tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt

    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        check_length("prompt", text, tokenizer, context)
    return await in_encoding_thread(_encoding_cost(texts), lambda: list(map(encode_one, prompts)))


async def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of bad words: at the start of a text and, if equally long, after a space (as vLLM)."""
    return await in_encoding_thread(_encoding_cost(words), lambda: tuple(_word_tokens(words, tokenizer)))


def check_length(name: str, text: str, tokenizer: Tokenizer, context: int | None) -> None:
    """Raises `InvalidRequestError`, for the field `name`, if the text has more tokens than `context` in any case.

    `context` None: no limit.
    """
    longest = tokenizer.longest_token
    if context is not None and longest is not None and len(text) > context * longest:
        raise InvalidRequestError(
            f"the prompt has {len(text)} characters: at {longest} for the longest token they exceed the context of "
            f"{context} tokens",
            param=name,
            code="context_length_exceeded",
        )


def check_ids(name: str, ids: Iterable[int], vocabulary_size: int) -> None:
    """Raises `InvalidRequestError`, for the field `name`, if an id is outside the vocabulary."""
    largest = max(ids, default=0)
    if largest >= vocabulary_size:
        message = f"{name}: token id {largest} is not below the vocabulary's {vocabulary_size}"
        raise InvalidRequestError(message, param=name)


def _encoding_cost(texts: Sequence[str]) -> int:
    """In characters."""
    return sum(len(text) + CALL_CHARACTERS for text in texts)


def _word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    for word in words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        yield tuple(bare)
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            yield tuple(spaced)
