"""A vocabulary small enough for the peaked Llama that can write JSON, and grammars for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from paceline.grammar import (
    grammar_from_choices,
    grammar_from_regex,
    grammar_from_schema,
    grammar_from_text,
    grammar_state,
)
from paceline.grammar.grammar_state import GrammarCompiler
from paceline.grammar.grammar_vocabulary import GrammarVocabulary
from paceline.grammar.lark import limits
from paceline.text import Tokenizer
from tests.helpers.llamas import VOCABULARY

END = 1
"""Ends a text, and is no text."""
PIECES = [
    *("<unused>", "<end>", "{", "}", "[", "]", '"', ":", ",", " ", "\n", ".", "-"),
    *"0123456789",
    *"abcdefghij",
    *('{"', '":', '",', '"}', ": ", ", ", "},", "]}", '": "', '", "', "\n  ", "ab", "abc", "bc", "10", "true", "false"),
    *("tr", "ue", '{"a', '"b', "ca", "de", "l", "s", "t", "r", "u"),
    *("<think>", "</think>", "<call>"),
]
THINK, ANSWER, CALL = (PIECES.index(piece) for piece in ("<think>", "</think>", "<call>"))
"""Special tokens, too."""
assert len(set(PIECES)) == len(PIECES) <= VOCABULARY


def tokenizer() -> Tokenizer:
    backend = Backend(models.WordLevel({piece: id_ for id_, piece in enumerate(PIECES)}, unk_token="<unused>"))
    backend.add_special_tokens(["<unused>", "<end>", "<think>", "</think>", "<call>"])
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, {"eos_token": "<end>"}, None)


def grammars() -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary(tokenizer), VOCABULARY)


def text_of(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens if token != END)


ROW = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 120},
        "b": {"type": "string", "maxLength": 6, "pattern": "^[a-j]*$"},
        "c": {"type": "boolean"},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
TABLE = {"type": "array", "items": ROW, "minItems": 1, "maxItems": 3}
GRAMMARS = {
    "schema": grammar_from_schema(TABLE),
    "compact schema": grammar_from_schema(TABLE, None),
    "any white space": grammar_from_schema({**TABLE, "x-guidance": {"whitespace_flexible": True}}),
    "regex": grammar_from_regex(r"[a-d]{2,9}\.(abc|de)+[0-9]*"),
    "choice": grammar_from_choices(["abc", "abcabc", "de", "true", "[10, 10]"]),
    "special tokens": f'start: /[a-d]{{0,6}}/ (<[{CALL}]> ("ab" | "c" | "[")+)+ <[{ANSWER},{CALL}]> "."',
    "gbnf": grammar_from_text('root ::= "[" item ("," item)* "]"\nitem ::= [a-j]+ | "[" item "]"'),
}

MEMORY = grammar_from_regex("[a-j]*[ae][a-j]{9}b[a-j]{3}")
"""Every text has a lexer state of its own, nearly."""
MARKED_MEMORY = f'start: (/[a-j]*[ae][a-j]{{3}}/ <[{CALL}]> "." )* {MEMORY.removeprefix("start: ")}'
"""The same behind any number of texts that a special token ends."""
AMBIGUOUS = 'start: s\ns: s s | "a" | "b" | "[" s "]" | " "\n'
"""Takes longer the longer it gets, and may end anywhere."""


def tight(fuel: int = 100_000, items: int = 20_000, states: int = 20_000) -> AbstractContextManager[object]:
    """Limits that small grammars hit."""
    rest = {"step_max_items": items, "max_lexer_states": states}
    return patch.multiple(
        grammar_state,
        LIMITS=limits(step_lexer_fuel=fuel, **rest),
        REPLAY_LIMITS=limits(10**8, fuel, **rest),
        PATIENT_LIMITS=limits(10**8, 10 * fuel, **rest),
    )
