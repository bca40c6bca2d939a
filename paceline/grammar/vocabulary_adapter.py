"""A vocabulary in llguidance's form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llguidance import LLTokenizer, TokenizerWrapper

END_NAME = b"< >"
"""The name of the additional token: grammars cannot write it, since a special token's name has no space there."""


def grammar_vocabulary(pieces: Sequence[bytes], special_ids: Iterable[int], size: int) -> LLTokenizer:
    """`size` token ids with these texts, and one additional token, the end of a text, whose id is `size`.

    Ids beyond `pieces` have no text. Grammars allow special tokens and tokens without text only by their ids.
    """
    return LLTokenizer(TokenizerWrapper(_VocabularyAdapter(pieces, special_ids, size)))


class _VocabularyAdapter:
    """What llguidance reads of a tokenizer."""

    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes], special_ids: Iterable[int], size: int) -> None:
        unused = [b""] * (size - len(pieces))
        self.eos_token_id = size
        self.tokens = [*pieces, *unused, END_NAME]
        self.special_token_ids = [*(token for token in special_ids if token < size), size]

    def __call__(self, text: bytes) -> list[int]:
        """Tokenizing is only needed for forced text, which is switched off."""
        return []
