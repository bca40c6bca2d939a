"""Every way in which a request ends, or its reasoning does, inside a run of accepted guesses, at every place in it.

The draft knows the output, and more of it than the request keeps. So each step commits six guesses and a token of the
target's own, until the end falls somewhere into such a run. The model is the shipped one with markers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import pytest

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.tree import ROOT, TokenTree
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.grammar import grammar_from_regex
from paceline.messages import FinishReason, GenerationRequest
from paceline.model import Model, load
from paceline.output_processor import OutputOptions, OutputProcessor, TextDelta
from paceline.parsing.formats.hermes import HERMES
from paceline.parsing.output_format import OutputFormat
from paceline.parsing.reasoning import ReasoningFormat
from paceline.parsing.tool_grammar import forced_call_grammar
from paceline.text import Tokenizer
from tests.combinations.request_rules import EOS
from tests.exactness.test_engine import FREE
from tests.helpers.replicas import Replicas
from tests.helpers.tool_models import save_tool_weights

RUN = 6
"""Guesses of a step."""
PLACES = range(2, 2 * (RUN + 1) + 2)
"""Where the output's last token is: all of two steps."""
LONGEST = 24
SAMPLING = SamplingParams(temperature=1.0, max_tokens=LONGEST, logprobs=2, stop_token_ids=(EOS,))


class Knowing(Replicas):
    """Guesses the next tokens of a known output."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        super().__init__()
        self._text = [*prompt, *output]

    def guesses(self, request_id: int, tree: TokenTree) -> Iterator[int]:
        parent = ROOT
        for token in self._text[tree.position + 1 :][:RUN]:
            child = tree.child(parent, token)
            if child is None:
                child = tree.add(parent, token, -0.1)
                yield child
            parent = child


@dataclass(frozen=True)
class Bench:
    """The model, and an output of it without an end."""

    model: Model
    tokenizer: Tokenizer
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seed: int = 0
    after: TextDelta = field(default_factory=lambda: TextDelta(""))
    """The output of the request that follows each request."""

    def request(self, name: str, **sampling: Any) -> GenerationRequest:
        params = SAMPLING.model_copy(update={"seed": self.seed, **sampling})
        return GenerationRequest(name, self.prompt, params)

    def engine(self, drafting: DraftClient) -> Engine:
        config = SpeculativeConfig(method="ngram", num_speculative_tokens=RUN, max_tree_nodes=RUN)
        return Engine(self.model, EngineConfig(slots=self.model.slots), config, drafting, FREE)

    def answer(self, engine: Engine, request: GenerationRequest, **options: Any) -> TextDelta:
        """The whole output as a gateway reads it, which cancels a request that a stop string ended."""
        processor = OutputProcessor(request, OutputOptions(eos_token_ids=[EOS], **options), self.tokenizer)
        whole = TextDelta(request.request_id)
        engine.submit(request)
        while engine.busy:
            for delta in engine.step():
                if not processor.stopped:
                    whole.extend(processor.process(delta))
                    if processor.stopped:
                        engine.cancel(request.request_id)
            engine.check_integrity()
        return whole

    def text(self, count: int) -> str:
        """Of the first tokens of the output without an end."""
        return self.tokenizer.decode(self.tokens[:count])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """With an output whose tokens all differ, and are mere text."""
    folder = save_tool_weights(tmp_path_factory.mktemp("model"), "pydoc")
    model = load(folder, EngineConfig(slots=2048, threads=1))
    bench = Bench(model, Tokenizer.load(folder))
    prompt = bench.tokenizer.encode("<|im_start|>user\nWhat does json.dumps do?<|im_end|>\n<|im_start|>assistant\n")
    engine = bench.engine(NoDraftClient())
    for seed in range(100):
        bench = replace(bench, prompt=prompt, seed=seed)
        tokens = bench.answer(engine, bench.request("endless", stop_token_ids=())).tokens
        if len(set(tokens)) == LONGEST and not bench.tokenizer.special_ids & set(tokens):
            return replace(bench, tokens=tokens, after=bench.answer(engine, bench.request("after", temperature=0.0)))
    raise AssertionError("no seed gives such an output")


def compared(output: TextDelta) -> list[Any]:
    """What has to be equal; the parts of an event are joined, and the prefix cache may have more or less."""
    events = [
        (kind, "".join(getattr(event, "text", getattr(event, "name", "")) for event in group))
        for kind, group in groupby(output.events, key=type)
    ]
    assert output.usage is not None
    tokens = output.usage.prompt_tokens, output.usage.completion_tokens, output.reasoning_tokens
    ends = output.finish_reason, output.stop_reason, output.stop_token, output.error
    return [output.tokens, output.log_probs, output.text, output.offsets, events, tokens, ends]


def check(
    bench: Bench, request: GenerationRequest, at: int | None = None, behind: Sequence[int] = (), **options: Any
) -> tuple[TextDelta, int | None]:
    """Compare a request's output with that without speculation; so with the request after it.

    `at`: the index of the token that ends something; None: the last one. `behind`: guesses behind the output's end; ():
    how the output without an end goes on. `options`: of the output. Returns the output, and that token's place in its
    run of accepted guesses, from 0; None: it was no guess.
    """
    expected = bench.answer(bench.engine(NoDraftClient()), request, **options)
    known = [*expected.tokens, *(behind or bench.tokens[len(expected.tokens) :])]
    engine = bench.engine(LocalDraftClient(Knowing(bench.prompt, known)))
    output = bench.answer(engine, request, **options)
    assert compared(output) == compared(expected)
    assert compared(bench.answer(engine, bench.request("after", temperature=0.0))) == compared(bench.after)
    assert engine.load.running == 0
    last = len(output.tokens) - 1 if at is None else at
    run = 0
    while run <= last and output.accepted[last - run]:
        run += 1
    return output, run - 1 if run else None


def check_places(found: Sequence[int | None]) -> None:
    assert set(range(RUN)) <= set(found), found


def test_max_tokens(bench: Bench) -> None:
    """No guess is verified for the last token: the run before it is cut short at every length."""
    places = []
    for at in PLACES:
        output, place = check(bench, bench.request("r", max_tokens=at + 1), at - 1)
        assert (output.tokens, output.finish_reason) == (bench.tokens[: at + 1], FinishReason.LENGTH)
        places.append(place)
    check_places(places)


@pytest.mark.parametrize("shown", [False, True])
def test_stop_token(bench: Bench, shown: bool) -> None:
    places = []
    for at in PLACES:
        request = bench.request("r", stop_token_ids=(EOS, bench.tokens[at]))
        output, place = check(bench, request, include_stop=shown)
        assert output.tokens == bench.tokens[: at + 1]
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, bench.tokens[at])
        assert output.text == bench.text(at + shown)
        places.append(place)
    check_places(places)


def test_end_of_text(bench: Bench) -> None:
    """The draft guesses more ends behind the first one, which the target would draw, too."""
    places = []
    for at in PLACES:
        output, place = check(bench, bench.request("r", min_tokens=at, logit_bias={EOS: 100.0}), behind=[EOS] * RUN)
        assert (output.tokens, output.text) == ([*bench.tokens[:at], EOS], bench.text(at))
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, None)
        places.append(place)
    check_places(places)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("longer", [0, 7], ids=["as short as possible", "of several tokens"])
def test_stop_string(bench: Bench, longer: int, shown: bool) -> None:
    """It ends with the last character of a token."""
    places = []
    for at in PLACES:
        text = bench.text(at + 1)
        length = next(size for size in range(1, len(text)) if text.find(text[-size:]) == len(text) - size)
        stop = text[-min(length + longer, len(text)) :]
        output, place = check(bench, bench.request("r"), stop=(stop, "never"), include_stop=shown)
        assert output.tokens == bench.tokens[: at + 1]
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
        assert output.text == (text if shown else text.removesuffix(stop))
        places.append(place)
    check_places(places)


def test_end_of_a_grammar(bench: Bench) -> None:
    """A text of a fixed length: there is no stop token."""
    places = []
    for at in PLACES:
        text = bench.text(at + 1)
        output, place = check(bench, bench.request("r", grammar=grammar_from_regex(f"(.|\n){{{len(text)}}}")))
        assert (output.tokens, output.text) == (bench.tokens[: at + 1], text)
        assert (output.finish_reason, output.stop_token) == (FinishReason.STOP, None)
        places.append(place)
    check_places(places)


def test_end_of_a_tool_call(bench: Bench) -> None:
    """A forced call, whose argument has a fixed length."""
    places = []
    for size in range(1, 15):
        word = {"type": "string", "pattern": f"^[a-z]{{{size}}}$"}
        schema = {"type": "object", "properties": {"q": word}, "required": ["q"], "additionalProperties": False}
        grammar = forced_call_grammar(HERMES, {"f": schema}, bench.tokenizer, parallel=False)
        request = bench.request("r", grammar=grammar, max_tokens=80)
        parser = partial(OutputFormat(tools=HERMES).parser, {"f": schema})
        output, place = check(bench, request, parser=parser, shown_tokens=bench.tokenizer.special_ids - {EOS})
        assert re.fullmatch(rf'\s*<tool_call>.*"q"\s*:\s*"[a-z]{{{size}}}".*</tool_call>', output.text, re.DOTALL)
        assert output.finish_reason is FinishReason.STOP
        places.append(place)
    check_places(places)


def test_end_of_the_reasoning(bench: Bench) -> None:
    """Where the grammar begins. The marker is what the model happens to write there."""
    places = []
    for at in PLACES:
        text = bench.text(at + 1)
        starts = [(first, len(bench.text(first))) for first in range(at, -1, -1)]
        first, start = next(each for each in starts if text.find(text[each[1] :]) == each[1])
        request = bench.request(
            "r", grammar=grammar_from_regex("[a-z ]{5,9}"), grammar_begins_after=tuple(bench.tokens[first : at + 1])
        )
        form = OutputFormat(ReasoningFormat("own", "<think>", text[start:]))
        output, place = check(bench, request, at, parser=partial(form.parser, {}, inside=True))
        assert output.tokens[: at + 1] == bench.tokens[: at + 1]
        assert re.fullmatch("[a-z ]{5,9}", output.text.removeprefix(text))
        assert output.reasoning_tokens >= at - first
        places.append(place)
    check_places(places)
