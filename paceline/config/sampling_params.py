"""How the tokens of one request are drawn."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from paceline.config.settings import Settings

# Noise is keyed by an unsigned 64-bit seed; OpenAI and vLLM take a signed one, which maps onto it.
SEED_BITS = 64
MAX_GRAMMAR_LENGTH = 65_536
"""Characters. Fifty tools of a coding agent take 39,000; compiling them takes 24 ms."""

GenerationConfig = Literal["auto", "none"]
"""Where defaults come from: a model's generation_config.json, or `SamplingParams` alone."""
TokenId = Annotated[int, Field(ge=0)]


class SamplingParams(Settings):
    """How the target turns logits into a token, and when a request ends. Names and defaults are vLLM's."""

    temperature: float = Field(1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, description="0 and -1 keep all")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=100.0, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(default_factory=dict)
    bad_words: tuple[tuple[TokenId, ...], ...] = Field((), description="token sequences that must not occur")
    allowed_token_ids: tuple[TokenId, ...] = Field((), description="the only tokens that are drawn; empty: any")
    grammar: str = Field(
        "",
        max_length=MAX_GRAMMAR_LENGTH,
        description="grammar of the output, as `paceline.grammar` writes it; empty: none",
    )
    grammar_begins_after: tuple[TokenId, ...] = Field(
        (),
        description="tokens that end a model's reasoning: the grammar applies to what follows; empty: to everything",
    )
    grammar_waits_if: int | None = Field(
        None, ge=0, description="there is reasoning only in an output that begins with this token; None: in any"
    )
    min_tokens: int = Field(0, ge=0)
    max_tokens: int = Field(16, ge=0, description="0: the prompt is computed, and no token is drawn")
    seed: int = Field(0, ge=-(2 ** (SEED_BITS - 1)), lt=2**SEED_BITS)
    stop_token_ids: tuple[TokenId, ...] = ()
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="how many of the most probable tokens to report at each position of the prompt"
    )
    logprob_token_ids: tuple[TokenId, ...] = Field(
        (), description="with logprobs: report these tokens in place of the most probable ones"
    )

    @field_validator("top_k")
    @classmethod
    def _all_is_zero(cls, value: int) -> int:
        return max(value, 0)

    @field_validator("seed")
    @classmethod
    def _unsigned(cls, value: int) -> int:
        return value if value >= 0 else value + (1 << SEED_BITS)

    @field_validator("bad_words")
    @classmethod
    def _no_empty_sequence(cls, value: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if not all(value):
            raise ValueError("a bad word needs at least one token")
        return value

    @field_validator("stop_token_ids")
    @classmethod
    def _no_marker_of_reasoning(cls, value: tuple[int, ...], others: ValidationInfo) -> tuple[int, ...]:
        """Inside the reasoning no stop token can be drawn."""
        given = others.data
        markers = {*given.get("grammar_begins_after", ()), given.get("grammar_waits_if")}
        if given.get("grammar") and (found := markers.intersection(value)):
            raise ValueError(
                f"token {min(found)} delimits the reasoning before the grammar, so it cannot end the output"
            )
        return value

    @model_validator(mode="after")
    def _min_within_max(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether a filter may remove tokens."""
        return self.min_p > 0.0 or self.top_k > 0 or self.top_p < 1.0

    @property
    def penalised(self) -> bool:
        """Whether penalties make the distribution depend on earlier tokens, beyond the model itself."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


TOKEN_ID_FIELDS = tuple(
    name for name, field in SamplingParams.model_fields.items() if get_args(field.annotation)[:1] == (TokenId,)
)
"""The parameters that are collections of token ids. Gateways check their ids against the target's vocabulary."""
