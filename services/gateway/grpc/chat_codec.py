"""Chats of gRPC clients as the fields of the HTTP body, and their outputs as responses."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from paceline.output_processor import TextDelta
from paceline.parsing import Content, Reasoning, ToolArguments, ToolCall
from paceline.v1 import inference_pb2 as pb
from paceline.wire.field_codec import set_fields
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.field_types import Json
from paceline_services.gateway.generation.chat_output import ChatOutput


def chat_fields(chat: pb.GenerateRequest.Chat) -> Json:
    """The HTTP body's fields, most of which have the same names. Raises `InvalidRequestError`."""
    fields = set_fields(chat)
    if "tool_name" in fields:
        fields["tool_choice"] = {"type": "function", "function": {"name": fields.pop("tool_name")}}
    tools = [_tool(tool, index) for index, tool in enumerate(chat.tools)]
    return {**fields, "messages": [_message(message) for message in chat.messages], "tools": tools}


def add_parts(response: pb.GenerateResponse, delta: TextDelta, output: ChatOutput) -> None:
    """Add a chat's delta to a response: text, reasoning and calls."""
    for event in output.events(delta):
        match event:
            case Content(text):
                response.text += text
            case Reasoning(text):
                response.reasoning += text
            case ToolCall(index, name):
                response.tool_calls.add(index=index, id=output.call_id(index), name=name)
            case ToolArguments(index, text):
                response.tool_calls.add(index=index, arguments=text)


def _message(message: pb.GenerateRequest.Chat.Message) -> Json:
    fields: Json = {"role": message.role, "content": message.content}
    fields |= {name: getattr(message, name) for name in ("tool_call_id", "reasoning") if message.HasField(name)}
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields


def _tool(tool: pb.Tool, index: int) -> Json:
    function = {name: getattr(tool, name) for name in ("description", "strict") if tool.HasField(name)}
    if tool.HasField("parameters"):
        function["parameters"] = _schema(tool.parameters, f"tools[{index}].function.parameters")
    return {"type": "function", "function": {"name": tool.name, **function}}


def _schema(text: str, param: str) -> Any:
    try:
        return from_json(text)
    except ValueError as error:
        raise InvalidRequestError(f"{param}: is not valid JSON: {error}", param=param) from None
