"""Maps the tokens of a target's vocabulary to those of a draft's, and back.

Two tokens have the same meaning if they add the same bytes to a text, however their vocabularies spell them: `Ġthe` and
`▁the`, `Ã` and `<0xC3>`. Special tokens have the same meaning if they are spelled alike, or both begin or both end a
text. If a vocabulary has several tokens of one meaning, the first is used, and byte tokens come last.

This is the intersection of TLI and of vLLM's `use_heterogeneous_vocab`. Tokens outside it are decoded, and encoded with
the other tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.model_names import ModelNotFoundError, configuration, fake_vocabulary, resolve_model
from paceline.text import Tokenizer
from paceline.text.token_pieces import BYTE_TOKEN

MIN_COMMON_TOKENS = 8
"""With fewer common tokens a draft is refused."""
ENDS_OF_TEXT = ("bos_token", "eos_token")

Meaning = tuple[str, bytes]
"""text: the bytes that a token adds. special: its spelling."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokenizer and its number of token ids, which is often a little larger than the tokenizer's."""

    name: str
    tokenizer: Tokenizer
    size: int

    @classmethod
    def load(cls, model: str) -> Vocabulary:
        """The vocabulary of the model with this name, without its weights. Raises `ModelNotFoundError`."""
        return cls(Path(model).name, Tokenizer.load(model), _size(model))

    def meanings(self) -> dict[Meaning, int]:
        """The token of each meaning. Raises ValueError if the tokenizer does not decode token by token."""
        tokenizer, bytes_of = self.tokenizer, self.tokenizer.pieces
        known = range(min(self.size, len(bytes_of)))
        special = [id_ for id_ in known if id_ in tokenizer.special_ids]
        plain = [id_ for id_ in known if id_ not in tokenizer.special_ids and bytes_of[id_]]
        plain.sort(key=lambda id_: BYTE_TOKEN.fullmatch(tokenizer.token_string(id_)) is not None)
        found: dict[Meaning, int] = {}
        for id_ in plain:
            found.setdefault(_text(bytes_of[id_]), id_)
        for id_ in special:
            found.setdefault(("special", tokenizer.token_string(id_).encode()), id_)
        return found

    def special_token(self, role: str) -> int | None:
        """The token of a role such as `eos_token`; None if there is none."""
        token = self.tokenizer.token_id(self.tokenizer.special_tokens.get(role, ""))
        return token if token is not None and token < self.size else None


@dataclass(frozen=True, slots=True)
class VocabularyMapping:
    """The tokens of a target and a draft with the same meaning."""

    target: Vocabulary
    draft: Vocabulary
    target_ids: Sequence[int]
    """By draft token, the target's token with its meaning, each at most once; -1: none."""
    draft_ids: Sequence[tuple[int, ...]]
    """By target token, the draft's tokens for it: the one with its meaning, or else one or more that spell it."""

    @classmethod
    def between(cls, target: Vocabulary, draft: Vocabulary) -> VocabularyMapping:
        """Raises ValueError if one of the tokenizers does not decode token by token."""
        draft_meanings, target_meanings = draft.meanings(), target.meanings()
        common = target_meanings.keys() & draft_meanings.keys()
        pairs = {target_meanings[meaning]: draft_meanings[meaning] for meaning in common}
        for role in ENDS_OF_TEXT:
            target_id, draft_id = target.special_token(role), draft.special_token(role)
            if target_id is None or draft_id is None or target_id in pairs or draft_id in pairs.values():
                continue
            pairs[target_id] = draft_id
        target_ids = [-1] * draft.size
        for target_id, draft_id in pairs.items():
            target_ids[draft_id] = target_id
        translator = _TokenTranslator(target, draft, draft_meanings, pairs)
        return cls(target, draft, target_ids, [translator.to_draft(token) for token in range(target.size)])

    @property
    def identical(self) -> bool:
        """Whether the tokenizers are the same."""
        return self.target.tokenizer.fingerprint == self.draft.tokenizer.fingerprint

    @property
    def common(self) -> list[int]:
        """The draft's tokens with a meaning that the target has too."""
        return [id_ for id_, its in enumerate(self.target_ids) if its >= 0]

    def require_common(self) -> None:
        """Raises ValueError if there are fewer than `MIN_COMMON_TOKENS` common tokens."""
        if (count := len(self.common)) < MIN_COMMON_TOKENS:
            raise ValueError(
                f"the vocabularies of {self.target.name} and its draft {self.draft.name} have only {count} tokens in "
                'common: choose another draft, or set "vocabulary_mapping" to "strings"'
            )

    def to_draft_tokens(self, tokens: Sequence[int]) -> list[int]:
        """The draft's tokens for the target's tokens, each mapped by itself."""
        return list(chain.from_iterable(self.draft_ids[token] for token in tokens))

    def prompt_to_draft_tokens(self, tokens: Sequence[int]) -> list[int]:
        """The draft's tokens for a whole prompt, with the draft's own tokens before a text."""
        prompt = [*self.draft.tokenizer.prefix_tokens, *self.to_draft_tokens(self.without_beginning(tokens))]
        return prompt or list(self.draft_ids[tokens[0]])

    def without_beginning(self, tokens: Sequence[int]) -> Sequence[int]:
        """These tokens of the target without those that its tokenizer puts before a text."""
        beginning = self.target.tokenizer.prefix_tokens
        return tokens[len(beginning) :] if list(tokens[: len(beginning)]) == beginning else tokens


class _TokenTranslator:
    """Translates single tokens of a target to a draft's."""

    def __init__(
        self, target: Vocabulary, draft: Vocabulary, draft_meanings: Mapping[Meaning, int], pairs: Mapping[int, int]
    ) -> None:
        """`draft_meanings`: see `Vocabulary.meanings`. `pairs`: the draft's token by the target's, if there is one."""
        self._target, self._draft, self._draft_meanings, self._pairs = target, draft, draft_meanings, pairs
        fallbacks = (draft.special_token(role) for role in ("unk_token", "eos_token", "bos_token"))
        self._unknown = next((token for token in fallbacks if token is not None), 0)

    def to_draft(self, token: int) -> tuple[int, ...]:
        """At least one token: the draft runs once more after every target token."""
        if token in self._pairs:
            return (self._pairs[token],)
        tokenizer = self._target.tokenizer
        special = token in tokenizer.special_ids
        piece = tokenizer.token_string(token).encode() if special else tokenizer.piece(token)
        return tuple(id_ for id_ in self._spelled(piece) if id_ < self._draft.size) or (self._unknown,)

    def _spelled(self, piece: bytes) -> Sequence[int]:
        if _text(piece) in self._draft_meanings:  # the meaning is paired with another token of the target
            return [self._draft_meanings[_text(piece)]]
        try:
            return self._draft.tokenizer.encode_fragment(piece.decode())
        except UnicodeDecodeError:  # a part of a character
            parts = (_text(bytes([byte])) for byte in piece)
            return [self._draft_meanings[part] for part in parts if part in self._draft_meanings]


def _text(piece: bytes) -> Meaning:
    return "text", piece


def _size(model: str) -> int:
    folder = resolve_model(model)
    if found := fake_vocabulary(folder):
        return found[0]
    config: dict[str, Any] = configuration(folder)
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise ModelNotFoundError(f"config.json in {folder} has no vocab_size: download the model again")
    return size
