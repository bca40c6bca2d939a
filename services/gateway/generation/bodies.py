"""Request bodies: OpenAI's fields, and further ones under vLLM's names. Unknown fields are refused.

Types are strict, as OpenAI's are: "5" is no number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, create_model, field_validator, model_validator

from paceline.config import SamplingParams
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.generation.chat_message import ChatMessage
from paceline_services.gateway.generation.tool_bodies import NamedToolChoice, Tool, ToolChoice, Tools
from paceline_services.gateway.http.json_body import (
    IDS,
    TEXT,
    TEXTS,
    Body,
    Renamed,
    Unsupported,
    Unused,
    any_of,
    as_string_list,
    refused,
)
from paceline_services.gateway.structured.output import ResponseFormat, StructuredOutputs

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
MAX_ALLOWED_TOKENS = 4096
MAX_LOGPROB_TOKENS = 128
"""Of `logprob_token_ids`, as in vLLM."""
MAX_SALT = 1024
MAX_REQUEST_ID = 128
"""Characters."""
ONE_PROMPT = (TEXT | {"minLength": 1}, IDS | {"minItems": 1})
"""JSON schemas of a text and of token ids."""
MAX_SESSION = 1024
"""Characters of a session's name, which is hashed once for each completion and target."""
INT32_MAX = 2**31 - 1

NO_SUFFIX = (
    "no model here fills a gap: send the text before it as the prompt, or both in the model's own fill-in-the-middle "
    "format"
)
Replaced = Annotated[None, refused("is not supported; use tools and tool_choice")]
"""A field of OpenAI's before there were tools."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def as_speculative(value: Any) -> Any:
    """`speculative: false` is short for limits that switch speculation off."""
    return {"enabled": value} if isinstance(value, bool) else value


def _check_bad_words(words: list[str] | None) -> list[str] | None:
    characters = sum(map(len, words or ()))
    if characters > MAX_BAD_CHARACTERS:
        raise ValueError(f"{characters} characters together, at most {MAX_BAD_CHARACTERS} are possible")
    return words


StringList = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
    BeforeValidator(as_string_list),
    any_of(TEXT, TEXTS),
]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Unused = None


class SpeculativeLimits(Body):
    """`speculative` of one request; `false` in its place switches speculation off."""

    enabled: bool | None = None
    num_speculative_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    max_tree_nodes: int | None = Field(None, ge=0, le=INT32_MAX)


OWN_FIELDS = frozenset(
    {"max_tokens", "stop_token_ids", "bad_words", "logprobs", "grammar", "grammar_begins_after", "grammar_waits_if"}
)
"""Sampling parameters that a body does not carry, or not in this form."""
SHARED_FIELDS = frozenset(SamplingParams.model_fields) - OWN_FIELDS
"""Sampling parameters that a body carries as they are. Their ranges are checked by `SamplingParams` alone."""

if TYPE_CHECKING:
    SamplingBody = Body
else:  # a body with all of SHARED_FIELDS; None: the client leaves the field out
    SamplingBody = create_model(
        "SamplingBody",
        __base__=Body,
        **{
            name: (parameter.annotation | None, Field(None, description=parameter.description))
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
    cuts_output: ClassVar[bool] = False
    """Whether a limit that the context cannot hold ends the output where the context ends; else it is refused."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[StringList | None, Field(max_length=MAX_STOPS)] = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    top_k: int | None = Field(None, le=INT32_MAX)
    logit_bias: dict[int, float] | None = Field(None, max_length=MAX_BIASES)
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKENS)
    bad_words: Annotated[StringList | None, Field(max_length=MAX_BAD_WORDS), AfterValidator(_check_bad_words)] = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool | None = None
    return_accepted: Annotated[bool, Field(description="by token: was it guessed, and where its text begins")] = False
    return_tree: Annotated[bool, Field(description="by step: the guesses that were verified, as a tree")] = False
    speculative: Annotated[SpeculativeLimits | None, BeforeValidator(as_speculative)] = None
    speculation_stats: bool = False
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=MAX_SALT)] = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    allowed_token_ids: list[int] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKENS)
    logprob_token_ids: list[int] | None = Field(None, max_length=MAX_LOGPROB_TOKENS)
    return_tokens_as_token_ids: Annotated[
        bool | None, Field(description="log-probabilities name tokens as `token_id:ID`")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, Field(ge=-1, le=INT32_MAX, description="keep so many tokens of a prompt's end; -1: as many as fit")
    ] = None
    priority: Annotated[
        int | None,
        Field(ge=-INT32_MAX, le=INT32_MAX, description="lower is earlier, among the requests of one client"),
    ] = None
    request_id: Annotated[
        str | None, Field(max_length=MAX_REQUEST_ID, pattern=r"^[!-~]+$", description="the end of the response's id")
    ] = None
    stream_interval: Annotated[
        int | None, Field(ge=1, le=INT32_MAX, description="least tokens of a chunk, but for the first and the last")
    ] = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Renamed = None
    guided_regex: Renamed = None
    guided_choice: Renamed = None
    guided_grammar: Renamed = None
    use_beam_search: Unsupported = None
    early_stopping: Unsupported = None
    logits_processors: Unsupported = None
    kv_transfer_params: Unsupported = None
    vllm_xargs: Unsupported = None
    length_penalty: float | None = Field(None, ge=1, le=1)
    spaces_between_special_tokens: bool | None = None

    user: Unused = None
    metadata: Unused = None
    store: Unused = None
    service_tier: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Annotated[
        str | None,
        Field(max_length=MAX_SESSION, description="requests with the same one go to the same target"),
    ] = None
    prompt_cache_retention: Unused = None

    @model_validator(mode="after")
    def _consistent(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs come with a whole response, not with stream: true"
            raise InvalidRequestError(message, param="prompt_logprobs")
        if self.logprob_token_ids and self.top_log_probs is None:
            raise InvalidRequestError("logprob_token_ids needs logprobs", param="logprob_token_ids")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens: 0 leaves no prompt", param="truncate_prompt_tokens")
        return self

    @property
    def choice_count(self) -> int:
        """Completions that are generated for each prompt."""
        return self.n or 1

    @property
    def kept_count(self) -> int:
        """Of these, how many are returned: the most probable ones."""
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

    @property
    def prompt_top_log_probs(self) -> int | None:
        """As `top_log_probs`, for the tokens of the prompt."""
        return self.prompt_logprobs


class CompletionBody(GenerationBody):
    prompt_field: ClassVar[str] = "prompt"
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Annotated[
        list[str] | list[list[int]],
        Field(max_length=MAX_PROMPTS),
        any_of(*ONE_PROMPT, *({"type": "array", "items": each, "minItems": 1} for each in ONE_PROMPT)),
    ]
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool = True
    suffix: Annotated[None, refused(NO_SUFFIX)] = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)

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
        if self.choice_count < self.kept_count:
            raise InvalidRequestError(f"best_of: must be at least n, which is {self.kept_count}", param="best_of")
        if self.stream and self.choice_count > self.kept_count:
            raise InvalidRequestError("best_of: which choices are best is not known in a stream", param="best_of")
        return self

    @property
    def choice_count(self) -> int:
        return self.best_of or self.n or 1

    @property
    def prompts(self) -> int:
        return len(self.prompt)

    @property
    def top_log_probs(self) -> int | None:
        return self.logprobs

    @property
    def scores_echo(self) -> bool:
        """Whether the echoed prompt has log-probabilities."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def prompt_top_log_probs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return max((each for each in (self.prompt_logprobs, echoed) if each is not None), default=None)


class ChatFields(Body):
    """How messages become a prompt, for chat completions and `/tokenize`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: ReasoningEffort | None = None
    documents: list[dict[str, Any]] | None = None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @model_validator(mode="after")
    def _known_choice(self) -> ChatFields:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise InvalidRequestError("tool_choice is only allowed with tools", param="tool_choice")
        if isinstance(self.tool_choice, NamedToolChoice):
            name = self.tool_choice.function.name
            if name not in [tool.function.name for tool in self.tools or ()]:
                message = f"tool_choice.function.name: no tool has the name {name!r}"
                raise InvalidRequestError(message, param="tool_choice.function.name")
        return self

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
    functions: Replaced = None
    function_call: Replaced = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    modalities: list[Literal["text"]] | None = None

    chat_template: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    include_reasoning: bool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Unused = None
    verbosity: Unused = None

    @model_validator(mode="after")
    def _agreeing(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
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
