"""What a request tells `CoupledWorker` beside vLLM's own parameters: JSON under one key of vLLM's `extra_args`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, NonNegativeInt

from paceline.config import Settings, SpeculativeOptions
from paceline.wire.common_codec import MAX_CACHE_SALT_BYTES

KEY = "paceline"
"""In `SamplingParams.extra_args`, over HTTP `vllm_xargs`."""


class ExtraArguments(Settings):
    """All are optional."""

    sampling: dict[str, Any] = Field(
        default_factory=dict,
        description="fields of paceline's SamplingParams, in place of vLLM's: vLLM refuses min_p and logit_bias beside "
        "speculation",
    )
    speculative: SpeculativeOptions = SpeculativeOptions()
    committed: int = Field(
        0, ge=0, description="how many tokens at the end of the prompt are output, drawn before the request came here"
    )
    cache_salt: str = Field(
        "",
        max_length=MAX_CACHE_SALT_BYTES,
        pattern="^[ -~]*$",
        description="what drafts learn of a request serves only requests of the same salt; vLLM's workers do not see "
        "vLLM's cache_salt",
    )
    forced: tuple[NonNegativeInt, ...] = Field((), description="the first tokens of the output, drawn earlier")

    @classmethod
    def read(cls, extra_args: Mapping[str, Any] | None) -> ExtraArguments:
        """Raises ValueError, TypeError."""
        given = (extra_args or {}).get(KEY)
        return cls() if given is None else cls.model_validate_json(given)

    def as_extra_args(self) -> dict[str, str]:
        """As `read` takes them."""
        return {KEY: self.model_dump_json(exclude_defaults=True)}
