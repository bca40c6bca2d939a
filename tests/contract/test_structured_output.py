"""Structured output as clients ask for it: the official client, a real stack, and the model that ships."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.helpers.served import serving

pytestmark = pytest.mark.timeout(240)

CHAT: Any = [{"role": "user", "content": "def area(width, height):"}]


class Side(BaseModel, extra="forbid"):
    name: str = Field(max_length=12)
    length: int = Field(ge=0, le=99)


class Shape(BaseModel, extra="forbid"):
    kind: Literal["square", "circle", "line"]
    sides: list[Side] = Field(max_length=3)
    closed: bool


SCHEMA = Shape.model_json_schema()
ASKED: Any = {"model": "pydoc", "messages": CHAT, "response_format": Shape}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serving("pydoc", "--port", "0") as served:
        url = served.wait_for(r"Serving pydoc at (\S+)/v1")[1]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120.0) as client:
            yield client


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_what_is_parsed_is_what_was_asked_for(client: openai.OpenAI, seed: int) -> None:
    """A stream has the same text, and so has an answer without speculation."""
    asked = ASKED | {"seed": seed, "temperature": 0.0 if seed == 0 else 1.0}
    answer = client.chat.completions.parse(**asked, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert isinstance(choice.message.parsed, Shape)
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert choice.model_extra is not None
    assert answer.usage.completion_tokens == len(choice.model_extra["token_ids"])
    plain = client.chat.completions.parse(**asked, extra_body={"speculative": False}).choices[0]
    assert plain.message.content == choice.message.content
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.parsed == choice.message.parsed
    assert final.message.content == choice.message.content
    assert final.finish_reason == "stop"


def test_a_structural_tag_binds_a_part_of_the_text(client: openai.OpenAI) -> None:
    """In the older form and as a format, with speculation and without."""
    tag = {
        "type": "tag",
        "begin": "<shape>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</shape>",
    }
    free = {"type": "triggered_tags", "triggers": ["<shape>"], "tags": [tag], "at_least_one": True}
    older = {"structures": [{"begin": "<shape>", "schema": SCHEMA, "end": "</shape>"}], "triggers": ["<shape>"]}

    def answered(form: Mapping[str, Any], **fields: Any) -> str:
        asked: Any = {"model": "pydoc", "messages": CHAT, "seed": 3, "max_tokens": 300}
        answer = client.chat.completions.create(**asked, response_format={"type": "structural_tag", **form}, **fields)
        text = answer.choices[0].message.content
        assert text is not None
        return text

    whole = answered({"format": tag})
    assert Shape.model_validate_json(whole.removeprefix("<shape>").removesuffix("</shape>"))
    text = answered({"format": free})
    assert text == answered({"format": free}, extra_body={"speculative": False})
    assert Shape.model_validate_json(text.removeprefix("<shape>").partition("</shape>")[0])
    for part in answered(older).split("<shape>")[1:]:
        assert Shape.model_validate_json(part.partition("</shape>")[0])


def test_vllms_fields_on_completions(client: openai.OpenAI) -> None:
    def generated(outputs: Mapping[str, Any], **fields: Any) -> str:
        body = {"structured_outputs": outputs}
        asked: Any = {"model": "pydoc", "prompt": "The answer: ", "max_tokens": 300, "extra_body": body}
        answer = client.completions.create(**asked, **fields)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert generated({"choice": ["left", "right"]}, seed=1) in ("left", "right")
    assert generated({"regex": "[a-f]{3}-[0-9]{4}"}, seed=2)[3] == "-"
    assert set(generated({"grammar": 'root ::= "(" root ")" | "x"'}, temperature=0.0).strip("()")) == {"x"}
    text = generated({"json": Shape.model_json_schema(), "disable_any_whitespace": True}, seed=4)
    assert Shape.model_validate_json(text)
    names = [side["name"] for side in json.loads(text)["sides"]]
    assert " " not in "".join(text.replace(json.dumps(name, ensure_ascii=False), "") for name in names[:1])
