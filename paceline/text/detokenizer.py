"""Token ids to text, incrementally, at a constant cost per token."""

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
