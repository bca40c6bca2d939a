"""A request's text, and what its parser finds there, do not depend on how its tokens are cut into deltas."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SamplingParams
from paceline.messages import (
    Delta,
    FinishReason,
    GenerationRequest,
    LogProbs,
    PromptLogProbs,
    SpeculationStats,
    Timings,
    Usage,
    VerifiedTree,
)
from paceline.output_processor import OutputOptions, OutputProcessor, TextDelta
from paceline.parsing import Content, OutputParser, Reasoning, ToolArguments, ToolCall
from paceline.parsing.output_format import choose_format
from paceline.text import Detokenizer, Tokenizer

TOKENIZER = Tokenizer.load("pydoc")
PARTS = ["def", " f", "(x)", ":\n", "é", "東", "京", "<|im_start|>", "return", " x"]
MARKED = ["<think>", "</think>", '<tool_call>{"name": "f", "arguments": ', '{"x": "東"}', "}</tool_call>", "\n", "<"]
EOS = 2


def parser() -> OutputParser:
    return choose_format("hermes", "qwen3", None).parser({"f": {}})


def process(tokens: list[int], borders: list[int], options: OutputOptions, **sampling: int) -> TextDelta:
    """The output of a request whose engine sends these tokens, cut at `borders` into deltas."""
    ends = [*sorted({border % len(tokens) for border in borders} - {0}), len(tokens)]
    request = GenerationRequest("r", [1, 5], SamplingParams(max_tokens=100, **sampling))  # type: ignore[arg-type]
    processor, output = OutputProcessor(request, options, TOKENIZER), TextDelta("r")
    for start, end in zip([0, *ends], ends, strict=False):
        delta = Delta("r", tokens[start:end], [True] * (end - start))
        delta.log_probs = [LogProbs(-float(index)) for index in range(start, end)]
        if end == len(tokens):
            stopped = tokens[-1] == EOS
            delta.finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            delta.stop_token = EOS if stopped else None
        output.extend(processor.process(delta))
        if processor.stopped:
            break
    output.stop_token = None
    return output


@settings(deadline=None)
@given(
    parts=st.lists(st.sampled_from([*PARTS, *MARKED]), min_size=1, max_size=12),
    stop=st.lists(st.sampled_from(["f(", "x):", "東京", "京r", "\n", "é"]), max_size=2, unique=True),
    borders=st.lists(st.integers(0, 99), max_size=6),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 5),
    stopped=st.booleans(),
    parsed=st.booleans(),
)
def test_any_cut_into_deltas_gives_the_same_output(
    parts: list[str],
    stop: list[str],
    borders: list[int],
    include_stop: bool,
    min_tokens: int,
    stopped: bool,
    parsed: bool,
) -> None:
    tokens = TOKENIZER.encode("".join(parts)) + ([EOS] if stopped else [])
    options = OutputOptions(stop, include_stop, parser=parser if parsed else None, eos_token_ids=[EOS])
    whole, cut = (process(tokens, each, options, min_tokens=min_tokens) for each in ([], borders))
    assert cut == whole
    assert len(whole.log_probs) == len(whole.accepted) == len(whole.offsets) == len(whole.tokens)
    assert whole.tokens == tokens[: len(whole.tokens)]
    assert bool(whole.events) <= parsed
    assert 0 <= whole.reasoning_tokens <= len(whole.tokens)
    assert bool(whole.reasoning_tokens) <= any(isinstance(event, Reasoning) for event in whole.events)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, len(whole.tokens))
    if whole.stop_reason is None:
        assert whole.text == TOKENIZER.decode(tokens)
    elif not include_stop:
        assert str(whole.stop_reason) in TOKENIZER.decode(whole.tokens).removeprefix(whole.text)


def test_a_delta_takes_every_field_of_the_next_one() -> None:
    empty, later = (
        TextDelta("r"),
        TextDelta(
            "r",
            [5, EOS],
            [True, False],
            [LogProbs(-1.0)],
            FinishReason.STOP,
            EOS,
            Usage(1, 2),
            SpeculationStats(),
            Timings(1.0),
            "an error",
            [PromptLogProbs(1, [])],
            [VerifiedTree([0])],
            "x",
            [Content("x")],
            1,
            [0],
            EOS,
            "float32",
        ),
    )
    assert [each.name for each in fields(TextDelta) if getattr(empty, each.name) == getattr(later, each.name)] == [
        "request_id"
    ]
    empty.extend(later)
    assert empty == later


def test_the_client_s_own_stop_token_is_the_stop_reason() -> None:
    assert process([5, EOS], [], OutputOptions()).stop_reason == EOS


def test_a_parser_sees_the_text_before_the_stop_and_no_more() -> None:
    text = '<think>\nHm.</think>\nYes.<tool_call>{"name": "f", "arguments": {"x": "def"}}</tool_call>'
    tokens = TOKENIZER.encode(text)
    output = process(tokens, [3, 7], OutputOptions(["ef"], parser=parser))
    kinds = {kind: [event for event in output.events if isinstance(event, kind)] for kind in (Reasoning, Content)}
    assert "".join(event.text for event in kinds[Reasoning]) == "Hm."
    assert "".join(event.text for event in kinds[Content]) == "Yes."
    assert ToolCall(0, "f") in output.events
    assert "".join(event.text for event in output.events if isinstance(event, ToolArguments)) == '{"x": "d'
    assert output.text == text[: text.index("ef")], "the text stays as the model wrote it"


def test_special_tokens_that_are_shown_become_text() -> None:
    tokens = TOKENIZER.encode("a<|im_start|>b<|im_end|>")
    start = TOKENIZER.token_id("<|im_start|>")
    assert Detokenizer(TOKENIZER).feed(tokens) == "ab"
    assert Detokenizer(TOKENIZER, shown=[start or 0]).feed(tokens) == "a<|im_start|>b"
