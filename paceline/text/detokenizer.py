"""Token ids to text, incrementally, at a constant cost per token; and the stop strings that end the text."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from paceline.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes the continuation of a prompt. A character appears with its last byte, never half of it.

    The text does not depend on how the tokens are cut. It is the text that the tokenizer decodes after another token,
    so a leading space is kept. One difference is intended: of byte tokens in a row, only the invalid bytes become
    U+FFFD; `tokenizers` would replace the whole row.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: Collection[int] = ()) -> None:
        """`shown`: special tokens that become text even if the others are skipped."""
        self._pieces = tokenizer.visible_pieces if skip_special_tokens else tokenizer.pieces
        self._shown = {token: tokenizer.piece(token) for token in shown}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        known = len(self._pieces)
        # A model may have more logits than its tokenizer has tokens; such ids have no text.
        pieces = [self._shown.get(token, self._pieces[token]) for token in tokens if token < known]
        return self._utf8.decode(b"".join(pieces))

    def flush(self) -> str:
        """End the text: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Searches text that arrives in parts, and holds back only text that may be the start of a stop string.

    Of several stop strings, the first one to be complete counts; of those complete at the same character, the longest.
    So the outcome does not depend on how the text is cut.
    """

    found: str | None = None
    """The first stop string in the text."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` may be empty; a stop string may not."""
        self._stops = tuple(stops)
        self._beginnings = frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))
        self._longest = max(map(len, stops), default=1) - 1
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text; return the text that can be shown now. When `found` is set, all text before it is shown."""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        shown = len(text) - self._undecided(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """End the text; return the text held back, which is no stop string."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return size
        return 0
