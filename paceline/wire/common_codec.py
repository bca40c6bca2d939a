"""`common.proto` ↔ `paceline.config`, `paceline.core.messages`. Decoders raise `WireError`, naming the field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from paceline.config import SamplingParams, SpeculativeOptions
from paceline.config.validation_messages import error_message
from paceline.core.messages import FinishReason, SpeculationStats, Timings
from paceline.v1 import common_pb2 as pb
from paceline.wire.link_errors import WireError

FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
MAX_CACHE_SALT_BYTES = 64
"""Longest cache salt between services, in bytes of UTF-8: gateways send digests."""
_FINISH_REASON_BY_NUMBER = {number: reason for reason, number in FINISH_REASONS.items()}


@contextmanager
def encode_errors(what: str) -> Iterator[None]:
    """Turn protobuf's complaint about a value that does not fit its field into a `WireError`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise WireError(f"{what} cannot be sent: {error}") from error


def encode_sampling(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        min_tokens=params.min_tokens,
        max_tokens=params.max_tokens,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        logprobs=params.logprobs,
        bad_words=[pb.TokenSequence(token_ids=word) for word in params.bad_words],
        grammar=params.grammar,
    )


def decode_sampling(message: pb.SamplingParams) -> SamplingParams:
    try:
        return SamplingParams(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=dict(message.logit_bias),
            min_tokens=message.min_tokens,
            max_tokens=message.max_tokens,
            seed=message.seed,
            stop_token_ids=tuple(message.stop_token_ids),
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
            grammar=message.grammar,
        )
    except ValidationError as error:
        raise WireError(f"sampling{_first(error)}") from error


def encode_options(options: SpeculativeOptions) -> pb.SpeculativeOptions:
    return pb.SpeculativeOptions(
        enabled=options.enabled,
        num_speculative_tokens=options.num_speculative_tokens,
        max_tree_nodes=options.max_tree_nodes,
        report=options.report,
    )


def decode_options(message: pb.SpeculativeOptions) -> SpeculativeOptions:
    return SpeculativeOptions(
        enabled=message.enabled if message.HasField("enabled") else None,
        num_speculative_tokens=(message.num_speculative_tokens if message.HasField("num_speculative_tokens") else None),
        max_tree_nodes=message.max_tree_nodes if message.HasField("max_tree_nodes") else None,
        report=message.report,
    )


def decode_salt(salt: str) -> str:
    if len(salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise WireError(f"cache_salt: longer than {MAX_CACHE_SALT_BYTES} bytes")
    return salt


def encode_finish_reason(reason: FinishReason | None) -> pb.FinishReason:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else FINISH_REASONS[reason]


def decode_finish_reason(number: pb.FinishReason) -> FinishReason | None:
    """None: the request has not ended. HANDED_OVER is for whoever holds the link, not for this function."""
    if number == pb.FINISH_REASON_UNSPECIFIED:
        return None
    try:
        return _FINISH_REASON_BY_NUMBER[number]
    except KeyError:
        raise WireError(f"finish_reason: {number} is unknown") from None


def encode_timings(timings: Timings) -> pb.Timings:
    return pb.Timings(queue_s=timings.queue_s, compute_s=timings.compute_s, total_s=timings.total_s)


def decode_timings(message: pb.Timings) -> Timings:
    return Timings(message.queue_s, message.compute_s, message.total_s)


def encode_stats(stats: SpeculationStats) -> pb.SpeculationStats:
    return pb.SpeculationStats(
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        verifications=stats.verifications,
        drafted_by_depth=stats.drafted_by_depth,
        accepted_by_depth=stats.accepted_by_depth,
        steps=stats.steps,
        drafts=stats.drafts,
        strategy=stats.strategy,
        lossy=stats.lossy,
        drafter_invariant=stats.drafter_invariant,
    )


def decode_stats(message: pb.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        drafted_by_depth=list(message.drafted_by_depth),
        accepted_by_depth=list(message.accepted_by_depth),
        drafted_tokens=message.drafted_tokens,
        verifications=message.verifications,
        steps=message.steps,
        drafts=list(message.drafts),
        strategy=message.strategy,
        lossy=message.lossy,
        drafter_invariant=message.drafter_invariant,
    )


def _first(error: ValidationError) -> str:
    """The first complaint, as `.field: text`, or `: text` if it concerns several fields."""
    first = error.errors(include_url=False)[0]
    path = "".join(f".{part}" for part in first["loc"])
    return f"{path}: {error_message(first)}"
