"""`paceline chat`: a conversation in the terminal that shows which tokens were drafted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

import httpx
from rich.console import Console

from paceline.cli.http_client import ApiRefusedError, HttpClient, HttpCompletion, open_client
from paceline.cli.token_colours import LEGEND, TokenPainter, summary
from paceline.launcher import StartError

PATH = "/v1/chat/completions"


def run(console: Console, url: str, sampling: dict[str, Any]) -> None:
    """Chat until the input ends. Raises `StartError` if no server answers at `url`."""
    asyncio.run(_chat(console, url, sampling))


async def _chat(console: Console, url: str, sampling: dict[str, Any]) -> None:
    async with open_client(url) as client:
        model = await _model(client, url)
        console.print(f"[bold]{model}[/bold] at {url} · Ctrl-C stops a response, Ctrl-D ends ·", LEGEND)
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
            console.print("\n[dim]stopped[/dim]" if stopped else f"\n[dim]{summary(completion)}[/dim]")


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
            f"no server answers at {url} ({error}): start one with `paceline serve`, or name it with --url"
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
