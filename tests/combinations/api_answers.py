"""Requests over HTTP and gRPC, and their answers in a form that can be compared.

An answer is what must not depend on speculation. Left out are ids, times, statistics, which tokens were guessed, and
how many tokens the prefix cache had. The chunks of a stream are joined: speculation cuts it elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from google.protobuf.json_format import MessageToDict

from paceline.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.combinations.request_rules import Combination, Json

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
SAMPLING = inference_pb2.GenerateRequest.Sampling.DESCRIPTOR.fields_by_name
SAME = {
    "n",
    "echo",
    "request_id",
    "truncate_prompt_tokens",
    "priority",
    "stream_interval",
    "cache_salt",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "return_tree",
}
"""Fields that `GenerateRequest` has under the same names."""
CHAT_FIELDS = {"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "include_reasoning"}
IMPLIED = {
    "stream",
    "stream_options",
    "return_token_ids",
    "return_accepted",
    "speculation_stats",
    "top_logprobs",
    "spaces_between_special_tokens",
}
"""What every gRPC response does, or another field says."""


class WrongStreamError(Exception):
    """A stream contradicts itself, or broke off."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`refused`: why the request was, with status 400; then there is no `content`."""

    content: Any = None
    refused: str = ""


@dataclass(slots=True)
class ApiClient:
    """Both APIs of one gateway. `accepted`: guesses that were accepted in all answers."""

    http: httpx.AsyncClient
    stub: Any
    accepted: int = 0

    async def over_http(self, sent: Combination) -> Answer:
        """Raises httpx's errors for any status but 200 and 400, and `WrongStreamError`."""
        response = await self.http.post(PATHS[sent.api], json=sent.body | {"speculation_stats": True})
        if response.status_code == 400:
            return Answer(refused=response.json()["error"]["message"])
        response.raise_for_status()
        if not sent.body.get("stream"):
            return Answer(self._compared(response.json()))
        *events, end = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
        if end != "[DONE]":
            raise WrongStreamError(f"the stream ended with {end}")
        return Answer(self._compared(joined([json.loads(event) for event in events])))

    async def over_grpc(self, request: inference_pb2.GenerateRequest) -> Answer:
        """Raises `AioRpcError` for any status but OK and INVALID_ARGUMENT."""
        try:
            chunks = [
                MessageToDict(each, preserving_proto_field_name=True) async for each in self.stub.Generate(request)
            ]
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            return Answer(refused=error.details() or "")
        choices: dict[int, Json] = {}
        for chunk in chunks:
            for call in chunk.get("tool_calls", []):
                call.pop("id", None)
            for name in ("timings", "accepted", "trees"):
                chunk.pop(name, None)
            if parts := chunk.pop("prompt_log_probs", None):
                chunk["prompt_log_probs"] = [entry for part in parts for entry in part["entries"]]
            self.accepted += int(chunk.pop("speculation", {}).get("accepted_tokens", 0))
            _merge(choices.setdefault(chunk.pop("index", 0), {}), chunk)
        return Answer(choices)

    def _compared(self, answer: Json) -> Json:
        self.accepted += answer.pop("speculation")["accepted_tokens"]
        for name in ("id", "created", "timings"):
            answer.pop(name, None)
        if answer["usage"]:
            answer["usage"].pop("prompt_tokens_details")
        for choice in answer["choices"]:
            for name in ("accepted", "trees"):
                choice.pop(name, None)
            for call in choice.get("message", {}).get("tool_calls", []):
                call.pop("id")
        return answer


@asynccontextmanager
async def api_client(http_url: str, grpc_address: str) -> AsyncIterator[ApiClient]:
    async with (
        httpx.AsyncClient(base_url=http_url, timeout=120.0, trust_env=False) as http,
        grpc.aio.insecure_channel(grpc_address) as channel,
    ):
        yield ApiClient(http, inference_pb2_grpc.InferenceServiceStub(channel))


def joined(chunks: list[Json]) -> Json:
    """The chunks of a stream as one answer. Raises `WrongStreamError` if a chunk's usage is not that of its place."""
    whole: Json = {"usage": None}
    choices: dict[int, Json] = {}
    tokens = 0
    for chunk in chunks:
        if "error" in chunk:
            return {"error": chunk["error"], "usage": None, "choices": [], "speculation": {"accepted_tokens": 0}}
        tokens += sum(len(choice.get("token_ids", ())) for choice in chunk["choices"])
        if (usage := chunk.get("usage")) and usage["completion_tokens"] != tokens:
            raise WrongStreamError(f"usage says {usage['completion_tokens']} after {tokens} tokens")
        for choice in chunk.pop("choices"):
            for call in choice.get("delta", {}).get("tool_calls", []):
                call.pop("id", None)
            _merge(choices.setdefault(choice["index"], {}), choice)
        whole |= {name: value for name, value in chunk.items() if value is not None}
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


def _merge(whole: Json, part: Json) -> None:
    """Append texts and lists of a part, and overwrite everything else. Calls go by their index."""
    for name, value in part.items():
        known = whole.get(name)
        if name == "tool_calls":
            calls = whole.setdefault(name, {})
            for call in value:
                _merge(calls.setdefault(call.get("index", 0), {}), call)
        elif isinstance(value, dict):
            whole[name] = known or {}
            _merge(whole[name], value)
        elif (
            name in ("index", "role", "type", "finish_reason", "stop_reason", "stop_string", "stop_token_id")
            or known is None
        ):
            whole[name] = value if value is not None else known
        elif value is not None:
            whole[name] = known + value


def as_grpc(sent: Combination) -> inference_pb2.GenerateRequest | None:
    """The same request over gRPC; None: gRPC lacks one of its fields."""
    body = {name: value for name, value in sent.body.items() if name not in IMPLIED}
    request = inference_pb2.GenerateRequest()
    if sent.api == "chat" and body.pop("logprobs", False):
        body["logprobs"] = sent.body["top_logprobs"]
    try:
        for name, value in body.items():
            if name in SAMPLING:
                _set(request.sampling, name, value)
            elif name in SAME:
                setattr(request, name, value)
            elif name in CHAT_FIELDS or name == "messages":
                _set_chat(request.chat, name, value)
            elif name == "stop":
                request.stop.extend([value] if isinstance(value, str) else value)
            elif name == "speculative":
                limits = {"enabled": value} if isinstance(value, bool) else value
                request.speculative.CopyFrom(common_pb2.SpeculativeOptions(**limits))
            elif name == "structured_outputs" and len(value) == 1:
                [(kind, structure)] = value.items()
                _set_structure(request, kind, structure)
            elif name == "prompt" and isinstance(value, str):
                request.text = value
            elif name == "prompt" and isinstance(value[0], int):
                request.tokens.token_ids.extend(value)
            else:
                return None
    except ValueError:  # a number that its field does not hold, such as a negative seed
        return None
    request.speculative.report = True
    return request


def _set(sampling: Any, name: str, value: Any) -> None:
    if isinstance(value, dict):
        getattr(sampling, name).update({int(token): bias for token, bias in value.items()})
    elif isinstance(value, list):
        getattr(sampling, name).extend(value)
    else:
        setattr(sampling, name, value)


def _set_structure(request: inference_pb2.GenerateRequest, kind: str, value: Any) -> None:
    if kind == "choice":
        request.choice.texts.extend(value)
    elif kind == "json_object":
        request.json_object = value
    else:
        name = "json_schema" if kind == "json" else kind
        setattr(request, name, value if isinstance(value, str) else json.dumps(value))


def _set_chat(chat: Any, name: str, value: Any) -> None:
    if name == "messages":
        for message in value:
            fields = {key: text for key, text in message.items() if key != "tool_calls" and text is not None}
            calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
            chat.messages.add(**fields, tool_calls=calls)
    elif name == "tools":
        for tool in value:
            function = dict(tool["function"])
            chat.tools.add(**function | {"parameters": json.dumps(function["parameters"])})
    elif isinstance(value, dict):
        chat.tool_name = value["function"]["name"]
    else:
        setattr(chat, name, value)
