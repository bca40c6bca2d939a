"""A request's output as Anthropic's message object, or as the events of its stream.

A stream is `message_start`, a `ping`, each content block as start, deltas and stop, `message_delta` with stop reason
and usage, and `message_stop` (https://docs.claude.com/en/docs/build-with-claude/streaming). The number of cached tokens
is known at the end: until then all tokens of the prompt count as new.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from paceline.messages import FinishReason
from paceline.output_processor import TextDelta
from paceline_services.gateway.anthropic.block_stream import BlockStream, whole_blocks
from paceline_services.gateway.anthropic.bodies import MessagesBody
from paceline_services.gateway.api_errors import ApiError
from paceline_services.gateway.generation.bodies import ChatBody
from paceline_services.gateway.generation.chat_output import ChatOutput
from paceline_services.gateway.generation.completion_request import CompletionRequest
from paceline_services.gateway.generation.deltas import Deltas
from paceline_services.gateway.generation.served_model import ServedModel
from paceline_services.gateway.generation.usage import RequestUsage
from paceline_services.gateway.http.error_shape import messages_error
from paceline_services.gateway.http.event_stream import ServerSentEvent
from paceline_services.gateway.http.json_body import Json


class MessageResponse:
    """The response to one request, built once from its deltas: whole or streamed."""

    def __init__(self, body: MessagesBody, chat: ChatBody, request: CompletionRequest, model: ServedModel) -> None:
        """`chat`: what the body was converted to."""
        self._max_tokens = body.max_tokens
        self._possible_tokens = request.sampling.max_tokens
        self._usage = RequestUsage([request], 1)
        self._output = ChatOutput(chat, request, model)
        self._blocks = BlockStream(request.group, self._output.call_id, omit_thinking=body.omits_thinking)
        self._envelope: Json = {
            "id": f"msg_{request.group}",
            "type": "message",
            "role": "assistant",
            "model": model.model,
            **request.left_out_json,
        }

    def message(self, output: TextDelta) -> Json:
        """The message object, from the whole output."""
        self._usage.add(0, output)
        content = whole_blocks(self._block_events(output))
        return self._envelope | {"content": content} | self._ending(output) | {"usage": self._token_counts()}

    async def events(self, deltas: Deltas) -> AsyncGenerator[ServerSentEvent]:
        """The events of the stream; the first two come with the first delta."""
        waiting = [*self._opening()]
        async with aclosing(deltas):
            async for _, delta in deltas:
                for data in (*waiting, *self._events_of(delta)):
                    yield ServerSentEvent(data, data["type"])
                waiting = []

    def _opening(self) -> Iterator[Json]:
        open_end: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._token_counts()}
        yield {"type": "message_start", "message": self._envelope | open_end}
        yield {"type": "ping"}

    def _events_of(self, delta: TextDelta) -> Iterator[Json]:
        self._usage.add(0, delta)
        yield from self._block_events(delta)
        if delta.finish_reason is not None:
            yield {"type": "message_delta", "delta": self._ending(delta), "usage": self._token_counts()}
            yield {"type": "message_stop"}

    def _block_events(self, delta: TextDelta) -> Iterator[Json]:
        for event in self._output.events(delta):
            yield from self._blocks.feed(event)
        if delta.finish_reason is not None:
            yield from self._blocks.close()

    def _ending(self, last: TextDelta) -> Json:
        """Why the output ends, once its blocks are complete."""
        stop_sequence = None
        if last.finish_reason == FinishReason.LENGTH:
            shortened = self._possible_tokens < self._max_tokens
            stop_reason = "model_context_window_exceeded" if shortened else "max_tokens"
        elif isinstance(last.stop_reason, str):
            stop_reason, stop_sequence = "stop_sequence", last.stop_reason
        else:  # a client would run a call that an abort has cut off
            aborted = last.finish_reason == FinishReason.CANCELLED
            stop_reason = "tool_use" if self._blocks.called and not aborted else "end_turn"
        return {"stop_reason": stop_reason, "stop_sequence": stop_sequence}

    def _token_counts(self) -> Json:
        """Anthropic's `input_tokens` are those that were not cached."""
        usage = self._usage.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
        if details := usage.get("completion_tokens_details"):
            counts["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
        return counts


def error_event(error: ApiError, request_id: str) -> ServerSentEvent:
    """An error that ends a stream."""
    return ServerSentEvent(messages_error(error, request_id), "error")
