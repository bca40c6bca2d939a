"""What a proposer can be told of a row: `CoupledWorker` knows its request."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.config import SamplingParams, SpeculativeOptions


@dataclass(frozen=True, slots=True)
class RowDescription:
    """How the tokens of one row of a batch are drawn."""

    params: SamplingParams
    prompt_tokens: int | None = None
    """Tokens of the row before its output; None: unknown."""
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)
    cache_salt: str = ""
    """See `GenerationRequest`."""
