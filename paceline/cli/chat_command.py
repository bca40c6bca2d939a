"""`paceline chat`: a conversation in the terminal that shows which tokens were drafted; with a server, or without."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import ValidationError
from rich.console import Console

from paceline.cli.http_client import ApiRefusedError, HttpClient, HttpCompletion, open_client
from paceline.cli.token_colours import LEGEND, TokenPainter, served_summary, summary
from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.launcher import StartError
from paceline.model_names import ModelNotFoundError

if TYPE_CHECKING:  # it loads torch
    from paceline.llm import LLM, Completion

PATH = "/v1/chat/completions"
KEYS = "Ctrl-C stops a response, Ctrl-D ends ·"


def run(console: Console, url: str, sampling: dict[str, Any]) -> None:
    """Chat with the server at `url` until the input ends. Raises `StartError` if none answers there."""
    asyncio.run(_chat(console, url, sampling))


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
    console.print(f"[bold]{model}[/bold] · {KEYS}", LEGEND)
    messages: list[dict[str, str]] = []
    while (question := _read_question(console)) is not None:
        messages.append({"role": "user", "content": question})
        try:
            text = _respond(console, llm, messages, sampling)
        except ValueError as error:
            console.print(f"[red]{error}[/red]")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})


def _respond(console: Console, llm: LLM, messages: list[dict[str, str]], sampling: SamplingParams) -> str:
    """Show an answer while it grows, until it ends or Ctrl-C; return its text. Raises ValueError."""
    completion: Completion | None = None
    painter = TokenPainter(console)
    try:
        for completion in llm.stream_chat(messages, sampling):
            painter(completion)
    except KeyboardInterrupt:
        console.print("\n[dim]stopped[/dim]")
    else:
        assert completion is not None
        shown = summary(completion, completion.timings.total_s, completion.speculation.verifications)
        console.print(f"\n[dim]{shown}[/dim]")
    return "" if completion is None else completion.text


async def _chat(console: Console, url: str, sampling: dict[str, Any]) -> None:
    async with open_client(url) as client:
        model = await _model(client, url)
        console.print(f"[bold]{model}[/bold] at {url} · {KEYS}", LEGEND)
        messages: list[dict[str, str]] = []
        while (question := _read_question(console)) is not None:
            messages.append({"role": "user", "content": question})
            completion = HttpCompletion()
            try:
                work = client.stream(PATH, {"messages": messages, **sampling}, TokenPainter(console), completion)
                stopped = await _cancelled_by_ctrl_c(work)
            except (ApiRefusedError, httpx.TransportError) as error:
                console.print(f"[red]{error}[/red]")
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": completion.text})
            console.print("\n[dim]stopped[/dim]" if stopped else f"\n[dim]{served_summary(completion)}[/dim]")


async def _cancelled_by_ctrl_c(work: Coroutine[Any, Any, object]) -> bool:
    """Await `work`, but cancel it on Ctrl-C; return whether it was cancelled."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return True
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return False


async def _model(client: HttpClient, url: str) -> str:
    try:
        return await client.model()
    except httpx.HTTPError as error:
        raise StartError(
            f"no server answers at {url} ({error}): start one with `paceline serve`, name it with --url, or "
            "name a model to chat with it here"
        ) from error


def _read_question(console: Console) -> str | None:
    """The next question, None at the end of the input. It blocks the event loop, on which nothing else runs."""
    try:
        while not (line := console.input("\n[bold]> [/bold]").strip()):
            pass
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return line
