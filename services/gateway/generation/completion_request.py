"""One completion as a gateway has it: what its target gets, and what stays here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.messages import GenerationRequest
from paceline.output_processor import OutputOptions
from paceline_services.gateway.http.http_metrics import REQUEST_ID_HEADER
from paceline_services.gateway.http.json_body import Json

SESSION_HEADER = "x-session-id"
"""Names the request's conversation, in place of the body's `prompt_cache_key`: its requests go to the same target."""
LABELS_HEADER = "x-target-labels"
"""Labels that the request's target must have."""
REQUEST_HEADERS = (LABELS_HEADER, SESSION_HEADER, REQUEST_ID_HEADER)
"""The headers, or gRPC's metadata, that belong to a request as its body does: kept with its journal. HTTP hands on no
others."""


@dataclass(frozen=True, slots=True)
class CompletionRequest(GenerationRequest):
    """A target gets the fields of `GenerationRequest` alone."""

    output: OutputOptions = field(default_factory=OutputOptions)
    session: str = ""
    """The conversation that the request belongs to; "": none."""
    needed_capabilities: frozenset[str] = frozenset()
    """Labels and features that its target must have."""
    choice: int = 0
    """Index among the `n` completions of one prompt."""
    client_request_id: str = ""
    """The id that the client chose for the API request; "": none."""
    left_out_keywords: Sequence[str] = ()
    """Of its schemas with `strict: false`: the output is not kept to them."""

    @property
    def left_out_json(self) -> Json:
        """What a response says of `left_out_keywords`; nothing if there are none."""
        return {"left_out_keywords": [*self.left_out_keywords]} if self.left_out_keywords else {}


def choices_of(requests: Sequence[CompletionRequest]) -> int:
    """Completions for each prompt, of the completions of one API request."""
    return 1 + max(request.choice for request in requests)
