"""Any body is refused by naming a field, or becomes requests that can be sent to a target."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.messages import GenerationRequest, TargetDescription
from paceline.text import Tokenizer
from paceline.wire.target_codec import decode_request, encode_request
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.generation.bodies import CompletionBody
from paceline_services.gateway.generation.completion_request import CompletionRequest
from paceline_services.gateway.generation.prompt_encoding import LONG_TEXT, bad_word_tokens, encode_prompts
from paceline_services.gateway.generation.request_builder import build_choices, build_sampling, speculative_options

TOKENIZER = Tokenizer.load("table:512")
MODEL = TargetDescription(
    "t", "m", "", vocabulary_size=512, max_model_len=64, slots=64, rows_invariant=True, eos_token_ids=(2,), method=""
)

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


def build(body: dict[str, Any]) -> list[CompletionRequest]:
    try:
        parsed = CompletionBody.model_validate_json(json.dumps(body))
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error
    prompt = parsed.prompt[0]
    tokens = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    bad_words = asyncio.run(bad_word_tokens(parsed.bad_words or (), TOKENIZER))
    sampling = build_sampling(parsed, MODEL, "", bad_words)
    return build_choices(parsed, MODEL, CompletionRequest("r", (), sampling, speculative_options(parsed)), tokens)


@settings(deadline=None)
@given(body=st.dictionaries(FIELDS, VALUES, max_size=4), with_prompt=st.booleans())
def test_any_body_is_refused_by_field_or_can_be_sent(body: dict[str, Any], with_prompt: bool) -> None:
    if with_prompt:
        body["prompt"] = "1 2 3"
    param, requests = None, []
    try:
        requests = build(body)
    except InvalidRequestError as error:
        param = (error.param or "no field").split(".")[0].split("[")[0]
    assert param is None or param in {*body, "prompt"}
    for request in requests:
        sent = decode_request(encode_request(request))
        ours = {name: getattr(request, name) for name in GenerationRequest.__match_args__}
        assert sent == GenerationRequest(**ours | {"committed": [], "draft_addresses": []})
        assert len(request.prompt) + request.sampling.max_tokens <= MODEL.max_model_len


@pytest.mark.parametrize(
    ("wanted", "max_tokens"),
    [
        ({"prompt": [1] * 60}, 4),
        ({"prompt": [1] * 60, "min_tokens": 4}, 4),
        ({"prompt": "1", "min_tokens": 20}, 20),
    ],
    ids=["cut to the context", "cut to a minimum that fits", "lifted by a minimum"],
)
def test_the_default_length(wanted: dict[str, Any], max_tokens: int) -> None:
    assert build(wanted)[0].sampling.max_tokens == max_tokens


def test_a_bad_word_without_tokens_is_refused() -> None:
    """It was an IndexError where a space is no token, either."""
    with pytest.raises(InvalidRequestError) as refused:
        build({"prompt": "1", "bad_words": [" "]})
    assert refused.value.param == "bad_words"


class RecordingTokenizer:
    """A tokenizer that records what it encodes in the event loop's thread, and what in others."""

    def __init__(self) -> None:
        self.in_loop: list[str] = []
        self.in_threads: list[str] = []
        self.longest_token = 8

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        (self.in_loop if threading.current_thread() is threading.main_thread() else self.in_threads).append(text)
        return TOKENIZER.encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize(
    ("texts", "long"),
    [(["1"], False), (["1"] * 20, False), (["1"] * 1024, True), (["1 " * 500] * 20, True), (["1" * LONG_TEXT], True)],
    ids=["one", "some", "many", "together long", "long"],
)
async def test_long_texts_are_encoded_in_a_thread(texts: list[str], long: bool) -> None:
    prompts, words = RecordingTokenizer(), RecordingTokenizer()
    assert len(await encode_prompts(texts, prompts, 10**9, add_special_tokens=True)) == len(texts)  # type: ignore[arg-type]
    await bad_word_tokens(texts, words)  # type: ignore[arg-type]
    for tokenizer in (prompts, words):
        assert (bool(tokenizer.in_loop), bool(tokenizer.in_threads)) == (not long, long)


@pytest.mark.parametrize(("own", "sent"), [(None, (2,)), ([7], (7, 2)), ([2, 7], (2, 7))])
def test_the_model_s_stop_tokens_are_added_to_the_client_s(own: list[int] | None, sent: tuple[int, ...]) -> None:
    [request] = build({"prompt": "1", "stop_token_ids": own})
    assert request.sampling.stop_token_ids == sent
