"""Structured output as clients ask for it: the official client, a real stack, and the model that ships."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.helpers.served import Served, serving

CHAT: Any = [{"role": "user", "content": "def area(width, height):"}]
START_S = 240


class Side(BaseModel, extra="forbid"):
    name: str = Field(max_length=12)
    length: int = Field(ge=0, le=99)


class Shape(BaseModel, extra="forbid"):
    kind: Literal["square", "circle", "line"]
    sides: list[Side] = Field(max_length=3)
    closed: bool


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("pydoc", "--port", "0", "--target-workers", "2", "--draft-workers", "1") as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    url = served.wait_for(r"Serving pydoc at (\S+)/v1")[1]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120.0) as client:
        yield client


def generated(client: openai.OpenAI, outputs: Mapping[str, Any], **fields: Any) -> str:
    answer = client.completions.create(
        model="pydoc", prompt="The answer: ", max_tokens=300, extra_body={"structured_outputs": outputs}, **fields
    )
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].text


@pytest.mark.timeout(START_S)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_what_is_parsed_is_what_was_asked_for(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.parse(
        model="pydoc",
        messages=CHAT,
        response_format=Shape,
        seed=seed,
        temperature=0.0 if seed == 0 else 1.0,
        extra_body={"return_token_ids": True},
    )
    choice = answer.choices[0]
    assert isinstance(choice.message.parsed, Shape)
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert choice.model_extra is not None
    assert answer.usage.completion_tokens == len(choice.model_extra["token_ids"])


@pytest.mark.timeout(START_S)
def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": "pydoc", "messages": CHAT, "response_format": Shape, "seed": 3}
    whole = client.chat.completions.parse(**asked)
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


@pytest.mark.timeout(START_S)
def test_speculation_changes_nothing(client: openai.OpenAI) -> None:
    texts = {}
    for speculative in (True, False):
        answer = client.chat.completions.parse(
            model="pydoc",
            messages=CHAT,
            response_format=Shape,
            seed=5,
            extra_body={"speculative": speculative},
        )
        texts[speculative] = answer.choices[0].message.content
    assert texts[True] == texts[False]


@pytest.mark.timeout(START_S)
def test_vllms_fields_on_completions(client: openai.OpenAI) -> None:
    assert generated(client, {"choice": ["left", "right"]}, seed=1) in ("left", "right")
    assert generated(client, {"regex": "[a-f]{3}-[0-9]{4}"}, seed=2)[3] == "-"
    assert set(generated(client, {"grammar": 'root ::= "(" root ")" | "x"'}, temperature=0.0).strip("()")) == {"x"}
    text = generated(client, {"json": Shape.model_json_schema(), "disable_any_whitespace": True}, seed=4)
    assert Shape.model_validate_json(text)
    names = [side["name"] for side in json.loads(text)["sides"]]
    assert " " not in "".join(text.replace(json.dumps(name, ensure_ascii=False), "") for name in names[:1])


@pytest.mark.timeout(START_S)
def test_any_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="pydoc", messages=CHAT, response_format={"type": "json_object"}, seed=1, max_tokens=200
    )
    content = answer.choices[0].message.content
    assert content is not None
    assert content.startswith("{")
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(content), dict)


LONG: Any = {
    "model": "pydoc",
    "prompt": "Numbers: ",
    "max_tokens": 500,
    "extra_body": {
        "structured_outputs": {
            "disable_any_whitespace": True,
            "json": {"type": "array", "items": Side.model_json_schema(), "minItems": 8, "maxItems": 12},
        }
    },
}


@pytest.mark.timeout(START_S)
def test_a_target_that_is_killed_takes_no_token_along(client: openai.OpenAI, served: Served) -> None:
    """Prompt, committed tokens and grammar go to the other one, which goes on where the first one was."""
    seeds = range(4)
    expected = [client.completions.create(**LONG, seed=seed).choices[0].text for seed in seeds]
    assert len(set(expected)) == len(expected)
    texts: dict[int, str] = {}
    begun = threading.Barrier(len(seeds) + 1, timeout=120.0)

    def follow(seed: int) -> None:
        text = ""
        for number, chunk in enumerate(client.completions.create(**LONG, seed=seed, stream=True)):
            text += chunk.choices[0].text
            if number == 2:
                begun.wait()
        texts[seed] = text

    threads = [threading.Thread(target=follow, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    begun.wait()
    victim = next(iter(served.children("paceline_services.target").values()))
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert [texts[seed] for seed in seeds] == expected
    assert all(8 <= len(json.loads(text)) <= 12 for text in expected)
