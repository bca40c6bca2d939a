"""The text of a model's tokens, in llguidance's form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

from llguidance import LLTokenizer, TokenizerWrapper

from paceline.grammar.json_schema import GrammarError
from paceline.model_names import ModelNotFoundError
from paceline.text import Tokenizer, TokenTexts, token_texts

SLICES = [r'[^"\\\x00-\x1F\x7F]{1,30}']
"""Tokens of which llguidance finds in advance that they may stand inside a JSON string. Its default has four such
sets: masks take as long with this one (0.06 ms on average), and the vocabulary half the time (0.2 s, not 0.4 s, for
152,000 tokens)."""


class GrammarVocabulary:
    """Made once, in a thread of its own. The thread holds Python's global lock for up to a second: if a request's first
    grammar began it, all streams would stop. So an engine waits for it before it serves."""

    def __init__(self, texts: Callable[[], TokenTexts | Tokenizer]) -> None:
        """`texts` is called in that thread."""
        self._texts = texts

    @classmethod
    def of(cls, model: str) -> GrammarVocabulary:
        """`model`: a name, see `paceline.model_names`."""
        return cls(lambda: token_texts(model))

    @cached_property
    def made(self) -> Future[LLTokenizer]:
        """The vocabulary, which the first use begins to make. `GrammarError` if the text of the tokens is unknown."""
        thread = ThreadPoolExecutor(1, "grammar vocabulary")
        making = thread.submit(self._make)
        thread.shutdown(wait=False)
        return making

    @property
    def end(self) -> int:
        """llguidance's token for the end of a text, behind those of the model's tokens that have text."""
        return self.made.result().vocab_size - 1

    def _make(self) -> LLTokenizer:
        try:
            texts = self._texts()
            wrapper = TokenizerWrapper(_VocabularyAdapter(texts.pieces, texts.special_ids))
            return LLTokenizer(wrapper, slices=SLICES)
        except (ModelNotFoundError, ValueError) as error:
            raise GrammarError(f"this model cannot follow grammars: {error}") from error


class _VocabularyAdapter:
    """A vocabulary in llguidance's form, with one additional token: the end of a text."""

    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes], special_ids: Iterable[int]) -> None:
        self.eos_token_id = len(pieces)
        self.tokens = [*pieces, b"<end>"]
        self.special_token_ids = [*special_ids, self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        """Tokenizing is only needed for forced text, which is switched off."""
        return []
