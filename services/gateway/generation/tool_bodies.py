"""Tools of a request, and the choice among them. As in OpenAI's API, unknown fields are refused in here, too."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from paceline_services.gateway.http.json_body import Body, Unused

MAX_TOOLS = 128
"""OpenAI's limit."""
MAX_TOOL_CHARACTERS = 262_144
"""Of all tools of a request as compact JSON: the chat template writes them into the prompt."""
MAX_NAME_LENGTH = 64

FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]+$", max_length=MAX_NAME_LENGTH)]


def _check_parameters(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    if schema is not None and schema.get("type", "object") != "object":
        raise ValueError("must be a schema whose type is object")
    return schema


class FunctionDefinition(Body):
    name: FunctionName
    description: str | None = None
    parameters: Annotated[
        dict[str, Any] | None, AfterValidator(_check_parameters), Field(description="a JSON schema of type object")
    ] = None
    strict: Annotated[
        bool | None, Field(description="false: leave out what forced calls cannot be kept to, and say so")
    ] = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Unused = None

    def for_template(self) -> dict[str, Any]:
        """The tool for a chat template. Many read a description and parameters without asking whether there are any."""
        function = self.function.model_dump(exclude_unset=True, exclude_none=True)
        defaults = {"name": self.function.name, "description": "", "parameters": {"type": "object", "properties": {}}}
        return {"type": self.type, "function": {**defaults, **function}}


def _check_size(tools: list[Tool]) -> list[Tool]:
    characters = sum(len(tool.model_dump_json(exclude_unset=True)) for tool in tools)
    if characters > MAX_TOOL_CHARACTERS:
        raise ValueError(f"{characters} characters together, at most {MAX_TOOL_CHARACTERS} are possible")
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_check_size)]


class NamedFunction(Body):
    name: FunctionName


class NamedToolChoice(Body):
    """The model must call this function."""

    type: Literal["function"]
    function: NamedFunction


def _kind_of_choice(value: Any) -> str:
    return "[function]" if isinstance(value, dict | NamedToolChoice) else "[mode]"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[mode]")] | Annotated[NamedToolChoice, Tag("[function]")],
    Discriminator(_kind_of_choice),
]
"""The tags are in brackets, so that `field_path` leaves them out."""
