"""A choice's text does not depend on how its tokens were cut into deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SamplingParams, SpeculativeOptions
from paceline.core.messages import Delta, FinishReason, LogProbs
from paceline.text import Tokenizer
from paceline_services.gateway.generation import GenerationRequest, OutputChunk, OutputProcessor, concatenate_chunks
from paceline_services.gateway.served_model import _interleaved

TOKENIZER = Tokenizer.load("pydoc")
WORDS = ["def", " f", "(x)", ":\n", "é", "東", "京", "<|im_start|>", "return", " x"]


def run(choice: GenerationRequest, tokens: list[int], borders: list[int], stop_token: int | None) -> OutputChunk:
    ends = [*sorted({border % len(tokens) for border in borders} - {0}), len(tokens)]
    text = OutputProcessor(choice, TOKENIZER)
    pieces = []
    for start, end in zip([0, *ends], ends, strict=False):
        delta = Delta("r", tokens[start:end], log_probs=[LogProbs(-float(i)) for i in range(start, end)])
        if end == len(tokens):
            delta.finish_reason = FinishReason.LENGTH if stop_token is None else FinishReason.STOP
            delta.stop_token = stop_token
        pieces.append(text.process(delta))
        if pieces[-1].finish_reason is not None:
            break
    return concatenate_chunks(pieces)


@settings(deadline=None)
@given(
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=12),
    stop=st.lists(st.sampled_from(["f(", "x):", "東京", "京r", "\n", "é"]), max_size=2, unique=True),
    borders=st.lists(st.integers(0, 99), max_size=6),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 5),
    stopped=st.booleans(),
)
def test_any_cut_into_deltas_gives_the_same_choice(
    words: list[str],
    stop: list[str],
    borders: list[int],
    include_stop: bool,
    min_tokens: int,
    stopped: bool,
) -> None:
    tokens = TOKENIZER.encode("".join(words)) + ([2] if stopped else [])
    choice = GenerationRequest(
        prompt=[1],
        sampling=SamplingParams(max_tokens=100, min_tokens=min_tokens),
        speculative=SpeculativeOptions(),
        eos_token_ids=[2],
        stop=tuple(stop),
        include_stop=include_stop,
    )
    stop_token = 2 if stopped else None
    whole, cut = (run(choice, tokens, each, stop_token) for each in ([], borders))
    assert cut == whole
    assert len(whole.log_probs) == len(whole.tokens) == len(whole.offsets)
    assert whole.tokens == tokens[: len(whole.tokens)]
    if whole.stop_reason is None:
        assert whole.text == TOKENIZER.decode(tokens)
    elif not include_stop:
        assert str(whole.stop_reason) in TOKENIZER.decode(whole.tokens).removeprefix(whole.text)


async def test_others_have_their_turns_while_many_choices_begin() -> None:
    """To begin one takes a moment, so a thousand at once would stop every stream."""
    turn, begun = 0, []

    async def others() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def choice() -> AsyncGenerator[OutputChunk]:
        begun.append(turn)
        yield OutputChunk(finish_reason=FinishReason.STOP)

    task = asyncio.create_task(others())
    assert len([part async for part in _interleaved([choice() for _ in range(10)])]) == 10
    task.cancel()
    assert len(set(begun)) == 10
