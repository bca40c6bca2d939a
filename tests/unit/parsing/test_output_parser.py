"""Reasoning and tool calls in outputs, which are spelled as the families' templates and vLLM's tests spell them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.parsing import Content, Event, OutputParser, Reasoning, ToolArguments, ToolCall
from paceline.parsing.json_text import is_json
from paceline.parsing.output_format import DETECTED, TOOL_FORMATS
from paceline.parsing.reasoning import REASONING_FORMATS
from paceline.parsing.tool_format import ToolFormat, Tools

TOOLS: Tools = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "search": {"type": "object", "properties": {"q": {"type": "string"}}},
}
WEATHER, SEARCH = '{"city": "Tokyo", "days": 3}', '{"q": "hotels"}'
CALLED: list[Event] = [ToolCall(0, "get_weather"), ToolArguments(0, WEATHER)]
BOTH: list[Event] = [*CALLED, ToolCall(1, "search"), ToolArguments(1, SEARCH)]


def joined(events: Iterable[Event]) -> list[Event]:
    """The events, neighbours of one kind as one."""
    result: list[Event] = []
    for (kind, index), group in groupby(events, key=lambda event: (type(event), getattr(event, "index", None))):
        if kind is ToolCall:
            result += group
        else:
            text = "".join(event.text for event in group if not isinstance(event, ToolCall))
            result.append(ToolArguments(index, text) if kind is ToolArguments else kind(text))
    return result


def fed(parser: OutputParser, parts: Sequence[str]) -> list[Event]:
    events = [event for part in parts for event in parser.feed(part)]
    return joined([*events, *parser.feed("", last=True)])


def read(name: str, text: str, *, reasoning: str = "none", inside: bool = False) -> list[Event]:
    """The events of a text, which must be the same whether it comes as a whole or character by character."""
    chosen = REASONING_FORMATS.get(reasoning), TOOL_FORMATS.get(name)
    whole = joined(OutputParser(*chosen, tools=TOOLS, inside=inside).feed(text, last=True))
    assert fed(OutputParser(*chosen, tools=TOOLS, inside=inside), list(text)) == whole
    return whole


def shown(text: str) -> list[Event]:
    return [Content(text)]


def words(events: Iterable[Event]) -> str:
    """All that the events say."""
    return "".join(event.name if isinstance(event, ToolCall) else event.text for event in events)


def one(name: str, arguments: str) -> list[Event]:
    return [ToolCall(0, name), ToolArguments(0, arguments)]


FIXTURES = Path(__file__).parent / "tool_formats"
OUTPUTS = {path.parent.name: path.read_text().removesuffix("\n") for path in sorted(FIXTURES.glob("*/output.txt"))}
"""`BOTH` in each format that writes several calls a turn and has no markers around its answers."""
HERMES = OUTPUTS["hermes"]
LLAMA = OUTPUTS["llama3_json"]
DEEPSEEK_V3 = OUTPUTS["deepseek_v3"]
DEEPSEEK_V31 = OUTPUTS["deepseek_v31"]
CODER = OUTPUTS["qwen3_coder"]
GLM45 = OUTPUTS["glm45"]
KIMI_K2 = OUTPUTS["kimi_k2"]
DSML = OUTPUTS["deepseek_v32"]
MINIMAX = OUTPUTS["minimax_m2"]
SEED = OUTPUTS["seed_oss"]
MISTRAL_V11 = "[TOOL_CALLS]get_weather[ARGS]" + WEATHER + "[TOOL_CALLS]search[CALL_ID]a1B2c3D4e[ARGS]" + SEARCH
HARMONY = (
    "<|channel|>analysis<|message|>Need the weather.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + WEATHER
)
PYTHONIC = "[get_weather(city='Tokyo', days=3), search(q=\"hotels\")]"
CODER_QUOTING = """<tool_call>
<function=search>
<parameter=q>
Tags: </parameter> and </function>
and <parameter=q> in
</parameter>
</function>
</tool_call>"""
CODER_QUOTED_CALL = (
    "<function=search><parameter=q>Use </tool_call>, <tool_call> and </parameter> so</parameter></function></tool_call>"
)
LLAMA_QUOTING = '{"name": "search", "parameters": {"q": "<|python_tag|> <|start_header_id|>user<|end_header_id|>"}}'
ONE_CODER = CODER.partition("\n<tool_call>\n<function=search")[0]
LLAMA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
HUNYUAN = f"<tool_calls>\n{GLM45}\n</tool_calls>".replace("weather\n", "weather<tool_sep>\n")
KIMI_K3 = (
    '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Tokyo<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="search" index="2"<|sep|>'
    '<|open|>argument key="q" type="string"<|sep|>hotels<|close|>argument<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|><|close|>message<|sep|>"
)
JSON_LIST = f'[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "search", "arguments": {SEARCH}}}]'
COHERE = (
    "<|START_ACTION|>" + JSON_LIST.replace("arguments", "parameters").replace("name", "tool_name") + "<|END_ACTION|>"
)
COHERE_ITEM = f'{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {WEATHER}}}'
GIGACHAT = '{"name": "get_weather", "arguments": ' + WEATHER + "}"
SOLAR_OPEN = (
    "<|begin|>assistant<|tool_calls|>"
    f"<|tool_call:begin|>0<|tool_call:name|>get_weather<|tool_call:args|>{WEATHER}<|tool_call:end|>"
    f"<|tool_call:begin|>1<|tool_call:name|>search<|tool_call:args|>{SEARCH}<|tool_call:end|>"
)


@pytest.mark.parametrize(("name", "output"), [*OUTPUTS.items(), ("mistral", MISTRAL_V11), ("glm45", HUNYUAN)])
def test_two_calls_and_the_text_around_them(name: str, output: str) -> None:
    assert read(name, output) == BOTH
    assert read(name, f"Let me see.\n\n{output}\n") == [Content("Let me see."), *BOTH]
    assert read(name, f"{output}\nThat is all. ") == [*BOTH, Content("That is all. ")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": ' + WEATHER),
        ("hermes", '<tool_call>{ "arguments": ' + WEATHER + ', "name": "get_weather"}\n</tool_call> '),
        ("hermes", '<tool_call>{"id":5,"name":"get_weather" ,"arguments" :' + WEATHER + ', "x": [1]} </tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": ' + json.dumps(WEATHER) + "}</tool_call>"),
        ("hermes", '<tool_call>{"arguments": ' + json.dumps(WEATHER) + ', "name": "get_weather"}</tool_call>'),
        ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": ' + WEATHER + "}"),
        ("llama3_json", '{"type": "function", "name": "get_weather", "parameters": ' + WEATHER + "}"),
        ("llama4_json", '<|python_start|>{"name": "get_weather", "parameters": ' + WEATHER + "}<|python_end|>"),
        ("mistral", "[TOOL_CALLS]get_weather" + WEATHER),
        ("mistral", '[TOOL_CALLS]  [ {"name":"get_weather" , "arguments" : ' + WEATHER + ', "id": "a1B2c3D4e"} ]'),
        ("mistral", MISTRAL_V11.partition("[TOOL_CALLS]search")[0]),
        ("deepseek_v3", DEEPSEEK_V31.partition("<｜tool▁call▁begin｜>search")[0]),
        ("deepseek_v31", "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" + WEATHER),
        ("pythonic", "[get_weather(city='Tokyo', days=3)"),
        ("qwen3_coder", CODER.partition("\n<tool_call>\n<function=search")[0].replace("</parameter>\n", "")),
        ("qwen3_coder", CODER.partition("\n<tool_call>\n<function=search")[0].removeprefix("<tool_call>")),
        ("qwen3_coder", ONE_CODER.replace("</parameter>\n</function>", "")),
        ("qwen3_coder", ONE_CODER.replace("\n</function>\n</tool_call>", "</function>")),
        ("qwen3_coder", ONE_CODER.replace(">\n", ">").replace("\n<", "<")),
        ("hermes", '{"name": "get_weather", "arguments": ' + WEATHER + "}"),
        ("hermes", '```json\n{"name": "get_weather", "arguments": ' + WEATHER + "}\n```"),
        ("hermes", '```\n[{"name": "get_weather", "arguments": ' + WEATHER + "}]\n```"),
        ("hermes", '{"name": "get_weather", "arguments": ' + WEATHER + "}\n</tool_call>"),
        ("hermes", '<tool_call>\n```json\n{"name": "get_weather", "arguments": ' + WEATHER + "}\n```\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": ' + WEATHER + "}}\n</tool_call>"),
        ("llama3_json", '{"name": "get_weather", "parameters": ' + WEATHER + "}}"),
        ("hermes", '<tool_call>[{"name": "get_weather", "arguments": ' + WEATHER + "}]</tool_call>"),
        ("llama3_json", '[{"name": "get_weather", "parameters": ' + WEATHER + "}]"),
        ("llama3_json", '```json\n{"name": "get_weather", "parameters": ' + WEATHER + "}\n```"),
        ("llama3_json", '<|python_tag|>[{"name": "get_weather", "parameters": ' + WEATHER + "}];"),
        ("llama3_json", LLAMA_HEADER + '{"name": "get_weather", "parameters": ' + WEATHER + "}"),
        ("nemotron_json", '<TOOLCALL> [ {"name" : "get_weather", "arguments":' + WEATHER + "} ] </TOOLCALL>"),
        ("granite", '<tool_call> {"name": "get_weather", "arguments": ' + WEATHER + "}"),
        ("apriel", '<tool_calls>[{"name": "get_weather", "arguments": ' + WEATHER + ', "id": "1"}]</tool_calls>'),
        ("phi4_mini_json", '<|tool_call|>{"name": "get_weather", "arguments": ' + WEATHER + "}<|/tool_call|>"),
        ("apertus", '<|tools_prefix|>{ "get_weather" : ' + WEATHER + " }<|tools_suffix|>"),
        ("seed_oss", SEED.partition("\n<seed:tool_call>\n<function=search")[0].removeprefix("<seed:tool_call>")),
        ("seed_oss", SEED.partition("\n<seed:tool_call>\n<function=search")[0].replace("3</parameter>\n", "3")),
        ("lfm2", '<|tool_call_start|>[{"name": "get_weather", "arguments": ' + WEATHER + "}]<|tool_call_end|>"),
        ("lfm2", '<|tool_call_start|>{"name": "get_weather", "arguments": ' + WEATHER + "}<|tool_call_end|>"),
        ("olmo3", "<function_calls>\nget_weather(city='Tokyo', days=3),\n</function_calls>"),
        ("gigachat3", "<|function_call|>" + GIGACHAT),
        ("gigachat3", "<|message_sep|>\n\nfunction call<|role_sep|>\n" + GIGACHAT + "<|message_sep|>\n\n"),
        ("cohere_command3", f"<|START_ACTION|>[{COHERE_ITEM}]<|END_ACTION|>"),
        ("deepseek_v32", DSML.partition('\n<｜DSML｜invoke name="search')[0].partition("calls>\n")[2]),
        ("minimax_m2", MINIMAX.partition('\n<invoke name="search')[0].replace("3</parameter>\n", "3")),
        ("minimax_m2", MINIMAX.partition('\n<invoke name="search')[0].partition("call>\n")[2]),
        ("minimax_m2", f'<minimax:tool_call><invoke name="get_weather"> {WEATHER}</invoke></minimax:tool_call>'),
        ("kimi_k2", "<|tool_call_begin|> get_weather <|tool_call_argument_begin|> " + WEATHER + " <|tool_call_end|>"),
        ("kimi_k2", f"<|tool_calls_section_begin|><|tool_calls_section_end|>{KIMI_K2[:147]}"),
        ("glm45", GLM45.partition("\n<tool_call>search")[0].replace("3</arg_value>\n", "3")),
        ("glm45", GLM45.partition("\n<tool_call>search")[0].replace("weather\n", "weather").replace("\n</", " </")),
        ("glm47", f"<tool_call>get_weather{WEATHER}</tool_call>"),
    ],
)
def test_one_call_in_other_spellings(name: str, text: str) -> None:
    assert read(name, text) == CALLED


DSML_ARGUMENT = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="{}">{}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>"
)
GEMMA_NESTED = '{"a b": {"c": [[], {}, [1, ",}"]]}, "d": true}'
GEMMA_QUOTES = '{"a": "b,\\"}", "c": "\\"<|\\"|>:"}'
GEMMA_MARKERS = '{"a": "<|tool_call>call:f{}<tool_call|>"}'
SPACES = "search", '{"q": " a\\n\\\\ "}'
TAGGED = "<arg_key></arg_value> </arg_key></tool_call> <tool_cal"
IN_TAGS = "search", f'{{"q": "{TAGGED}"}}'
DEEP = "[" * 5_000 + "]" * 5_000
"""Deeper than Python's parsers of JSON and of Python go."""
DEEP_TEXT = '"{\\"a\\": ' + DEEP + '}"'


@pytest.mark.parametrize(
    ("name", "text", "called", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": "hello"}</tool_call>', "f", '"hello"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "f", "{}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + DEEP_TEXT, "f", DEEP_TEXT),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "f", "{}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1\n</tool_call>', "f", '{"a": [1\n'),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "f", "{}"),
        ("mistral", '[TOOL_CALLS]f{"a": "re.compile(r\'{}\')', "f", '{"a": "re.compile(r\'{}\')'),
        ("pythonic", "[search(q='Martha\\'s (\"inn\"]')]", "search", '{"q": "Martha\'s (\\"inn\\"]"}'),
        ("pythonic", "[search(a={'b': [None, True, -1.5]})]", "search", '{"a": {"b": [null, true, -1.5]}}'),
        ("pythonic", "[ search(\na=(),) ]", "search", '{"a": []}'),
        ("pythonic", "[search(a='é\\d')]", "search", '{"a": "é\\\\d"}'),
        ("llama4_pythonic", "<|python_start|>[f(a=1)]<|python_end|>", "f", '{"a": 1}'),
        ("qwen3_coder", "<tool_call><function=f></function></tool_call>", "f", "{}"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>\n\n x\n\n</parameter>", "f", '{"a": "\\n x\\n"'),
        ("qwen3_coder", "<tool_call><function=get_weather><parameter=days>thr", "get_weather", '{"days": thr'),
        ("gemma4", "<|tool_call>call:f{}<tool_call|>", "f", "{}"),
        ("gemma4", '<|tool_call> call:f {a b:{c:[[],{},[1, <|"|>,}<|"|>]]}, d :true}', "f", GEMMA_NESTED),
        ("gemma4", "<|tool_call>call:f{a:x y,b:-1.5e3,c:null}", "f", '{"a": "x y", "b": -1.5e3, "c": null}'),
        ("gemma4", '<|tool_call>call:f{"a":"b,\\"}",<|"|>c<|"|>:<|"|>"<|"|>:<|"|>}', "f", GEMMA_QUOTES),
        ("gemma4", '<|tool_call>call:f{a:<|"|><|tool_call>call:f{}<tool_call|><|"|>}', "f", GEMMA_MARKERS),
        ("gemma4", '<|tool_call>call:f{a:[1,<|"|>b', "f", '{"a": [1, "b'),
        ("gemma4", "<|tool_call>call:f{a:[1,tr", "f", '{"a": [1, tr'),
        ("gemma4", "<|tool_call>call:f{a:[1,],b", "f", '{"a": [1], "b'),
        ("gemma4", "<|tool_call>call:f{a:[1<tool_call|>", "f", '{"a": [1'),
        ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f"/>\n</｜DSML｜tool_calls>', "f", "{}"),
        ("deepseek_v4", '<｜DSML｜tool_calls><｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>', "f", "{}"),
        ("deepseek_v4", DSML_ARGUMENT.format("false", "[1, null]"), "f", '{"a": [1, null]}'),
        ("deepseek_v4", DSML_ARGUMENT.format("false", "x"), "f", '{"a": "x"}'),
        ("deepseek_v4", DSML_ARGUMENT.format("true", " 1\n"), "f", '{"a": " 1\\n"}'),
        ("deepseek_v4", DSML_ARGUMENT.format("true", "</｜DSML｜parameter>"), "f", '{"a": "</｜DSML｜parameter>"}'),
        ("deepseek_v4", DSML_ARGUMENT.format("fal", "").partition("fal")[0], "f", '{"a": '),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">1', "f", '{"a": "1'),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a', "f", '{"a": "'),
        ("glm45", "<tool_call>search\n</tool_call>", "search", "{}"),
        ("glm47", "<tool_call>search<arg_key>q</arg_key><arg_value> a\n\\ </arg_value></tool_call>", *SPACES),
        ("glm47", f"<tool_call>search<arg_key>q</arg_key><arg_value>{TAGGED}</arg_value></tool_call>", *IN_TAGS),
        ("glm47", "<tool_call>get_weather<arg_key>days</arg_key><arg_value>thr", "get_weather", '{"days": thr'),
        ("glm47", "<tool_call>search<arg_key>q</arg_key><arg_value>a</arg_value><arg_k", "search", '{"q": "a"'),
        ("glm47", "<tool_call>search<arg_key>q</arg_key><arg_value>a</arg_value><arg_key>", "search", '{"q": "a"'),
        ("glm47", "<tool_call>search<arg_key>q</arg_key><arg_v", "search", '{"q": "'),
        ("glm47", "<tool_call>search<arg_key>q", "search", '{"q'),
    ],
)
def test_arguments(name: str, text: str, called: str, arguments: str) -> None:
    assert read(name, text) == one(called, arguments)


BLOCK = HERMES.replace("\n</tool_call>\n<tool_call>", "")
WITHOUT_ENDS = CODER.replace("\n</parameter>\n</function>\n</tool_call>\n<tool_call>", "\n<tool_call>")
BARE = BLOCK.replace("<tool_call>\n", "").replace("\n</tool_call>", "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", BLOCK),
        ("hermes", BLOCK.replace("}}\n{", "}},\n{")),
        ("hermes", BARE),
        ("hermes", f"```json\n{BARE}\n```"),
        ("hermes", "[" + BARE.replace("}}\n{", "}}, {").replace("}\n{", "}, {") + "]"),
        ("llama3_json", "[" + LLAMA.replace("; ", ", ") + "]"),
        ("llama3_json", LLAMA.replace("; ", ", ")),
        ("llama3_json", LLAMA.replace("; ", "\n\n")),
        ("llama3_json", "<|python_tag|>" + LLAMA),
        ("qwen3_coder", WITHOUT_ENDS),
        ("qwen3_coder", CODER.replace("\n</tool_call>\n<tool_call>", "")),
    ],
)
def test_two_calls_in_other_spellings(name: str, text: str) -> None:
    assert read(name, text) == BOTH


@pytest.mark.parametrize(
    ("name", "text", "called", "arguments"),
    [
        ("pythonic", "[search(q=true, r=[null, {'a': false}])]", "search", '{"q": true, "r": [null, {"a": false}]}'),
        ("pythonic", "[search(q='a\nb', r=\"true\r\n=\")]", "search", '{"q": "a\\nb", "r": "true\\r\\n="}'),
        ("pythonic", "[search(from='a=b', class = 1, _in=2)]", "search", '{"from": "a=b", "class": 1, "_in": 2}'),
        ("qwen3_coder", CODER_QUOTING, "search", '{"q": "Tags: </parameter> and </function>\\nand <parameter=q> in"}'),
        ("qwen3_coder", CODER_QUOTED_CALL, "search", '{"q": "Use </tool_call>, <tool_call> and </parameter> so"}'),
        ("llama3_json", LLAMA_QUOTING, "search", '{"q": "<|python_tag|> <|start_header_id|>user<|end_header_id|>"}'),
    ],
)
def test_arguments_that_models_write_carelessly(name: str, text: str, called: str, arguments: str) -> None:
    assert read(name, text) == one(called, arguments)


@pytest.mark.parametrize("text", [", and so on", "\n]", "; {", ", {a"])
def test_text_behind_an_object_is_content(text: str) -> None:
    call = '{"name": "get_weather", "parameters": ' + WEATHER + "}"
    assert read("llama3_json", call + text) == [*CALLED, Content(text.lstrip())]


def test_text_between_parameters_is_content_behind_the_call() -> None:
    """Clients of some APIs get a call as one block."""
    text = ONE_CODER.replace("</parameter>\n<parameter=days>", "</parameter>\nNow the days:\n<parameter=days>")
    assert read("qwen3_coder", text) == [*CALLED, Content("Now the days:")]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("[search(q=q), search(q='a')]", [Content("[search(q=q)"), *one("search", '{"q": "a"}')]),
        ("[search(q='a'), search(q=q)]", [*one("search", '{"q": "a"}'), Content("search(q=q)]")]),
        ("[search(q=q), f(q='a')]", shown("[search(q=q), f(q='a')]")),
    ],
)
def test_a_bad_call_beside_a_good_one(text: str, events: list[Event]) -> None:
    assert read("pythonic", text) == events


def test_a_call_behind_what_only_looks_like_one() -> None:
    assert read("hermes", "<tool_call>\n" + HERMES) == [Content("<tool_call>\n"), *BOTH]
    assert read("mistral", "hi{hi" + MISTRAL_V11) == [Content("hi{hi"), *BOTH]
    broken = DEEPSEEK_V3.replace("3}", "3")
    assert read("deepseek_v3", broken) == [CALLED[0], ToolArguments(0, WEATHER[:-1] + "\n"), *BOTH[2:]]


THOUGHT = Reasoning("Need the weather.")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
TWICE = [Reasoning("a\nb"), Content("c")]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (HARMONY, [THOUGHT, Content("One moment."), *CALLED]),
        (HARMONY + "<|call|>", [THOUGHT, Content("One moment."), *CALLED]),
        (HARMONY.replace("<|constrain|>", ""), [THOUGHT, Content("One moment."), *CALLED]),
        ("<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>" + WEATHER, CALLED),
        ("<|channel|>analysis to=functions.get_weather code<|message|>\n" + WEATHER + "<|call|>", CALLED),
        ("<|channel|>commentary to=get_weather<|constrain|>json<|message|>" + WEATHER, CALLED),
        ("<|channel|>commentary to=functions.f<|message|>foo  bar<|end|>", one("f", "foo  bar")),
        ("<|channel|>commentary to=functions.f<|message|><|end|>", [ToolCall(0, "f")]),
        (f"{ANALYSIS}a<|end|>b", [Reasoning("a"), Content("b")]),
        (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|><|start|>assistant{FINAL}c<|return|>", TWICE),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [Reasoning("1 + 1")]),
        ("<|channel|>analysis<|message|>a", [Reasoning("a")]),
        ("<|start|>assistant<|message|>a<|start|>assistant<|channel|>final<|message|>b", [Content("a\nb")]),
        (" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>" + WEATHER, CALLED),
        (" to=functions.get_weather<|channel|>analysis<|message|>" + WEATHER + "<|call|>", CALLED),
        (f"<|channel|>commentary to=assistant{ANALYSIS}a<|end|>{FINAL}b", [Reasoning("a"), Content("b")]),
        ("<|start|>functions.f to=assistant<|channel|>commentary<|message|>a<|end|>", [Reasoning("a")]),
        ("<|channel|>final to=assistant<|message|>b", [Content("b")]),
        (f"{ANALYSIS}No <|call|> or <|channel|>final yet<|end|>", [Reasoning("No <|call|> or <|channel|>final yet")]),
        (" to=functions.get_weather or not", shown(" to=functions.get_weather or not")),
        ("What <|channel|> means", shown("What <|channel|> means")),
        ("<|channel|>fin", shown("<|channel|>fin")),
    ],
)
def test_harmony(text: str, events: list[Event]) -> None:
    assert read("openai", text, reasoning="openai_gptoss") == events


RESPONSE, RESPONSE_END = "<|open|>response<|sep|>", "<|close|>response<|sep|>"


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (f"Hm.<|close|>think<|sep|>{RESPONSE}{RESPONSE_END}{KIMI_K3}", [Reasoning("Hm."), *BOTH]),
        (f"<|close|>think<|sep|>{RESPONSE}One moment.{RESPONSE_END}{KIMI_K3}", [Content("One moment."), *BOTH]),
        (f"Hm.<|close|>think<|sep|>{RESPONSE}Yes{RESPONSE_END}<|close|>message", [Reasoning("Hm."), Content("Yes")]),
        ("<|close|>think<|sep|>The <|open|> and <|close|>x<|sep|>", [Content("The <|open|> and <|close|>x<|sep|>")]),
        ("<|close|>think<|sep|>" + KIMI_K3.replace("Tokyo", "a<|close|>argument<|sep|> b")[:180],
         one("get_weather", '{"city": "a<|close|>argument<|sep|> b"')),
        ('<|close|>think<|sep|><|open|>call tool="f"<|sep|><|open|>argument key="a&amp;b" type="null"<|sep|>null'
         "<|close|>argument<|sep|><|close|>call<|sep|>", one("f", '{"a&b": null}')),
        (
            '<|close|>think<|sep|><|open|>call tool="f"<|sep|><|open|>json type="object"<|sep|>{"a": [1]}'
            "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
            one("f", '{"a": [1]}'),
        ),
    ],
)  # fmt: skip
def test_kimi_k3(text: str, events: list[Event]) -> None:
    assert read("kimi_k3", text, reasoning="kimi_k3", inside=True) == events


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("<|START_THINKING|>Hm.<|END_THINKING|>" + COHERE, [Reasoning("Hm."), *BOTH]),
        ("<|START_RESPONSE|>Yes <co>a</co: 0:[1]>.<|END_RESPONSE|>", [Content("Yes <co>a</co: 0:[1]>.")]),
        ("<|START_TEXT|>Yes<|END_TEXT|>", [Content("Yes")]),
    ],
)
def test_cohere(text: str, events: list[Event]) -> None:
    assert read("cohere_command3", text, reasoning="cohere_command3") == events


NESTED = '{"to": {"zip": "01", "floor": 2}, "note": " a\\n"}'
ORDER = {
    "type": "object",
    "properties": {
        "items": {"anyOf": [{"type": "array", "items": {"$ref": "#/x"}}, {"type": "null"}]},
        "ids": {"type": "array", "items": {"type": "integer"}},
        "to": {"type": "object", "properties": {"zip": {"type": "string"}, "floor": {"type": "integer"}}},
        "note": {"type": "string"},
    },
}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<ids>\n<item>1</item>\n<item>2</item>\n</ids></invoke>", '{"ids": [1, 2]}'),
        ("<to><zip>01</zip><floor>2</floor></to><note> a\n</note></invoke>", NESTED),
        ("<items><item><sku>b</sku></item></items></invoke>", '{"items": [{"sku": "b"}]}'),
        ("<ids></ids><to></to><note></note></invoke>", '{"ids": [], "to": {}, "note": ""}'),
        ("<new><item>1</item></new></invoke>", '{"new": ["1"]}'),
        ("</invoke>", "{}"),
        ("<to><zip>0", '{"to": {"zip": "0'),
        ("<ids><item>1</item><item", '{"ids": [1, '),
    ],
)
def test_minimax_m3_nests_arguments(text: str, arguments: str) -> None:
    output = f'<tool_call>\n<invoke name="order">{text}'.replace("<", "]<]minimax[>[<")
    for parts in ([output], list(output)):
        parser = OutputParser(None, TOOL_FORMATS["minimax_m3"], tools={"order": ORDER})
        assert fed(parser, parts) == one("order", arguments)


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (f"<|think|>Hm.<|end|>{SOLAR_OPEN}", [Reasoning("Hm."), *BOTH]),
        ("<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes<|end|>", [Reasoning("Hm."), Content("Yes")]),
        (f"<|content|>One moment.<|end|>{SOLAR_OPEN}", [Content("One moment."), *BOTH]),
        ("<|content|>Yes<|end|><|begin|>assi", [Content("Yes")]),
    ],
)
def test_solar_open(text: str, events: list[Event]) -> None:
    assert read("solar_open", text, reasoning="solar_open") == events


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (f"get_weather\n{WEATHER}>>>search\n{SEARCH}", BOTH),
        (f"all\nOne moment.\n>>>get_weather\n{WEATHER}\n>>>search\n{SEARCH}", [Content("One moment."), *BOTH]),
        (">>>all\nYes >>> no", [Content("Yes >>> no")]),
        ("all", [Content("all")]),
    ],
)
def test_functionary(text: str, events: list[Event]) -> None:
    assert read("functionary_v3_2", text) == events


HUNYUAN_A13B = OUTPUTS["hunyuan_a13b"]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (f"<think>\nHm.\n</think>\n<answer>\n{HUNYUAN_A13B}\n</answer>", [Reasoning("Hm."), *BOTH]),
        ("<think>\nHm.\n</think>\n<answer>\nYes\n</answer>\n", [Reasoning("Hm."), Content("Yes")]),
        ("<think>\n\n</think>\n<answer>\nAn <answer> ends with </answer> so.\n</answer>",
         [Content("An <answer> ends with </answer> so.")]),
        ("<answer>\nYes", [Content("Yes")]),
        (" Yes <answer>", [Content(" Yes <answer>")]),
    ],
)  # fmt: skip
def test_hunyuan_a13b(text: str, events: list[Event]) -> None:
    assert read("hunyuan_a13b", text, reasoning="hunyuan_a13b") == events


def test_harmony_without_tools_has_no_calls() -> None:
    parser = OutputParser(REASONING_FORMATS["openai_gptoss"], TOOL_FORMATS["openai"])
    assert joined(parser.feed(HARMONY, last=True)) == [THOUGHT, Content("One moment."), Reasoning("\n" + WEATHER)]


@pytest.mark.parametrize(
    ("name", "text", "inside", "events"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\nYes. ", False, [Reasoning("Hm."), Content("Yes. ")]),
        ("qwen3", "\n<think>a < b\n\nc</think>", False, [Reasoning("a < b\n\nc")]),
        ("qwen3", "Hm.</think>Yes", True, [Reasoning("Hm."), Content("Yes")]),
        ("qwen3", "<think>Hm.</think>Yes", True, [Reasoning("Hm."), Content("Yes")]),
        ("qwen3", "<think>Hm.</think>\n\n" + HERMES, False, [Reasoning("Hm."), *BOTH]),
        ("qwen3", "</think>\n\nYes", False, [Content("Yes")]),
        ("qwen3", "</think>\n\nYes", True, [Content("Yes")]),
        ("qwen3", "<think>Hm.\n" + HERMES, False, [Reasoning("Hm."), *BOTH]),
        ("qwen3", "Hm.\n" + HERMES + "\n</think>\n\nYes", True, [Reasoning("Hm."), *BOTH, Content("Yes")]),
        ("qwen3", "<think>A <tool_call> or\n<tool_call> so", False, [Reasoning("A <tool_call> or\n<tool_call> so")]),
        ("qwen3", "<think>Say " + HERMES[:80], False, [Reasoning("Say " + HERMES[:80])]),
        ("qwen3", "<think>Hm.</thi", False, [Reasoning("Hm.</thi")]),
        ("qwen3", "<think>\n\n</think>\n\n", False, []),
        ("qwen3", " \n<thin", False, shown(" \n<thin")),
        ("qwen3", " Why <think>?", False, shown(" Why <think>?")),
        ("apertus", "<|inner_prefix|>Hm.<|inner_suffix|>Yes", False, [Reasoning("Hm."), Content("Yes")]),
        ("gemma4", "<|channel>thought\nHm.\n<channel|>Yes", False, [Reasoning("Hm."), Content("Yes")]),
        ("mistral", "[THINK]Hm.[/THINK]Yes", False, [Reasoning("Hm."), Content("Yes")]),
        ("openai_gptoss", f"a\nb<|end|><|start|>assistant{FINAL}c", True, TWICE),
    ],
)
def test_reasoning(name: str, text: str, inside: bool, events: list[Event]) -> None:
    tools = "openai" if name == "openai_gptoss" else "hermes"
    assert read(tools, text, reasoning=name, inside=inside) == events


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Write <tool_call> before it,  </tool_call> behind it. "),
        ("hermes", '<tool_call>\n{"name": "get_wea'),
        ("hermes", '<tool_call>\n{"name": "get_weather"'),
        ("hermes", '<tool_call>\n{"nome": "get_weather", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}'),
        ("hermes", "a\n<tool_cal"),
        ("llama3_json", '{"name": "Tokyo", "parameters": {}}'),
        ("llama3_json", '{"name": "search"}'),
        ("llama3_json", '{"name": "search", "city": "Tokyo"}'),
        ("llama3_json", 'if (a) { b["c"] = {}; }\n'),
        ("llama3_json", '<|python_tag|>brave_search.call(query="hotels")'),
        ("mistral", "[TOOL_CALLS] not a call"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[TOOL_CALLS]get_weather"),
        ("deepseek_v31", '<｜tool▁calls▁begin｜>foo<｜tool▁sep｜>{"x":1}<｜tool▁calls▁end｜>'),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json"),
        ("pythonic", "[1, 2], [search](https://example.org), [search(q)], [f(a=1)]"),
        ("pythonic", "[search(q=b'z')], [search(q=1e999)], [search(q=q)]"),
        ("pythonic", "[search(q=f(1)), search(**{'q': 1}), search(q='"),
        ("pythonic", f"[search(q={DEEP})]"),
        ("pythonic", "[search(q='\\ud800')]"),
        ("qwen3_coder", "<tool_call>\n<function=get_weather\n<parameter=city>"),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></function>"),
        ("xlam", '[{"name": "f", "arguments": {}}], [{"city": 1}], [1]  {2 }, [see (a)]'),
        ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>"),
        ("nemotron_json", "<TOOLCALL>[1] </TOOLCALL>"),
        ("phi4_mini_json", "functools, functools[0]"),
        ("apertus", '<|tools_prefix|>[{"search": 1}]'),
        ("lfm2", "<|tool_call_start|>[search (q=1)]"),
        ("olmo3", "<function_calls>the calls</function_calls>"),
        ("seed_oss", "<function=f><parameter=q>1</parameter></function>"),
        ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="search">q'),
        ("minicpm5", '<function name="f"><param name="a">1</param></function>'),
        ("functionary_v3_2", "f\n{} >>> search"),
        ("functionary_v3_2", "all >>>f\n{}"),
        ("solar_open", "<|tool_call:begin|>0<|tool_call:name|>search<|tool_call:args|>"),
        ("gemma4", "<|tool_call>call:search"),
        ("gemma4", "<|tool_call>call:search of it<tool_call|> {}"),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="'),
        ("minimax_m2", '<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>'),
        ("minimax_m2", '<minimax:tool_call><invoke name="f">1'),
        ("kimi_k2", "<|tool_calls_section_begin|> x <|tool_call_begin|>search:0<|tool_call_end|>"),
        ("kimi_k2", "<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"),
        ("glm45", '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'),
        ("glm45", "<tool_call>search\n<arg_k"),
        ("glm45", "<tool_call> or </tool_call>"),
    ],
)
def test_text_that_only_looks_like_a_call_is_content(name: str, text: str) -> None:
    assert read(name, text) == shown(text)


@pytest.mark.parametrize(
    ("name", "parts", "events"),
    [
        ("hermes", ["Hello wor", "ld < "], ["Hello wor", "ld <"]),
        ("hermes", ["a\n{", '"b": 1}'], ["a", '\n{"b": 1}']),
        ("openai", [" Hel", "lo"], [" Hel", "lo"]),
        ("hermes", ["a\n", "<tool", "s>"], ["a", "", "\n<tools>"]),
        ("llama3_json", ['{"city": "', "To"], ['{"city": "', "To"]),
        ("pythonic", ["[link", "](ht"], ["", "[link](ht"]),
        ("hermes", ['<tool_call>{"name": "f", "arguments": {"a', '": [1'], ['f{"a', '": [1']),
        ("mistral", ['[TOOL_CALLS]f[ARGS]{"a', '": [1'], ['f{"a', '": [1']),
        ("qwen3_coder", ["<tool_call><function=f><parameter=a>\nb", "c\n", "d"], ['f{"a": "b', "c", "\\nd"]),
    ],
)
def test_nothing_is_held_back_without_need(name: str, parts: list[str], events: list[str]) -> None:
    parser = OutputParser(None, TOOL_FORMATS[name], tools=TOOLS)
    assert [words(parser.feed(part)) for part in parts] == events


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_end_of_the_text_can_fall_anywhere(name: str) -> None:
    """Arguments that are cut off are passed on, and never look complete."""
    for size in range(1, len(OUTPUTS[name])):
        text = OUTPUTS[name][:size]
        events = joined(OutputParser(None, TOOL_FORMATS[name], tools=TOOLS).feed(text, last=True))
        arguments = [event.text for event in events if isinstance(event, ToolArguments)]
        assert not any(is_json(each) for each in arguments if each not in (WEATHER, SEARCH))
        if not any(isinstance(event, ToolCall) for event in events):
            assert events == shown(text)


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_closing_marker_that_is_cut_off_is_no_content(name: str) -> None:
    """Behind the second call nothing comes but markers."""
    text = OUTPUTS[name]
    text = f"<|python_start|>{text}<|python_end|>" if "llama4" in name else text
    start = text.rindex("hotels") + len("hotels")
    for size in range(start, len(text)):
        events = OutputParser(None, TOOL_FORMATS[name], tools=TOOLS).feed(text[:size], last=True)
        if sum(isinstance(event, ToolCall) for event in events) == 2:
            assert not any(isinstance(event, Content) and event.text.strip() for event in events), size


@pytest.mark.parametrize(
    ("formats", "thought", "behind"),
    [
        (("qwen3", "hermes"), "<think>\nso it is", "\n</think>\n\n" + HERMES),
        (("openai_gptoss", "openai"), "<|channel|>analysis<|message|>so", "<|end|>" + HARMONY),
    ],
)
def test_reasoning_lasts_from_its_first_word_to_its_end_s_marker(
    formats: tuple[str, str], thought: str, behind: str
) -> None:
    parser = OutputParser(REASONING_FORMATS[formats[0]], TOOL_FORMATS[formats[1]], tools=TOOLS)
    said = False
    for character in thought:
        said |= bool(parser.feed(character))
        assert parser.in_reasoning == said
    assert said
    end = re.match(r"\s*<[^>]*>", behind)
    assert end is not None
    for at, character in enumerate(behind[: behind.index("analysis") if "analysis" in behind else None]):
        parser.feed(character)
        assert parser.in_reasoning == (at < end.end() - 1), at


@pytest.mark.parametrize("tool_format", DETECTED)
def test_what_a_grammar_writes_is_read(tool_format: ToolFormat) -> None:
    begin, middle, end = tool_format.call
    calls = [
        begin + name + middle + arguments + end for name, arguments in (("get_weather", WEATHER), ("search", SEARCH))
    ]
    text = tool_format.opening + tool_format.separator.join(calls) + tool_format.closing
    assert joined(OutputParser(None, tool_format, tools=TOOLS).feed(text, last=True)) == BOTH


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "42", "42"),
        ({"type": "number"}, "3.14", "3.14"),
        ({"type": "number"}, "42", "42"),
        ({"type": "boolean"}, "true", "true"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "object"}, '{"key": ["value"]}', '{"key": ["value"]}'),
        ({"type": "array"}, "['a', None]", '["a", null]'),
        ({"type": "integer"}, "many", '"many"'),
        ({"type": "integer"}, "true", '"true"'),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "object"}, "{1", '"{1"'),
        ({"type": "string"}, "42", '"42"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "42", "42"),
        ({"type": ["string", "object"]}, '{"a": 1}', '{"a": 1}'),
        ({"type": ["string", "integer"]}, "042", '"042"'),
        ({"type": "integer"}, "5.0", "5"),
        ({"type": "integer"}, "5.5", '"5.5"'),
        ({"type": "integer"}, "1e999", '"1e999"'),
        ({"type": "number"}, "5.0", "5.0"),
        ({"type": "boolean"}, "TRUE", "true"),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": "string"}, "TRUE", '"TRUE"'),
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": ["1", "2"]}, "2", '"2"'),
        ({"const": True}, "true", "true"),
        ({"anyOf": [{"properties": {}}, {"type": "null"}]}, '{"a": 1}', '{"a": 1}'),
        ({"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}, "[1]", "[1]"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "42", "42"),
        ({"oneOf": [{"type": "array"}]}, "[1]", "[1]"),
        ({"$ref": "#/$defs/x"}, '{"a": 1}', '{"a": 1}'),
        ({}, "42", '"42"'),
        (True, "x", '"x"'),
    ],
)
def test_qwen3_coder_s_values_have_the_types_of_the_schema(schema: object, text: str, value: str) -> None:
    tools = {"f": {"properties": {"a": schema}}}
    output = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    for parts in ([output], list(output)):
        parser = OutputParser(None, TOOL_FORMATS["qwen3_coder"], tools=tools)
        assert fed(parser, parts) == one("f", f'{{"a": {value}}}')


CARELESS = (
    *(BARE, f"```json\n{BARE}\n```", WITHOUT_ENDS, CODER_QUOTING, CODER_QUOTED_CALL, LLAMA_HEADER),
    *(
        "<think>\n" + HERMES + "\n</think>",
        "[search(q=q), search(from='a\nb', q=true)]",
        *(" to=functions.search" + HARMONY, "<think>Hm.</think>"),
    ),
)
"""Calls as models write them against their format."""
OTHERS = (MISTRAL_V11, HARMONY, KIMI_K3, COHERE, SOLAR_OPEN)
SPLICED = st.builds(
    lambda pieces: "".join(text[start : start + size] for text, start, size in pieces),
    st.lists(
        st.tuples(
            st.sampled_from([*OUTPUTS.values(), *OTHERS, *CARELESS, "<think>Hm.</think>", "a [b] {c}\n\n"]),
            st.integers(0, 90),
            st.integers(1, 150),
        ),
        max_size=6,
    ),
)
"""Pieces of outputs, which are calls, beginnings of calls and nonsense."""


@settings(deadline=None, max_examples=400)
@given(
    text=SPLICED,
    borders=st.lists(st.integers(0, 400), max_size=8),
    name=st.sampled_from(sorted(TOOL_FORMATS)),
    reasoning=st.sampled_from(["none", *REASONING_FORMATS]),
    inside=st.booleans(),
)
def test_no_cut_into_parts_changes_the_events(
    text: str, borders: list[int], name: str, reasoning: str, inside: bool
) -> None:
    chosen = REASONING_FORMATS.get(reasoning), TOOL_FORMATS[name]
    ends = [*sorted(min(border, len(text)) for border in borders), len(text)]
    parts = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    whole = joined(OutputParser(*chosen, tools=TOOLS, inside=inside).feed(text, last=True))
    assert fed(OutputParser(*chosen, tools=TOOLS, inside=inside), parts) == whole
    drops_markers = TOOL_FORMATS[name].reads_every_text
    if not drops_markers and reasoning == "none" and not any(isinstance(event, ToolCall) for event in whole):
        assert whole == (shown(text) if text else [])


MARKERS = {
    *(marker for tool_format in DETECTED for marker in tool_format.markers),
    *(marker for form in REASONING_FORMATS.values() for marker in (form.begin, form.end)),
}
PLAIN = st.text().filter(lambda text: not any(marker in text for marker in MARKERS - {""}))


@settings(deadline=None)
@given(text=PLAIN, name=st.sampled_from(sorted(TOOL_FORMATS)), reasoning=st.sampled_from(sorted(REASONING_FORMATS)))
def test_text_without_markers_is_content_as_it_is(text: str, name: str, reasoning: str) -> None:
    assert read(name, text, reasoning=reasoning) == (shown(text) if text else [])


@settings(deadline=None, max_examples=300)
@given(data=st.data(), name=st.sampled_from(sorted(OUTPUTS)))
def test_each_word_of_a_text_is_in_one_event(data: st.DataObject, name: str) -> None:
    """Whether it is in content, in arguments, or in what only begins like a call."""
    text = ""
    for index in range(data.draw(st.integers(1, 6))):
        first, second = f"word{index}a", f"word{index}b"
        call = OUTPUTS[name].replace("Tokyo", first).replace("hotels", second)
        cut = call[: data.draw(st.integers(0, len(call)))]
        text += data.draw(st.sampled_from([call, cut, f" {first} {second}\n"]))
    assert re.findall(r"word\d[ab]", words(read(name, text))) == re.findall(r"word\d[ab]", text)


LONG = "b" * 100_000
QUOTED = "</parameter> b " * 7_000
NO_END = "</arg_value> . "


@pytest.mark.parametrize(
    ("name", "text", "events"),
    [
        ("hermes", "a <b> " * 20_000 + ".", shown("a <b> " * 20_000 + ".")),
        ("hermes", "\n" * 100_000 + "a", shown("\n" * 100_000 + "a")),
        ("hermes", "<tool_call>" * 10_000, shown("<tool_call>" * 10_000)),
        ("hermes", '<tool_call>{"a": [' * 6_000, shown('<tool_call>{"a": [' * 6_000)),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + LONG, one("f", '{"a": "' + LONG)),
        ("gemma4", '<|tool_call>call:f{a:<|"|>' + LONG, one("f", '{"a": "' + LONG)),
        ("gemma4", "<|tool_call>call:f{a:" + "[" * 50_000, one("f", '{"a": ' + "[" * 50_000)),
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>" + LONG, one("f", '{"a": "' + LONG)),
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>" + NO_END * 6_000, one("f", '{"a": "' + NO_END * 6_000)),
        ("hermes", '<tool_call>{"arguments": {"a": "' + LONG + '"}, "name": "f"}', one("f", '{"a": "' + LONG + '"}')),
        ("hermes", "\n[" * 50_000, shown("\n[" * 50_000)),
        ("llama3_json", '{"id": {' * 12_000, shown('{"id": {' * 12_000)),
        ("pythonic", "[search(" * 12_000, shown("[search(" * 12_000)),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>" + "b\n" * 50_000, one("f", '{"a": "' + "b\\n" * 50_000)),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>" + QUOTED, one("f", '{"a": "' + QUOTED)),
    ],
)
def test_long_outputs(name: str, text: str, events: list[Event]) -> None:
    """100,000 characters, one by one: what is quadratic takes minutes here."""
    assert read(name, text) == events


@pytest.mark.parametrize("mention", ["\n<tool_call>", "\n<tool_call>{", " <tool_call> a"])
def test_long_reasoning_with_mentions_of_calls(mention: str) -> None:
    thought = "Hm." + mention * 8_000
    assert read("hermes", f"<think>{thought}</think>", reasoning="qwen3") == [Reasoning(thought)]


def test_ids_are_derived() -> None:
    openai, mistral = TOOL_FORMATS["hermes"], TOOL_FORMATS["mistral"]
    assert re.fullmatch("call_[0-9a-f]{24}", openai.call_id("r", 0))
    assert re.fullmatch("[0-9a-f]{9}", mistral.call_id("r", 0))
    ids = {openai.call_id(request, index) for request in ("r", "s") for index in (0, 1)}
    assert len(ids) == 4
    assert openai.call_id("r", 1) in ids
