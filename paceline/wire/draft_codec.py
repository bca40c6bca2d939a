"""`draft.proto` ↔ `paceline.drafting.speculator` and `paceline.core.growth`.

Targets and drafts do not trust each other. Decoders check every rule that the proto files state and raise `WireError`,
so decoded growth is safe to graft and decoded events are safe to draft from. Rules about the state of a link, such as
which requests are open, are checked by `draft_stream` and by the draft's servicer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.growth import CERTAIN_TOKEN, ROOT_ID, DraftDistribution, Growth, GrowthBatch
from paceline.drafting.draft_loop import LinkUpdate, RequestClosed, RequestEvent
from paceline.drafting.speculator import Commit, Context, DraftDescription, Limit, Opening
from paceline.messages import Timings
from paceline.v1 import common_pb2
from paceline.v1 import draft_pb2 as pb
from paceline.wire import node_codec
from paceline.wire.common_codec import decode_salt, decode_sampling, decode_trace_parent, encode_sampling
from paceline.wire.field_codec import decode_fields, encode_fields
from paceline.wire.link_errors import WireError
from paceline.wire.tensor_codec import decode_tensor, encode_tensor

if TYPE_CHECKING:
    import torch

MAX_NODES = 4096
"""Most nodes in one growth, and in a tree."""
MAX_DISTRIBUTION_TOKENS = 256
"""Most tokens of one draft distribution."""
MAX_WEIGHT = 2**16 - 1
MAX_NAME = 1024
"""Longest text in a description, in characters."""
MAX_POSITION = 2**31
MAX_MICROSECONDS = 2**32 - 1


def encode_draft_description(draft: DraftDescription) -> pb.DraftServiceDescribeResponse:
    return encode_fields(pb.DraftServiceDescribeResponse, draft)


def decode_draft_description(message: pb.DraftServiceDescribeResponse) -> DraftDescription:
    for name in ("worker_id", "method", "model", "vocabulary_fingerprint"):
        if len(getattr(message, name)) > MAX_NAME:
            raise WireError(f"{name}: over {MAX_NAME} characters")
    return decode_fields(DraftDescription, message, hidden_state_layers=tuple(message.hidden_state_layers))


# Encoders of `DraftFrame` take `wire_id`, the request's id on the link; its id in the engine differs.


def encode_opening(opening: Opening, wire_id: int) -> pb.DraftFrame.Open:
    return encode_fields(
        pb.DraftFrame.Open,
        opening,
        request_id=wire_id,
        token_ids=opening.tokens,
        sampling=encode_sampling(opening.sampling),
    )


def encode_context(context: Context, wire_id: int) -> pb.DraftFrame.Context:
    return pb.DraftFrame.Context(
        request_id=wire_id,
        base_position=context.base_position,
        hidden_states=encode_tensor(context.hidden_states),
    )


def encode_commit(commit: Commit, wire_id: int) -> pb.DraftFrame.Commit:
    return pb.DraftFrame.Commit(
        request_id=wire_id,
        base_position=commit.base_position,
        token_ids=commit.tokens,
        accepted=commit.accepted,
        hidden_states=None if commit.hidden_states is None else encode_tensor(commit.hidden_states),
    )


def encode_limit(limit: Limit, wire_id: int) -> pb.DraftFrame.Limit:
    return encode_fields(pb.DraftFrame.Limit, limit, request_id=wire_id)


def decode_draft_frame(frame: pb.DraftFrame) -> list[RequestEvent]:
    """Return the events of a frame in the order in which they apply."""
    return [
        *map(_decode_opening, frame.opens),
        *map(_decode_context, frame.contexts),
        *map(_decode_commit, frame.commits),
        *(RequestClosed(each.request_id) for each in frame.closes),
        *map(_decode_limit, frame.limits),
    ]


def parse_draft_frame(data: bytes) -> list[RequestEvent]:
    """Return `decode_draft_frame` of a serialised frame."""
    return decode_draft_frame(pb.DraftFrame.FromString(data))


def encode_growth_frame(update: LinkUpdate) -> pb.GrowthFrame:
    return pb.GrowthFrame(
        growths=[_encode_growth(growth, request_id) for request_id, growth in update.growths],
        dropped=[
            pb.GrowthFrame.Dropped(request_id=request_id, reason=reason)
            for request_id, reason in update.dropped.items()
        ],
        applied=update.applied,
        queue_us=_microseconds(update.timings.queue_s),
        compute_us=_microseconds(update.timings.compute_s),
    )


def decode_growth_frame(frame: pb.GrowthFrame) -> LinkUpdate:
    """Return growth that needs no further checks before it is grafted, but one: a draft's matrices may be padded to
    more tokens than the target has (`paceline.engine.draft_manager`). Raises `WireError` otherwise."""
    return LinkUpdate(
        growths=_decode_growths(frame.growths),
        dropped={each.request_id: each.reason for each in frame.dropped},
        applied=frame.applied,
        timings=Timings(frame.queue_us / 1e6, frame.compute_us / 1e6, (frame.queue_us + frame.compute_us) / 1e6),
    )


def parse_growth_frame(data: bytes) -> LinkUpdate:
    """Return `decode_growth_frame` of a serialised frame."""
    return decode_growth_frame(pb.GrowthFrame.FromString(data))


def _encode_growth(growth: Growth, wire_id: int) -> pb.GrowthFrame.Growth:
    distances = [id_ - parent if parent else 0 for id_, parent in zip(growth.node_ids, growth.parent_ids, strict=True)]
    return pb.GrowthFrame.Growth(
        request_id=wire_id,
        base_position=growth.base_position,
        first_node_id=growth.first_id,
        nodes=node_codec.pack_nodes(node_codec.PackedNodes(growth.tokens, distances, growth.log_probs)),
        draft_laws=map(_encode_distribution, growth.distributions),
    )


def _decode_growths(messages: Sequence[pb.GrowthFrame.Growth]) -> GrowthBatch:
    """Parent ids are 0 for the root, or any id that this draft has used, also of pruned nodes."""
    headers: list[tuple[int, int, int, int]] = []
    parent_ids: list[int] = []
    tokens: list[int] = []
    log_probs: list[float] = []
    distributions: list[DraftDistribution] = []
    have_distributions = any(message.draft_laws for message in messages)
    for message in messages:
        nodes = _decode_nodes(message)
        headers.append((message.request_id, message.base_position, message.first_node_id, len(nodes.tokens)))
        parent_ids.extend(_parent_ids(message.first_node_id, nodes.distances))
        tokens.extend(nodes.tokens)
        log_probs.extend(nodes.log_probs)
        if have_distributions:
            distributions += _decode_distributions(message.draft_laws, nodes.tokens)
    return GrowthBatch(headers, parent_ids, tokens, log_probs, distributions)


def _decode_nodes(message: pb.GrowthFrame.Growth) -> node_codec.PackedNodes:
    if message.base_position >= MAX_POSITION:
        raise WireError(f"base_position: {message.base_position} exceeds any context")
    if message.first_node_id == 0:
        raise WireError("first_node_id: 0 is the id of the root")
    return node_codec.unpack_nodes(message.nodes, MAX_NODES)


def _parent_ids(first_id: int, distances: Sequence[int]) -> list[int]:
    ids = [id_ - distance for id_, distance in enumerate(distances, first_id)]
    if min(ids, default=1) < 1:
        raise WireError(f"nodes: a parent lies {max(distances)} ids before its node, and ids start at {first_id}")
    return [id_ if distance else ROOT_ID for id_, distance in zip(ids, distances, strict=True)]


def _encode_distribution(distribution: DraftDistribution) -> pb.DraftLaw:
    tokens = sorted(distribution)
    steps = [token - before for before, token in itertools.pairwise((0, *tokens))]
    return pb.DraftLaw(token_steps=steps, weights=[distribution[token] for token in tokens])


def _decode_distributions(messages: Sequence[pb.DraftLaw], nodes: Sequence[int]) -> Sequence[DraftDistribution]:
    if not messages:
        return [CERTAIN_TOKEN] * len(nodes)
    if len(messages) != len(nodes):
        raise WireError(f"draft_laws: {len(messages)} for {len(nodes)} nodes")
    return [_decode_distribution(each, node) for each, node in zip(messages, nodes, strict=True)]


def _decode_distribution(message: pb.DraftLaw, node: int) -> DraftDistribution:
    tokens, weights = list(itertools.accumulate(message.token_steps)), message.weights
    if not tokens and not weights:
        return CERTAIN_TOKEN
    if len(tokens) != len(weights) or len(tokens) > MAX_DISTRIBUTION_TOKENS:
        raise WireError(
            f"draft_laws: {len(tokens)} tokens with {len(weights)} weights, of at most {MAX_DISTRIBUTION_TOKENS}"
        )
    if 0 in message.token_steps[1:]:
        raise WireError("draft_laws: token ids that do not rise")
    if not 0 < min(weights) <= max(weights) <= MAX_WEIGHT:
        raise WireError(f"draft_laws: weights from {min(weights)} to {max(weights)}")
    distribution = dict(zip(tokens, weights, strict=True))
    if node not in distribution:
        raise WireError(f"draft_laws: token {node} cannot have been drawn from its distribution")
    return distribution


def _microseconds(seconds: float) -> int:
    """Round up to 1 from anything above 0: merging frames would keep the previous frame's value over a 0."""
    microseconds = min(max(0.0, seconds * 1e6), MAX_MICROSECONDS)
    return max(round(microseconds), int(microseconds > 0))


def _decode_opening(message: pb.DraftFrame.Open) -> Opening:
    if message.request_id == 0:
        raise WireError("opens.request_id: 0")
    if not message.token_ids:
        raise WireError("opens.token_ids: empty")
    if message.output_tokens > len(message.token_ids):
        raise WireError(f"opens.output_tokens: {message.output_tokens} of {len(message.token_ids)} tokens")
    _check_limits("opens", message)
    return decode_fields(
        Opening,
        message,
        tokens=list(message.token_ids),
        sampling=decode_sampling(message.sampling),
        cache_salt=decode_salt(message.cache_salt),
        trace_parent=decode_trace_parent(message.trace_parent),
    )


def _decode_limit(message: pb.DraftFrame.Limit) -> Limit:
    _check_limits("limits", message)
    return decode_fields(Limit, message)


def _check_limits(field: str, message: pb.DraftFrame.Open | pb.DraftFrame.Limit) -> None:
    if message.max_nodes > MAX_NODES:
        raise WireError(f"{field}.max_nodes: {message.max_nodes}, more than {MAX_NODES}")
    if not 0.0 <= message.least_path_probability <= 1.0:
        raise WireError(f"{field}.least_path_probability: {message.least_path_probability} is no probability")


def _decode_context(message: pb.DraftFrame.Context) -> Context:
    hidden_states = _decode_hidden_states(message.hidden_states)
    return Context(message.request_id, message.base_position, hidden_states)


def _decode_commit(message: pb.DraftFrame.Commit) -> Commit:
    if not message.token_ids:
        raise WireError("commits.token_ids: empty")
    if message.accepted > len(message.token_ids):
        raise WireError(f"commits.accepted: {message.accepted} of {len(message.token_ids)} tokens")
    hidden_states = _decode_hidden_states(message.hidden_states) if message.HasField("hidden_states") else None
    if hidden_states is not None and len(hidden_states) != len(message.token_ids):
        raise WireError(f"commits.hidden_states: {len(hidden_states)} rows, {len(message.token_ids)} tokens")
    return Commit(
        request_id=message.request_id,
        base_position=message.base_position,
        tokens=list(message.token_ids),
        accepted=message.accepted,
        hidden_states=hidden_states,
    )


def _decode_hidden_states(message: common_pb2.Tensor) -> torch.Tensor:
    """Shape [positions, layers, hidden size]."""
    hidden_states = decode_tensor(message)
    if hidden_states.dim() != 3:
        raise WireError(f"hidden_states: {hidden_states.dim()} dimensions, not 3")
    return hidden_states
