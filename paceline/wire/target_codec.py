"""`target.proto` ↔ `paceline.messages`. Decoders raise `WireError`, naming the field."""

from __future__ import annotations

from paceline.config import SpeculativeOptions
from paceline.messages import (
    Delta,
    EngineLoad,
    GenerationRequest,
    LogProbs,
    PromptLogProbs,
    SpeculationStats,
    TargetDescription,
    Usage,
    VerifiedTree,
)
from paceline.v1 import common_pb2
from paceline.v1 import target_pb2 as pb
from paceline.wire.common_codec import (
    decode_finish_reason,
    decode_salt,
    decode_sampling,
    decode_timings,
    decode_trace_parent,
    encode_finish_reason,
    encode_sampling,
    encode_stats,
    encode_timings,
)
from paceline.wire.field_codec import decode_fields, encode_fields
from paceline.wire.link_errors import WireError


def encode_request(request: GenerationRequest) -> pb.SubmitFrame.Submit:
    """Raises `WireError` if a value does not fit its field, such as a token id of 2**32."""
    try:
        return encode_fields(
            pb.SubmitFrame.Submit,
            request,
            prompt_token_ids=request.prompt,
            committed_token_ids=request.committed,
            drafts=request.draft_addresses,
            sampling=encode_sampling(request.sampling),
            speculative=encode_fields(common_pb2.SpeculativeOptions, request.speculative),
        )
    except (ValueError, TypeError) as error:
        raise WireError(f"request {request.request_id} cannot be sent: {error}") from error


def decode_request(message: pb.SubmitFrame.Submit) -> GenerationRequest:
    if not message.prompt_token_ids:
        raise WireError("prompt_token_ids: empty")
    if not message.HasField("sampling"):
        raise WireError("sampling: missing")
    return decode_fields(
        GenerationRequest,
        message,
        prompt=list(message.prompt_token_ids),
        committed=list(message.committed_token_ids),
        draft_addresses=list(message.drafts),
        sampling=decode_sampling(message.sampling),
        speculative=decode_fields(SpeculativeOptions, message.speculative),
        cache_salt=decode_salt(message.cache_salt),
        trace_parent=decode_trace_parent(message.trace_parent),
    )


def encode_delta(delta: Delta, request_id: str) -> pb.DeltaFrame.Delta:
    """`request_id`: the request's id on the link; `delta.request_id` is its id in the engine."""
    return pb.DeltaFrame.Delta(
        request_id=request_id,
        token_ids=delta.tokens,
        log_probs=[_encode_log_probs(log_probs) for log_probs in delta.log_probs],
        finish_reason=encode_finish_reason(delta.finish_reason),
        usage=None if delta.usage is None else encode_fields(pb.DeltaFrame.Usage, delta.usage),
        speculation=None if delta.speculation is None else encode_stats(delta.speculation),
        timings=encode_timings(delta.timings),
        error=delta.error,
        stop_token_id=delta.stop_token,
        accepted=delta.accepted,
        prompt_log_probs=[_encode_prompt_log_probs(part) for part in delta.prompt_log_probs],
        trees=[encode_tree(tree) for tree in delta.trees],
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
        log_probs=[_decode_log_probs(log_probs) for log_probs in message.log_probs],
        finish_reason=decode_finish_reason(message.finish_reason),
        stop_token=message.stop_token_id if message.HasField("stop_token_id") else None,
        usage=decode_fields(Usage, message.usage) if message.HasField("usage") else None,
        speculation=decode_fields(SpeculationStats, message.speculation) if message.HasField("speculation") else None,
        timings=decode_timings(message.timings),
        error=message.error,
        prompt_log_probs=[_decode_prompt_log_probs(part) for part in message.prompt_log_probs],
        trees=[_decode_tree(tree) for tree in message.trees],
    )


def encode_load(load: EngineLoad) -> pb.DeltaFrame.Load:
    # Written out, like deltas: a load is sent after every step.
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
    return encode_fields(pb.TargetServiceDescribeResponse, description)


def decode_target_description(message: pb.TargetServiceDescribeResponse) -> TargetDescription:
    return decode_fields(TargetDescription, message, eos_token_ids=tuple(message.eos_token_ids))


def _encode_log_probs(log_probs: LogProbs) -> pb.DeltaFrame.LogProbs:
    top = [pb.DeltaFrame.TokenLogProb(token_id=token, log_prob=value) for token, value in log_probs.top]
    return pb.DeltaFrame.LogProbs(log_prob=log_probs.log_prob, top=top, rank=log_probs.rank)


def _decode_log_probs(message: pb.DeltaFrame.LogProbs) -> LogProbs:
    return LogProbs(message.log_prob, [(each.token_id, each.log_prob) for each in message.top], message.rank)


def _encode_prompt_log_probs(part: PromptLogProbs) -> pb.DeltaFrame.PromptLogProbs:
    return pb.DeltaFrame.PromptLogProbs(start=part.start, entries=[_encode_log_probs(each) for each in part.entries])


def _decode_prompt_log_probs(message: pb.DeltaFrame.PromptLogProbs) -> PromptLogProbs:
    if not message.start:
        raise WireError("prompt_log_probs.start: 0; the first token has no log-probability")
    return PromptLogProbs(message.start, [_decode_log_probs(each) for each in message.entries])


def encode_tree(tree: VerifiedTree) -> pb.DeltaFrame.VerifiedTree:
    return pb.DeltaFrame.VerifiedTree(
        parents=tree.parents, token_ids=tree.tokens, accepted=tree.accepted, methods=tree.methods
    )


def _decode_tree(message: pb.DeltaFrame.VerifiedTree) -> VerifiedTree:
    lists = list(message.parents), list(message.token_ids), list(message.accepted), list(message.methods)
    if len({len(each) for each in lists}) > 1:
        raise WireError("trees: lists of different lengths")
    if any(parent > node for node, parent in enumerate(message.parents)):
        raise WireError("trees: a node before its parent")
    return VerifiedTree(*lists)
