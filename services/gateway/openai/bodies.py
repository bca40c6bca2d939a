"""Request bodies: OpenAI's fields, and further ones under vLLM's names. Unknown fields are refused.

Types are strict, as OpenAI's are: "5" is no number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)

from paceline.config import SamplingParams
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.structured_output import ResponseFormat, StructuredOutputs

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
"""Characters of a stop string or a bad word."""
MAX_BAD_WORDS = 1024
MAX_BAD_CHARACTERS = 16_384
"""Of all bad words together: every completion carries their tokens to its target."""
MAX_STOP_TOKENS = 1024
MAX_BIASES = 4096
MAX_SALT = 1024
INT32_MAX = 2**31 - 1


def _as_string_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_speculative(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else value


def _check_bad_words(words: list[str] | None) -> list[str] | None:
    characters = sum(map(len, words or ()))
    if characters > MAX_BAD_CHARACTERS:
        raise ValueError(f"{characters} characters together, at most {MAX_BAD_CHARACTERS} are possible")
    return words


def _reject_unsupported(value: Any) -> None:
    if value:
        raise ValueError("is not supported")


def _reject_renamed(value: Any) -> None:
    if value is not None:
        raise ValueError("is a key of structured_outputs now")


def _any_of(*schemas: dict[str, Any]) -> WithJsonSchema:
    """The types that a client may send, where validation converts them."""
    return WithJsonSchema({"anyOf": list(schemas)})


TEXT: dict[str, Any] = {"type": "string"}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT}
IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
StringList = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
    BeforeValidator(_as_string_list),
    _any_of(TEXT, TEXTS),
]
Unused = Annotated[Any, Field(description="accepted as OpenAI does; has no effect here")]
Unsupported = Annotated[None, BeforeValidator(_reject_unsupported)]
"""Known, but not implemented: accepted only where it asks for nothing."""
Renamed = Annotated[None, BeforeValidator(_reject_renamed)]
"""A field of vLLM before 0.12."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Unused = None


class SpeculativeLimits(Body):
    """`speculative` of one request; `false` in its place switches speculation off."""

    enabled: bool | None = None
    num_speculative_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    max_tree_nodes: int | None = Field(None, ge=0, le=INT32_MAX)


OWN_FIELDS = frozenset({"max_tokens", "stop_token_ids", "bad_words", "logprobs", "grammar"})
"""Sampling parameters that a body does not carry, or not in this form."""
SHARED_FIELDS = frozenset(SamplingParams.model_fields) - OWN_FIELDS
"""Sampling parameters that a body carries as they are. Their ranges are checked by `SamplingParams` alone."""

if TYPE_CHECKING:
    SamplingBody = Body
else:
    SamplingBody = create_model(
        "SamplingBody",
        __base__=Body,
        **{
            name: (parameter.annotation | None, None)
            for name, parameter in SamplingParams.model_fields.items()
            if name in SHARED_FIELDS
        },
    )


class GenerationBody(SamplingBody):
    """The fields that completions and chat completions share. None means: the default."""

    prompt_field: ClassVar[str]
    """The field to name in errors about the prompt."""
    default_max_tokens: ClassVar[int | None]
    """Most tokens of an output for which the client sets no limit; None: as many as the context holds."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[StringList | None, Field(max_length=MAX_STOPS)] = None
    max_tokens: int | None = None
    top_k: int | None = Field(None, le=INT32_MAX)
    logit_bias: dict[int, float] | None = Field(None, max_length=MAX_BIASES)
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKENS)
    bad_words: Annotated[StringList | None, Field(max_length=MAX_BAD_WORDS), AfterValidator(_check_bad_words)] = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_accepted: Annotated[bool, Field(description="by token: was it guessed, and where its text begins")] = False
    return_tree: Annotated[bool, Field(description="by step: the guesses that were verified, as a tree")] = False
    speculative: Annotated[SpeculativeLimits | None, BeforeValidator(_as_speculative)] = None
    speculation_stats: bool = False
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=MAX_SALT)] = None
    prompt_logprobs: Unsupported = None
    allowed_token_ids: Unsupported = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Renamed = None
    guided_regex: Renamed = None
    guided_choice: Renamed = None
    guided_grammar: Renamed = None
    use_beam_search: Unsupported = None
    early_stopping: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    return_tokens_as_token_ids: Unsupported = None
    priority: Unsupported = None
    logits_processors: Unsupported = None
    kv_transfer_params: Unsupported = None
    vllm_xargs: Unsupported = None
    length_penalty: float | None = Field(None, ge=1, le=1)
    spaces_between_special_tokens: Literal[True] | None = None

    user: Unused = None
    metadata: Unused = None
    store: Unused = None
    service_tier: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Annotated[str | None, Field(description="requests with the same one go to the same target")] = (
        None
    )
    prompt_cache_retention: Unused = None

    @model_validator(mode="after")
    def _consistent(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        return self

    @property
    def choices(self) -> int:
        """Completions for each prompt."""
        return self.n or 1

    @property
    def prompts(self) -> int:
        """How many prompts there are."""
        return 1

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """The field that limits the output, and the client's value for it."""
        return "max_tokens", self.max_tokens

    @property
    def top_log_probs(self) -> int | None:
        """How many alternatives to report for each token; None: no log-probabilities."""
        raise NotImplementedError


class CompletionBody(GenerationBody):
    prompt_field: ClassVar[str] = "prompt"
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Annotated[
        list[str] | list[list[int]],
        Field(max_length=MAX_PROMPTS),
        _any_of(TEXT, TEXTS, IDS, {"type": "array", "items": IDS}),
    ]
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool = True
    suffix: Unsupported = None
    best_of: int | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """One prompt becomes a list of one. The first entry decides between texts and token ids."""
        if isinstance(value, str) or (_is_nonempty_list(value) and isinstance(value[0], int)):
            value = [value]
        if not _is_nonempty_list(value):
            raise ValueError("must be a string, a list of token ids, or a list of these, and not empty")
        kind = str if isinstance(value[0], str) else list
        for entry in value:
            if not isinstance(entry, kind):
                raise ValueError("must not mix strings and token ids")
            if not entry:
                raise ValueError("must not be empty")
            if kind is list and not all(type(id_) is int and id_ >= 0 for id_ in entry):
                raise ValueError("token ids must be integers from 0 on")
        return value

    @model_validator(mode="after")
    def _possible(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError("best_of other than n is not supported", param="best_of")
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError("logprobs of an echoed prompt are not supported", param="logprobs")
        return self

    @property
    def prompts(self) -> int:
        return len(self.prompt)

    @property
    def top_log_probs(self) -> int | None:
        return self.logprobs


class ChatMessage(Body):
    """The chat template receives further fields (`name`, `tool_call_id`, ...), too."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(min_length=1)
    content: Annotated[str | None, _any_of(TEXT, {"type": "array", "items": {"type": "object"}}, {"type": "null"})] = (
        None
    )

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """Joins content that comes in parts, which must be text. null becomes an empty text."""
        if value is None:
            return ""
        if not isinstance(value, list):
            return value
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
            raise ValueError("only parts of type text are supported")
        return "".join(part["text"] for part in value)


class ChatFields(Body):
    """How messages become a prompt, for chat completions and `/tokenize`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_end(self) -> ChatFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise _not_continued("needs add_generation_prompt: false")
        if self.continue_final_message and not self.messages[-1].content:
            raise _not_continued("needs a final message with content")
        return self


class ChatBody(ChatFields, GenerationBody):
    prompt_field: ClassVar[str] = "messages"
    default_max_tokens: ClassVar[int | None] = None

    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Unsupported = None
    functions: Unsupported = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None

    chat_template: Unsupported = None
    documents: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    include_reasoning: Literal[True] | None = None
    parallel_tool_calls: Unused = None
    prediction: Unused = None
    reasoning_effort: Unused = None
    verbosity: Unused = None

    @model_validator(mode="after")
    def _agreeing(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            message = "max_tokens and max_completion_tokens contradict each other"
            raise InvalidRequestError(message, param="max_tokens")
        return self

    @property
    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def top_log_probs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeTextBody(Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatFields):
    model: str | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def _not_continued(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"continue_final_message {why}", param="continue_final_message")


def _is_nonempty_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0
