"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`, with Anthropic's fields. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paceline_services.gateway.anthropic.content_blocks import InputMessage, LenientBody, Texts
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.generation.bodies import (
    INT32_MAX,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    SpeculativeLimits,
    as_speculative,
)
from paceline_services.gateway.http.json_body import Body, Unsupported
from paceline_services.gateway.structured.structural_tag import Schema

MAX_INPUT_MESSAGES = 100_000
"""Anthropic's limit; chat completions have a lower one."""
MIN_THINKING_BUDGET = 1024

Ignored = Annotated[Any, Field(description="accepted as Anthropic does; has no effect here")]
StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class ClientTool(LenientBody):
    """A tool that the client runs. The others, which Anthropic defines or runs, have other types."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ClientToolChoice(LenientBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ClientToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise InvalidRequestError("tool_choice.name is needed with type tool, and only then", param="tool_choice")
        return self


class ThinkingConfig(LenientBody):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[
        int | None, Field(ge=MIN_THINKING_BUDGET, description="accepted as Anthropic does; max_tokens alone is a limit")
    ] = None
    display: Literal["summarized", "omitted"] | None = None


class JsonOutputFormat(LenientBody):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(LenientBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class RequestMetadata(LenientBody):
    user_id: Annotated[str | None, Field(description="requests with the same one go to the same target")] = None


class CountTokensBody(Body):
    """What decides the prompt."""

    model: str
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_INPUT_MESSAGES)
    system: Texts | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ClientToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[JsonOutputFormat | None, Field(description="the older name of output_config.format")] = (
        None
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="as in chat completions")] = None
    compaction: Unsupported = None
    container: Unsupported = None
    mcp_servers: Unsupported = None
    thread: Unsupported = None

    billing_policy: Ignored = None
    cache_control: Ignored = None
    context_management: Ignored = None
    diagnostics: Ignored = None
    fallbacks: Ignored = None
    inference_geo: Ignored = None
    service_tier: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None

    @model_validator(mode="after")
    def _choosable(self) -> CountTokensBody:
        choice, names = self.tool_choice, [tool.name for tool in self.tools or ()]
        if choice is not None and choice.type == "any" and not names:
            raise InvalidRequestError("tool_choice any needs tools", param="tool_choice")
        if choice is not None and choice.name is not None and choice.name not in names:
            raise InvalidRequestError(f"tool_choice.name: no tool is called {choice.name!r}", param="tool_choice.name")
        return self

    @property
    def thinks(self) -> bool:
        """Whether the client wants the model to reason. As in Anthropic's API it must ask for it."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def json_format(self) -> JsonOutputFormat | None:
        """The schema of the output."""
        return (self.output_config.format if self.output_config else None) or self.output_format


class MessagesBody(CountTokensBody):
    max_tokens: int = Field(ge=1)
    stream: bool | None = False
    stop_sequences: Annotated[list[StopSequence] | None, Field(max_length=MAX_STOPS)] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, le=INT32_MAX)
    metadata: RequestMetadata | None = None
    seed: Annotated[int | None, Field(description="as in chat completions")] = None
    speculative: Annotated[
        SpeculativeLimits | None, BeforeValidator(as_speculative), Field(description="as in chat completions")
    ] = None

    @property
    def omits_thinking(self) -> bool:
        """Whether a block with a signature alone stands for reasoning."""
        return self.thinking is not None and self.thinking.display == "omitted"
