"""Text that follows other text, as a tokenizer would write it, and only those of its tokens that are likely to stay.

More text can change how the end of a text is written: ` hel` need not begin the tokens of ` hello`. So the last token
does not count, nor what one more letter would change; unless the draft has the same token, and ended its guess there.
"""

from __future__ import annotations

import bisect
import codecs
import itertools
from collections.abc import Sequence

from paceline.text import Tokenizer

PROBE_CHARACTER = "a"


class StableTokens:
    """Finds them for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, text: bytes, after: bytes, last: int = -1, *, final: bool = False) -> list[tuple[int, int]]:
        """Tokens of `text`, each with how many of its bytes are written then.

        `after`: text before it that is written in whole tokens, from a character's beginning on; `text` may
        complete a character of it. `last`: the token that stays if it is the last one. `final`: nothing follows, so
        that all stay. None come if the tokenizer does not give back what it is given.
        """
        together = self._stable(after + text, last, final=final)
        ends = self._ends(together)
        if len(after) in (0, *ends):
            start = bisect.bisect_right(ends, len(after))
            return [(token, end - len(after)) for token, end in zip(together[start:], ends[start:], strict=True)]
        # The text before was written otherwise than this tokenizer would, or goes on in a token of its own. Alone, the
        # rest of a character is nothing.
        alone = self._stable(text, last, final=final)
        return list(zip(alone, self._ends(alone), strict=True))

    def _stable(self, text: bytes, last: int, *, final: bool) -> list[int]:
        """Of a text on its own. An incomplete character at its end is left out."""
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
    """How many tokens both begin with."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)
