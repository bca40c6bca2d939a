"""Token ids to text, a few at a time, each token costing the same however long the text is."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from paceline.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes the continuation of a prompt. A character appears with its last byte, never half of it.

    Fed all at once or token by token, the texts join to the same: what the tokenizer decodes after another
    token (so a space at the very start stays). One difference is meant: in a run of byte tokens, one of them
    invalid, only the invalid bytes become U+FFFD, where `tokenizers` would take back the whole run.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._pieces = tokenizer.visible_pieces if skip_special_tokens else tokenizer.pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        known = len(self._pieces)
        # A model may have more logits than its tokenizer has tokens; such an id stands for nothing.
        return self._utf8.decode(b"".join([self._pieces[token] for token in tokens if token < known]))

    def flush(self) -> str:
        """No more tokens come: U+FFFD for a character that remained incomplete."""
        return self._utf8.decode(b"", final=True)
