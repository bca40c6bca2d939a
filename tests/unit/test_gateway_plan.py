"""Whatever a body holds: it is refused by naming a field, or becomes choices that can be sent to a target."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from paceline.core.messages import Submission
from paceline.telemetry.gateway_metrics import GatewayMetrics
from paceline.text import Tokenizer
from paceline.wire.target_codec import decode_submission, encode_submission
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.generation import GenerationRequest
from paceline_services.gateway.openai.bodies import CompletionBody
from paceline_services.gateway.openai.prompt_encoding import LONG_TEXT, bad_word_tokens, encode_prompts
from paceline_services.gateway.openai.request_builder import RequestBuilder
from paceline_services.gateway.routing.fleet import Fleet
from paceline_services.gateway.served_model import ModelLimits, ServedModel

TOKENIZER = Tokenizer.load("table:512")
GATEWAY = ServedModel("m", TOKENIZER, Fleet("m", TOKENIZER.fingerprint), GatewayMetrics(CollectorRegistry()))
SERVED = ModelLimits(max_model_len=64, vocabulary_size=512, eos_token_ids=(2,))

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 600),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=5), SCALARS, max_size=3))
FIELDS = st.sampled_from(sorted(CompletionBody.model_fields))


def planned(body: dict[str, Any]) -> list[GenerationRequest]:
    try:
        parsed = CompletionBody.model_validate_json(json.dumps(body))
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error
    prompt = parsed.prompt[0]
    tokens = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    planner = RequestBuilder(parsed, GATEWAY, SERVED, "prompt", default_tokens=16)
    words = asyncio.run(bad_word_tokens(parsed.bad_words or (), TOKENIZER))
    return planner.requests(tokens, planner.build_sampling("", words))


@settings(deadline=None)
@given(body=st.dictionaries(FIELDS, VALUES, max_size=4), with_prompt=st.booleans())
def test_any_body_is_refused_by_name_or_can_be_sent(body: dict[str, Any], with_prompt: bool) -> None:
    if with_prompt:
        body["prompt"] = "1 2 3"
    blamed, choices = None, []
    try:
        choices = planned(body)
    except InvalidRequestError as error:
        blamed = (error.param or "no field").split(".")[0].split("[")[0]
    assert blamed is None or blamed in {*body, "prompt"}
    for choice in choices:
        submission = Submission("r", choice.prompt, choice.sampling, choice.speculative)
        sent = decode_submission(encode_submission(submission))
        assert (sent.prompt, sent.sampling, sent.speculative) == (
            choice.prompt,
            choice.sampling,
            choice.speculative,
        )
        assert len(choice.prompt) + choice.sampling.max_tokens <= SERVED.max_model_len


@pytest.mark.parametrize("wanted", [{"prompt": [1] * 60}, {"prompt": [1] * 60, "min_tokens": 4}])
def test_the_default_length_is_cut_to_the_context(wanted: dict[str, Any]) -> None:
    assert planned(wanted)[0].sampling.max_tokens == 4


def test_a_minimum_lifts_the_default_length() -> None:
    assert planned({"prompt": "1", "min_tokens": 20})[0].sampling.max_tokens == 20


def test_a_bad_word_without_tokens_is_refused() -> None:
    """It was an IndexError where a space is no token, either."""
    with pytest.raises(InvalidRequestError) as refused:
        planned({"prompt": "1", "bad_words": [" "]})
    assert refused.value.param == "bad_words"


class Watched:
    """A tokenizer that tells what it encoded in the event loop's thread, and what elsewhere."""

    def __init__(self) -> None:
        self.here: list[str] = []
        self.aside: list[str] = []
        self.longest_token = 8

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        (self.here if threading.current_thread() is threading.main_thread() else self.aside).append(text)
        return TOKENIZER.encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize(
    ("texts", "long"),
    [(["1"], False), (["1"] * 20, False), (["1"] * 1024, True), (["1 " * 500] * 20, True), (["1" * LONG_TEXT], True)],
    ids=["one", "some", "many", "together long", "long"],
)
async def test_whatever_takes_long_to_encode_holds_nobody_up(texts: list[str], long: bool) -> None:
    prompts, words = Watched(), Watched()
    assert len(await encode_prompts(texts, prompts, 10**9, add_special_tokens=True)) == len(texts)  # type: ignore[arg-type]
    await bad_word_tokens(texts, words)  # type: ignore[arg-type]
    for tokenizer in (prompts, words):
        assert (bool(tokenizer.here), bool(tokenizer.aside)) == (not long, long)


def test_a_stop_token_that_the_client_names_is_its_own() -> None:
    choice = planned({"prompt": "1", "stop_token_ids": [2, 7]})[0]
    assert choice.sampling.stop_token_ids == (2, 7)
    assert choice.eos_token_ids == []
