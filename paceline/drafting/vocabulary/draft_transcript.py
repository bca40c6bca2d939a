"""A request's committed text in the draft's tokens, updated as the target's tokens are committed.

More text can change how the end of a text is encoded, so the tail is encoded again after every commit. Text some words
before the end is settled. Bytes of an incomplete character wait for its other bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from paceline.drafting.vocabulary.vocabulary_mapping import VocabularyMapping

LOOKBEHIND = 48
"""The tail has at least this many characters once text is settled."""
LONGEST_TAIL = 160
"""A longer tail is settled, up to the beginning of a word if there is one."""
WINDOW = 10
"""The target's last tokens, which are encoded again together with a draft."""


class DraftTranscript:
    """The text of one request."""

    def __init__(self, mapping: VocabularyMapping, tokens: Sequence[int]) -> None:
        self._mapping = mapping
        self._tokenizer = mapping.target.tokenizer
        self._settled = list(mapping.draft.tokenizer.prefix_tokens)
        self._tail = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._recent: list[int] = []
        self._begun = False
        self._fallback_tokens = mapping.draft_ids[tokens[0]]
        self.extend(mapping.without_beginning(tokens))

    @property
    def tokens(self) -> list[int]:
        """The draft's tokens, at least one."""
        tokens = [*self._settled, *self._mapping.draft.tokenizer.encode_fragment(self._tail)]
        return tokens or list(self._fallback_tokens)

    @property
    def pending(self) -> bytes:
        """The bytes of an incomplete character after `tokens`."""
        return self._utf8.getstate()[0]

    @property
    def window(self) -> bytes:
        """The text of the target's last tokens, from the beginning of a character on, `pending` included."""
        pieces = [self._tokenizer.piece(token) for token in self._recent[-WINDOW:]]
        while pieces and _continues(pieces[0]):
            del pieces[0]
        return b"".join(pieces)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens of the target."""
        for token in tokens:
            if token in self._tokenizer.special_ids:
                self._settle_all()
                self._settled += self._mapping.draft_ids[token]
            else:
                self._recent.append(token)
                self._add(self._utf8.decode(self._tokenizer.piece(token)))
        del self._recent[:-WINDOW]
        if len(self._tail) > LONGEST_TAIL:
            self._settle(_word_start(self._tail, len(self._tail) - LOOKBEHIND))

    def _add(self, text: str) -> None:
        if text and not self._begun:
            self._begun = True
            text = self._first(text)
        self._tail += text

    def _first(self, text: str) -> str:
        """The first text of the request, with the draft tokenizer's convention of a space before it."""
        wanted = self._mapping.draft.tokenizer.adds_prefix_space
        if wanted == self._tokenizer.adds_prefix_space:
            return text
        return " " + text if wanted else text.removeprefix(" ")

    def _settle(self, length: int) -> None:
        self._settled += self._mapping.draft.tokenizer.encode_fragment(self._tail[:length])
        self._tail = self._tail[length:]

    def _settle_all(self) -> None:
        """A special token follows: later text cannot change the encoding of the text so far."""
        self._add(self._utf8.decode(b"", final=True))
        self._settle(len(self._tail))
        self._recent.clear()


def _continues(piece: bytes) -> bool:
    """Whether these bytes begin inside a character."""
    return not piece or 0x80 <= piece[0] < 0xC0


def _word_start(text: str, most: int) -> int:
    """The index of the space before the last word that begins among the first `most` characters; `most` if none
    does."""
    starts = (i for i in range(most, 0, -1) if text[i].isspace() and not text[i - 1].isspace())
    return next(starts, most)
