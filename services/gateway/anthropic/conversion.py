"""From a body of Anthropic's API to the chat completion that it asks for."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ValidationError

from paceline_services.gateway.anthropic.bodies import (
    ClientTool,
    ClientToolChoice,
    CountTokensBody,
    MessagesBody,
)
from paceline_services.gateway.anthropic.conversation import chat_messages
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.generation.bodies import SHARED_FIELDS, ChatBody
from paceline_services.gateway.http.json_body import Json

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""The levels that chat templates know."""
FIELDS = (
    (r"^messages\b.*", "messages"),
    (r"^stop\b", "stop_sequences"),
    (r"^response_format(\.json_schema)?", "output_config.format"),
    (r"^(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"^(tools\[\d+\])\.function", r"\1"),
    (r"^prompt_cache_key$", "metadata.user_id"),
)
"""Fields of chat completions, as patterns, and what they are called here."""


class MessagesChatBody(ChatBody):
    """Agents ask for more tokens than small contexts hold. Anthropic's API gives them what there is."""

    cuts_output: ClassVar[bool] = True


def chat_body(body: CountTokensBody) -> MessagesChatBody:
    """The chat completion. Errors name its own fields: see `FIELDS`."""
    fields = _prompt_fields(body) | (_generation_fields(body) if isinstance(body, MessagesBody) else {})
    try:
        return MessagesChatBody.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error


def _prompt_fields(body: CountTokensBody) -> Json:
    messages = chat_messages(body.system or (), body.messages)
    if not messages or messages[-1]["role"] == "system":
        raise InvalidRequestError("messages: one with role user is needed", param="messages")
    tools = [_tool(each) for each in body.tools or ()] or None
    choice = body.tool_choice
    return {
        "model": body.model,
        "messages": messages,
        "tools": tools,
        "tool_choice": _tool_choice(choice) if tools and choice else None,
        "parallel_tool_calls": False if tools and choice and choice.disable_parallel_tool_use else None,
        "chat_template_kwargs": _template_variables(body),
        "include_reasoning": body.thinks,
        **_continuation(messages[-1]),
    }


def _generation_fields(body: MessagesBody) -> Json:
    json_format = body.json_format
    schema = None if json_format is None else {"name": "output", "schema": json_format.schema_}
    return {
        "max_tokens": body.max_tokens,
        "stream": bool(body.stream),
        "stop": body.stop_sequences or None,
        **{name: getattr(body, name) for name in SHARED_FIELDS & type(body).model_fields.keys()},
        "speculative": body.speculative,
        "prompt_cache_key": None if body.metadata is None else body.metadata.user_id,
        "response_format": None if schema is None else {"type": "json_schema", "json_schema": schema},
    }


def _tool(tool: ClientTool) -> Json:
    optional = {"description": tool.description, "strict": tool.strict}
    given = {name: value for name, value in optional.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema, **given}}


def _tool_choice(choice: ClientToolChoice) -> str | Json:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return TOOL_CHOICES[choice.type]


def _template_variables(body: CountTokensBody) -> Json:
    """Reasoning is switched by the variables that families of models use for it; a template ignores other families'.

    `reasoning_effort` as a variable has no effect where the template does not know it. As the field of chat completions
    it would be refused there, but clients send an effort whatever the model is.
    """
    variables: Json = {"enable_thinking": body.thinks, "thinking": body.thinks}
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = EFFORTS[body.output_config.effort]
    return variables | (body.chat_template_kwargs or {})


def _continuation(last: Json) -> Json:
    """The output continues the last message, if it is the assistant's."""
    if last["role"] != "assistant":
        return {}
    if not last["content"] or "tool_calls" in last:
        raise InvalidRequestError("messages: the assistant's last one has no text to continue", param="messages")
    return {"continue_final_message": True, "add_generation_prompt": False}
