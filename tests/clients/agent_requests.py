"""What coding agents in a terminal send, as they send it: Claude Code to `/v1/messages`, Codex to `/v1/responses`.

The bodies have the fields that the agents document, with short prompts of our own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.asked import URL

FOLDER = Path(__file__).parents[1] / "contract"
CLAUDE_CODE = json.loads((FOLDER / "claude_code.json").read_text(encoding="utf-8"))
CODEX = json.loads((FOLDER / "codex.json").read_text(encoding="utf-8"))


def events(path: str, agent: dict[str, Any], body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream."""
    response = httpx.post(f"{URL}{path}", json=body, headers=agent["headers"], timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("request_name", ["turn", "title"])
def test_claude_code(request_name: str) -> None:
    first, *_, last = events("/v1/messages?beta=true", CLAUDE_CODE, CLAUDE_CODE[request_name])
    assert (first["type"], last["type"]) == ("message_start", "message_stop")


def test_claude_code_counts_tokens() -> None:
    headers = CLAUDE_CODE["headers"]
    path = f"{URL}/v1/messages/count_tokens?beta=true"
    response = httpx.post(path, json=CLAUDE_CODE["count"], headers=headers, trust_env=False)
    assert response.json()["input_tokens"] > 0


def test_codex() -> None:
    first, *_, last = events("/v1/responses", CODEX, CODEX["turn"])
    assert first["type"] == "response.created"
    assert last["type"] in ("response.completed", "response.incomplete")
    assert last["response"]["usage"]["input_tokens"] > 0


def test_codex_is_called_back() -> None:
    """With a call forced on the model, which makes few by itself: the arguments keep to the agent's schema."""
    commands = {"cmd": {"enum": ["ls", "wc -l notes.txt"]}}
    tool = CODEX["turn"]["tools"][0]
    tools = [tool | {"parameters": tool["parameters"] | {"properties": commands}}]
    body = CODEX["turn"] | {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    *_, last = events("/v1/responses", CODEX, body)
    [call] = [item for item in last["response"]["output"] if item["type"] == "function_call"]
    assert json.loads(call["arguments"]) in [{"cmd": command} for command in commands["cmd"]["enum"]]
