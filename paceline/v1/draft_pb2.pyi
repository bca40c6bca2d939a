from paceline.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftServiceDescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceDescribeResponse(_message.Message):
    __slots__ = ("worker_id", "method", "model", "vocabulary_fingerprint", "hidden_state_layers", "position_limit")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    POSITION_LIMIT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    method: str
    model: str
    vocabulary_fingerprint: str
    hidden_state_layers: _containers.RepeatedScalarFieldContainer[int]
    position_limit: int
    def __init__(self, worker_id: _Optional[str] = ..., method: _Optional[str] = ..., model: _Optional[str] = ..., vocabulary_fingerprint: _Optional[str] = ..., hidden_state_layers: _Optional[_Iterable[int]] = ..., position_limit: _Optional[int] = ...) -> None: ...

class DraftFrame(_message.Message):
    __slots__ = ("opens", "contexts", "commits", "closes", "limits")
    class CloseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CLOSE_REASON_UNSPECIFIED: _ClassVar[DraftFrame.CloseReason]
        CLOSE_REASON_FINISHED: _ClassVar[DraftFrame.CloseReason]
        CLOSE_REASON_CANCELLED: _ClassVar[DraftFrame.CloseReason]
        CLOSE_REASON_MOVED: _ClassVar[DraftFrame.CloseReason]
    CLOSE_REASON_UNSPECIFIED: DraftFrame.CloseReason
    CLOSE_REASON_FINISHED: DraftFrame.CloseReason
    CLOSE_REASON_CANCELLED: DraftFrame.CloseReason
    CLOSE_REASON_MOVED: DraftFrame.CloseReason
    class Open(_message.Message):
        __slots__ = ("request_id", "token_ids", "output_tokens", "sampling", "max_depth", "max_nodes", "strategy", "least_path_probability", "cache_salt", "trace_parent")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        SAMPLING_FIELD_NUMBER: _ClassVar[int]
        MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
        MAX_NODES_FIELD_NUMBER: _ClassVar[int]
        STRATEGY_FIELD_NUMBER: _ClassVar[int]
        LEAST_PATH_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
        CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
        TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
        request_id: int
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        output_tokens: int
        sampling: _common_pb2.SamplingParams
        max_depth: int
        max_nodes: int
        strategy: str
        least_path_probability: float
        cache_salt: str
        trace_parent: str
        def __init__(self, request_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., output_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., max_depth: _Optional[int] = ..., max_nodes: _Optional[int] = ..., strategy: _Optional[str] = ..., least_path_probability: _Optional[float] = ..., cache_salt: _Optional[str] = ..., trace_parent: _Optional[str] = ...) -> None: ...
    class Context(_message.Message):
        __slots__ = ("request_id", "base_position", "hidden_states")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
        HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
        request_id: int
        base_position: int
        hidden_states: _common_pb2.Tensor
        def __init__(self, request_id: _Optional[int] = ..., base_position: _Optional[int] = ..., hidden_states: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...
    class Commit(_message.Message):
        __slots__ = ("request_id", "base_position", "token_ids", "accepted", "hidden_states")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        ACCEPTED_FIELD_NUMBER: _ClassVar[int]
        HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
        request_id: int
        base_position: int
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        accepted: int
        hidden_states: _common_pb2.Tensor
        def __init__(self, request_id: _Optional[int] = ..., base_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., hidden_states: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...
    class Limit(_message.Message):
        __slots__ = ("request_id", "max_depth", "max_nodes", "least_path_probability")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
        MAX_NODES_FIELD_NUMBER: _ClassVar[int]
        LEAST_PATH_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
        request_id: int
        max_depth: int
        max_nodes: int
        least_path_probability: float
        def __init__(self, request_id: _Optional[int] = ..., max_depth: _Optional[int] = ..., max_nodes: _Optional[int] = ..., least_path_probability: _Optional[float] = ...) -> None: ...
    class Close(_message.Message):
        __slots__ = ("request_id", "reason")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        request_id: int
        reason: DraftFrame.CloseReason
        def __init__(self, request_id: _Optional[int] = ..., reason: _Optional[_Union[DraftFrame.CloseReason, str]] = ...) -> None: ...
    OPENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[DraftFrame.Open]
    contexts: _containers.RepeatedCompositeFieldContainer[DraftFrame.Context]
    commits: _containers.RepeatedCompositeFieldContainer[DraftFrame.Commit]
    closes: _containers.RepeatedCompositeFieldContainer[DraftFrame.Close]
    limits: _containers.RepeatedCompositeFieldContainer[DraftFrame.Limit]
    def __init__(self, opens: _Optional[_Iterable[_Union[DraftFrame.Open, _Mapping]]] = ..., contexts: _Optional[_Iterable[_Union[DraftFrame.Context, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[DraftFrame.Commit, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[DraftFrame.Close, _Mapping]]] = ..., limits: _Optional[_Iterable[_Union[DraftFrame.Limit, _Mapping]]] = ...) -> None: ...

class DraftLaw(_message.Message):
    __slots__ = ("token_steps", "weights")
    TOKEN_STEPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    token_steps: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_steps: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class GrowthFrame(_message.Message):
    __slots__ = ("growths", "dropped", "applied", "queue_us", "compute_us")
    class Growth(_message.Message):
        __slots__ = ("request_id", "base_position", "first_node_id", "nodes", "draft_laws")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
        FIRST_NODE_ID_FIELD_NUMBER: _ClassVar[int]
        NODES_FIELD_NUMBER: _ClassVar[int]
        DRAFT_LAWS_FIELD_NUMBER: _ClassVar[int]
        request_id: int
        base_position: int
        first_node_id: int
        nodes: bytes
        draft_laws: _containers.RepeatedCompositeFieldContainer[DraftLaw]
        def __init__(self, request_id: _Optional[int] = ..., base_position: _Optional[int] = ..., first_node_id: _Optional[int] = ..., nodes: _Optional[bytes] = ..., draft_laws: _Optional[_Iterable[_Union[DraftLaw, _Mapping]]] = ...) -> None: ...
    class Dropped(_message.Message):
        __slots__ = ("request_id", "reason")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        request_id: int
        reason: str
        def __init__(self, request_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
    GROWTHS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    growths: _containers.RepeatedCompositeFieldContainer[GrowthFrame.Growth]
    dropped: _containers.RepeatedCompositeFieldContainer[GrowthFrame.Dropped]
    applied: int
    queue_us: int
    compute_us: int
    def __init__(self, growths: _Optional[_Iterable[_Union[GrowthFrame.Growth, _Mapping]]] = ..., dropped: _Optional[_Iterable[_Union[GrowthFrame.Dropped, _Mapping]]] = ..., applied: _Optional[int] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ...) -> None: ...
