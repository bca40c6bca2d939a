"""The bytes that each token adds to a text, for incremental decoding and log-probabilities."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

NO_BYTE = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How sentencepiece-like vocabularies spell a single byte."""


def token_pieces(backend: Backend) -> list[bytes]:
    """Entry i: the bytes of token i inside a text. Raises ValueError if they depend on the other tokens."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    decoder = backend.decoder and json.loads(backend.decoder.__getstate__())  # what pickle keeps
    if is_byte_level(decoder):
        return byte_level_pieces(vocabulary)
    tokens = _tokens(vocabulary)
    pieces = _in_context(backend, tokens)
    if "ByteFallback" in _decoder_types(decoder):
        for id_, token in enumerate(tokens):
            if byte := BYTE_TOKEN.fullmatch(token):
                pieces[id_] = bytes.fromhex(byte[1])
    return pieces


def is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    """Whether a token's spelling alone says its bytes, by the decoder as tokenizer.json has it."""
    decoders = set(_decoder_types(decoder))
    return "ByteLevel" in decoders and decoders <= {"ByteLevel", "Fuse"}


def byte_level_pieces(vocabulary: Mapping[str, int]) -> list[bytes]:
    """By id, the bytes of the tokens of a byte-level vocabulary."""
    return [_byte_level(token) for token in _tokens(vocabulary)]


def _tokens(vocabulary: Mapping[str, int]) -> list[str]:
    """The vocabulary by id; "" for an unused id."""
    tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, id_ in vocabulary.items():
        tokens[id_] = token
    return tokens


def _decoder_types(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoder_types(part)
    else:
        yield str(decoder["type"])


def _byte_characters() -> dict[int, str]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for characters from U+0100 on.

    For `str.translate`, by code: the Latin-1 character of the byte, and for Latin-1 that stands for no byte one that is
    none.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, NO_BYTE) | {0x100 + i: chr(byte) for i, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(BYTE_CHARACTERS).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()  # an added token may be plain text


def _in_context(backend: Backend, tokens: list[str]) -> list[bytes]:
    """The bytes that each token adds after another token, for decoders that depend on nothing else."""
    first = next(
        (i for i, token in enumerate(tokens) if token.isascii() and token.isalnum() and backend.decode([i])), None
    )
    if first is None:
        raise ValueError("the tokenizer has no plain ASCII token to measure the others against")
    before = backend.decode([first])
    after = backend.decode_batch([[first, id_] for id_ in range(len(tokens))], skip_special_tokens=False)
    changed = [token for token, text in zip(tokens, after, strict=True) if not text.startswith(before)]
    if changed:
        raise ValueError(f"the tokenizer's decoder changes earlier text, as at token {changed[0]!r}")
    return [text[len(before) :].encode() for text in after]
