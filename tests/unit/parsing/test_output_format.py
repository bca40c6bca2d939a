"""The choice of the formats in which a model writes reasoning and tool calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.parsing import Content, Reasoning, ToolArguments, ToolCall, choose_format
from paceline.parsing.formats.mistral import MISTRAL, MISTRAL_V11
from paceline.parsing.output_format import DETECTED, TOOL_FORMATS, OutputFormat
from paceline.parsing.reasoning import REASONING_FORMATS
from paceline.parsing.tool_format import ToolFormat
from paceline.text import Tokenizer
from tests.house.names import ROOT

FIXTURES = Path(__file__).parent / "tool_formats"
QWEN3 = (FIXTURES / "hermes" / "template.qwen3.jinja").read_text()
MISTRAL_3 = (FIXTURES / "mistral" / "template.jinja").read_text()
DEVSTRAL = r"""{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"""
PLAIN = r"""{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"""


def recognised(template: str | None) -> list[str]:
    """The names of the formats that `auto` chooses: of calls, then of reasoning."""
    chosen = choose_format("auto", "auto", template)
    return [each.name for each in (chosen.tools, chosen.reasoning) if each is not None]


@pytest.mark.parametrize(
    "path", sorted(FIXTURES.glob("*/template*.jinja")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_a_template_is_recognised(path: Path) -> None:
    """`template.REASONING.jinja` has reasoning in this format, too."""
    assert recognised(path.read_text()) == [path.parent.name, *path.name.split(".")[1:-1]]


SPECIAL = re.compile(r"<\|[^<>\s|]+\|?>|<｜[^<>\s｜]+｜>|\[[A-Z_]{2,}\]")


@pytest.mark.parametrize("form", DETECTED)
def test_each_token_that_looks_special_is_a_marker(form: ToolFormat) -> None:
    """Other special tokens never reach a parser."""
    written = form.opening + "".join(form.call) + form.separator + form.closing
    assert set(SPECIAL.findall(written)) <= set(form.markers)


def test_each_format_has_fixtures() -> None:
    assert {path.name for path in FIXTURES.iterdir()} == set(TOOL_FORMATS)


def test_the_documentation_lists_each_format() -> None:
    _, calls, reasoning = re.split(r"^\| `--.*", (ROOT / "docs" / "tools.md").read_text(), flags=re.MULTILINE)
    for table, names in ((calls, TOOL_FORMATS), (reasoning.partition("\n\n")[0], REASONING_FORMATS)):
        listed = re.findall(r"^\|([^|]*)", table, re.MULTILINE)
        assert set(re.findall("`(.*?)`", "".join(listed))) == set(names)


@pytest.mark.parametrize("template", [QWEN3, PLAIN, None])
def test_none_leaves_a_template_alone(template: str | None) -> None:
    chosen = choose_format("none", "none", template)
    assert (chosen.tools, chosen.reasoning) == (None, None)


@pytest.mark.parametrize("template", [PLAIN, None])
def test_an_unknown_template_has_no_format(template: str | None) -> None:
    assert recognised(template) == []


def test_names_outrank_the_template() -> None:
    chosen = choose_format("pythonic", "deepseek_r1", QWEN3)
    assert chosen.tools is not None
    assert chosen.reasoning is not None
    assert (chosen.tools.name, chosen.reasoning.name) == ("pythonic", "deepseek_r1")


@pytest.mark.parametrize(
    ("name", "template", "tools"),
    [
        ("auto", DEVSTRAL, MISTRAL_V11),
        ("mistral", DEVSTRAL, MISTRAL_V11),
        ("mistral", MISTRAL_3, MISTRAL),
        ("mistral", None, MISTRAL),
    ],
)
def test_the_template_tells_mistral_s_two_formats_apart(name: str, template: str | None, tools: object) -> None:
    assert choose_format(name, "none", template).tools is tools


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("hermez", "none"), "tool_call_parser must be one of auto, none, .*deepseek_v3, .*pythonic, .*, not 'hermez'"),
        (("none", "r1"), "reasoning_parser must be one of auto, none, .*deepseek_r1, .*, not 'r1'"),
        (("openai", "none"), "are one format"),
        (("hermes", "openai_gptoss"), "are one format"),
    ],
)
def test_what_cannot_be_chosen_is_refused(names: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_format(*names, None)


@pytest.mark.parametrize(("names"), [("openai", "auto"), ("auto", "openai_gptoss"), ("openai", "openai_gptoss")])
def test_gpt_oss_s_format_is_chosen_by_either_name(names: tuple[str, str]) -> None:
    chosen = choose_format(*names, None)
    assert chosen.tools is not None
    assert chosen.reasoning is not None
    assert {"<|channel|>", "<|call|>", "<|end|>"} <= set(chosen.markers)


@pytest.mark.parametrize(
    ("name", "prompt", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n", False),
        ("deepseek_r1", "<｜User｜>Hi<｜Assistant｜>", True),
        ("deepseek_r1", "<｜User｜>Hi<｜Assistant｜><think>\n", True),
        ("deepseek_r1", "<｜User｜>Hi<｜Assistant｜></think>", False),
        ("mistral", "[INST]Hi[/INST]", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("gemma4", "<|turn>model\n", False),
        ("none", "<think>", False),
    ],
)
def test_whether_an_answer_begins_with_reasoning(name: str, prompt: str, inside: bool) -> None:
    assert choose_format("none", name, None).begins_inside(prompt) is inside


def test_calls_are_looked_for_where_the_request_has_tools() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    chosen = choose_format("hermes", "none", None)
    assert chosen.parser({"f": {}}).feed(text, last=True) == [ToolCall(0, "f"), ToolArguments(0, "{}")]
    assert chosen.parser({}).feed(text, last=True) == [Content(text)]
    kimi = choose_format("kimi_k3", "auto", None).parser({})
    assert kimi.feed("<|open|>response<|sep|>Yes<|close|>response<|sep|>", last=True) == [Content("Yes")]
    harmony = choose_format("openai", "auto", None).parser({})
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    assert harmony.feed(text, last=True) == [Reasoning("Hm."), Content("Yes")]


@pytest.mark.parametrize("form", DETECTED)
def test_without_tools_there_are_no_calls(form: ToolFormat) -> None:
    begin, middle, end = form.call
    call = f"{form.opening}{begin}f{middle}{{}}{end}{form.closing}"
    assert any(
        isinstance(event, ToolCall) for event in OutputFormat(tools=form).parser({"f": {}}).feed(call, last=True)
    )
    assert not any(isinstance(event, ToolCall) for event in OutputFormat(tools=form).parser({}).feed(call, last=True))


def test_the_shipped_model_has_neither() -> None:
    template = Tokenizer.load("pydoc").chat_template
    assert template is not None
    assert choose_format("auto", "auto", template.source).tools is None


@pytest.mark.parametrize("name", ["gemma4", "kimi_k3"])
def test_tokens_of_reasoning_that_is_read_without_tools_are_markers(name: str) -> None:
    assert {"gemma4": "<|channel>", "kimi_k3": "<|sep|>"}[name] in choose_format("none", name, None).markers


def test_each_reasoning_format_has_its_name() -> None:
    assert all(name == each.name for name, each in REASONING_FORMATS.items())
