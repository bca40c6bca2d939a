"""`common.proto` ↔ `paceline.config`, `paceline.messages`. Decoders raise `WireError`, naming the field."""

from __future__ import annotations

from pydantic import ValidationError

from paceline.config import SamplingParams
from paceline.config.validation_messages import error_message
from paceline.messages import FinishReason, SpeculationStats, Timings
from paceline.v1 import common_pb2 as pb
from paceline.wire.field_codec import decode_fields, encode_fields
from paceline.wire.link_errors import WireError

FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
MAX_CACHE_SALT_BYTES = 64
"""Longest cache salt between services, in bytes of UTF-8: gateways send digests."""
MAX_TRACE_PARENT = 55
"""Length of a W3C traceparent of version 00."""
_FINISH_REASON_BY_NUMBER = {number: reason for reason, number in FINISH_REASONS.items()}


def encode_sampling(params: SamplingParams) -> pb.SamplingParams:
    """Raises ValueError or TypeError if a value does not fit its field."""
    bad_words = [pb.TokenSequence(token_ids=tokens) for tokens in params.bad_words]
    return encode_fields(pb.SamplingParams, params, bad_words=bad_words)


def decode_sampling(message: pb.SamplingParams) -> SamplingParams:
    bad_words = [tuple(sequence.token_ids) for sequence in message.bad_words]
    try:
        return decode_fields(SamplingParams, message, bad_words=bad_words)
    except ValidationError as error:
        raise WireError(f"sampling{_first_error(error)}") from error


def decode_salt(salt: str) -> str:
    if len(salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise WireError(f"cache_salt: longer than {MAX_CACHE_SALT_BYTES} bytes")
    return salt


def decode_trace_parent(trace_parent: str) -> str:
    """Other texts than W3C's are left to tracing, which ignores them."""
    if len(trace_parent) > MAX_TRACE_PARENT:
        raise WireError(f"trace_parent: longer than {MAX_TRACE_PARENT} characters")
    return trace_parent


def encode_finish_reason(reason: FinishReason | None) -> pb.FinishReason:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else FINISH_REASONS[reason]


def decode_finish_reason(number: pb.FinishReason) -> FinishReason | None:
    """Return None if the request has not ended. `TargetLink` handles HANDED_OVER before it decodes a delta."""
    if number == pb.FINISH_REASON_UNSPECIFIED:
        return None
    try:
        return _FINISH_REASON_BY_NUMBER[number]
    except KeyError:
        raise WireError(f"finish_reason: {number} is unknown") from None


def encode_timings(timings: Timings) -> pb.Timings:
    # In every delta, so written out: several times as fast as `encode_fields`.
    return pb.Timings(
        queue_s=timings.queue_s,
        compute_s=timings.compute_s,
        total_s=timings.total_s,
        prefill_s=timings.prefill_s,
    )


def decode_timings(message: pb.Timings) -> Timings:
    return Timings(message.queue_s, message.compute_s, message.total_s, message.prefill_s)


def encode_stats(stats: SpeculationStats) -> pb.SpeculationStats:
    return encode_fields(pb.SpeculationStats, stats)


def _first_error(error: ValidationError) -> str:
    """Return the first error as `.field: text`, or as `: text` if it concerns several fields."""
    first = error.errors(include_url=False)[0]
    path = "".join(f".{part}" for part in first["loc"])
    return f"{path}: {error_message(first)}"
