"""Structural tags: free text with parts that a grammar binds, such as tool calls in the middle of an answer.

The bodies are those of vLLM and SGLang: `structures` with `triggers`, and the `format` objects of xgrammar. Texts that
are special tokens of the model stand for these tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import from_json, to_json

from paceline.config.sampling_params import MAX_GRAMMAR_LENGTH
from paceline.text import Tokenizer
from paceline_services.gateway.http.json_body import TEXT, TEXTS, Body, Unsupported, any_of, as_string_list, type_tag

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


class ConstStringFormat(Body):
    """This text."""

    type: Literal["const_string"]
    value: str


class JsonSchemaFormat(Body):
    """JSON that the schema describes."""

    type: Literal["json_schema"]
    json_schema: Schema
    style: Literal["json"] = "json"
    any_order: Unsupported = None


class RegexFormat(Body):
    """Text that the expression matches from end to end."""

    type: Literal["regex"]
    pattern: GrammarText
    excludes: Unsupported = None


class AnyTextFormat(Body):
    """Any text, up to the end of the tag around it."""

    type: Literal["any_text"]
    excludes: Unsupported = None
    max_tokens: Unsupported = None


class SequenceFormat(Body):
    """One element after another. Only the last one may have no end of its own."""

    type: Literal["sequence"]
    elements: list[Format] = Field(min_length=1)


class OrFormat(Body):
    """One of the elements."""

    type: Literal["or"]
    elements: list[Format] = Field(min_length=1)


class TagFormat(Body):
    """`begin`, the content, and `end`, or one of several ends."""

    type: Literal["tag"] = "tag"
    begin: str
    content: Format
    end: Annotated[list[str], BeforeValidator(as_string_list), Field(min_length=1), any_of(TEXT, TEXTS)]


class TriggeredTagsFormat(Body):
    """Any text, in which a trigger has to go on as a tag that begins with it.

    `at_least_one`: the text begins with a tag. `stop_after_first`: it ends with its first tag.
    """

    type: Literal["triggered_tags"]
    triggers: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)
    tags: list[TagFormat] = Field(min_length=1)
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Unsupported = None


Format = Annotated[
    Annotated[ConstStringFormat, Tag("[const_string]")]
    | Annotated[JsonSchemaFormat, Tag("[json_schema]")]
    | Annotated[RegexFormat, Tag("[regex]")]
    | Annotated[AnyTextFormat, Tag("[any_text]")]
    | Annotated[SequenceFormat, Tag("[sequence]")]
    | Annotated[OrFormat, Tag("[or]")]
    | Annotated[TagFormat, Tag("[tag]")]
    | Annotated[TriggeredTagsFormat, Tag("[triggered_tags]")],
    Discriminator(type_tag),
]

SequenceFormat.model_rebuild()
OrFormat.model_rebuild()
TagFormat.model_rebuild()
TriggeredTagsFormat.model_rebuild()


class TagStructure(Body):
    """The older form of a tag with JSON in it."""

    begin: str
    schema_: Schema = Field(ANY_OBJECT, alias="schema", validate_default=False)
    end: str


class StructuralFields(Body):
    """The two forms of a structural tag."""

    format: Annotated[Format | None, BeforeValidator(within_limit)] = None
    structures: Annotated[list[TagStructure] | None, BeforeValidator(within_limit)] = Field(None, min_length=1)
    triggers: Annotated[list[Annotated[str, Field(min_length=1)]] | None, BeforeValidator(within_limit)] = Field(
        None, min_length=1
    )

    def structural_format(self) -> Format:
        """Either form as a format. Raises ValueError if there is not exactly one."""
        if self.format is not None and self.structures is None and self.triggers is None:
            return self.format
        if self.structures is None or self.triggers is None or self.format is not None:
            raise ValueError("a structural tag has either a format, or structures and triggers")
        tags = [
            TagFormat(
                begin=each.begin,
                content=JsonSchemaFormat(type="json_schema", json_schema=each.schema_),
                end=[each.end],
            )
            for each in self.structures
        ]
        return TriggeredTagsFormat(type="triggered_tags", triggers=self.triggers, tags=tags)


class StructuralTag(StructuralFields):
    """A structural tag as an object of its own."""

    type: Literal["structural_tag"] = "structural_tag"

    @model_validator(mode="after")
    def _whole(self) -> StructuralTag:
        self.structural_format()
        return self
