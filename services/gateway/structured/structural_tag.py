"""Structural tags: free text with parts that a grammar binds, such as tool calls in the middle of an answer.

The bodies are those of vLLM and SGLang: `structures` with `triggers`, and the `format` objects of xgrammar. Texts that
are special tokens of the model stand for these tokens.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from paceline_services.gateway.field_types import TEXT, TEXTS, Body, Unsupported, any_of, as_string_list, type_tag
from paceline_services.gateway.structured.structure_fields import ANY_OBJECT, GrammarText, Schema, within_limit


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
