"""`target.proto` ↔ `paceline.core.messages`. Decoders raise `WireError`, naming the field."""

from __future__ import annotations

from paceline.core.messages import Delta, EngineLoad, LogProbs, Submission, TargetDescription, Usage
from paceline.v1 import target_pb2 as pb
from paceline.wire.common_codec import (
    decode_finish_reason,
    decode_options,
    decode_salt,
    decode_sampling,
    decode_stats,
    decode_timings,
    encode_errors,
    encode_finish_reason,
    encode_options,
    encode_sampling,
    encode_stats,
    encode_timings,
)
from paceline.wire.link_errors import WireError


def encode_submission(submission: Submission) -> pb.SubmitFrame.Submit:
    """Raises `WireError` if a value does not fit its field, such as a token id of 2**32."""
    with encode_errors(f"request {submission.request_id}"):
        return pb.SubmitFrame.Submit(
            request_id=submission.request_id,
            prompt_token_ids=submission.prompt,
            sampling=encode_sampling(submission.sampling),
            speculative=encode_options(submission.speculative),
            committed_token_ids=submission.committed,
            drafts=submission.drafts,
            cache_salt=submission.cache_salt,
            client=submission.client,
            group=submission.group,
        )


def decode_submission(message: pb.SubmitFrame.Submit) -> Submission:
    if not message.prompt_token_ids:
        raise WireError("prompt_token_ids: empty")
    if not message.HasField("sampling"):
        raise WireError("sampling: missing")
    return Submission(
        request_id=message.request_id,
        prompt=list(message.prompt_token_ids),
        sampling=decode_sampling(message.sampling),
        speculative=decode_options(message.speculative),
        committed=list(message.committed_token_ids),
        drafts=list(message.drafts),
        cache_salt=decode_salt(message.cache_salt),
        client=message.client,
        group=message.group,
    )


def encode_delta(delta: Delta, request_id: str) -> pb.DeltaFrame.Delta:
    """`request_id` is the name on the link, which need not be the engine's."""
    return pb.DeltaFrame.Delta(
        request_id=request_id,
        token_ids=delta.tokens,
        log_probs=[_encode_log_probs(each) for each in delta.log_probs],
        finish_reason=encode_finish_reason(delta.finish_reason),
        usage=None if delta.usage is None else _encode_usage(delta.usage),
        speculation=None if delta.speculation is None else encode_stats(delta.speculation),
        timings=encode_timings(delta.timings),
        error=delta.error,
        stop_token_id=delta.stop_token,
        accepted=delta.accepted,
    )


def decode_delta(message: pb.DeltaFrame.Delta) -> Delta:
    tokens = list(message.token_ids)
    if len(message.accepted) != len(tokens):
        raise WireError(f"accepted: {len(message.accepted)} entries for {len(tokens)} tokens")
    if message.log_probs and len(message.log_probs) != len(tokens):
        raise WireError(f"log_probs: {len(message.log_probs)} entries for {len(tokens)} tokens")
    return Delta(
        request_id=message.request_id,
        tokens=tokens,
        accepted=list(message.accepted),
        log_probs=[_decode_log_probs(each) for each in message.log_probs],
        finish_reason=decode_finish_reason(message.finish_reason),
        stop_token=message.stop_token_id if message.HasField("stop_token_id") else None,
        usage=_decode_usage(message.usage) if message.HasField("usage") else None,
        speculation=decode_stats(message.speculation) if message.HasField("speculation") else None,
        timings=decode_timings(message.timings),
        error=message.error,
    )


def encode_load(load: EngineLoad) -> pb.DeltaFrame.Load:
    return pb.DeltaFrame.Load(
        running=load.running,
        waiting=load.waiting,
        free_slots=load.free_slots,
        rows=load.rows,
        step_s=load.step_s,
    )


def decode_load(message: pb.DeltaFrame.Load) -> EngineLoad:
    return EngineLoad(message.running, message.waiting, message.free_slots, message.rows, message.step_s)


def encode_target_description(description: TargetDescription) -> pb.TargetServiceDescribeResponse:
    return pb.TargetServiceDescribeResponse(
        worker_id=description.worker_id,
        model=description.model,
        vocabulary_fingerprint=description.vocabulary_fingerprint,
        vocabulary_size=description.vocabulary_size,
        max_model_len=description.max_model_len,
        slots=description.slots,
        rows_invariant=description.rows_invariant,
        eos_token_ids=description.eos_token_ids,
        method=description.method,
        numerics=description.numerics,
    )


def decode_target_description(message: pb.TargetServiceDescribeResponse) -> TargetDescription:
    return TargetDescription(
        worker_id=message.worker_id,
        model=message.model,
        vocabulary_fingerprint=message.vocabulary_fingerprint,
        vocabulary_size=message.vocabulary_size,
        max_model_len=message.max_model_len,
        slots=message.slots,
        rows_invariant=message.rows_invariant,
        eos_token_ids=tuple(message.eos_token_ids),
        method=message.method,
        numerics=message.numerics,
    )


def _encode_log_probs(each: LogProbs) -> pb.DeltaFrame.LogProbs:
    top = [pb.DeltaFrame.TokenLogProb(token_id=token, log_prob=value) for token, value in each.top]
    return pb.DeltaFrame.LogProbs(log_prob=each.log_prob, top=top)


def _decode_log_probs(message: pb.DeltaFrame.LogProbs) -> LogProbs:
    return LogProbs(message.log_prob, [(each.token_id, each.log_prob) for each in message.top])


def _encode_usage(usage: Usage) -> pb.DeltaFrame.Usage:
    return pb.DeltaFrame.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _decode_usage(message: pb.DeltaFrame.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)
