"""One request to the Responses API, from its body to the events of its response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from paceline.core.messages import Delta, GenerationRequest
from paceline.telemetry.tracing import NO_SPAN, TraceSpan
from paceline_services.gateway.api_errors import ApiError, InvalidRequestError
from paceline_services.gateway.auth import ApiClient
from paceline_services.gateway.openai.bodies import ChatBody
from paceline_services.gateway.openai.request_builder import build_requests
from paceline_services.gateway.openai.server_sent_event import ServerSentEvent
from paceline_services.gateway.responses.input_items import InputItem
from paceline_services.gateway.responses.response_body import ResponseBody
from paceline_services.gateway.responses.response_conversion import FIELDS, chat_body
from paceline_services.gateway.responses.response_history import ResponseHistory, StoredResponse, items_json
from paceline_services.gateway.responses.running_response import Json, RunningResponse
from paceline_services.gateway.responses.truncation import truncated_to_fit
from paceline_services.gateway.served_model import ServedModel


async def build_response_request(
    body: ResponseBody,
    items: Sequence[InputItem],
    model: ServedModel,
    request_id: str,
    client: ApiClient,
    headers: Mapping[str, str],
    span: TraceSpan = NO_SPAN,
) -> tuple[ChatBody, GenerationRequest]:
    """The chat that continues `items`, and its one completion.

    Raises as `build_requests`; errors name the fields of this API.
    """

    async def build(items: Sequence[InputItem]) -> tuple[ChatBody, GenerationRequest]:
        chat = chat_body(body, items)
        [request] = await build_requests(chat, model, request_id, client, headers, span)
        return chat, request

    try:
        return await (truncated_to_fit(items, build) if body.truncation == "auto" else build(items))
    except InvalidRequestError as error:
        raise error.renamed(FIELDS) from error


@dataclass(slots=True)
class ResponseGeneration:
    """A response, the deltas that it is made of, and the conversation with which it is kept."""

    response: RunningResponse
    deltas: AsyncGenerator[tuple[int, Delta]]
    client: ApiClient
    items: Sequence[InputItem]
    history: ResponseHistory
    running: dict[tuple[str, str], RunningResponse] = field(repr=False)
    """The running responses of all requests, by client and id."""

    async def events(self) -> AsyncGenerator[ServerSentEvent]:
        """The events of the stream. An error before the first of them is raised; a later one ends the response."""
        key = self.client.name, self.response.id
        self.running[key] = self.response
        try:
            async with aclosing(self._output_events()) as events:
                async for event in events:
                    yield sse(event)
            await self._keep()
            yield sse(self.response.closing())
        finally:
            del self.running[key]

    async def whole(self) -> Json:
        """The whole response. Raises the error that ended it."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        if self.response.failure is not None:
            raise self.response.failure
        return self.response.as_json()

    def error_event(self, error: ApiError) -> ServerSentEvent:
        """An error of the gateway itself."""
        return sse(self.response.error_event(error))

    async def _output_events(self) -> AsyncGenerator[Json]:
        """The events of the output, as it comes; none before the first delta."""
        begun = False
        try:
            async with aclosing(self.deltas) as deltas:
                async for _, delta in deltas:
                    for event in () if begun else self.response.opening():
                        yield event
                    begun = True
                    for event in self.response.feed(delta):
                        yield event
        except ApiError as error:
            if not begun:
                raise
            for event in self.response.fail(error):
                yield event

    async def _keep(self) -> None:
        """Keep the response if it is to be kept and has not failed."""
        response = self.response
        response.kept &= response.failure is None and self.history.keeps
        if response.kept:
            items = items_json(self.items, response.id.removeprefix("resp_"))
            response.kept = await self.history.save(self.client.name, StoredResponse(response.as_json(), items))


def sse(event: Json) -> ServerSentEvent:
    """An event of the stream; its name is its type."""
    return ServerSentEvent(event, event["type"])
