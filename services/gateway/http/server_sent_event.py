"""One server-sent event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from paceline_services.gateway.field_types import Json

encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """`data` is written as JSON, or as it is if it is a text. An empty `event` is left out."""

    data: Json | str
    event: str = ""
    id: str | None = None
    """None: left out. "": clients forget the id of the event before."""

    def encode(self) -> bytes:
        text = self.data if isinstance(self.data, str) else encode_json(self.data)
        lines = [] if self.id is None else [f"id: {self.id}"]
        lines += [f"event: {self.event}"] if self.event else []
        lines += [f"data: {line}" for line in text.split("\n")]
        return ("\n".join(lines) + "\n\n").encode()
