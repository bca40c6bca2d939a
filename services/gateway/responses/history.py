"""Finished responses, kept so that their clients can continue, read and delete them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from paceline.state.state_errors import StateUnavailableError
from paceline.state.state_store import StateStore
from paceline_services.gateway.api_errors import MAX_ECHOED, InvalidRequestError, UnavailableError
from paceline_services.gateway.http.json_body import Json, encode_json
from paceline_services.gateway.responses.input_items import InputItem

log = logging.getLogger(__name__)

MAX_RECORD_CHARACTERS = 4 * 2**20
"""Of a response with its whole conversation; a longer one is not kept."""
ITEMS = TypeAdapter(list[InputItem])


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response and the items that it continued, those of earlier responses first."""

    response: Json
    items: list[Json]

    @property
    def conversation(self) -> list[InputItem]:
        """All items, with the response's own. Raises ValidationError for items of another version."""
        return ITEMS.validate_python([*self.items, *self.response["output"]])


class ResponseHistory:
    """The responses of all clients; a client reaches its own only. Requests go on without it while Redis is away."""

    def __init__(self, store: StateStore, *, enabled: bool) -> None:
        """`enabled`: whether responses are kept; otherwise none is found."""
        self._store = store
        self.enabled = enabled

    @property
    def keeps(self) -> bool:
        """Whether a response would be kept now."""
        return self.enabled and not self._store.presence.unavailable

    async def save(self, client: str, stored: StoredResponse) -> bool:
        """Keep a response. Returns False if it is not kept: Redis is away, or the record is too long."""
        response_id = stored.response["id"]
        record = encode_json({"response": stored.response, "items": stored.items})
        if len(record) > MAX_RECORD_CHARACTERS:
            log.info("response %s is not kept: its conversation has %d characters", response_id, len(record))
            return False
        return await self._store.presence.attempt(self._store.records.save(client, response_id, record))

    async def load(self, client: str, response_id: str, param: str = "response_id") -> StoredResponse:
        """`param`: the field that names the response. Raises `InvalidRequestError` (404) or `UnavailableError`."""
        try:
            entries = await self._store.records.load(client, response_id) if self.enabled else []
        except StateUnavailableError as error:
            raise _unavailable(param) from error
        if not entries:
            raise self._not_found(response_id, param)
        content = from_json(entries[0])
        return StoredResponse(content["response"], content["items"])

    async def conversation(self, client: str, response_id: str | None) -> list[InputItem]:
        """The items that a request continues; none without `previous_response_id`. Raises as `load`."""
        if response_id is None:
            return []
        stored = await self.load(client, response_id, "previous_response_id")
        try:
            return stored.conversation
        except ValidationError as error:  # kept by a gateway of another version
            log.warning("response %s cannot be continued", response_id, extra={"error": str(error)})
            raise self._not_found(response_id, "previous_response_id") from error

    async def delete(self, client: str, response_id: str) -> None:
        """Raises as `load`."""
        try:
            deleted = self.enabled and await self._store.records.delete(client, response_id)
        except StateUnavailableError as error:
            raise _unavailable("response_id") from error
        if not deleted:
            raise self._not_found(response_id, "response_id")

    def _not_found(self, response_id: str, param: str) -> InvalidRequestError:
        why = "it has not ended, or is not stored (any more)" if self.enabled else "this server stores no responses"
        message = f"{param}: no response {response_id[:MAX_ECHOED]!r} is found: {why}"
        code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
        return InvalidRequestError(message, param=param, code=code, status=404)


def items_json(items: Sequence[InputItem], request_id: str) -> list[Json]:
    """The items as they are kept. An item without an id gets one that follows from its request and its place."""
    return [item.as_json(f"{item.id_prefix}_{request_id}_i{index}") for index, item in enumerate(items)]


def _unavailable(param: str) -> UnavailableError:
    """`param`: the field that names the response."""
    message = f"{param}: stored responses cannot be reached, because Redis does not answer; try again soon"
    if param == "previous_response_id":
        message += ", or send the whole conversation as input"
    return UnavailableError(message, code="response_store_unavailable")
