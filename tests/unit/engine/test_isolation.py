"""A cache salt keeps requests apart: nothing computed or learned of one serves another of a different salt."""

from __future__ import annotations

import pytest

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.drafting.speculator import Opening
from paceline.engine.draft_client import LocalDraftClient
from paceline.engine.engine import Engine
from paceline.messages import Delta, GenerationRequest
from paceline.model.rows import BLOCK_SIZE
from paceline.v1 import draft_pb2
from paceline.wire.draft_codec import decode_draft_frame, encode_opening
from paceline.wire.link_errors import WireError
from paceline.wire.target_codec import decode_request, encode_request
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers.drafts import suffix_draft
from tests.helpers.engine_runs import run
from tests.helpers.targets import FREE

PROMPT = [7 * i % 500 for i in range(100)]
SPECULATION = SpeculativeConfig(method="suffix", num_speculative_tokens=8, max_tree_nodes=16)


def asked(salt: str) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=60)
    return GenerationRequest("r", PROMPT, sampling, SpeculativeOptions(report=True), cache_salt=salt)


def opened(salt: str) -> draft_pb2.DraftFrame:
    opening = Opening(1, [1], 0, SamplingParams(), max_depth=4, max_nodes=8, cache_salt=salt)
    return draft_pb2.DraftFrame(opens=[encode_opening(opening, 1)])


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("", "b"), ("a", "")])
def test_another_salt_finds_nothing_and_gets_the_same_tokens(first: str, second: str) -> None:
    """Suffix decoding learns from the answers of its own salt alone."""
    drafting = LocalDraftClient(suffix_draft(SPECULATION))
    target = Engine(TableModel(500, 512, 512), EngineConfig(slots=512), SPECULATION, drafting, FREE)
    answers: list[Delta] = []
    for salt in (first, second, first):
        answers += run(target, [asked(salt)]).values()
    alone, other, again = answers
    assert alone.tokens == other.tokens == again.tokens
    cached = [each.usage.cached_tokens for each in answers if each.usage]
    assert cached == [0, 0, len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE]
    accepted = [each.speculation.accepted_tokens for each in answers if each.speculation]
    assert accepted[0] == accepted[1] < accepted[2]


def test_the_salt_travels() -> None:
    assert decode_request(encode_request(asked("salted"))).cache_salt == "salted"
    [opening] = decode_draft_frame(opened("salted"))
    assert isinstance(opening, Opening)
    assert opening.cache_salt == "salted"


def test_a_salt_that_is_too_long_is_refused() -> None:
    with pytest.raises(WireError, match="cache_salt: longer than 64 bytes"):
        decode_request(encode_request(asked("é" * 33)))
    with pytest.raises(WireError, match="cache_salt: longer than 64 bytes"):
        decode_draft_frame(opened("x" * 65))
