"""Chat templates: rendered as transformers renders them, and kept in their sandbox."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.text import ChatTemplate, ChatTemplateError, Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '<b>Grüße</b> & "quotes"'},
    {"role": "assistant", "content": " Hello. "},
]
TEMPLATES = {
    "llama": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}\n    {% if m.role == 'assistant' %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}\n    {% endif %}\n{% endfor %}"
    ),
    "json": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ tools }}|{{ documents }}",
    "controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "prompt": (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>>{% endif %}{{ style }}"
    ),
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "undefined": "{{ nothing }}{% if nothing is defined %}no{% endif %}{{ messages[0].content }}",
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(source: str, add_generation_prompt: bool) -> None:
    ours = ChatTemplate(source, SPECIAL).render(
        CHAT, add_generation_prompt=add_generation_prompt, variables={"style": "dry"}
    )
    theirs, _ = render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=add_generation_prompt, style="dry", **SPECIAL
    )
    assert ours == theirs[0]


@pytest.mark.parametrize(
    "source", [TEMPLATES["prompt"], TEMPLATES["llama"].replace("{{ m.content }}", "{{ m.content|trim }}")]
)
def test_a_final_message_is_continued_as_transformers_does(source: str) -> None:
    ours = ChatTemplate(source, SPECIAL).render(CHAT, add_generation_prompt=False, continue_final_message=True)
    theirs, _ = render_jinja_template([CHAT], chat_template=source, continue_final_message=True, **SPECIAL)
    assert ours == theirs[0]
    assert not ours.endswith("</s>")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_errors_of_a_template_are_raised_and_it_cannot_leave_its_sandbox(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {}).render(CHAT)


def test_a_template_that_does_not_parse_is_refused_when_read() -> None:
    with pytest.raises(ChatTemplateError, match="does not parse"):
        ChatTemplate("{% for %}", {})


def test_the_shipped_model_asks_the_assistant_to_speak() -> None:
    template = Tokenizer.load("pydoc").chat_template
    assert template is not None
    text = template.render([{"role": "user", "content": "What does json.dumps do?"}])
    assert text == "<|im_start|>user\nWhat does json.dumps do?<|im_end|>\n<|im_start|>assistant\n"
