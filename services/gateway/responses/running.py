"""A response while it is generated: the object at any moment, and the events of its stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from paceline.messages import FinishReason
from paceline.output_processor import TextDelta
from paceline.parsing import Content
from paceline_services.gateway.api_errors import ApiError
from paceline_services.gateway.generation.bodies import ChatBody
from paceline_services.gateway.generation.chat_output import ChatOutput
from paceline_services.gateway.generation.completion_request import CompletionRequest
from paceline_services.gateway.generation.logprobs import TokenSpelling, chat_log_probs
from paceline_services.gateway.generation.served_model import ServedModel
from paceline_services.gateway.generation.usage import RequestUsage
from paceline_services.gateway.http.json_body import Json
from paceline_services.gateway.responses.body import ResponseBody
from paceline_services.gateway.responses.output import ResponseOutput

STATUSES = {FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete", FinishReason.CANCELLED: "cancelled"}
LAST_EVENTS = {"completed": "response.completed", "failed": "response.failed"}
"""By status; for other statuses the last event is `response.incomplete`."""


class RunningResponse:
    """Made when the request is known to be right; then fed with the request's deltas.

    The events that methods return have their `sequence_number`: send each, in this order.
    """

    def __init__(
        self,
        body: ResponseBody,
        chat: ChatBody,
        request: CompletionRequest,
        model: ServedModel,
        created: int,
        clock: Callable[[], int],
        *,
        kept: bool,
    ) -> None:
        """`chat`: what the body was converted to. `created`, `clock`: when the API request came, and the time of the
        latest delta, in seconds since 1970. `kept`: whether the response will be kept for its client."""
        self.id = f"resp_{request.group}"
        self.status = "in_progress"
        self.kept = kept
        self.failure: ApiError | None = None
        self._body = body
        self._request = request
        self._model = model
        self._created = created
        self._clock = clock
        self._completed: int | None = None
        self._chat = ChatOutput(chat, request, model)
        self._output = ResponseOutput(request.group, self._chat.call_id)
        self._usage = RequestUsage([request], 1)
        self._log_probs: list[Json] = []
        """Of tokens whose text has not come yet."""
        self._numbers = count()

    def as_json(self, status: str | None = None) -> Json:
        """The response so far. `status`: to be shown in place of the present one."""
        status = status or self.status
        ended, sampling = self.ended, self._request.sampling
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed,
            "status": status,
            "error": None if self.failure is None else _error(self.failure),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model.model,
            "output": self._output.as_json,
            "usage": self._usage_json() if ended else None,
            "store": self.kept,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **settings_json(self._body),
            **self._request.left_out_json,
        }
        if self._body.speculation_stats and ended:
            response |= {"speculation": self._usage.speculation(), "timings": self._usage.timings()}
        return response

    @property
    def ended(self) -> bool:
        return self.status != "in_progress"

    def opening(self) -> list[Json]:
        """The events before the first item."""
        kinds = ("response.created", "response.in_progress")
        return [self._numbered({"type": kind, "response": self.as_json()}) for kind in kinds]

    def feed(self, delta: TextDelta) -> Iterator[Json]:
        """Append a delta; the last one ends the output, but not the response: `closing` follows."""
        self._usage.add(0, delta)
        self._collect_log_probs(delta)
        for event in self._chat.events(delta):
            log_probs: list[Json] = []
            if isinstance(event, Content):
                log_probs, self._log_probs = self._log_probs, []
            yield from map(self._numbered, self._output.feed(event, log_probs))
        if delta.finish_reason is not None:
            yield from self._end(STATUSES[delta.finish_reason])

    def fail(self, error: ApiError) -> Iterator[Json]:
        """The output ends with an error."""
        self.failure = error
        yield from self._end("failed")

    def closing(self) -> Json:
        """The last event, with the whole response."""
        kind = LAST_EVENTS.get(self.status, "response.incomplete")
        return self._numbered({"type": kind, "response": self.as_json()})

    def error_event(self, error: ApiError) -> Json:
        """The event of an error that leaves no response to be shown."""
        event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return self._numbered(event)

    def _collect_log_probs(self, delta: TextDelta) -> None:
        """Only a message has them: those of a delta that brings reasoning or calls alone are dropped."""
        if self._body.returns_log_probs:
            self._log_probs += chat_log_probs(delta, TokenSpelling(self._model.tokenizer))["content"]
            if delta.events and not any(isinstance(each, Content) for each in delta.events):
                self._log_probs.clear()

    def _end(self, status: str) -> Iterator[Json]:
        closing = self._output.close("completed" if status == "completed" else "incomplete", self._log_probs)
        yield from map(self._numbered, closing)
        self.status = status
        self._completed = self._clock()

    def _numbered(self, event: Json) -> Json:
        return event | {"sequence_number": next(self._numbers)}

    def _usage_json(self) -> Json:
        """OpenAI's names. What was not found in the prefix cache is written into it, in whole blocks."""
        usage = self._usage.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reasoning = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": usage["prompt_tokens"] - cached},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": reasoning,
            "total_tokens": usage["total_tokens"],
        }


def settings_json(body: ResponseBody) -> Json:
    """What a response shows of its request, with OpenAI's defaults. A number beyond JSON's, such as 1e999, is null."""
    objects = {"tools", "tool_choice", "text", "reasoning"}
    shown = body.model_dump(mode="json", include=objects, by_alias=True, exclude_unset=True, exclude_none=True)
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None} | shown.get("reasoning", {}),
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "text": {"format": {"type": "text"}} | shown.get("text", {}),
        "tool_choice": shown.get("tool_choice", "auto"),
        "tools": shown.get("tools", []),
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _error(error: ApiError) -> Json:
    """OpenAI's codes of failed responses are fewer than ours."""
    return {"code": "server_error", "message": error.message}
