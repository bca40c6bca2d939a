"""The HTTP bodies that requests of gRPC clients correspond to."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from paceline.v1 import inference_pb2 as pb
from paceline.wire.field_codec import set_fields
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.generation.bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from paceline_services.gateway.http.json_body import Json

STRUCTURES = frozenset(field.name for field in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["structure"].fields)
CONVERTED_FIELDS = frozenset({"text", "tokens", "chat", "sampling", "speculative"}) | STRUCTURES
"""Fields of `GenerateRequest` that the HTTP body has in another form. It has all others under the same names."""


def generation_body(request: pb.GenerateRequest) -> GenerationBody:
    """The HTTP body that a request corresponds to. Raises `InvalidRequestError`."""
    fields = _body_fields(request)
    try:
        match request.WhichOneof("prompt"):
            case "text":
                return CompletionBody.model_validate(fields | {"prompt": request.text})
            case "tokens":
                return CompletionBody.model_validate(fields | {"prompt": list(request.tokens.token_ids)})
            case "chat":
                if "logprobs" in fields:
                    fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
                return ChatBody.model_validate(fields | _chat_fields(request.chat))
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error
    raise InvalidRequestError("one of text, tokens and chat must be set", param="prompt")


def tokenize_body(request: pb.TokenizeRequest) -> TokenizeTextBody | TokenizeChatBody:
    """As `generation_body`, for `Tokenize`."""
    given = request.HasField("add_special_tokens")
    fields: Json = {"add_special_tokens": request.add_special_tokens} if given else {}
    try:
        match request.WhichOneof("prompt"):
            case "text":
                return TokenizeTextBody.model_validate(fields | {"prompt": request.text})
            case "chat":
                return TokenizeChatBody.model_validate(fields | _chat_fields(request.chat))
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error
    raise InvalidRequestError("one of text and chat must be set", param="prompt")


def _body_fields(request: pb.GenerateRequest) -> Json:
    """The fields of the HTTP body, without its prompt."""
    given, speculative = set_fields(request), set_fields(request.speculative)
    return {
        "max_tokens": CompletionBody.default_max_tokens,
        **set_fields(request.sampling),
        **{name: value for name, value in given.items() if name not in CONVERTED_FIELDS},
        "structured_outputs": _structure(request),
        "speculation_stats": speculative.pop("report", False),
        "speculative": speculative or None,
    }


def _structure(request: pb.GenerateRequest) -> Json | None:
    """The HTTP body's `structured_outputs`."""
    match request.WhichOneof("structure"):
        case None:
            return None
        case "json_schema":
            return {"json": request.json_schema}
        case "choice":
            return {"choice": list(request.choice.texts)}
        case kind:
            return {kind: getattr(request, kind)}


def _chat_fields(chat: pb.GenerateRequest.Chat) -> Json:
    """The HTTP body's fields, most of which have the same names. Raises `InvalidRequestError`."""
    fields = set_fields(chat)
    if "tool_name" in fields:
        fields["tool_choice"] = {"type": "function", "function": {"name": fields.pop("tool_name")}}
    tools = [_tool(tool, index) for index, tool in enumerate(chat.tools)]
    return {**fields, "messages": [_message(message) for message in chat.messages], "tools": tools}


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
