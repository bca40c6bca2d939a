"""The choice of the formats in which a model writes reasoning and tool calls."""

from __future__ import annotations

import pytest

from paceline.parsing import Content, Reasoning, ToolArguments, ToolCall, choose_format
from paceline.parsing.formats.mistral import MISTRAL, MISTRAL_V11
from paceline.parsing.reasoning import REASONING_FORMATS
from paceline.text import Tokenizer

QWEN25 = r"""
{{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments:\n<tool_call>\n" }}
{{- "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}"""
QWEN3 = QWEN25 + r"""{%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"""
CODER = r"""
{{- '\n\n<tool_call>\n<function=example_function_name>\n' }}
{{- '<parameter=example_parameter_1>\nvalue_1\n</parameter>' }}"""
LLAMA3 = r"""
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}"""
LLAMA4 = LLAMA3.replace("start_header_id", "header_start").replace("end_header_id", "header_end")
LLAMA3_LIST = r"""
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- 'Respond in the format [func_name1(params_name1=params_value1, ...), func_name2(params)] ' }}"""
LLAMA4_LIST = r"""
{{- "<|header_start|>system<|header_end|>\n\n" }}
{{- "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]\n" }}"""
MISTRAL_3 = r"""{{- "[TOOL_CALLS] [" }}{{- ', "id": "' + tool_call.id[-9:] + '"}' }}"""
DEVSTRAL = r"""{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"""
MAGISTRAL = DEVSTRAL + r"""{{- '[THINK]' + block['thinking'] + '[/THINK]' }}"""
R1 = r"""
{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\n' + '```json'}}
{%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1] -%}{%- endif -%}
{{'<｜Assistant｜><think>\n'}}"""
V31 = r"""
{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments + '<｜tool▁call▁end｜>'}}
{%- if not thinking -%}{{'</think>'}}{%- endif %}"""
GPT_OSS = r"""
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
{{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}"""
GLM45 = """
{{ '\\n<tool_call>' + tc.name }}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson if v is not string else v }}</arg_value>
{% endfor %}
{{ '<think></think>' }}"""
GLM47 = GLM45.replace("\n<", "<")
HY3 = "{%- set s = ':opensource' %}{{- '<arg_key{0}>'.format(s) }}{{- '<think{0}></think{0}>'.format(s) }}"
KIMI_K2 = """
<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ args }}<|tool_call_end|>"""
KIMI_K3 = """{{- '<|open|>think<|sep|>' + thought + '<|close|>think<|sep|>' }}"""
DSML = """{%- set token = '｜DSML｜' -%}{{- '<' ~ token ~ 'function_calls>\\n' }}{{- '</think>' }}"""
MINIMAX = """
{%- set begin = '<minimax:tool_call>' %}{{- '<invoke name="' + name + '">' }}{{- '<think>\\n' }}{{- '</think>' }}"""
GEMMA4 = """
{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '<|"|>' + argument + '<|"|>' -}}
{{- '<|channel>thought\\n<channel|>' -}}"""
PLAIN = r"""{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"""


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (QWEN3, "hermes", "qwen3"),
        (QWEN25, "hermes", None),
        (CODER, "qwen3_coder", None),
        (LLAMA3, "llama3_json", None),
        (LLAMA4, "llama4_json", None),
        (LLAMA3_LIST, "pythonic", None),
        (LLAMA4_LIST, "llama4_pythonic", None),
        (MISTRAL_3, "mistral", None),
        (MAGISTRAL, "mistral", "mistral"),
        (R1, "deepseek_v3", "qwen3"),
        (V31, "deepseek_v31", "qwen3"),
        (GPT_OSS, "openai", "openai_gptoss"),
        (GLM45, "glm45", "qwen3"),
        (GLM47, "glm47", "qwen3"),
        (GLM47 + "<tool_sep>", "hy_v3", "qwen3"),
        (HY3, "hy_v3", "hy_v3"),
        (HY3.replace("opensource", "6124c78e"), "hy_v4", "hy_v4"),
        (KIMI_K2, "kimi_k2", None),
        ("{{ '<|im_system|>tool_declare<|im_middle|>' -}}{{- tools | tojson -}}", "kimi_k2", None),
        (KIMI_K3, "kimi_k3", "kimi_k3"),
        (DSML, "deepseek_v32", "qwen3"),
        (DSML.replace("function_calls", "tool_calls"), "deepseek_v4", "qwen3"),
        (DSML.replace("function_calls", " calls"), "deepseek_v41", "qwen3"),
        (MINIMAX, "minimax_m2", "qwen3"),
        (GEMMA4, "gemma4", "gemma4"),
        ("{{- '<TOOLCALL>[{\"name\": \"' + name }}{{ '<think></think>' }}", "nemotron_json", "qwen3"),
        (r'within <tool_call></tool_call> XML tags: <tool_calls>[{"name": <name>, "arguments": <a>}', "apriel", None),
        ("respond only with <|tool_call|> followed by a JSON list of tools used.", "granite", None),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4_mini_json", None),
        ("{{ '<|inner_prefix|>' }}{{ '<|tools_prefix|>[' }}", "apertus", "apertus"),
        ("<|START_THINKING|>{{ plan }}<|END_THINKING|><|START_ACTION|>[", "cohere_command3", "cohere_command3"),
        (CODER.replace("tool_call>", "seed:tool_call>") + "{%- set think = '<seed:think>' -%}", "seed_oss", "seed_oss"),
        ("{{- '<|tool_call_start|>[' + calls | join(', ') + ']<|tool_call_end|>' -}}", "lfm2", None),
        ("{{ '<function_calls>' + message['function_calls'] + '</function_calls>' }}", "olmo3", None),
        ("{%- set sep = '<|role_sep|>\\n' -%}{{- role_message('function call') }}", "gigachat3", None),
        (
            "{{- ']<]minimax[>[' ~ '<invoke name=\"' }}{{- '<mm:think>' }}{{- '<tool_call>' }}",
            "minimax_m3",
            "minimax_m3",
        ),
        ("{{- '<|think|>' }}{{- '<|tool_call:begin|>' + id + '<|tool_call:name|>' }}", "solar_open", "solar_open"),
        ("{{- '<|tool_call:start|>' + name }}{{- '<|tool_arg:start|>' }}", "solar_open2", None),
        ("{{- '<function name=\"' + name + '\">' }}{{- '<param name=\"' }}", "minicpm5", None),
        ("{{ '>>>all\\n' + message['content'] }}", "functionary_v3_2", None),
        (PLAIN, None, None),
        (None, None, None),
    ],
)
def test_templates_are_recognised(template: str | None, tools: str | None, reasoning: str | None) -> None:
    chosen = choose_format("auto", "auto", template)
    assert (chosen.tools and chosen.tools.name, chosen.reasoning and chosen.reasoning.name) == (tools, reasoning)
    nothing = choose_format("none", "none", template)
    assert (nothing.tools, nothing.reasoning) == (None, None)


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


def test_the_shipped_model_has_neither() -> None:
    template = Tokenizer.load("pydoc").chat_template
    assert template is not None
    assert choose_format("auto", "auto", template.source).tools is None


@pytest.mark.parametrize("name", ["gemma4", "kimi_k3"])
def test_tokens_of_reasoning_that_is_read_without_tools_are_markers(name: str) -> None:
    assert {"gemma4": "<|channel>", "kimi_k3": "<|sep|>"}[name] in choose_format("none", name, None).markers


def test_each_reasoning_format_has_its_name() -> None:
    assert all(name == each.name for name, each in REASONING_FORMATS.items())
