"""A cache salt keeps requests apart: nothing computed or learned of one serves another of a different salt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.core.messages import Delta, GenerationRequest
from paceline.drafting.methods.suffix import SuffixSpeculator
from paceline.engine.draft_client import LocalDraftClient
from paceline.engine.engine import Engine
from paceline.engine.slot_pool import BLOCK_SIZE, SlotPool
from paceline.v1 import draft_pb2
from paceline.wire.draft_codec import decode_draft_frame, encode_opening
from paceline.wire.link_errors import WireError
from paceline.wire.target_codec import decode_submission, encode_submission
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers.targets import FREE
from tests.unit.test_suffix import drafted, opening, suffix

VOCABULARY = 500
SLOTS = 512
PROMPT = [7 * i % VOCABULARY for i in range(100)]
SPECULATION = SpeculativeConfig(method="suffix", num_speculative_tokens=8, max_tree_nodes=16)


def engine() -> Engine:
    """Of a table model; suffix decoding beside it learns from what was answered."""
    model = TableModel(VOCABULARY, SLOTS, SLOTS)

    return Engine(model, EngineConfig(slots=SLOTS), SPECULATION, LocalDraftClient(SuffixSpeculator(SPECULATION)), FREE)


def asked(salt: str, name: str = "r") -> GenerationRequest:
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=60)
    return GenerationRequest(name, PROMPT, sampling, SpeculativeOptions(report=True), cache_salt=salt)


def answered(target: Engine, submission: GenerationRequest) -> Delta:
    """The last delta, with all tokens."""
    target.submit(submission)
    tokens: list[int] = []
    while target.busy:
        for delta in target.step():
            tokens += delta.tokens
            last = delta
        target.check_integrity()
    return replace(last, tokens=tokens)


def cached(delta: Delta) -> int:
    assert delta.usage is not None
    return delta.usage.cached_tokens


def accepted(delta: Delta) -> int:
    assert delta.speculation is not None
    return delta.speculation.accepted_tokens


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("", "b"), ("a", "")])
def test_another_salt_finds_nothing_and_gets_the_same_tokens(first: str, second: str) -> None:
    target = engine()
    alone = answered(target, asked(first))
    other = answered(target, asked(second))
    again = answered(target, asked(first))
    assert alone.tokens == other.tokens == again.tokens
    assert cached(alone) == cached(other) == 0
    assert cached(again) == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
    assert accepted(other) == accepted(alone) < accepted(again), "what one was answered guesses for its own salt alone"


def test_a_salt_counts_for_the_whole_path() -> None:
    """The second block is found through the first; the same tokens behind another salt are another path."""
    pool = SlotPool(8 * BLOCK_SIZE)
    tokens = [1] * (2 * BLOCK_SIZE)
    for salt in ("a", "b"):
        slots, shared = pool.allocate(len(tokens)), []
        pool.cache_blocks(tokens, slots, shared, salt)
        pool.release(slots, shared)
    found = {salt: [block.serial for block in pool.match_prefix(tokens, salt)] for salt in ("a", "b", "", "c")}
    assert [len(blocks) for blocks in found.values()] == [2, 2, 0, 0]
    assert not set(found["a"]) & set(found["b"])


def test_a_salt_that_reads_like_a_block_is_none() -> None:
    """Blocks are numbered; a salt of the same looks must not lead into the middle of another path."""
    pool = SlotPool(8 * BLOCK_SIZE)
    slots, shared = pool.allocate(2 * BLOCK_SIZE), []
    pool.cache_blocks([1] * BLOCK_SIZE + [2] * BLOCK_SIZE, slots, shared, "a")
    assert pool.match_prefix([2] * BLOCK_SIZE, str(shared[0].serial)) == []


def test_preemption_finds_its_own_again() -> None:
    """What was given up under a salt is taken up under it."""
    pool = SlotPool(8 * BLOCK_SIZE)
    slots, shared = pool.allocate(BLOCK_SIZE), []
    pool.cache_blocks([3] * BLOCK_SIZE, slots, shared, "a")
    pool.release(slots, shared)
    assert len(pool.match_prefix([3] * BLOCK_SIZE, "a")) == 1


def test_suffix_decoding_learns_by_salt() -> None:
    speculator = suffix()
    speculator.open(replace(opening([1, 2, 3], 1, output=3), cache_salt="a"))
    speculator.close(1)
    assert drafted(speculator, [9, 1]) == []
    speculator.open(replace(opening([9, 1], 2), cache_salt="a"))
    assert speculator.grow()[2].tokens[0] == 2


def test_the_salt_travels() -> None:
    submission = asked("salted")
    assert decode_submission(encode_submission(submission)).cache_salt == "salted"
    begun = replace(opening([1], 1), cache_salt="salted")
    [decoded] = decode_draft_frame(draft_pb2.DraftFrame(opens=[encode_opening(begun, 1)]))
    assert decoded == begun


def test_a_salt_that_is_too_long_is_refused() -> None:
    with pytest.raises(WireError, match="cache_salt: longer than 64 bytes"):
        decode_submission(encode_submission(asked("é" * 33)))
    with pytest.raises(WireError, match="cache_salt: longer than 64 bytes"):
        decode_draft_frame(
            draft_pb2.DraftFrame(opens=[encode_opening(replace(opening([1], 1), cache_salt="x" * 65), 1)])
        )
