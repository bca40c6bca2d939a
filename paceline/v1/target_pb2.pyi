from paceline.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TargetServiceDescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetServiceDescribeResponse(_message.Message):
    __slots__ = ("worker_id", "model", "vocabulary_fingerprint", "vocabulary_size", "max_model_len", "slots", "rows_invariant", "eos_token_ids", "method", "numerics", "labels", "features", "beside")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    model: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    max_model_len: int
    slots: int
    rows_invariant: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    method: str
    numerics: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    features: _containers.RepeatedScalarFieldContainer[str]
    beside: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., model: _Optional[str] = ..., vocabulary_fingerprint: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., slots: _Optional[int] = ..., rows_invariant: _Optional[bool] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., method: _Optional[str] = ..., numerics: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., features: _Optional[_Iterable[str]] = ..., beside: _Optional[_Iterable[str]] = ...) -> None: ...

class SubmitFrame(_message.Message):
    __slots__ = ("submits", "cancels")
    class Submit(_message.Message):
        __slots__ = ("request_id", "prompt_token_ids", "sampling", "speculative", "committed_token_ids", "drafts", "cache_salt", "client", "group", "trace_parent", "return_tree", "priority", "accepted_average")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        SAMPLING_FIELD_NUMBER: _ClassVar[int]
        SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
        COMMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        DRAFTS_FIELD_NUMBER: _ClassVar[int]
        CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
        CLIENT_FIELD_NUMBER: _ClassVar[int]
        GROUP_FIELD_NUMBER: _ClassVar[int]
        TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
        RETURN_TREE_FIELD_NUMBER: _ClassVar[int]
        PRIORITY_FIELD_NUMBER: _ClassVar[int]
        ACCEPTED_AVERAGE_FIELD_NUMBER: _ClassVar[int]
        request_id: str
        prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
        sampling: _common_pb2.SamplingParams
        speculative: _common_pb2.SpeculativeOptions
        committed_token_ids: _containers.RepeatedScalarFieldContainer[int]
        drafts: _containers.RepeatedScalarFieldContainer[str]
        cache_salt: str
        client: str
        group: str
        trace_parent: str
        return_tree: bool
        priority: int
        accepted_average: float
        def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., speculative: _Optional[_Union[_common_pb2.SpeculativeOptions, _Mapping]] = ..., committed_token_ids: _Optional[_Iterable[int]] = ..., drafts: _Optional[_Iterable[str]] = ..., cache_salt: _Optional[str] = ..., client: _Optional[str] = ..., group: _Optional[str] = ..., trace_parent: _Optional[str] = ..., return_tree: _Optional[bool] = ..., priority: _Optional[int] = ..., accepted_average: _Optional[float] = ...) -> None: ...
    class Cancel(_message.Message):
        __slots__ = ("request_id",)
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        request_id: str
        def __init__(self, request_id: _Optional[str] = ...) -> None: ...
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    submits: _containers.RepeatedCompositeFieldContainer[SubmitFrame.Submit]
    cancels: _containers.RepeatedCompositeFieldContainer[SubmitFrame.Cancel]
    def __init__(self, submits: _Optional[_Iterable[_Union[SubmitFrame.Submit, _Mapping]]] = ..., cancels: _Optional[_Iterable[_Union[SubmitFrame.Cancel, _Mapping]]] = ...) -> None: ...

class DeltaFrame(_message.Message):
    __slots__ = ("deltas", "load", "draining")
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
        top: _containers.RepeatedCompositeFieldContainer[DeltaFrame.TokenLogProb]
        rank: int
        def __init__(self, log_prob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[DeltaFrame.TokenLogProb, _Mapping]]] = ..., rank: _Optional[int] = ...) -> None: ...
    class PromptLogProbs(_message.Message):
        __slots__ = ("start", "entries")
        START_FIELD_NUMBER: _ClassVar[int]
        ENTRIES_FIELD_NUMBER: _ClassVar[int]
        start: int
        entries: _containers.RepeatedCompositeFieldContainer[DeltaFrame.LogProbs]
        def __init__(self, start: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[DeltaFrame.LogProbs, _Mapping]]] = ...) -> None: ...
    class Usage(_message.Message):
        __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
        PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
        CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        prompt_tokens: int
        completion_tokens: int
        cached_tokens: int
        def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...
    class VerifiedTree(_message.Message):
        __slots__ = ("parents", "token_ids", "accepted", "methods")
        PARENTS_FIELD_NUMBER: _ClassVar[int]
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        ACCEPTED_FIELD_NUMBER: _ClassVar[int]
        METHODS_FIELD_NUMBER: _ClassVar[int]
        parents: _containers.RepeatedScalarFieldContainer[int]
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        accepted: _containers.RepeatedScalarFieldContainer[bool]
        methods: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, parents: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[bool]] = ..., methods: _Optional[_Iterable[str]] = ...) -> None: ...
    class Delta(_message.Message):
        __slots__ = ("request_id", "token_ids", "log_probs", "finish_reason", "usage", "speculation", "timings", "error", "stop_token_id", "accepted", "trees", "prompt_log_probs")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
        FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
        USAGE_FIELD_NUMBER: _ClassVar[int]
        SPECULATION_FIELD_NUMBER: _ClassVar[int]
        TIMINGS_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
        ACCEPTED_FIELD_NUMBER: _ClassVar[int]
        TREES_FIELD_NUMBER: _ClassVar[int]
        PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
        request_id: str
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        log_probs: _containers.RepeatedCompositeFieldContainer[DeltaFrame.LogProbs]
        finish_reason: _common_pb2.FinishReason
        usage: DeltaFrame.Usage
        speculation: _common_pb2.SpeculationStats
        timings: _common_pb2.Timings
        error: str
        stop_token_id: int
        accepted: _containers.RepeatedScalarFieldContainer[bool]
        trees: _containers.RepeatedCompositeFieldContainer[DeltaFrame.VerifiedTree]
        prompt_log_probs: _containers.RepeatedCompositeFieldContainer[DeltaFrame.PromptLogProbs]
        def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[_Union[DeltaFrame.LogProbs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[DeltaFrame.Usage, _Mapping]] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationStats, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., error: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., accepted: _Optional[_Iterable[bool]] = ..., trees: _Optional[_Iterable[_Union[DeltaFrame.VerifiedTree, _Mapping]]] = ..., prompt_log_probs: _Optional[_Iterable[_Union[DeltaFrame.PromptLogProbs, _Mapping]]] = ...) -> None: ...
    class Load(_message.Message):
        __slots__ = ("running", "waiting", "free_slots", "rows", "step_s")
        RUNNING_FIELD_NUMBER: _ClassVar[int]
        WAITING_FIELD_NUMBER: _ClassVar[int]
        FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
        ROWS_FIELD_NUMBER: _ClassVar[int]
        STEP_S_FIELD_NUMBER: _ClassVar[int]
        running: int
        waiting: int
        free_slots: int
        rows: int
        step_s: float
        def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_slots: _Optional[int] = ..., rows: _Optional[int] = ..., step_s: _Optional[float] = ...) -> None: ...
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[DeltaFrame.Delta]
    load: DeltaFrame.Load
    draining: bool
    def __init__(self, deltas: _Optional[_Iterable[_Union[DeltaFrame.Delta, _Mapping]]] = ..., load: _Optional[_Union[DeltaFrame.Load, _Mapping]] = ..., draining: _Optional[bool] = ...) -> None: ...
