"""Types of fields that say what a text must be."""

from __future__ import annotations

from typing import Annotated, Any, Protocol, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import from_json, to_json

from paceline.config.sampling_params import MAX_GRAMMAR_LENGTH
from paceline.text import Tokenizer

ANY_OBJECT: dict[str, Any] = {"type": "object"}


class GrammarSource(Protocol):
    """What a client wrote, of which a grammar is made."""

    @property
    def field(self) -> str:
        """The field to name when the grammar cannot be compiled."""

    def identity(self) -> bytes:
        """Different for different grammars of one vocabulary."""

    def to_grammar(self, tokenizer: Tokenizer) -> str:
        """The grammar for a model with this tokenizer; "": any text. Raises `GrammarError`."""


def parsed(value: Any) -> Any:
    """A JSON text as its value. Raises ValueError, also for JSON that is nested too deep."""
    return from_json(value) if isinstance(value, str) else value


def _parsed_schema(value: Any) -> Any:
    value = parsed(value)
    if not isinstance(value, dict | bool):
        raise ValueError("must be an object")
    return value


T = TypeVar("T")


def within_limit(value: T) -> T:
    """Checks the length as JSON, which is quick: the grammar is never shorter."""
    if (length := len(to_json(value).decode())) > MAX_GRAMMAR_LENGTH:
        raise ValueError(f"{length} characters, {MAX_GRAMMAR_LENGTH} are the most")
    return value


Schema = Annotated[dict[str, Any] | bool, BeforeValidator(_parsed_schema), AfterValidator(within_limit)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
