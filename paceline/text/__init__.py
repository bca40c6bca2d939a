"""Text and token ids: tokenizer, chat template, detokenizer, stop strings. Imports no torch."""

from paceline.text.chat_template import ChatTemplate, ChatTemplateError
from paceline.text.detokenizer import Detokenizer, StopStrings
from paceline.text.tokenizer import Tokenizer, TokenTexts, token_texts, vocabulary_fingerprint

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "Detokenizer",
    "StopStrings",
    "TokenTexts",
    "Tokenizer",
    "token_texts",
    "vocabulary_fingerprint",
]
