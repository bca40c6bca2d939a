"""The target's tokens for drafted text, as far as text after it is unlikely to change them.

More text can change how the end of a text is encoded: the tokens of ` hello` need not begin with those of ` hel`. So
the last token is left out, and tokens that one more letter would change. If the draft's path ends with the same token,
that token stays.
"""

from __future__ import annotations

import bisect
import codecs
import itertools
from collections.abc import Sequence

from paceline.text import Tokenizer

PROBE_CHARACTER = "a"


class StableTokens:
    """Finds the stable tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, text: bytes, after: bytes, last: int = -1, *, final: bool = False) -> list[tuple[int, int]]:
        """The stable tokens of `text`, each with the number of bytes of `text` up to its end.

        `after`: the text before, which is whole tokens and begins with a whole character; `text` may complete its last
        character. `last`: a token that is stable at the end. `final`: no text follows, so all tokens are stable. The
        result is empty if the tokenizer changes the text.
        """
        together = self._stable(after + text, last, final=final)
        ends = self._ends(together)
        if len(after) in (0, *ends):
            start = bisect.bisect_right(ends, len(after))
            return [(token, end - len(after)) for token, end in zip(together[start:], ends[start:], strict=True)]
        # The text before has other tokens than this tokenizer's, or a token spans its end. Then `text` is encoded
        # alone, which gives nothing if it begins inside a character.
        alone = self._stable(text, last, final=final)
        return list(zip(alone, self._ends(alone), strict=True))

    def _stable(self, text: bytes, last: int, *, final: bool) -> list[int]:
        """The stable tokens of a whole text. An incomplete character at its end is left out."""
        try:
            readable = codecs.getincrementaldecoder("utf-8")().decode(text)
        except UnicodeDecodeError:
            return []
        tokens = self._tokenizer.encode_fragment(readable)
        if b"".join(map(self._tokenizer.piece, tokens)) != readable.encode():
            return []
        if final or tokens[-1:] == [last]:
            return tokens
        more = self._tokenizer.encode_fragment(readable + PROBE_CHARACTER)
        return tokens[: min(common_prefix_length(tokens, more), max(0, len(tokens) - 1))]

    def _ends(self, tokens: Sequence[int]) -> list[int]:
        return list(itertools.accumulate(len(self._tokenizer.piece(token)) for token in tokens))


def common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)
