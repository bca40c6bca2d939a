"""Messages between services round-trip, and decoders refuse invalid ones."""

import math
import string
from collections.abc import Sequence
from dataclasses import replace
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import pytest
import torch
from google.protobuf.message import Message
from hypothesis import Phase, find, given, reject, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.config import SamplingParams, SpeculativeOptions
from paceline.core.growth import ROOT_ID, Growth, GrowthBatch
from paceline.drafting.draft_loop import LinkUpdate, RequestClosed
from paceline.drafting.speculator import Commit, Context, DraftDescription, Limit, Opening
from paceline.messages import (
    Delta,
    EngineLoad,
    FinishReason,
    GenerationRequest,
    LogProbs,
    PromptLogProbs,
    SpeculationStats,
    TargetDescription,
    Timings,
    Usage,
    VerifiedTree,
)
from paceline.v1 import common_pb2, draft_pb2, inference_pb2, target_pb2
from paceline.wire import draft_codec, target_codec
from paceline.wire.link_errors import WireError
from paceline.wire.node_codec import LOG_ODDS, log_probability
from paceline.wire.tensor_codec import decode_tensor, encode_tensor
from paceline_services.gateway.generation.bodies import SHARED_FIELDS, CompletionBody
from paceline_services.gateway.grpc.bodies import CONVERTED_FIELDS

VOCABULARY = 1000

tokens = st.integers(0, 2**32 - 1)
counts = st.integers(0, 2**32 - 1)
seconds = st.floats(0, 1e9)
texts = st.text(string.printable, max_size=20)


def values(annotation: Any, metadata: Sequence[Any] = (), least: int = 0) -> st.SearchStrategy[Any]:
    """Values of a parameter's type within its bounds. `least`: items of a tuple."""
    kind, inner = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return values(inner[0], inner[1].metadata)
    if kind is UnionType:
        return st.none() | values(inner[0], metadata)
    if kind is tuple:
        return st.lists(values(inner[0], least=1), min_size=least, max_size=3).map(tuple)
    if kind is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=3)
    if annotation is str:
        return texts
    bounds = {
        name: getattr(each, name) for each in metadata for name in ("ge", "gt", "le", "lt") if hasattr(each, name)
    }
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if annotation is float:
        return st.floats(low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds)
    return st.integers(low, 2**31 - 1 if high is None else high - ("lt" in bounds))


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """Any value of every parameter."""
    fields = SamplingParams.model_fields.items()
    drawn = {name: draw(values(field.annotation, field.metadata)) for name, field in fields}
    drawn["min_tokens"], drawn["max_tokens"] = sorted((drawn["min_tokens"], drawn["max_tokens"]))
    try:
        return SamplingParams(**drawn)
    except ValidationError:  # parameters that exclude each other
        reject()


samplings = sampling_params()
options = st.builds(
    SpeculativeOptions,
    enabled=st.none() | st.booleans(),
    num_speculative_tokens=st.none() | counts,
    max_tree_nodes=st.none() | counts,
    report=st.booleans(),
)
generation_requests = st.builds(
    GenerationRequest,
    request_id=texts,
    prompt=st.lists(tokens, min_size=1, max_size=5),
    sampling=samplings,
    speculative=options,
    committed=st.lists(tokens, max_size=3),
    draft_addresses=st.lists(texts, max_size=3),
    priority=st.integers(-(2**31), 2**31 - 1),
    return_tree=st.booleans(),
)
stats = st.builds(
    SpeculationStats,
    drafted_by_depth=st.lists(counts, max_size=4),
    accepted_by_depth=st.lists(counts, max_size=4),
    drafted_tokens=counts,
    verifications=counts,
    steps=counts,
    drafts=st.lists(texts, max_size=2),
    strategy=texts,
    lossy=st.booleans(),
    drafter_invariant=st.booleans(),
)
timings = st.builds(Timings, seconds, seconds, seconds)
levels = st.sampled_from(LOG_ODDS).map(log_probability)
negative = st.floats(-100, 0)
log_probs = st.builds(LogProbs, negative, st.lists(st.tuples(tokens, negative), max_size=3), counts)
prompt_log_probs = st.builds(PromptLogProbs, st.integers(1, 2**32 - 1), st.lists(log_probs, max_size=3))


@st.composite
def trees(draw: st.DrawFn) -> VerifiedTree:
    nodes = range(draw(st.integers(0, 5)))
    return VerifiedTree(
        parents=[draw(st.integers(0, node)) for node in nodes],
        tokens=[draw(tokens) for _ in nodes],
        accepted=[draw(st.booleans()) for _ in nodes],
        methods=[draw(texts) for _ in nodes],
    )


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    count = draw(st.integers(0, 4))
    some = st.lists(log_probs, min_size=count, max_size=count)
    return Delta(
        request_id=draw(texts),
        tokens=draw(st.lists(tokens, min_size=count, max_size=count)),
        accepted=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        log_probs=draw(st.just([]) | some),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        stop_token=draw(st.none() | tokens),
        usage=draw(st.none() | st.builds(Usage, counts, counts, counts)),
        speculation=draw(st.none() | stats),
        timings=draw(timings),
        error=draw(texts),
        prompt_log_probs=draw(st.lists(prompt_log_probs, max_size=2)),
        trees=draw(st.lists(trees(), max_size=2)),
    )


@st.composite
def growths(draw: st.DrawFn) -> Growth:
    count = draw(st.integers(0, 6))
    first = draw(st.integers(1, 2**32 - 1 - count))
    return Growth(
        base_position=draw(st.integers(0, 2**31 - 1)),
        first_id=first,
        parent_ids=[draw(st.integers(ROOT_ID, before)) for before in range(first - 1, first - 1 + count)],
        tokens=draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=count, max_size=count)),
        log_probs=draw(st.lists(levels, min_size=count, max_size=count)),
    )


weights = st.integers(1, draft_codec.MAX_WEIGHT)
openings = st.builds(
    Opening,
    request_id=st.integers(1, 2**64 - 1),
    tokens=st.lists(tokens, min_size=3, max_size=5),
    output_tokens=st.integers(0, 3),
    sampling=samplings,
    max_depth=counts,
    max_nodes=st.integers(0, draft_codec.MAX_NODES),
    strategy=texts,
    least_path_probability=st.floats(0, 1, width=32),
)


@st.composite
def drawn_growths(draw: st.DrawFn) -> Growth:
    """Growth with a draft distribution for each node, or certainty."""
    growth = draw(growths().filter(len))
    others = st.dictionaries(st.integers(0, VOCABULARY - 1), weights, max_size=5)
    distributions = [draw(st.just({}) | others.map(lambda d, token=token: d | {token: 9})) for token in growth.tokens]
    return replace(growth, distributions=distributions)


def round_timings(queue_us: int, compute_us: int) -> Timings:
    return Timings(queue_us / 1e6, compute_us / 1e6, (queue_us + compute_us) / 1e6)


UNKNOWN_FIELD = bytes([0xC2, 0x3E, 3]) + b"new"
"""Field 1000 with three bytes."""


def add_unknown_fields(message: Message) -> None:
    """Add one unknown field to every message, as a newer build would."""
    for field, value in message.ListFields():
        if field.message_type and not field.message_type.GetOptions().map_entry:
            for each in value if field.is_repeated else [value]:
                add_unknown_fields(each)
    message.MergeFromString(UNKNOWN_FIELD)


def sent(message: Message) -> list[bytes]:
    """The message as this build sends it, and as a newer build would."""
    ours = message.SerializeToString()
    add_unknown_fields(message)
    theirs = message.SerializeToString()
    assert UNKNOWN_FIELD in theirs
    return [ours, theirs]


@given(generation_requests)
def test_generation_request(generation_request: GenerationRequest) -> None:
    for wire in sent(target_codec.encode_request(generation_request)):
        assert target_codec.decode_request(target_pb2.SubmitFrame.Submit.FromString(wire)) == generation_request


@given(deltas())
def test_delta(delta: Delta) -> None:
    for wire in sent(target_codec.encode_delta(delta, delta.request_id)):
        assert target_codec.decode_delta(target_pb2.DeltaFrame.Delta.FromString(wire)) == delta


def test_the_first_token_of_a_prompt_has_no_log_probability() -> None:
    message = target_pb2.DeltaFrame.Delta(prompt_log_probs=[target_pb2.DeltaFrame.PromptLogProbs(start=0)])
    with pytest.raises(WireError, match=r"prompt_log_probs\.start"):
        target_codec.decode_delta(message)


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        (target_pb2.DeltaFrame.VerifiedTree(parents=[0, 1], token_ids=[5, 6], accepted=[True]), "different lengths"),
        (
            target_pb2.DeltaFrame.VerifiedTree(parents=[1], token_ids=[5], accepted=[True], methods=["ngram"]),
            "a node before its parent",
        ),
    ],
)
def test_an_invalid_tree_is_refused(tree: target_pb2.DeltaFrame.VerifiedTree, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        target_codec.decode_delta(target_pb2.DeltaFrame.Delta(trees=[tree]))


@given(st.builds(EngineLoad, counts, counts, counts, counts, seconds))
def test_load(load: EngineLoad) -> None:
    assert target_codec.decode_load(target_codec.encode_load(load)) == load


def test_descriptions() -> None:
    target = TargetDescription("w", "m", "f", 4096, 8192, 16384, True, (2, 3), "ngram", "native avx2; float32")
    target = replace(target, labels=["pool=long"], features=["prompt_logprobs"], beside=["ngram"])
    assert target_codec.decode_target_description(target_codec.encode_target_description(target)) == target
    draft = DraftDescription("custom", "m", "f", 0, (0, 3, 7), 2048, "w")
    assert draft_codec.decode_draft_description(draft_codec.encode_draft_description(draft)) == draft


def test_every_sampling_parameter_has_a_field() -> None:
    """The codec encodes a parameter by its field, so this is all that a new one needs."""
    assert set(SamplingParams.model_fields) == set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("name", SamplingParams.model_fields)
def test_round_trips_try_every_sampling_parameter(name: str) -> None:
    default, quick = getattr(SamplingParams(), name), settings(phases=[Phase.generate])
    find(samplings, lambda params: getattr(params, name) != default, settings=quick)


def test_grpc_clients_have_the_parameters_of_http_under_the_same_names() -> None:
    """`InferenceService` copies fields by name, so this is all that a new one needs there."""
    http = set(CompletionBody.model_fields)
    sampling = set(inference_pb2.GenerateRequest.Sampling.DESCRIPTOR.fields_by_name)
    assert http & set(SamplingParams.model_fields) <= sampling <= http
    assert set(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name) - CONVERTED_FIELDS <= http


def test_a_sampling_parameter_that_a_grpc_client_leaves_out_has_its_default() -> None:
    """Not the zero of its type: so it needs presence, or a default that equals this zero."""
    for field in inference_pb2.GenerateRequest.Sampling.DESCRIPTOR.fields:
        fields = (SamplingParams if field.name in SHARED_FIELDS else CompletionBody).model_fields
        default = fields[field.name].get_default(call_default_factory=True)
        assert field.has_presence or not default, field.name


@given(openings, st.builds(Limit, counts, counts, st.integers(0, draft_codec.MAX_NODES), st.floats(0, 1, width=32)))
def test_opening_and_limit(opening: Opening, limit: Limit) -> None:
    frame = draft_pb2.DraftFrame(
        opens=[draft_codec.encode_opening(opening, opening.request_id)],
        limits=[draft_codec.encode_limit(limit, limit.request_id)],
    )
    for wire in sent(frame):
        assert draft_codec.parse_draft_frame(wire) == [opening, limit]


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_a_limit_must_be_a_probability(value: float) -> None:
    limited = draft_pb2.DraftFrame.Limit(request_id=1, least_path_probability=value)
    opening = Opening(1, [1], 0, SamplingParams(), 1, 1, least_path_probability=value)
    opened = draft_codec.encode_opening(opening, 1)
    for frame in (draft_pb2.DraftFrame(limits=[limited]), draft_pb2.DraftFrame(opens=[opened])):
        with pytest.raises(WireError, match="no probability"):
            draft_codec.decode_draft_frame(frame)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (3, 2, 5), (2, 1, 1, 4)])
def test_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """In any layout, and with NaN and infinity."""
    tensor = (torch.randn(shape) * 100).to(dtype)
    if dtype.is_floating_point:
        tensor.view(-1)[0] = math.nan if len(shape) > 1 else -math.inf
    for each in (tensor, tensor.transpose(0, -1)):
        decoded = decode_tensor(encode_tensor(each))
        assert decoded.dtype == dtype
        assert torch.equal(decoded.view(torch.uint8), each.contiguous().view(torch.uint8))


def test_the_events_of_a_frame_are_in_order() -> None:
    states = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    context = Context(7, 5, states)
    commit = Commit(7, 9, [4, 5], 1, states)
    frame = draft_pb2.DraftFrame(
        closes=[draft_pb2.DraftFrame.Close(request_id=7)],
        commits=[draft_codec.encode_commit(commit, 7)],
        contexts=[draft_codec.encode_context(context, 7)],
    )
    first, second, third = draft_codec.decode_draft_frame(frame)
    assert isinstance(first, Context)
    assert (first.request_id, first.base_position) == (7, 5)
    assert torch.equal(first.hidden_states, states)
    assert isinstance(second, Commit)
    assert (second.base_position, second.tokens, second.accepted) == (9, [4, 5], 1)
    assert second.hidden_states is not None
    assert torch.equal(second.hidden_states, states)
    assert third == RequestClosed(7)


@given(
    st.builds(
        LinkUpdate,
        growths=st.lists(st.tuples(st.integers(1, 2**64 - 1), growths() | drawn_growths()), max_size=3).map(
            GrowthBatch.of
        ),
        dropped=st.dictionaries(st.integers(1, 2**64 - 1), texts, max_size=2),
        applied=counts,
        timings=st.builds(round_timings, st.integers(0, 10**9), st.integers(0, 10**9)),
    )
)
def test_growth_frame(update: LinkUpdate) -> None:
    for wire in sent(draft_codec.encode_growth_frame(update)):
        assert draft_codec.parse_growth_frame(wire) == update


def frame_of(*growths: Growth, **fields: Any) -> draft_pb2.GrowthFrame:
    return draft_codec.encode_growth_frame(LinkUpdate(GrowthBatch.of([(1, growth) for growth in growths]), **fields))


def test_two_rounds_merge_into_one_frame() -> None:
    """The growths of a request stay separate and in order."""
    first = Growth(3, 1, [0], [10], [log_probability(2.0)])
    second = Growth(3, 2, [1], [11], [log_probability(-2.0)])
    frame = frame_of(first, applied=4, timings=Timings(0.25, 0.5, 0.75))
    frame.MergeFrom(frame_of(second, dropped={2: "full"}, applied=5, timings=Timings(1e-9, 0.125, 0.125)))
    update = draft_codec.decode_growth_frame(frame)
    assert list(update.growths) == [(1, first), (1, second)]
    assert (update.dropped, update.applied) == ({2: "full"}, 5)
    assert update.timings == round_timings(1, 125_000)


def test_the_timings_of_a_round_are_clamped() -> None:
    frame = frame_of(timings=Timings(-1.0, math.inf, math.inf))
    assert draft_codec.decode_growth_frame(frame).timings == round_timings(0, 2**32 - 1)


def test_the_size_of_a_typical_growth() -> None:
    """Twenty nodes, in a tree of width two: 12 bits per token, 5 per probability, 38 for all parents: 48 bytes."""
    parents = [0, 0, *(100 + i // 2 for i in range(18))]
    frame = frame_of(Growth(300, 100, parents, [2**12 - 1 - i for i in range(20)], [-0.5] * 20))
    assert len(frame.growths[0].nodes) == 2 + 48
    assert frame.ByteSize() == 61


def distribution(token_steps: list[int], weights: list[int]) -> draft_pb2.DraftLaw:
    return draft_pb2.DraftLaw(token_steps=token_steps, weights=weights)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([distribution([5], [1, 2])], "1 tokens with 2 weights"),
        ([distribution([5], [])], "1 tokens with 0 weights"),
        ([distribution([], [1])], "0 tokens with 1 weights"),
        ([distribution([5, 0], [1, 1])], "do not rise"),
        ([distribution([5, 1], [1, 0])], "weights from 0 to 1"),
        ([distribution([5], [2**16])], "weights from 65536"),
        ([distribution([6], [1])], "token 5 cannot have been drawn"),
        ([distribution([1] * 257, [1] * 257)], "257 tokens with 257 weights, of at most 256"),
        ([], "draft_laws: 1 for 2 nodes"),
        ([distribution([5], [1])] * 2, "draft_laws: 3 for 2 nodes"),
    ],
)
def test_an_invalid_distribution_is_refused(messages: list[draft_pb2.DraftLaw], complaint: str) -> None:
    """Every node has a distribution, or none has."""
    frame = frame_of(Growth(0, 1, [0, 1], [5, 5], [-0.1, -0.1]))
    frame.growths[0].draft_laws.extend([distribution([5], [1]), *messages])
    with pytest.raises(WireError, match=complaint):
        draft_codec.decode_growth_frame(frame)


def test_distributions_are_exact_and_take_five_bytes_per_token() -> None:
    weights = {500 * i + 7: 2**15 - i for i in range(64)}
    frame = frame_of(Growth(0, 1, [0], [7], [log_probability(2.0)], [weights]))
    assert len(frame.growths[0].draft_laws[0].SerializeToString()) <= 64 * 5 + 6
    [(_, decoded)] = draft_codec.decode_growth_frame(frame).growths
    assert decoded.distributions == [weights]
