"""Requests over HTTP to `paceline serve`: bodies that clients send, several at once, and a draft that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from tests.helpers.served import Served, serving

TABLE = "table:256"
PAIR = '{"method": "draft_model", "model": "table:256:0.3"}'
FLOAT32 = '{"dtype": "float32"}'
DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 11}
VOLATILE = (
    "id",
    "created",
    "system_fingerprint",
    "timings",
    "speculation",
    "accepted",
    "numerics",
    "prompt_tokens_details",  # cached tokens: by which of two requests came first
)
"""Of an answer: what is another one's each time."""
CODE = "def area(width, height):\n    return"
CHAT = [{"role": "user", "content": "What does json.dumps do?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}

TABLE_BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "1 2 3", "temperature": 0},
    "token ids": {"prompt": [1, 2, 3], "temperature": 0},
    "drawn": {"prompt": "1 2 3", **DRAWN},
    "two prompts": {"prompt": ["1 2 3", "4 5 6"], **DRAWN},
    "three choices": {"prompt": "7 8 9", "n": 3, **DRAWN},
    "echo": {"prompt": "7 8 9", "echo": True, **DRAWN},
    "log-probabilities": {"prompt": "7 8 9", "logprobs": 3, **DRAWN},
    "token ids told": {"prompt": "7 8 9", "return_token_ids": True, **DRAWN},
    "stop": {"prompt": "1 2 3", "stop": ["7", "25"], "temperature": 0, "max_tokens": 64},
    "stop, included": {"prompt": "1 2 3", "stop": "7", "include_stop_str_in_output": True, "temperature": 0},
    "stop tokens": {"prompt": "1 2 3", "stop_token_ids": list(range(0, 256, 7)), **DRAWN},
    "bias": {"prompt": "1 2 3", "logit_bias": {"17": 100}, "max_tokens": 4},
    "bad words": {"prompt": "1 2 3", "bad_words": ["7", "25 26"], **DRAWN},
    "penalties": {"prompt": "1 2 3 1 2 3", "presence_penalty": 1, "frequency_penalty": 0.5, **DRAWN},
    "filters": {"prompt": "1 2 3", "top_p": 0.9, "top_k": 3, "min_p": 0.05, **DRAWN},
    "speculation off": {"prompt": "1 2 3", "speculative": False, **DRAWN},
    "less speculation": {"prompt": "1 2 3", "speculative": {"num_speculative_tokens": 1}, **DRAWN},
    "streamed": {"prompt": "1 2 3", "stream": True, "stream_options": {"include_usage": True}, **DRAWN},
    "streamed, three choices": {"prompt": "1 2 3", "n": 3, "stream": True, **DRAWN},
    "no such field": {"prompt": "1 2 3", "temprature": 1},
    "too long": {"prompt": "1 2 3", "max_tokens": 10**7},
    "too hot": {"prompt": "1 2 3", "temperature": -1},
    "no prompt": {},
    "another model": {"prompt": "1 2 3", "model": "another"},
}
TEXT_BODIES: dict[str, dict[str, Any]] = {
    "completion": {"prompt": CODE, "temperature": 0},
    "completion, log-probabilities": {"prompt": CODE, "logprobs": 2, **DRAWN},
    "completion, stop": {"prompt": CODE, "stop": ["\n"], "temperature": 0},
    "chat": {"messages": CHAT, "temperature": 0},
    "chat, drawn": {"messages": CHAT, **DRAWN},
    "chat, log-probabilities": {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "temperature": 0},
    "chat, streamed": {"messages": CHAT, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0},
    "chat, continued": {
        "messages": [*CHAT, {"role": "assistant", "content": "It"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "temperature": 0,
    },
    "choice": {"messages": CHAT, "structured_outputs": {"choice": ["yes", "no", "perhaps"]}, **DRAWN},
    "regex": {"prompt": "The answer: ", "structured_outputs": {"regex": "[a-c]{3,9}[.]"}, **DRAWN},
    "schema": {"prompt": "The answer: ", "structured_outputs": {"json": SCHEMA}, "max_tokens": 64, **DRAWN},
    "schema, greedy": {"messages": CHAT, "structured_outputs": {"json": SCHEMA}, "max_tokens": 64, "temperature": 0},
    "lark": {"prompt": "The answer: ", "structured_outputs": {"grammar": 'start: "a" start "b" | "c"'}, **DRAWN},
    "json object": {"messages": CHAT, "response_format": {"type": "json_object"}, "max_tokens": 64, **DRAWN},
    "impossible": {"prompt": "The answer: ", "structured_outputs": {"regex": "^$"}},
}
LONG = {f"long {number}": {"prompt": f"{number} 2 3", "max_tokens": 1500, **DRAWN} for number in range(4)}
"""They run while their draft is killed."""


def recorded() -> dict[str, Any]:
    """By the name of each request."""
    with serving(TABLE, "--port", "0", "--speculative-config", PAIR) as served:
        url = served.wait_for(r"Serving \S+ at (\S+)/v1")[1]
        answers = asyncio.run(_asked(url, "table", TABLE_BODIES))
        answers |= asyncio.run(_asked(url, "killed", LONG, killed=served))
    with serving("pydoc", "--port", "0", "--engine-config", FLOAT32) as served:
        url = served.wait_for(r"Serving \S+ at (\S+)/v1")[1]
        answers |= asyncio.run(_asked(url, "text", TEXT_BODIES))
    return answers


async def _asked(
    url: str, what: str, bodies: Mapping[str, Mapping[str, Any]], killed: Served | None = None
) -> dict[str, Any]:
    """All of them at once. `killed`: whose draft is killed meanwhile."""
    async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as client:
        asked = [_answer(client, {"max_tokens": 24} | body) for body in bodies.values()]
        if killed is not None:
            asked.append(_kill(killed))
        answers = await asyncio.gather(*asked)
    return {f"{what}: {name}": answer for name, answer in zip(bodies, answers, strict=False)}


async def _kill(served: Served) -> None:
    """The draft, once it drafts for requests that run."""
    await asyncio.sleep(0.2)
    for process in served.children("paceline_services.draft").values():
        os.kill(process, signal.SIGKILL)


async def _answer(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Any:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = await client.post(path, json=body)
    if not body.get("stream"):
        return {"status": answer.status_code, **_lasting(answer.json())}
    chunks = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert chunks.pop() == "[DONE]"
    return {"status": answer.status_code, **_joined([_lasting(json.loads(chunk)) for chunk in chunks])}


def _lasting(said: Any) -> Any:
    if isinstance(said, dict):
        return {key: _lasting(value) for key, value in said.items() if key not in VOLATILE}
    return [_lasting(each) for each in said] if isinstance(said, list) else said


def _joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Text and end of each choice, and the usage: how a stream is cut depends on time."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            said = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + said
            if choice.get("finish_reason"):
                reasons[choice["index"]] = choice["finish_reason"]
    return {"texts": sorted(texts.items()), "reasons": sorted(reasons.items()), "usage": usage}
