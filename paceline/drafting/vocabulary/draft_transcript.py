"""A request's committed text, token by token in the target's tokens, as the draft's tokenizer would write it.

The end of a text is encoded again whenever more comes, for more can change how it is written. What stands a few words
before the end is settled. Bytes that do not make a character yet wait for the rest of it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from paceline.drafting.vocabulary.vocabulary_mapping import VocabularyMapping

LOOKBEHIND = 48
"""At least so many characters at the end are encoded again."""
LONGEST_TAIL = 160
"""And at most so many, if there is a word to begin with."""
WINDOW = 10
"""Last tokens of the target's that are encoded again together with a guess."""


class DraftTranscript:
    """Of one request."""

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
        """The draft's, never none."""
        written = [*self._settled, *self._mapping.draft.tokenizer.encode_fragment(self._tail)]
        return written or list(self._fallback_tokens)

    @property
    def pending(self) -> bytes:
        """The beginning of a character, after those tokens."""
        return self._utf8.getstate()[0]

    @property
    def window(self) -> bytes:
        """The text of the last few tokens of the target's, from a whole character on, `pending` at its end."""
        pieces = [self._tokenizer.piece(token) for token in self._recent[-WINDOW:]]
        while pieces and _continues(pieces[0]):
            del pieces[0]
        return b"".join(pieces)

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens of the target's were committed."""
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
        """The first text as the draft would have it, which may put a space before it."""
        wanted = self._mapping.draft.tokenizer.adds_prefix_space
        if wanted == self._tokenizer.adds_prefix_space:
            return text
        return " " + text if wanted else text.removeprefix(" ")

    def _settle(self, length: int) -> None:
        self._settled += self._mapping.draft.tokenizer.encode_fragment(self._tail[:length])
        self._tail = self._tail[length:]

    def _settle_all(self) -> None:
        """What comes next has nothing to do with the text before."""
        self._add(self._utf8.decode(b"", final=True))
        self._settle(len(self._tail))
        self._recent.clear()


def _continues(piece: bytes) -> bool:
    """Whether these bytes begin in the middle of a character."""
    return not piece or 0x80 <= piece[0] < 0xC0


def _word_start(text: str, most: int) -> int:
    """Where the last word begins among the first `most` characters, with the space before it; `most` if none does."""
    starts = (i for i in range(most, 0, -1) if text[i].isspace() and not text[i - 1].isspace())
    return next(starts, most)
