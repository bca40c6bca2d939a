"""Instructor, in the modes in which a model of ours answers."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
import pytest
from instructor import Mode

from tests.clients.asked import LIMIT, MODEL, QUESTION, URL, Forecast, speculated

OPENAI = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ANTHROPIC = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
ASKED: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": LIMIT,
    "max_retries": 0,
}


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA], ids=lambda mode: mode.value)
def test_openai(mode: Mode) -> None:
    client = instructor.from_openai(OPENAI, mode=mode)
    Forecast.model_validate(
        speculated(
            lambda body: client.chat.completions.create(
                response_model=Forecast, temperature=0, **ASKED, extra_body=body
            ).model_dump()
        )
    )


def test_responses() -> None:
    client = instructor.from_openai(OPENAI, mode=Mode.RESPONSES_TOOLS)
    made = client.responses.create(
        model=MODEL, input=QUESTION, response_model=Forecast, temperature=0, max_output_tokens=LIMIT, max_retries=0
    )
    assert isinstance(made, Forecast)


def test_partial_objects() -> None:
    client = instructor.from_openai(OPENAI, mode=Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(response_model=Forecast, **ASKED)
    Forecast.model_validate(last.model_dump())


def test_anthropic() -> None:
    client = instructor.from_anthropic(ANTHROPIC, mode=Mode.TOOLS)
    made = client.messages.create(response_model=Forecast, **ASKED, extra_body={"temperature": 0})
    assert isinstance(made, Forecast)
