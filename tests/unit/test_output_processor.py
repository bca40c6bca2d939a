"""A request's text does not depend on how its tokens are cut into deltas."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SamplingParams
from paceline.core.messages import Delta, FinishReason, GenerationRequest, LogProbs
from paceline.output_processor import OutputProcessor
from paceline.text import Tokenizer

TOKENIZER = Tokenizer.load("pydoc")
PARTS = ["def", " f", "(x)", ":\n", "é", "東", "京", "<|im_start|>", "return", " x"]
EOS = 2


def process(request: GenerationRequest, tokens: list[int], borders: list[int]) -> Delta:
    """The output of a request whose engine sends these tokens, cut at `borders` into deltas."""
    ends = [*sorted({border % len(tokens) for border in borders} - {0}), len(tokens)]
    processor, output = OutputProcessor(request, TOKENIZER), Delta(request.request_id)
    for start, end in zip([0, *ends], ends, strict=False):
        delta = Delta(request.request_id, tokens[start:end], [True] * (end - start))
        delta.log_probs = [LogProbs(-float(index)) for index in range(start, end)]
        if end == len(tokens):
            stopped = tokens[-1] == EOS
            delta.finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            delta.stop_token = EOS if stopped else None
        processor.process(delta)
        output.extend(delta)
        if processor.stopped:
            break
    output.stop_token = None
    return output


@settings(deadline=None)
@given(
    parts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=12),
    stop=st.lists(st.sampled_from(["f(", "x):", "東京", "京r", "\n", "é"]), max_size=2, unique=True),
    borders=st.lists(st.integers(0, 99), max_size=6),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 5),
    stopped=st.booleans(),
)
def test_any_cut_into_deltas_gives_the_same_output(
    parts: list[str], stop: list[str], borders: list[int], include_stop: bool, min_tokens: int, stopped: bool
) -> None:
    tokens = TOKENIZER.encode("".join(parts)) + ([EOS] if stopped else [])
    request = GenerationRequest(
        "r",
        [1, 5],
        SamplingParams(max_tokens=100, min_tokens=min_tokens),
        eos_token_ids=[EOS],
        stop=stop,
        include_stop=include_stop,
    )
    whole, cut = process(request, tokens, []), process(request, tokens, borders)
    assert cut == whole
    assert len(whole.log_probs) == len(whole.accepted) == len(whole.offsets) == len(whole.tokens)
    assert whole.tokens == tokens[: len(whole.tokens)]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, len(whole.tokens))
    if whole.stop_reason is None:
        assert whole.text == TOKENIZER.decode(tokens)
    elif not include_stop:
        assert str(whole.stop_reason) in TOKENIZER.decode(whole.tokens).removeprefix(whole.text)


def test_the_client_s_own_stop_token_is_the_stop_reason() -> None:
    request = GenerationRequest("r", [1], SamplingParams())
    assert process(request, [5, EOS], []).stop_reason == EOS
