"""Structural tags: which texts they allow, in vLLM's and SGLang's older form and in xgrammar's formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config.sampling_params import MAX_GRAMMAR_LENGTH
from paceline.grammar import GrammarError
from paceline.grammar.grammar_checker import complaint
from paceline.grammar.grammar_state import GrammarCompiler, GrammarState
from paceline.grammar.grammar_vocabulary import GrammarVocabulary
from paceline.grammar.lark_rules import LarkRules
from paceline.text import Tokenizer
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.structured import tag_grammar
from paceline_services.gateway.structured.output import ResponseFormat, StructuredOutputs
from paceline_services.gateway.structured.structural_tag import TagFormat

SHIPPED = Tokenizer.load("pydoc")
COMPILER = GrammarCompiler(GrammarVocabulary(lambda: SHIPPED), len(SHIPPED.pieces))
END = SHIPPED.token_id("<|endoftext|>")
ANY = {"type": "any_text"}
SIZE = {"type": "object", "properties": {"n": {"enum": [1, 23]}}, "required": ["n"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": SIZE}


def tag(begin: str, content: Any = JSON, end: Any = "</a>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def triggered(**options: Any) -> dict[str, Any]:
    tags = [tag("<f=a>"), tag("<f=b>", {"type": "regex", "pattern": "[0-9]{2}"}, "</b>"), tag("[c]", const("C"), ";")]
    return {"type": "triggered_tags", "triggers": ["<f=", "[c"], "tags": tags, **options}


def state_of(tag_format: dict[str, Any]) -> GrammarState:
    body = {"type": "structural_tag", "format": tag_format}
    grammar = ResponseFormat.model_validate(body).to_grammar(SHIPPED)
    assert grammar == StructuredOutputs.model_validate({"structural_tag": json.dumps(body)}).to_grammar(SHIPPED)
    assert complaint(grammar) == ""
    state = COMPILER.start(grammar, (END,), [])
    state.wait(30.0)
    assert state.ready
    assert state.error() == ""
    return state


def is_whole(state: GrammarState, text: str) -> bool | None:
    """Whether this text may end here; None: it cannot even begin so. Special tokens in it are these tokens."""
    tokens = SHIPPED.encode(text, add_special_tokens=False)
    if not all(state.permits(tokens[:at], token) for at, token in enumerate(tokens)):
        return None
    return state.permits(tokens, END) or (state.finished(tokens) and state.error(tokens) == "")


CASES: dict[str, tuple[dict[str, Any], list[str], list[str], list[str]]] = {
    "a text": (const('say "hi"\n'), ['say "hi"\n'], ["say"], ["hi", 'say "hi"\n\n']),
    "JSON": (JSON, ['{"n": 23}', '{"n":1}'], ['{"n"'], ['{"m": 1}', '{"n": 2}']),
    "a regular expression": ({"type": "regex", "pattern": "a/b|c+"}, ["a/b", "ccc"], ["a"], ["b"]),
    "any text": (ANY, ["", "x <a> y\n", "ä"], [], ["<|im_end|>"]),
    "a tag": (tag("<a>"), ['<a>{"n": 1}</a>'], ["<a>", '<a>{"n": 1}</'], ["{", "<a>x", '<a>{"n": 1}</a> ']),
    "text in a tag": (
        tag("<a>", ANY),
        ["<a></a>", "<a>x < y </ a\n</a>"],
        ["<a>", "<a>x</"],
        ["x", "<a>x</a>y"],
    ),
    "two ends": (tag("<a>", ANY, ["</a>", "."]), ["<a>x</a>", "<a>x."], ["<a>x<"], ["<a>x.y", "<a>x</a>."]),
    "a sequence": (
        {"type": "sequence", "elements": [const("Size: "), JSON, {"type": "regex", "pattern": "!?"}, ANY]},
        ['Size: {"n": 1}', 'Size: {"n": 1}! Well.'],
        ["Size: "],
        ["size", "Size: 1"],
    ),
    "one of them": (
        {"type": "or", "elements": [const("yes"), tag("<a>", ANY), const("no")]},
        ["yes", "no", "<a>x</a>"],
        ["<a>x"],
        ["yes<a>", "maybe"],
    ),
    "one of them in a tag": (
        tag("<a>", {"type": "or", "elements": [const("yes"), ANY]}),
        ["<a>yes</a>", "<a>yesterday</a>"],
        ["<a>yes"],
        ["<a>yes</a>x"],
    ),
    "a tag in a tag": (tag("<o>", tag("<a>", ANY), "</o>"), ["<o><a>x</o></a></o>"], ["<o><a>x</a>"], ["<o>x"]),
    "triggers": (
        triggered(),
        ["", "x <f y", '<f=a>{"n": 1}</a>', 'x <f=b>12</b> y [c]C; z <f=a>{"n": 23}</a>', "a[b]"],
        ["x <f=", "x <f=b>1", "[c"],
        ["x <f=c", "<f=b>x", "[cd", "<f=a>12"],
    ),
    "a tag first": (
        triggered(at_least_one=True),
        ["<f=b>12</b>", "<f=b>12</b> y [c]C;", "[c]C;x"],
        ["<f=", "[c]"],
        ["x", " <f=b>"],
    ),
    "nothing after a tag": (
        triggered(stop_after_first=True),
        ["", "x", "x <f=b>12</b>", "[c]C;"],
        ["x <f=b>12"],
        ["x <f=b>12</b>.", "[c]C;[c"],
    ),
    "a tag and nothing else": (
        triggered(stop_after_first=True, at_least_one=True),
        ["<f=b>12</b>", "[c]C;"],
        ["<f="],
        ["x", "[c]C;x"],
    ),
    "triggers in a tag": (
        tag("<o>", triggered(), "</o>"),
        ["<o></o>", "<o>x</o>", "<o>x<f=b>12</b>y</o>"],
        ["<o>x<f=b>12</b>", "<o>x<f=b>12</b></"],
        ["<o>x<f=c", "<o></o>x"],
    ),
    "triggers in a tag, one tag": (
        tag("<o>", triggered(stop_after_first=True), "</o>"),
        ["<o>x</o>", "<o>x<f=b>12</b></o>"],
        ["<o>x<f=b>12</b>"],
        ["<o>x<f=b>12</b>y"],
    ),
    "special tokens": (
        {"type": "sequence", "elements": [tag("<|im_start|>think", ANY, "\n<|im_end|>"), const("x<|im_start|>y")]},
        ["<|im_start|>think a\nb\n<|im_end|>x<|im_start|>y", "<|im_start|>think\n<|im_end|>x<|im_start|>y"],
        ["<|im_start|>think a\n"],
        ["<|im_end|>", "<|im_start|>think a<|im_end|>", "<|im_start|>think\n<|im_start|>"],
    ),
    "special tokens as triggers": (
        {
            "type": "triggered_tags",
            "triggers": ["<|im_start|>", "\n<|im_end|>"],
            "tags": [tag("<|im_start|>a", const("1"), "<|im_end|>"), tag("\n<|im_end|>b", const("2"), "")],
        },
        ["", "x\ny", "x<|im_start|>a1<|im_end|>y", "x\n<|im_end|>b2<|im_start|>a1<|im_end|>"],
        ["x<|im_start|>", "x\n<|im_end|>b"],
        ["<|im_end|>", "x<|im_start|>b", "x\n<|im_end|>a"],
    ),
}
"""By name: a format, texts that are whole, that may go on only, and that cannot begin so."""


@pytest.mark.parametrize(("tag_format", "whole", "begun", "other"), CASES.values(), ids=CASES)
def test_a_structural_tag_allows_what_it_describes(
    tag_format: dict[str, Any], whole: list[str], begun: list[str], other: list[str]
) -> None:
    state = state_of(tag_format)
    assert [text for text in whole if is_whole(state, text) is not True] == []
    assert [text for text in begun if is_whole(state, text) is not False] == []
    assert [text for text in other if is_whole(state, text) is not None] == []


def test_the_older_form_is_triggered_tags() -> None:
    older = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<f=a>", "schema": SIZE, "end": "</f>"},
            {"begin": "<f=b>", "schema": json.dumps(SIZE), "end": "</f>"},
            {"begin": "<f=c>", "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    tags = [tag("<f=a>", JSON, "</f>"), tag("<f=b>", JSON, "</f>")]
    tags.append(tag("<f=c>", {"type": "json_schema", "json_schema": {"type": "object"}}, "</f>"))
    newer = {"type": "triggered_tags", "triggers": ["<f="], "tags": tags}
    grammar = ResponseFormat.model_validate(older).to_grammar(SHIPPED)
    assert grammar == ResponseFormat.model_validate({"type": "structural_tag", "format": newer}).to_grammar(SHIPPED)
    assert grammar == StructuredOutputs.model_validate({"structural_tag": older}).to_grammar(SHIPPED)


@pytest.mark.parametrize(
    ("tag_format", "message"),
    [
        ({"type": "sequence", "elements": [ANY, const("x")]}, "only be the last element"),
        (
            {"type": "sequence", "elements": [{"type": "or", "elements": [const("x"), triggered()]}, JSON]},
            "last element",
        ),
        (tag("<a>", ANY, ""), "needs an end"),
        (triggered(triggers=["<f=", "[c", "<g"]), "no tag begins with the trigger '<g'"),
        (triggered(triggers=["<f="]), "0 triggers fit"),
        (triggered(triggers=["<f=", "<f=a", "[c"]), "2 triggers fit"),
        ({"type": "triggered_tags", "triggers": ["<|im"], "tags": [tag("<|im_start|>x")]}, "inside a special token"),
    ],
)
def test_a_format_that_cannot_be_followed_is_refused(tag_format: dict[str, Any], message: str) -> None:
    body = ResponseFormat.model_validate({"type": "structural_tag", "format": tag_format})
    with pytest.raises(GrammarError, match=message):
        body.to_grammar(SHIPPED)


@pytest.mark.parametrize(
    ("tag_format", "name"),
    [
        ({"type": "grammar", "grammar": "root ::= [a]"}, "'grammar'"),
        ({"type": "tags_with_separator", "tags": [tag("<a>")], "separator": ","}, "'tags_with_separator'"),
        ({**JSON, "style": "qwen_xml"}, "style"),
        ({**JSON, "any_order": True}, "any_order"),
        ({**ANY, "excludes": ["x"]}, "excludes"),
        ({**ANY, "max_tokens": 5}, "max_tokens"),
        (triggered(excludes=["x"]), "excludes"),
        (tag("<a>", {"type": "qwen_xml_parameter", "json_schema": SIZE}), "'qwen_xml_parameter'"),
        ({"type": "or", "elements": []}, "elements"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tag_format: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ResponseFormat.model_validate({"type": "structural_tag", "format": tag_format})
    error = InvalidRequestError.of(refused.value)
    assert name in f"{error.param} {error.message}"


def test_what_asks_for_nothing_is_taken() -> None:
    """Clients send all fields of xgrammar's classes, with their defaults."""
    assert is_whole(state_of({**ANY, "excludes": [], "max_tokens": None}), "x")
    assert is_whole(state_of({**JSON, "style": "json", "any_order": False}), '{"n": 1}')
    assert is_whole(state_of(triggered(excludes=[], at_least_one=False)), "x")


MANY = 600
CROSSED = tag("a", {"type": "or", "elements": [ANY] * MANY}, ["x"] * MANY)
"""Each element may be followed by each end: a grammar of 17 million characters."""


def test_a_small_tag_that_describes_a_huge_grammar_is_refused_before_the_grammar_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []
    add = LarkRules.add

    def counting(rules: LarkRules, body: str, options: str = "") -> str:
        written.append(len(body))
        return add(rules, body, options)

    monkeypatch.setattr(LarkRules, "add", counting)
    source = ResponseFormat.model_validate({"type": "structural_tag", "format": CROSSED})
    with pytest.raises(GrammarError, match=f"{MAX_GRAMMAR_LENGTH} are the most"):
        source.to_grammar(SHIPPED)
    assert sum(written) < 2 * MAX_GRAMMAR_LENGTH


def test_each_tag_is_compared_with_the_triggers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"<{number:03}" for number in range(100)]
    compared: list[str] = []
    trigger_of = tag_grammar._trigger_of

    def counting(compared_tag: TagFormat, triggers: Sequence[str]) -> str:
        compared.append(compared_tag.begin)
        return trigger_of(compared_tag, triggers)

    monkeypatch.setattr(tag_grammar, "_trigger_of", counting)
    body = {"type": "triggered_tags", "triggers": names, "tags": [tag(name + ">") for name in names]}
    ResponseFormat.model_validate({"type": "structural_tag", "format": body}).to_grammar(SHIPPED)
    assert compared == [name + ">" for name in names]


@pytest.mark.parametrize("field", ["format", "structures", "triggers"])
def test_a_tag_may_be_as_long_as_a_grammar(field: str) -> None:
    value: Any = const("x" * MAX_GRAMMAR_LENGTH) if field == "format" else ["x" * MAX_GRAMMAR_LENGTH]
    with pytest.raises(ValidationError, match=f"{MAX_GRAMMAR_LENGTH} are the most"):
        ResponseFormat.model_validate({"type": "structural_tag", field: value})
