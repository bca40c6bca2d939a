"""The body of `POST /v1/responses`: OpenAI's fields, and vLLM's further ones. Unknown fields are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, create_model, model_validator

from paceline_services.gateway.api_errors import MAX_ECHOED, InvalidRequestError
from paceline_services.gateway.generation.bodies import MAX_MESSAGES, SHARED_FIELDS, ChatBody, ReasoningEffort
from paceline_services.gateway.http.json_body import TEXT, UNUSED, Body, Json, Unsupported, Unused, any_of, type_tag
from paceline_services.gateway.responses.input_items import OBJECTS, InputItem, ItemId
from paceline_services.gateway.structured.output import JsonSchema

MAX_METADATA = 16
LOG_PROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""
PASSED_ON = (SHARED_FIELDS - {"prompt_logprobs"}) | {
    "bad_words",
    "cache_salt",
    "chat_template_kwargs",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "parallel_tool_calls",
    "priority",
    "prompt_cache_key",
    "skip_special_tokens",
    "speculation_stats",
    "speculative",
    "stop",
    "stop_token_ids",
    "structured_outputs",
}
"""Fields that a chat completion has, too, under the same names and with the same meaning. A response has no place for
log-probabilities of the prompt."""

if TYPE_CHECKING:

    class ChatFieldsPassedOn(Body):
        include_reasoning: bool | None
        parallel_tool_calls: bool | None
        prompt_cache_key: str | None
        speculation_stats: bool
else:
    ChatFieldsPassedOn = create_model(
        "ChatFieldsPassedOn",
        __base__=Body,
        **{name: (field.annotation, field) for name, field in ChatBody.model_fields.items() if name in PASSED_ON},
    )


def _function_only(kind: Any) -> Any:
    if kind != "function":
        raise ValueError(f"{str(kind)[:MAX_ECHOED]!r} is not supported, only function")
    return kind


class FunctionDeclaration(Body):
    """A tool."""

    type: Annotated[Literal["function"], BeforeValidator(_function_only)]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    output_schema: Unused = None
    defer_loading: Unsupported = None

    def as_chat_tool(self) -> Json:
        """The tool as chat completions have it."""
        fields = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        given = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **given}}


def _without_search(tools: Any) -> Any:
    """Without OpenAI's search in the web, which agents offer unasked: nothing here can run it."""
    if not isinstance(tools, list):
        return tools
    return [each for each in tools if not (isinstance(each, dict) and each.get("type") == "web_search")]


class FunctionChoice(Body):
    type: Annotated[Literal["function"], BeforeValidator(_function_only)]
    name: str


class AllowedTools(Body):
    """The model may call these tools only."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice] = Field(min_length=1)


def _check_choice(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else "mode"
    if kind not in ("mode", "function", "allowed_tools"):
        raise ValueError(f"type {str(kind)[:MAX_ECHOED]!r} is not supported, only function and allowed_tools")
    return value


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[mode]")]
    | Annotated[FunctionChoice, Tag("[function]")]
    | Annotated[AllowedTools, Tag("[allowed_tools]")],
    Discriminator(lambda value: type_tag(value) or "[mode]"),
    BeforeValidator(_check_choice),
]


class TextFormat(JsonSchema):
    """`text.format`: `response_format` of chat completions with the schema's fields beside the type."""

    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _whole(self) -> TextFormat:
        if (self.type == "json_schema") != ("schema_" in self.model_fields_set):
            raise InvalidRequestError(
                "text.format.schema is needed with type json_schema, and only then", param="text.format.schema"
            )
        return self

    def as_response_format(self) -> Json:
        """The format as chat completions have it."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = self.model_dump(by_alias=True, exclude_unset=True, exclude={"type"})
        return {"type": self.type, "json_schema": schema}


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Unused = None


class ReasoningOptions(Body):
    effort: ReasoningEffort | None = None
    summary: Annotated[Unused, Field(description="accepted; reasoning is returned as it is, never summarised")] = None
    generate_summary: Unused = None
    context: Unused = None
    mode: Unused = None


class ResponseStreamOptions(Body):
    include_obfuscation: Unused = None


def _as_items(value: Any) -> Any:
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


class ResponseBody(ChatFieldsPassedOn):
    model: str | None = None
    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(_as_items),
        any_of(TEXT, OBJECTS),
    ]
    instructions: str | None = None
    previous_response_id: ItemId | None = None
    tools: Annotated[list[FunctionDeclaration] | None, BeforeValidator(_without_search)] = None
    tool_choice: ResponseToolChoice | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: (
        list[
            Literal[
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "web_search_call.action.sources",
                "web_search_call.results",
            ]
        ]
        | None
    ) = Field(None, description="only message.output_text.logprobs has an effect")
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=MAX_METADATA
    )
    store: Annotated[bool | None, Field(description="keep the response, for previous_response_id")] = None
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    background: Annotated[bool | None, Field(description="answer at once; the response is read later")] = None

    client_metadata: Unused = None
    conversation: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None
    prompt: Unsupported = None
    max_tool_calls: Annotated[int | None, UNUSED] = None
    prompt_cache_options: Unused = None
    prompt_cache_retention: Unused = None
    safety_identifier: Annotated[str | None, UNUSED] = None
    service_tier: Unused = None
    user: Annotated[str | None, UNUSED] = None

    @model_validator(mode="after")
    def _kept_in_background(self) -> ResponseBody:
        if self.background and not self.to_be_kept:
            raise InvalidRequestError("background: it takes store: true", param="background")
        return self

    @property
    def to_be_kept(self) -> bool:
        """Whether the client wants the response to be kept; that is the default."""
        return self.store is not False

    @property
    def returns_log_probs(self) -> bool:
        return LOG_PROBS in (self.include or ())
