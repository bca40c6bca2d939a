"""`paceline chat`: a conversation in the terminal that shows which tokens were drafted; with a server, or without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
from pydantic import ValidationError
from rich.console import Console

from paceline.cli.http_client import ApiRefusedError, open_client
from paceline.cli.token_colours import LEGEND, TokenPainter, served_summary, summary
from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.launcher import StartError
from paceline.model_names import ModelNotFoundError

PATH = "/v1/chat/completions"
KEYS = "Ctrl-C stops a response, Ctrl-D ends ·"

Messages = list[dict[str, str]]


def run(console: Console, url: str, sampling: dict[str, Any]) -> None:
    """Chat with the server at `url` until the input ends. Raises `StartError` if none answers there."""

    async def answer(messages: Messages, painter: TokenPainter) -> str:
        async with open_client(url) as client:
            return served_summary(await client.stream(PATH, {"messages": messages, **sampling}, painter))

    title = f"[bold]{asyncio.run(_model(url))}[/bold] at {url}"
    _converse(console, title, lambda messages, painter: asyncio.run(answer(messages, painter)))


def run_here(
    console: Console, model: str, speculation: SpeculativeConfig, engine: EngineConfig, sampling: SamplingParams
) -> None:
    """Chat with a model in this process until the input ends. Raises `StartError` if it cannot be loaded."""
    try:
        with console.status(f"loading {model}"):
            from paceline.llm import LLM

            llm = LLM(model, speculation, engine)
        if llm.tokenizer.chat_template is None:
            raise StartError(f"{model} has no chat template: it was not trained for conversations")
    except (ValueError, OSError, ModelNotFoundError, ValidationError) as error:
        raise StartError(f"{model} cannot be loaded: {error}") from error

    def answer(messages: Messages, painter: TokenPainter) -> str:
        for completion in llm.stream_chat(messages, sampling):
            painter(completion)
        return summary(completion, completion.timings.total_s, completion.speculation.verifications)

    _converse(console, f"[bold]{model}[/bold]", answer)


def _converse(console: Console, title: str, answer: Callable[[Messages, TokenPainter], str]) -> None:
    """`answer` paints the next message and returns its summary; Ctrl-C ends it."""
    console.print(f"{title} · {KEYS}", LEGEND)
    messages: Messages = []
    while (question := _read_question(console)) is not None:
        messages.append({"role": "user", "content": question})
        painter = TokenPainter(console)
        try:
            shown = answer(messages, painter)
        except KeyboardInterrupt:
            shown = "stopped"
        except (ValueError, ApiRefusedError, httpx.TransportError) as error:
            console.print(f"[red]{error}[/red]")
            messages.pop()
            continue
        console.print(f"\n[dim]{shown}[/dim]")
        messages.append({"role": "assistant", "content": painter.text})


async def _model(url: str) -> str:
    try:
        async with open_client(url) as client:
            return await client.model()
    except httpx.HTTPError as error:
        raise StartError(
            f"no server answers at {url} ({error}): start one with `paceline serve`, name it with --url, or "
            "name a model to chat with it here"
        ) from error


def _read_question(console: Console) -> str | None:
    """The next question, None at the end of the input."""
    try:
        while not (line := console.input("\n[bold]> [/bold]").strip()):
            pass
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return line
