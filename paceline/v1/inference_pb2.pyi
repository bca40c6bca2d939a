from paceline.v1 import common_pb2 as _common_pb2
from paceline.v1 import target_pb2 as _target_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., strict: _Optional[bool] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "tokens", "chat", "sampling", "stop", "speculative", "cache_salt", "json_schema", "regex", "grammar", "json_object", "choice", "structural_tag", "n", "echo", "request_id", "truncate_prompt_tokens", "priority", "stream_interval", "include_stop_str_in_output", "skip_special_tokens", "return_tree")
    class Chat(_message.Message):
        __slots__ = ("messages", "tools", "tool_choice", "tool_name", "parallel_tool_calls", "reasoning_effort", "include_reasoning")
        class Message(_message.Message):
            __slots__ = ("role", "content", "tool_calls", "tool_call_id", "reasoning")
            ROLE_FIELD_NUMBER: _ClassVar[int]
            CONTENT_FIELD_NUMBER: _ClassVar[int]
            TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
            TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
            REASONING_FIELD_NUMBER: _ClassVar[int]
            role: str
            content: str
            tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
            tool_call_id: str
            reasoning: str
            def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...
        MESSAGES_FIELD_NUMBER: _ClassVar[int]
        TOOLS_FIELD_NUMBER: _ClassVar[int]
        TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
        TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
        PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
        REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
        INCLUDE_REASONING_FIELD_NUMBER: _ClassVar[int]
        messages: _containers.RepeatedCompositeFieldContainer[GenerateRequest.Chat.Message]
        tools: _containers.RepeatedCompositeFieldContainer[Tool]
        tool_choice: str
        tool_name: str
        parallel_tool_calls: bool
        reasoning_effort: str
        include_reasoning: bool
        def __init__(self, messages: _Optional[_Iterable[_Union[GenerateRequest.Chat.Message, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[str] = ..., tool_name: _Optional[str] = ..., parallel_tool_calls: _Optional[bool] = ..., reasoning_effort: _Optional[str] = ..., include_reasoning: _Optional[bool] = ...) -> None: ...
    class Sampling(_message.Message):
        __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "max_tokens", "seed", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "allowed_token_ids", "logprob_token_ids", "bad_words")
        class LogitBiasEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: int
            value: float
            def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
        TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
        TOP_K_FIELD_NUMBER: _ClassVar[int]
        TOP_P_FIELD_NUMBER: _ClassVar[int]
        MIN_P_FIELD_NUMBER: _ClassVar[int]
        REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
        PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
        FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
        LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
        MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
        MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
        SEED_FIELD_NUMBER: _ClassVar[int]
        STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
        LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
        temperature: float
        top_k: int
        top_p: float
        min_p: float
        repetition_penalty: float
        presence_penalty: float
        frequency_penalty: float
        logit_bias: _containers.ScalarMap[int, float]
        min_tokens: int
        max_tokens: int
        seed: int
        stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
        ignore_eos: bool
        logprobs: int
        prompt_logprobs: int
        allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
        logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
        bad_words: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ...) -> None: ...
    class Choice(_message.Message):
        __slots__ = ("texts",)
        TEXTS_FIELD_NUMBER: _ClassVar[int]
        texts: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TREE_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    tokens: _common_pb2.TokenSequence
    chat: GenerateRequest.Chat
    sampling: GenerateRequest.Sampling
    stop: _containers.RepeatedScalarFieldContainer[str]
    speculative: _common_pb2.SpeculativeOptions
    cache_salt: str
    json_schema: str
    regex: str
    grammar: str
    json_object: bool
    choice: GenerateRequest.Choice
    structural_tag: str
    n: int
    echo: bool
    request_id: str
    truncate_prompt_tokens: int
    priority: int
    stream_interval: int
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    return_tree: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[_common_pb2.TokenSequence, _Mapping]] = ..., chat: _Optional[_Union[GenerateRequest.Chat, _Mapping]] = ..., sampling: _Optional[_Union[GenerateRequest.Sampling, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., speculative: _Optional[_Union[_common_pb2.SpeculativeOptions, _Mapping]] = ..., cache_salt: _Optional[str] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., json_object: _Optional[bool] = ..., choice: _Optional[_Union[GenerateRequest.Choice, _Mapping]] = ..., structural_tag: _Optional[str] = ..., n: _Optional[int] = ..., echo: _Optional[bool] = ..., request_id: _Optional[str] = ..., truncate_prompt_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., stream_interval: _Optional[int] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., return_tree: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "speculation", "timings", "index", "log_probs", "prompt_log_probs", "prompt_token_ids", "reasoning", "tool_calls", "reasoning_tokens", "accepted", "trees", "stop_string", "stop_token_id")
    class TokenLogProb(_message.Message):
        __slots__ = ("token_id", "log_prob")
        TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
        LOG_PROB_FIELD_NUMBER: _ClassVar[int]
        token_id: int
        log_prob: float
        def __init__(self, token_id: _Optional[int] = ..., log_prob: _Optional[float] = ...) -> None: ...
    class LogProbs(_message.Message):
        __slots__ = ("log_prob", "top", "rank")
        LOG_PROB_FIELD_NUMBER: _ClassVar[int]
        TOP_FIELD_NUMBER: _ClassVar[int]
        RANK_FIELD_NUMBER: _ClassVar[int]
        log_prob: float
        top: _containers.RepeatedCompositeFieldContainer[GenerateResponse.TokenLogProb]
        rank: int
        def __init__(self, log_prob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[GenerateResponse.TokenLogProb, _Mapping]]] = ..., rank: _Optional[int] = ...) -> None: ...
    class PromptLogProbs(_message.Message):
        __slots__ = ("start", "entries")
        START_FIELD_NUMBER: _ClassVar[int]
        ENTRIES_FIELD_NUMBER: _ClassVar[int]
        start: int
        entries: _containers.RepeatedCompositeFieldContainer[GenerateResponse.LogProbs]
        def __init__(self, start: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[GenerateResponse.LogProbs, _Mapping]]] = ...) -> None: ...
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _common_pb2.FinishReason
    prompt_tokens: int
    completion_tokens: int
    speculation: _common_pb2.SpeculationStats
    timings: _common_pb2.Timings
    index: int
    log_probs: _containers.RepeatedCompositeFieldContainer[GenerateResponse.LogProbs]
    prompt_log_probs: _containers.RepeatedCompositeFieldContainer[GenerateResponse.PromptLogProbs]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    reasoning_tokens: int
    accepted: _containers.RepeatedScalarFieldContainer[bool]
    trees: _containers.RepeatedCompositeFieldContainer[_target_pb2.DeltaFrame.VerifiedTree]
    stop_string: str
    stop_token_id: int
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationStats, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., index: _Optional[int] = ..., log_probs: _Optional[_Iterable[_Union[GenerateResponse.LogProbs, _Mapping]]] = ..., prompt_log_probs: _Optional[_Iterable[_Union[GenerateResponse.PromptLogProbs, _Mapping]]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., reasoning_tokens: _Optional[int] = ..., accepted: _Optional[_Iterable[bool]] = ..., trees: _Optional[_Iterable[_Union[_target_pb2.DeltaFrame.VerifiedTree, _Mapping]]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: GenerateRequest.Chat
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[GenerateRequest.Chat, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_model_len")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: bool
    def __init__(self, aborted: _Optional[bool] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    class Model(_message.Message):
        __slots__ = ("id", "max_model_len")
        ID_FIELD_NUMBER: _ClassVar[int]
        MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
        id: str
        max_model_len: int
        def __init__(self, id: _Optional[str] = ..., max_model_len: _Optional[int] = ...) -> None: ...
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ListModelsResponse.Model]
    def __init__(self, models: _Optional[_Iterable[_Union[ListModelsResponse.Model, _Mapping]]] = ...) -> None: ...
