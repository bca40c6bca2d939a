"""From a request's text or messages to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from paceline.text import ChatTemplateError, Tokenizer
from services.gateway.bodies import ChatFields
from services.gateway.errors import InvalidRequestError

LONG_TEXT = 16_384
"""Characters from which on a text is encoded in a thread: it would hold up every stream for milliseconds."""


async def encode(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text that may be long."""
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


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


def bad_sequences(words: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """The token sequences that spell bad words, at the start of a line and, if as long, after a space."""
    for word in words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        yield tuple(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            yield tuple(spaced)
