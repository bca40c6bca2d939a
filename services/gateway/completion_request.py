"""One completion as a gateway has it: what its target gets, and what stays here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.messages import GenerationRequest
from paceline.output_processor import OutputOptions


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
    attempt: str = ""
    """Distinguishes, at targets, a request that is taken over from what its earlier gateway still runs; "": the first
    attempt."""


def choices_of(requests: Sequence[CompletionRequest]) -> int:
    """Completions for each prompt, of the completions of one API request."""
    return 1 + max(request.choice for request in requests)
