"""Between text and token ids: tokenizer, chat template, decoding, stop strings. Needs no torch."""

from paceline.text.chat import ChatTemplate, ChatTemplateError
from paceline.text.detokenizer import Detokenizer
from paceline.text.stops import StopStrings
from paceline.text.tokenizer import Tokenizer, vocabulary_fingerprint

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "Detokenizer",
    "StopStrings",
    "Tokenizer",
    "vocabulary_fingerprint",
]
