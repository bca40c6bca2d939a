"""A forced call is always valid, and the parser of the same format reads it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from paceline.config import SamplingParams
from paceline.grammar import GrammarError
from paceline.grammar.grammar_checker import GrammarChecker, complaint
from paceline.grammar.grammar_state import GrammarCompiler, GrammarState
from paceline.grammar.grammar_vocabulary import GrammarVocabulary
from paceline.grammar.json_schema import SHORT_ESCAPES, llguidance_schema
from paceline.llm import LLM
from paceline.messages import FinishReason
from paceline.parsing import Content, OutputParser, ToolArguments, ToolCall
from paceline.parsing.formats.harmony import OPENAI
from paceline.parsing.formats.hermes import HERMES
from paceline.parsing.output_format import DETECTED
from paceline.parsing.reasoning import HARMONY_REASONING
from paceline.parsing.tool_format import ToolFormat
from paceline.parsing.tool_grammar import forced_call_grammar
from paceline.text import Tokenizer
from paceline_services.gateway.generation.tool_choice import ForcedCalls
from paceline_services.gateway.structured.output import GrammarChecks
from tests.helpers.grammars import CALL, PIECES, grammars, text_of, tokenizer
from tests.helpers.random_schemas import RECORDS

SHIPPED = Tokenizer.load("pydoc")
EOS = SHIPPED.token_id("<|im_end|>")
assert EOS is not None
COMPILER = GrammarCompiler(GrammarVocabulary(lambda: SHIPPED), len(SHIPPED.pieces))
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


FORMATS = {f"{each.name}, {number}": each for number, each in enumerate(DETECTED)}
"""Two of them have one name."""
TOOLS = st.dictionaries(st.sampled_from(["f", "ff", "get_weather", "a-b"]), RECORDS, min_size=1, max_size=3)


def started(grammar: str, compiler: GrammarCompiler = COMPILER, stop: int | None = EOS) -> GrammarState:
    state = compiler.start(grammar, () if stop is None else (stop,), [])
    state.wait(30.0)
    assert state.ready
    assert state.error() == ""
    return state


def wandered(state: GrammarState, rng: random.Random) -> list[int]:
    """Random tokens up to the first place where the text may end."""
    path: list[int] = []
    while (allowed := state.allowed(path)) is not None and not allowed[EOS]:
        path.append(int(rng.choice(np.flatnonzero(allowed))))
        assert len(path) < 3000
    return path


def calls_in(text: str, tool_format: ToolFormat, tools: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The names and arguments that the format's parser reads; there must be nothing else."""
    parser, calls = OutputParser(tool_format=tool_format, tools=tools), list[list[str]]()
    for event in parser.feed(text, last=True):
        assert not isinstance(event, Content) or not event.text.strip(), text
        if isinstance(event, ToolCall):
            calls.append([event.name, ""])
        elif isinstance(event, ToolArguments):
            calls[event.index][1] += event.text
    return [(name, json.loads(arguments)) for name, arguments in calls]


def schemas_of(kinds: Mapping[str, Any]) -> dict[str, Any]:
    return {name: TypeAdapter(kind).json_schema() for name, kind in kinds.items()}


def check_calls(text: str, tool_format: ToolFormat, kinds: Mapping[str, Any]) -> list[str]:
    """The names of the calls in a text; all of them must be valid."""
    calls = calls_in(text, tool_format, schemas_of(kinds))
    for name, arguments in calls:
        TypeAdapter(kinds[name]).validate_python(arguments, strict=True)
    return [name for name, _ in calls]


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=40)
@given(kinds=TOOLS, seed=st.integers(0, 999), parallel=st.booleans())
def test_the_parser_of_a_format_reads_what_the_grammar_forces(
    name: str, kinds: dict[str, Any], seed: int, parallel: bool
) -> None:
    """With random tokens of the shipped vocabulary."""
    grammar = forced_call_grammar(FORMATS[name], schemas_of(kinds), SHIPPED, parallel=parallel)
    assert complaint(grammar) == ""
    tokens = wandered(started(grammar), random.Random(seed))
    text = b"".join(SHIPPED.pieces[token] for token in tokens).decode()
    calls = len(check_calls(text, FORMATS[name], kinds))
    assert calls >= 1 if parallel else calls == 1


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_are_forced_only_where_they_may_be(name: str) -> None:
    tool_format, tools = FORMATS[name], {"f": NO_PARAMETERS, "g": NO_PARAMETERS}
    begin, middle, end = tool_format.call
    call = {each: f"{begin}{each}{middle}{{}}{end}" for each in tools}
    text = f"{tool_format.opening}{call['f']}{tool_format.separator}{call['g']}{tool_format.separator}{call['f']}"
    tokens = SHIPPED.encode(text + tool_format.closing, add_special_tokens=False)
    for parallel in (True, False):
        state = started(forced_call_grammar(tool_format, tools, SHIPPED, parallel=parallel))
        permitted = [state.permits(tokens[:at], token) for at, token in enumerate(tokens)]
        assert all(permitted) == parallel
        if parallel:
            assert state.permits(tokens, EOS)
            assert [each for each, _ in calls_in(text + tool_format.closing, tool_format, tools)] == ["f", "g", "f"]


SPECIAL = ToolFormat(
    "special",
    HERMES.parse,
    markers=("<call>",),
    template_signs=(),
    call=("<call>a", ":", "</think>"),
    opening="\n[",
    closing="]<call>",
)


def test_markers_that_are_special_tokens_are_these_tokens() -> None:
    """A little white space may come first, as behind reasoning. A name with a marker in it is text."""
    tools = {"b": NO_PARAMETERS, "<call>c": NO_PARAMETERS}
    grammar = forced_call_grammar(SPECIAL, tools, tokenizer(), parallel=False)
    assert complaint(grammar) == ""
    state = started(grammar, grammars(), stop=None)
    call = [PIECES.index(piece) for piece in ("<call>", "ab", ":", "{", "}", "</think>", "]", "<call>")]
    bracket, space = PIECES.index("["), PIECES.index(" ")
    for white in ([], [space], [space] * 8):
        path = [*white, bracket, *call]
        assert all(state.permits(path[:at], token) for at, token in enumerate(path))
        assert state.finished(path)
        assert state.error(path) == ""
    assert not state.permits([space] * 8, space)
    written = [bracket, CALL, PIECES.index("a")]
    assert not state.permits(written, CALL), "of the name's text every token is ordinary"
    assert text_of(call) == "<call>ab:{}</think>]<call>"


def test_a_format_with_reasoning_in_it_has_it_in_its_grammar() -> None:
    """gpt-oss: any number of messages of reasoning, of which each may have any text, and then the call."""
    tools = {"f": NO_PARAMETERS}
    state = started(forced_call_grammar(OPENAI, tools, SHIPPED, parallel=False, reasoning=HARMONY_REASONING))
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    thought = "<|channel|>analysis<|message|>Well <|channel|>, hm<|end|>"
    for number in range(3):
        tokens = SHIPPED.encode(f"{thought}<|start|>assistant" * number + call, add_special_tokens=False)
        assert all(state.permits(tokens[:at], token) for at, token in enumerate(tokens))
        assert state.finished(tokens)
        assert not state.permits([], tokens[-1])
    assert not all(state.permits(tokens[:at], token) for at, token in enumerate(SHIPPED.encode(thought + call)))


@pytest.mark.parametrize("name", ['q"uote', "back\\slash", "line\n", ""])
def test_a_name_that_json_would_escape_is_refused(name: str) -> None:
    if name:
        with pytest.raises(GrammarError, match="the tool name"):
            forced_call_grammar(HERMES, {name: NO_PARAMETERS}, SHIPPED, parallel=False)
    else:
        with pytest.raises(GrammarError, match="no tool"):
            forced_call_grammar(HERMES, {}, SHIPPED, parallel=False)


def test_annotations_of_schemas_are_left_out() -> None:
    """But not a property that is named like one, nor a value that looks like one."""
    schema = {
        "title": "T",
        "description": "D",
        "$defs": {"title": {"title": "x", "type": "null"}},
        "properties": {
            "description": {"description": "x", "type": "string", "default": "y"},
            "a": {"anyOf": [{"title": "x", "const": {"title": "kept"}}, {"enum": [{"title": "kept"}]}]},
            "b": {"items": {"examples": [1], "$ref": "#/$defs/title"}},
        },
        "required": ["title"],
    }
    assert llguidance_schema(schema, {}) == {
        "x-guidance": {"json_allowed_escapes": SHORT_ESCAPES},
        "$defs": {"title": {"type": "null"}},
        "properties": {
            "description": {"type": "string"},
            "a": {"anyOf": [{"const": {"title": "kept"}}, {"enum": [{"title": "kept"}]}]},
            "b": {"items": {"$ref": "#/$defs/title"}},
        },
        "required": ["title"],
    }


def usual_tool(number: int) -> dict[str, Any]:
    """As an agent declares them: eight parameters, of which some are objects, all described."""
    text = {"type": "string", "description": f"What the {number}-th tool is given. " * 5}
    return {
        "type": "object",
        "description": "A tool. " * 60,
        "properties": {
            f"path_{number}": text,
            "pattern": text,
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000, "description": "How many. " * 5},
            "mode": {"type": "string", "enum": ["content", "files", "count"], "default": "files"},
            "recursive": {"type": "boolean"},
            "tags": {"type": "array", "items": text, "maxItems": 20},
            "edits": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"old": text, "new": text, "all": {"type": "boolean"}},
                    "required": ["old", "new"],
                    "additionalProperties": False,
                },
            },
            "timeout": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]},
        },
        "required": [f"path_{number}", "mode"],
        "additionalProperties": False,
    }


async def test_fifty_tools_are_within_the_limits() -> None:
    """Of length, time and memory: as a gateway checks them."""
    tools = {f"tool_{number}": usual_tool(number) for number in range(50)}
    assert len(json.dumps(tools)) > 100_000, "most of it is prose"
    checks = GrammarChecks()
    grammar = await checks.checked(ForcedCalls(HERMES, tools, parallel=True), SHIPPED)
    assert grammar == await checks.checked(ForcedCalls(HERMES, tools, parallel=True), SHIPPED)
    assert grammar != await checks.checked(ForcedCalls(HERMES, tools, parallel=False), SHIPPED)
    await checks.close()
    checker = GrammarChecker()
    await checker.check(grammar.text)
    await checker.close()


@pytest.fixture(scope="module")
def llm() -> LLM:
    speculation = {"method": ["ngram", "draft_model"], "model": "pydoc-draft", "num_speculative_tokens": 4}
    return LLM("pydoc", speculation, {"slots": 4096})


def check_model(llm: LLM, kinds: dict[str, Any], seed: int) -> None:
    grammar = forced_call_grammar(HERMES, schemas_of(kinds), SHIPPED, parallel=False)
    params = SamplingParams(grammar=grammar, seed=seed, temperature=0.0 if seed % 4 == 0 else 1.0, max_tokens=600)
    [ours] = llm.generate("def call(", params)
    assert ours.finish_reason is FinishReason.STOP
    assert len(check_calls(ours.text, HERMES, kinds)) == 1
    if seed % 3 == 0:
        assert llm.generate("def call(", params, speculative=False)[0].tokens == ours.tokens


SAME = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "phases": [Phase.generate]}


@settings(max_examples=10, **SAME)
@given(kinds=TOOLS, seed=st.integers(0, 999))
def test_the_model_that_ships_calls_random_tools(llm: LLM, kinds: dict[str, Any], seed: int) -> None:
    check_model(llm, kinds, seed)


@pytest.mark.slow
@settings(max_examples=200, **SAME)
@given(kinds=TOOLS, seed=st.integers(0, 999))
def test_the_model_that_ships_calls_many_random_tools(llm: LLM, kinds: dict[str, Any], seed: int) -> None:
    check_model(llm, kinds, seed)
