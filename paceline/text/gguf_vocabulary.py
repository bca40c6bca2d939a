"""The vocabulary of a GGUF file: its tokens, their types and roles, checked against each other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

from paceline.gguf.gguf_file import GgufError, GgufFile

log = logging.getLogger(__name__)

MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
MERGES, SCORES = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
"""Kinds of `tokenizer.ggml.model` that are read."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
ADDED = (UNKNOWN, CONTROL, USER_DEFINED)

ROLES: Mapping[str, str] = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # the format's own spelling
    "pad_token": "tokenizer.ggml.padding_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
SENTENCEPIECE_ROLES: Mapping[str, int] = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
"""Ids where a sentencepiece file names none."""
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class GgufVocabulary:
    """Every list is read, and checked, when it is first used; each property may raise `GgufError`."""

    def __init__(self, file: GgufFile) -> None:
        """Reads nothing yet."""
        self._file = file

    def error(self, text: str) -> GgufError:
        """An error of this file."""
        return GgufError(f"{self._file.path}: {text}")

    @cached_property
    def model(self) -> str:
        """`BYTE_LEVEL` or `SENTENCEPIECE`."""
        model: str = self._file.need(MODEL, str)
        if model not in (BYTE_LEVEL, SENTENCEPIECE):
            raise self.error(f"{MODEL} is {model!r}: {BYTE_LEVEL!r} and {SENTENCEPIECE!r} are read")
        return model

    @cached_property
    def tokens(self) -> list[str]:
        """By id."""
        tokens: list[str] = self._file.need(TOKENS, list)
        try:
            "".join(tokens).encode()
        except (TypeError, UnicodeEncodeError) as error:
            raise self.error(f"{TOKENS} holds what is no text") from error
        return tokens

    @cached_property
    def types(self) -> list[int]:
        """By id."""
        return self._of_each_token(TYPES)

    @cached_property
    def scores(self) -> list[float]:
        """By id: of two sentencepiece tokens, the one of the higher score is built first."""
        return self._of_each_token(SCORES)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids by token. Unused tokens `[PADn]`, which fill up the embedding, are left out."""
        ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(ids) < len(self.tokens) and (twice := {t: i for i, t in enumerate(self.tokens) if t and ids[t] != i}):
            raise self.error(f"{TOKENS} holds {next(iter(twice))!r} twice")
        for id_, type_ in enumerate(self.types):
            if type_ == UNUSED and self.tokens[id_] == f"[PAD{id_}]":
                del ids[self.tokens[id_]]
        ids.pop("", None)
        return ids

    @cached_property
    def roles(self) -> dict[str, int]:
        """Ids by role: `bos_token`, `eos_token`, ...

        A text token with another role is left out: an old converter's default.
        """
        named = {role: id_ for role, key in ROLES.items() if (id_ := self.named(key)) is not None}
        if self.model == SENTENCEPIECE:
            named = {role: id_ for role, id_ in SENTENCEPIECE_ROLES.items() if id_ < len(self.tokens)} | named
        always = ("bos_token", "eos_token")
        return {role: id_ for role, id_ in named.items() if role in always or self.types[id_] != NORMAL}

    @cached_property
    def added(self) -> dict[str, int]:
        """Ids of the tokens that are found in a text before all others: special and user-defined ones."""
        ids = {id_ for id_, type_ in enumerate(self.types) if type_ in ADDED} | set(self.roles.values())
        return {self.tokens[id_]: id_ for id_ in sorted(ids) if self.tokens[id_]}

    def named(self, key: str) -> int | None:
        """The id that a key of the file gives; None without the key, and for an end that the vocabulary lacks."""
        id_: int | None = self._file.get(key, int)
        if id_ is None or 0 <= id_ < len(self.tokens):
            return id_
        fault = self.error(f"{key} is {id_}, and {TOKENS} has {len(self.tokens)} entries")
        if key not in END_KEYS:
            raise fault
        log.warning("%s: left out", fault)
        return None

    def is_special(self, id_: int) -> bool:
        """Whether an added token controls the model, and is not text."""
        return self.types[id_] != USER_DEFINED or id_ in self.roles.values()

    def _of_each_token(self, key: str) -> list[Any]:
        values: list[Any] = self._file.need(key, list)
        if len(values) != len(self.tokens):
            raise self.error(f"{key} has {len(values)} entries, and {TOKENS} has {len(self.tokens)}")
        return values


@lru_cache(maxsize=2)
def gguf_vocabulary(file: GgufFile) -> GgufVocabulary:
    """A file's vocabulary, whose lists are read and checked once."""
    return GgufVocabulary(file)
