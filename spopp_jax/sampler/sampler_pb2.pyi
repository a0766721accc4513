from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATUS_UNSPECIFIED: _ClassVar[Status]
    STATUS_OK: _ClassVar[Status]
    STATUS_ENV_ERROR: _ClassVar[Status]
    STATUS_TOOL_TIMEOUT: _ClassVar[Status]
    STATUS_VERIFIER_TIMEOUT: _ClassVar[Status]
    STATUS_CONTEXT_LIMIT: _ClassVar[Status]
    STATUS_LENGTH: _ClassVar[Status]
    STATUS_SAMPLER_ERROR: _ClassVar[Status]
    STATUS_STALE: _ClassVar[Status]
    STATUS_DUPLICATE: _ClassVar[Status]
    STATUS_MIXED_VERSIONS: _ClassVar[Status]
    STATUS_INVALID: _ClassVar[Status]
    STATUS_CANCELLED: _ClassVar[Status]

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_BOOL: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]

class LogprobKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOGPROB_KIND_UNSPECIFIED: _ClassVar[LogprobKind]
    LOGPROB_KIND_PROCESSED: _ClassVar[LogprobKind]
    LOGPROB_KIND_RAW: _ClassVar[LogprobKind]
STATUS_UNSPECIFIED: Status
STATUS_OK: Status
STATUS_ENV_ERROR: Status
STATUS_TOOL_TIMEOUT: Status
STATUS_VERIFIER_TIMEOUT: Status
STATUS_CONTEXT_LIMIT: Status
STATUS_LENGTH: Status
STATUS_SAMPLER_ERROR: Status
STATUS_STALE: Status
STATUS_DUPLICATE: Status
STATUS_MIXED_VERSIONS: Status
STATUS_INVALID: Status
STATUS_CANCELLED: Status
DTYPE_UNSPECIFIED: DType
DTYPE_BOOL: DType
DTYPE_INT32: DType
DTYPE_FLOAT32: DType
DTYPE_INT64: DType
LOGPROB_KIND_UNSPECIFIED: LogprobKind
LOGPROB_KIND_PROCESSED: LogprobKind
LOGPROB_KIND_RAW: LogprobKind

class HandshakeRequest(_message.Message):
    __slots__ = ("contract_version", "limits", "session_id")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    contract_version: int
    limits: ChannelLimits
    session_id: str
    def __init__(self, contract_version: _Optional[int] = ..., limits: _Optional[_Union[ChannelLimits, _Mapping]] = ..., session_id: _Optional[str] = ...) -> None: ...

class ChannelLimits(_message.Message):
    __slots__ = ("max_message_bytes", "keepalive_time_ms", "keepalive_timeout_ms")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEEPALIVE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    KEEPALIVE_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    keepalive_time_ms: int
    keepalive_timeout_ms: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., keepalive_time_ms: _Optional[int] = ..., keepalive_timeout_ms: _Optional[int] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("contract_version", "limits", "tokenizer_fingerprint", "model_fingerprint", "max_context_tokens", "num_slots", "max_pending", "active_policy_version", "active_weights_checksum", "num_tasks", "tasks_fingerprint")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_PENDING_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_WEIGHTS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    contract_version: int
    limits: ChannelLimits
    tokenizer_fingerprint: str
    model_fingerprint: str
    max_context_tokens: int
    num_slots: int
    max_pending: int
    active_policy_version: int
    active_weights_checksum: str
    num_tasks: int
    tasks_fingerprint: str
    def __init__(self, contract_version: _Optional[int] = ..., limits: _Optional[_Union[ChannelLimits, _Mapping]] = ..., tokenizer_fingerprint: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., num_slots: _Optional[int] = ..., max_pending: _Optional[int] = ..., active_policy_version: _Optional[int] = ..., active_weights_checksum: _Optional[str] = ..., num_tasks: _Optional[int] = ..., tasks_fingerprint: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_turn_tokens", "max_turns", "min_p")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TURN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_turn_tokens: int
    max_turns: int
    min_p: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_turn_tokens: _Optional[int] = ..., max_turns: _Optional[int] = ..., min_p: _Optional[float] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "task_id", "policy_version", "seed", "sampling", "crosses_versions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CROSSES_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    task_id: str
    policy_version: int
    seed: int
    sampling: SamplingParams
    crosses_versions: bool
    def __init__(self, request_id: _Optional[str] = ..., task_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., seed: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., crosses_versions: _Optional[bool] = ...) -> None: ...

class Acknowledgement(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class Requests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[Request]
    def __init__(self, requests: _Optional[_Iterable[_Union[Request, _Mapping]]] = ...) -> None: ...

class RolloutMessage(_message.Message):
    __slots__ = ("opening", "requests", "acknowledgement")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    opening: Opening
    requests: Requests
    acknowledgement: Acknowledgement
    def __init__(self, opening: _Optional[_Union[Opening, _Mapping]] = ..., requests: _Optional[_Union[Requests, _Mapping]] = ..., acknowledgement: _Optional[_Union[Acknowledgement, _Mapping]] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("dtype", "length", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    length: int
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., length: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class KeptIds(_message.Message):
    __slots__ = ("ids", "offsets", "log_mass")
    IDS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    LOG_MASS_FIELD_NUMBER: _ClassVar[int]
    ids: Array
    offsets: Array
    log_mass: Array
    def __init__(self, ids: _Optional[_Union[Array, _Mapping]] = ..., offsets: _Optional[_Union[Array, _Mapping]] = ..., log_mass: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("policy_version", "weights_checksum", "num_actions")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    weights_checksum: str
    num_actions: int
    def __init__(self, policy_version: _Optional[int] = ..., weights_checksum: _Optional[str] = ..., num_actions: _Optional[int] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("schema_version", "request_id", "task_id", "status", "reward", "policy_version", "weights_checksum", "tokens", "action_mask", "behaviour_logprobs", "num_actions", "payload_crc32", "num_turns", "sampling", "seconds", "detail", "logprob_kind", "kept", "spans")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTION_MASK_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_CRC32_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_KIND_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    request_id: str
    task_id: str
    status: Status
    reward: float
    policy_version: int
    weights_checksum: str
    tokens: Array
    action_mask: Array
    behaviour_logprobs: Array
    num_actions: int
    payload_crc32: int
    num_turns: int
    sampling: SamplingParams
    seconds: float
    detail: str
    logprob_kind: LogprobKind
    kept: KeptIds
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    def __init__(self, schema_version: _Optional[int] = ..., request_id: _Optional[str] = ..., task_id: _Optional[str] = ..., status: _Optional[_Union[Status, str]] = ..., reward: _Optional[float] = ..., policy_version: _Optional[int] = ..., weights_checksum: _Optional[str] = ..., tokens: _Optional[_Union[Array, _Mapping]] = ..., action_mask: _Optional[_Union[Array, _Mapping]] = ..., behaviour_logprobs: _Optional[_Union[Array, _Mapping]] = ..., num_actions: _Optional[int] = ..., payload_crc32: _Optional[int] = ..., num_turns: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., seconds: _Optional[float] = ..., detail: _Optional[str] = ..., logprob_kind: _Optional[_Union[LogprobKind, str]] = ..., kept: _Optional[_Union[KeptIds, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ...) -> None: ...

class RolloutReply(_message.Message):
    __slots__ = ("trajectories",)
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    trajectories: _containers.RepeatedCompositeFieldContainer[Trajectory]
    def __init__(self, trajectories: _Optional[_Iterable[_Union[Trajectory, _Mapping]]] = ...) -> None: ...

class PublishHeader(_message.Message):
    __slots__ = ("policy_version", "weights_checksum", "size_bytes", "session_id", "directory")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    weights_checksum: str
    size_bytes: int
    session_id: str
    directory: str
    def __init__(self, policy_version: _Optional[int] = ..., weights_checksum: _Optional[str] = ..., size_bytes: _Optional[int] = ..., session_id: _Optional[str] = ..., directory: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "crc32", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    crc32: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., crc32: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PublishPart(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PublishHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[PublishHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("policy_version", "weights_checksum", "size_bytes", "session_id")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    weights_checksum: str
    size_bytes: int
    session_id: str
    def __init__(self, policy_version: _Optional[int] = ..., weights_checksum: _Optional[str] = ..., size_bytes: _Optional[int] = ..., session_id: _Optional[str] = ...) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ("held_bytes",)
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    held_bytes: int
    def __init__(self, held_bytes: _Optional[int] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("policy_version", "weights_checksum")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    weights_checksum: str
    def __init__(self, policy_version: _Optional[int] = ..., weights_checksum: _Optional[str] = ...) -> None: ...

class ActivateRequest(_message.Message):
    __slots__ = ("interrupt", "policy_version", "weights_checksum", "session_id")
    INTERRUPT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    interrupt: bool
    policy_version: int
    weights_checksum: str
    session_id: str
    def __init__(self, interrupt: _Optional[bool] = ..., policy_version: _Optional[int] = ..., weights_checksum: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class ActivateReply(_message.Message):
    __slots__ = ("policy_version", "weights_checksum")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    weights_checksum: str
    def __init__(self, policy_version: _Optional[int] = ..., weights_checksum: _Optional[str] = ...) -> None: ...
