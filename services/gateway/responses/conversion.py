"""A request to the Responses API as a chat completion: both are generated in the same way."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.generation.bodies import ChatBody
from paceline_services.gateway.http.json_body import Json
from paceline_services.gateway.responses.body import PASSED_ON, AllowedTools, FunctionChoice, ResponseBody
from paceline_services.gateway.responses.input_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
)

SYSTEM_ROLES = ("system", "developer")
"""Chat templates of open models know the first one only."""
FIELDS = (
    (r"^messages\b.*", "input"),
    (r"^max_completion_tokens$", "max_output_tokens"),
    (r"^response_format(\.json_schema)?", "text.format"),
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"^(tools\[\d+\]|tool_choice)\.function", r"\1"),
)
"""Fields of chat completions, as patterns, and what they are called here."""


def chat_body(body: ResponseBody, items: Sequence[InputItem]) -> ChatBody:
    """The chat completion that continues these items. Errors name its own fields: see `FIELDS`."""
    fields = body.model_dump(include=set(PASSED_ON), exclude_unset=True, by_alias=True)
    fields |= {"messages": chat_messages(body.instructions, items), "model": body.model}
    optional = {
        "max_completion_tokens": body.max_output_tokens,
        "response_format": body.text.format.as_response_format() if body.text and body.text.format else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
    }
    fields |= {name: value for name, value in optional.items() if value is not None} | _tool_fields(body)
    if body.returns_log_probs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error


def chat_messages(instructions: str | None, items: Sequence[InputItem]) -> list[Json]:
    """The messages that say what the items say. Raises `InvalidRequestError` for a function's output without its call.

    A chat message of the assistant has its reasoning, its text and its function calls together.
    """
    messages = _ChatMessages()
    if instructions is not None:
        messages.add_system(instructions)
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                messages.assistant_without("content", "tool_calls")["content"] = item.text
            case MessageItem() if item.role in SYSTEM_ROLES:
                messages.add_system(item.text)
            case MessageItem():
                messages.all.append({"role": "user", "content": item.text})
            case ReasoningItem():
                messages.add_reasoning(item.text)
            case FunctionCallItem():
                messages.add_call(item)
            case FunctionCallOutputItem():
                messages.add_output(item)
    return [{"content": "", **message} for message in messages.all]


class _ChatMessages:
    def __init__(self) -> None:
        self.all: list[Json] = []
        self._functions: dict[str, str] = {}
        """The function's name by the id of its call."""

    def add_system(self, text: str) -> None:
        """One system message at the beginning: many templates take no second one there."""
        if len(self.all) == 1 and self.all[0]["role"] == "system":
            self.all[0]["content"] += f"\n\n{text}"
        else:
            self.all.append({"role": "system", "content": text})

    def add_reasoning(self, text: str) -> None:
        message = self.assistant_without("content", "tool_calls")
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def add_call(self, call: FunctionCallItem) -> None:
        self._functions[call.call_id] = call.name
        function = {"name": call.name, "arguments": call.arguments}
        calls = self.assistant_without().setdefault("tool_calls", [])
        calls.append({"id": call.call_id, "type": "function", "function": function})

    def add_output(self, output: FunctionCallOutputItem) -> None:
        name = self._functions.get(output.call_id)
        if name is None:
            message = f"input: no function_call before this function_call_output has the call_id {output.call_id!r}"
            raise InvalidRequestError(message, param="input")
        self.all.append({"role": "tool", "tool_call_id": output.call_id, "name": name, "content": output.text})

    def assistant_without(self, *fields: str) -> Json:
        """The last message, if it is the assistant's and has none of the fields, else a new one."""
        if not self.all or self.all[-1]["role"] != "assistant" or self.all[-1].keys() & set(fields):
            self.all.append({"role": "assistant"})
        return self.all[-1]


def _tool_fields(body: ResponseBody) -> Json:
    """`tools` and `tool_choice` as chat completions have them.

    They have no list of allowed tools, so other tools are left out; and they take no choice without tools.
    """
    tools, choice = body.tools, body.tool_choice
    if isinstance(choice, AllowedTools):
        allowed = {each.name for each in choice.tools}
        if unknown := allowed - {each.name for each in tools or ()}:
            message = f"tool_choice.tools: {', '.join(sorted(unknown))}: not among the tools"
            raise InvalidRequestError(message, param="tool_choice.tools")
        tools, choice = [each for each in tools or () if each.name in allowed], choice.mode
    fields: Json = {}
    if tools:
        fields["tools"] = [each.as_chat_tool() for each in tools]
    if isinstance(choice, FunctionChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif tools or choice == "required":
        fields["tool_choice"] = choice
    return fields
