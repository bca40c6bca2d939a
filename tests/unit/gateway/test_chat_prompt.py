"""What a chat template gets of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer as Backend
from tokenizers import models

from paceline.text import Tokenizer
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.generation.bodies import TokenizeChatBody
from paceline_services.gateway.generation.chat_prompt import render_chat

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2.5]}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "b": 1, "a": 2}}}


def rendered(template: str, *messages: dict[str, Any], **fields: Any) -> str:
    backend = Backend(models.WordLevel({"0": 0}, unk_token="0"))
    body = TokenizeChatBody.model_validate({"messages": [*messages] or [USER], **fields})
    return render_chat(body, Tokenizer(backend, {}, template))


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, '{"role": "user", "content": "a"}'),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            '{"role": "user", "content": "a\\nb"}',
        ),
        ({"role": "user", "content": "a", "name": "me"}, '{"role": "user", "content": "a", "name": "me"}'),
        ({"role": "assistant", "content": "a", "tool_calls": None}, '{"role": "assistant", "content": "a"}'),
        ({"role": "assistant", "content": "a", "tool_calls": []}, '{"role": "assistant", "content": "a"}'),
        (
            {"role": "assistant", "content": "a", "reasoning": "b"},
            '{"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "b"}',
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "b"},
            '{"role": "assistant", "content": "a", "reasoning_content": "b", "reasoning": "b"}',
        ),
        (
            {"role": "tool", "content": "a", "tool_call_id": "x"},
            '{"role": "tool", "content": "a", "tool_call_id": "x"}',
        ),
    ],
)
def test_messages_are_as_templates_expect_them(message: dict[str, Any], shown: str) -> None:
    assert rendered("{{ messages[0] | tojson }}", message) == shown


@pytest.mark.parametrize(
    ("condition", "shown"),
    [
        ("true", "system: a"),  # any role: the model never saw this one
        ("m.role == 'system'", "system: a"),
        ("m.role in ['system', 'developer']", "developer: a"),
        ("m.role in ['system', raise_exception('no developer') if m.role == 'developer']", "system: a"),
        ("m.role == 'system' or 'developer' in m.content", "system: a"),
    ],
)
def test_developers_are_the_system_where_they_have_no_turn(condition: str, shown: str) -> None:
    turn = "{{ m.role }}: {{ m.content }}"
    template = f"{{% for m in messages %}}{{% if {condition} %}}{turn}{{% endif %}}{{% endfor %}}"
    assert rendered(template, {"role": "developer", "content": "a"}) == shown


def test_a_call_that_was_cut_off_comes_back_as_far_as_it_went() -> None:
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    cut = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2], "city": "Par'}}
    assert rendered(template, {"role": "assistant", "tool_calls": [cut]}) == '{"a": [1, 2], "city": "Par"}'
    for wrong in ("a", "{a", '{"a": 1} b', "[1"):
        cut["function"] = {"name": "f", "arguments": wrong}
        with pytest.raises(ValidationError):
            rendered(template, {"role": "assistant", "tool_calls": [cut]})


@pytest.mark.parametrize("given", [{}, {"description": None, "parameters": None}, {"strict": True}])
def test_a_tool_has_a_description_and_parameters(given: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", **given}, "cache_control": {"type": "ephemeral"}}
    shown = json.loads(rendered("{{ tools | tojson }}", tools=[tool], tool_choice="auto"))
    strict = {key: value for key, value in given.items() if value}
    defaults = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert shown == [{"type": "function", "function": {**defaults, **strict}}]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"content": "a"}, "b"),
        ({"tool_calls": [CALL]}, "b"),
        ({"content": "a", "tool_calls": [CALL]}, "none"),  # gpt-oss's template raises an error for both
    ],
)
def test_a_template_that_reads_thinking_gets_the_reasoning(fields: dict[str, Any], shown: str) -> None:
    template = "{% for message in messages %}{{ message.thinking or 'none' }}{% endfor %}"
    for name in ("reasoning", "reasoning_content"):
        assert rendered(template, {"role": "assistant", name: "b", **fields}) == shown


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_arguments_become_objects_in_the_client_s_order(content: dict[str, Any]) -> None:
    template = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    message = {"role": "assistant", **content, "tool_calls": [CALL]}
    assert rendered(template + "{{ messages[0].content + '.' }}", message) == '{"b": 1, "a": [2.5]}.'
    nothing: list[Any] = ["", None, "{}", {}]
    for none in nothing:
        empty = {**CALL, "function": {"name": "f", "arguments": none}}
        assert rendered(template, {"role": "assistant", "tool_calls": [empty]}) == "{}"


@pytest.mark.parametrize(
    ("template", "fields", "text"),
    [
        (
            "{{ tools | tojson }}",
            {"tools": [TOOL]},
            '[{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object", "b": ',
        ),
        ("{{ tools }}", {"tools": [TOOL], "tool_choice": "none"}, "None"),
        ("{{ tools }}", {"tools": []}, "None"),
        ("{{ tools }}", {"tools": [], "tool_choice": "auto"}, "None"),
        ("{{ documents | tojson }}", {"documents": [{"title": "a"}]}, '[{"title": "a"}]'),
        ("{{ reasoning_effort }}", {"reasoning_effort": "low"}, "low"),
        ("{{ enable_thinking }}", {"reasoning_effort": "none"}, "False"),
        ("{{ enable_thinking }}", {"reasoning_effort": "low"}, "True"),
        ("{{ thinking }}", {"reasoning_effort": "none"}, "False"),
        ("{% if thinking is not defined %}{% set thinking = 7 %}{% endif %}{{ thinking }}", {}, "7"),
        (
            "{{ enable_thinking }}",
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "True",
        ),
    ],
)
def test_variables_reach_the_template(template: str, fields: dict[str, Any], text: str) -> None:
    assert rendered(template, **fields).startswith(text)


@pytest.mark.parametrize(
    "fields",
    [{"tools": [TOOL]}, {"documents": [{"title": "a"}]}, {"reasoning_effort": "none"}],
    ids=lambda f: next(iter(f)),
)
def test_what_a_template_does_not_know_is_refused(fields: dict[str, Any]) -> None:
    """A word in a comment, a field or a name of its own is not the request's variable."""
    [name] = fields
    for text in ("{{ my_NAME }}", "{# NAME #}", "{{ messages[0].NAME }}", "{% set NAME = 1 %}"):
        with pytest.raises(InvalidRequestError, match="does not know it") as refused:
            rendered(text.replace("NAME", name), **fields)
        assert refused.value.param == name
