"""Sampling defaults of others' generation_config.json: as in vLLM, for every API, and a request's own fields win."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline import family
from paceline.config import SamplingParams
from paceline.llm import LLM
from paceline.messages import GenerationRequest
from paceline.model_defaults import sampling_defaults
from paceline.model_names import BrokenFileError
from paceline.v1 import inference_pb2 as pb
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.gguf_files import tiny_config, write_gguf
from tests.helpers.openai_stack import MODEL, Stack, counts, generated, open_stack

QWEN = {
    **{"bos_token_id": 0, "eos_token_id": [2, 0], "do_sample": True, "transformers_version": "4.51.0"},
    **{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
}
"""As Qwen ships it, with the shipped model's end tokens."""
MESSAGES = [{"role": "user", "content": "Hi."}]


@asynccontextmanager
async def stack(folder: Path, content: Any = QWEN, **settings: Any) -> AsyncIterator[Stack]:
    """The shipped model, of which others changed generation_config.json."""
    shutil.copytree(family.path(MODEL), folder, dirs_exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content))
    async with open_stack(counts, folder=str(folder), **settings) as running:
        yield running


def last(running: Stack) -> GenerationRequest:
    return running.decoder.requests[-1]


def drawn(sampling: SamplingParams) -> tuple[float, int, float, float, float]:
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty


async def ask(running: Stack, path: str, **fields: Any) -> SamplingParams:
    prompts: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
        "/v1/responses": {"input": "Hi.", "max_output_tokens": 4},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    }
    answer = await running.http.post(path, json={"model": MODEL, **prompts[path], **fields})
    assert answer.status_code == 200, answer.text
    return last(running).sampling


PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]


@pytest.mark.parametrize("path", PATHS)
async def test_absent_fields_are_the_model_s(tmp_path: Path, path: str) -> None:
    async with stack(tmp_path) as running:
        assert drawn(await ask(running, path)) == (0.6, 20, 0.95, 0.0, 1.05)


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_s_own_fields_win(tmp_path: Path, path: str) -> None:
    async with stack(tmp_path) as running:
        given = await ask(running, path, temperature=0, top_p=0.5)
        assert drawn(given) == (0.0, 20, 0.5, 0.0, 1.05)


async def test_null_is_absent_and_a_neutral_value_is_not(tmp_path: Path) -> None:
    async with stack(tmp_path) as running:
        given = await ask(running, "/v1/completions", temperature=None, top_k=-1, repetition_penalty=1.0)
        assert drawn(given) == (0.6, 0, 0.95, 0.0, 1.0)


async def test_grpc_requests(tmp_path: Path) -> None:
    async with stack(tmp_path) as running, running.inference() as stub:
        await generated(stub, pb.GenerateRequest(model=MODEL, text="x"))
        assert drawn(last(running).sampling) == (0.6, 20, 0.95, 0.0, 1.05)
        own = pb.GenerateRequest.Sampling(temperature=0.0)
        await generated(stub, pb.GenerateRequest(model=MODEL, text="x", sampling=own))
        assert drawn(last(running).sampling) == (0.0, 20, 0.95, 0.0, 1.05)


async def test_without_them_absent_fields_are_those_of_the_api(tmp_path: Path) -> None:
    async with stack(tmp_path, generation_config="none") as running:
        assert drawn(await ask(running, "/v1/chat/completions")) == (1.0, 0, 1.0, 0.0, 1.0)
        assert (await running.http.get(f"/v1/models/{MODEL}")).json()["sampling_defaults"] == {}


async def test_max_new_tokens_is_a_limit_where_the_api_has_none(tmp_path: Path) -> None:
    """Completions have one, 16, and Anthropic's clients always name one."""
    async with stack(tmp_path, QWEN | {"max_new_tokens": 7}) as running:
        chat, completion = "/v1/chat/completions", "/v1/completions"
        assert (await ask(running, chat, max_tokens=None)).max_tokens == 7
        assert (await ask(running, "/v1/responses", max_output_tokens=None)).max_tokens == 7
        assert (await ask(running, chat, max_tokens=None, min_tokens=9)).max_tokens == 9
        assert (await ask(running, chat, max_tokens=11)).max_tokens == 11
        assert (await ask(running, completion)).max_tokens == 16


async def test_they_are_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with stack(tmp_path) as running:
        shown = (await running.http.get(f"/v1/models/{MODEL}")).json()["sampling_defaults"]
    assert shown == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    [record] = [each for each in caplog.records if "sampling defaults" in each.getMessage()]
    assert {name: record.__dict__[name] for name in shown} == shown


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"temperature": -1}, "generation_config.json: temperature: must be at least 0"),
        ({"top_p": "high"}, "generation_config.json: top_p: must be a number"),
        ([], "generation_config.json holds no JSON object"),
    ],
)
def test_a_value_that_no_request_could_have_is_refused(tmp_path: Path, content: Any, complaint: str) -> None:
    save_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(BrokenFileError, match=complaint):
        sampling_defaults(str(tmp_path))


def test_shipped_models_gguf_files_and_fake_models_have_none(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_config("qwen2"))
    for model in (*family.NAMES, str(tmp_path / "tiny.gguf"), "table:64"):
        assert sampling_defaults(model) == {}


def test_prompts_of_an_llm_without_parameters(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 5}')
    llm = LLM(str(tmp_path), engine_config={"slots": 256})
    assert (llm.default_sampling.temperature, llm.default_sampling.max_tokens) == (0.0, 5)
    [default], [own] = llm.generate([[3, 1]]), llm.generate([[3, 1]], SamplingParams(temperature=0.0, max_tokens=9))
    assert len(default.tokens) == 5
    assert own.tokens[:5] == default.tokens
    assert len(own.tokens) == 9
    assert LLM(str(tmp_path), engine_config={"slots": 256}, generation_config="none").default_sampling == (
        SamplingParams()
    )
