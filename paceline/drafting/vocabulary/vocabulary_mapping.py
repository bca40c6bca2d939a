"""What the tokens of two vocabularies have in common, and how one's tokens are written in the other's.

Two tokens mean the same if they add the same bytes to a text, however their vocabularies spell them: `Ġthe` and `▁the`,
`Ã` and `<0xC3>`. Special tokens mean the same if they are spelled alike, or both begin or both end a text. Of several
tokens that mean the same the first counts; one that stands for a single byte counts after those spelled as text.

This is the intersection of TLI and of vLLM's `use_heterogeneous_vocab`; the tokens outside it are decoded, and encoded
again by the other tokenizer.
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
"""Two vocabularies with fewer tokens in common have nothing to say to each other."""
ENDS_OF_TEXT = ("bos_token", "eos_token")

Meaning = tuple[str, bytes]
"""Text or special, and the bytes it adds or is spelled with."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokenizer, and how many token ids the model knows: often a few more, that stand for nothing."""

    name: str
    tokenizer: Tokenizer
    size: int

    @classmethod
    def load(cls, model: str) -> Vocabulary:
        """Of the model by this name, without its weights. Raises `ModelNotFoundError`."""
        return cls(Path(model).name, Tokenizer.load(model), _size(model))

    def meanings(self) -> dict[Meaning, int]:
        """The first token of each meaning. Raises ValueError if the tokenizer does not decode piece by piece."""
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
        """The token of a role such as `eos_token`."""
        token = self.tokenizer.token_id(self.tokenizer.special_tokens.get(role, ""))
        return token if token is not None and token < self.size else None


@dataclass(frozen=True, slots=True)
class VocabularyMapping:
    """Between the tokens of a target and those of a draft."""

    target: Vocabulary
    draft: Vocabulary
    target_ids: Sequence[int]
    """By draft token, the target's that means the same, each once; -1 for those that none does."""
    draft_ids: Sequence[tuple[int, ...]]
    """By target token, how the draft writes it: as the one token that means the same, else as some others."""

    @classmethod
    def between(cls, target: Vocabulary, draft: Vocabulary) -> VocabularyMapping:
        """Raises ValueError if either tokenizer does not decode piece by piece."""
        ours, theirs = draft.meanings(), target.meanings()
        pairs = {theirs[meaning]: ours[meaning] for meaning in theirs.keys() & ours.keys()}
        for role in ENDS_OF_TEXT:
            mine, its = draft.special_token(role), target.special_token(role)
            if mine is not None and its is not None and its not in pairs and mine not in pairs.values():
                pairs[its] = mine
        target_ids = [-1] * draft.size
        for its, mine in pairs.items():
            target_ids[mine] = its
        writer = _TokenTranslator(target, draft, ours, pairs)
        return cls(target, draft, target_ids, [writer.written(id_) for id_ in range(target.size)])

    @property
    def identical(self) -> bool:
        """Whether every id means the same to both, so that there is nothing to map."""
        return self.target.tokenizer.fingerprint == self.draft.tokenizer.fingerprint

    @property
    def common(self) -> list[int]:
        """The draft's tokens that the target has, too."""
        return [id_ for id_, its in enumerate(self.target_ids) if its >= 0]

    def require_common(self) -> None:
        """Raises ValueError unless the two have enough tokens in common for one to guess the other's."""
        if (count := len(self.common)) < MIN_COMMON_TOKENS:
            raise ValueError(
                f"the vocabularies of {self.target.name} and its draft {self.draft.name} have only {count} tokens in "
                'common: choose another draft, or set "vocabulary_mapping" to "strings"'
            )

    def to_draft_tokens(self, tokens: Sequence[int]) -> list[int]:
        """The target's tokens, one by one, as the draft's."""
        return list(chain.from_iterable(self.draft_ids[token] for token in tokens))

    def prompt_to_draft_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Those of a whole text: it begins with what the draft expects before a text, as the target's does."""
        written = [*self.draft.tokenizer.prefix_tokens, *self.to_draft_tokens(self.without_beginning(tokens))]
        return written or list(self.draft_ids[tokens[0]])

    def without_beginning(self, tokens: Sequence[int]) -> Sequence[int]:
        """These tokens of the target's, but what it sets before a text."""
        beginning = self.target.tokenizer.prefix_tokens
        return tokens[len(beginning) :] if list(tokens[: len(beginning)]) == beginning else tokens


class _TokenTranslator:
    """Writes single tokens of a target as a draft's."""

    def __init__(
        self, target: Vocabulary, draft: Vocabulary, ours: Mapping[Meaning, int], pairs: Mapping[int, int]
    ) -> None:
        """`ours`: the draft's tokens by meaning. `pairs`: the draft's token of the target's that it has."""
        self._target, self._draft, self._ours, self._pairs = target, draft, ours, pairs
        named = (draft.special_token(role) for role in ("unk_token", "eos_token", "bos_token"))
        self._unknown = next((id_ for id_ in named if id_ is not None), 0)

    def written(self, token: int) -> tuple[int, ...]:
        """Never nothing: after every token the draft is to be asked again."""
        if token in self._pairs:
            return (self._pairs[token],)
        tokenizer = self._target.tokenizer
        special = token in tokenizer.special_ids
        said = tokenizer.token_string(token).encode() if special else tokenizer.piece(token)
        return tuple(id_ for id_ in self._spelled(said) if id_ < self._draft.size) or (self._unknown,)

    def _spelled(self, said: bytes) -> Sequence[int]:
        if _text(said) in self._ours:  # another token of the target's means the same
            return [self._ours[_text(said)]]
        try:
            return self._draft.tokenizer.encode_fragment(said.decode())
        except UnicodeDecodeError:  # a part of a character
            return [self._ours[part] for byte in said if (part := _text(bytes([byte]))) in self._ours]


def _text(piece: bytes) -> Meaning:
    return "text", piece


def _size(model: str) -> int:
    place = resolve_model(model)
    if found := fake_vocabulary(place):
        return found[0]
    said: dict[str, Any] = configuration(place)
    size = said.get("vocab_size") or said.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise ModelNotFoundError(f"config.json in {place} has no vocab_size: download the model again")
    return size
