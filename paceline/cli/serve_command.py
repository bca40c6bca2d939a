"""`paceline serve`: everything on this machine under one supervisor."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from paceline.cli.deployment import Deployment
from paceline.cli.local_stack import LocalStack, running_stack
from paceline.cli.supervisor import Supervisor
from paceline.family import NAMES
from paceline.telemetry.logs import LineFormatter

log = logging.getLogger(__name__)

LEVEL_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}
CUT_SHORT = 1
"""Exit code: a second Ctrl-C ended everything at once."""


def serve(deployment: Deployment, redis_url: str | None) -> int:
    """Serve until Ctrl-C or SIGTERM, and return the exit code. Raises `ServiceStartError` or `StateError`."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    _log_to(console)
    if not deployment.speculation.enabled:
        log.info('decoding plainly; to speculate, give --speculative-config \'{"method": "ngram"}\', or a draft_model')
    return asyncio.run(_serve(deployment, redis_url, console))


async def _serve(deployment: Deployment, redis_url: str | None, console: Console) -> int:
    signals = _Signals()

    async with running_stack(deployment, lambda line: console.print(_coloured(line)), redis_url) as stack:
        signals.supervisor = stack.supervisor
        with _progress(console) as missing:
            came_up = await _unless(signals.stop, stack.ready(missing))
        if came_up:
            _announce(stack)
        await signals.stop.wait()
        log.info("stopping when running requests have finished; Ctrl-C again to cut them off")
    log.info("stopped")
    return CUT_SHORT if signals.cut_short else 0


class _Signals:
    """The first SIGINT or SIGTERM asks for an orderly end, the next one for an immediate one."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.cut_short = False
        self.supervisor: Supervisor | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._received)

    def _received(self) -> None:
        if self.stop.is_set() and self.supervisor is not None:
            self.cut_short = True
            self.supervisor.kill()
        self.stop.set()


async def _unless(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """Whether the work was done before it was to stop."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        working.result()
        return True
    working.cancel()
    return False


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[Collection[str]], None]]:
    """On a terminal, a line that says who is still loading; elsewhere the log has to do."""
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield lambda missing: status.update(f"loading: {', '.join(missing)}")


def _announce(stack: LocalStack) -> None:
    """Where it serves, and a command that shows it."""
    deployment = stack.deployment
    if deployment.served_model_name in NAMES:
        path, content = "chat/completions", '"messages": [{"role": "user", "content": "What does json.dumps do?"}]'
    else:
        path, content = "completions", '"prompt": "1 2 3", "max_tokens": 32'
    body = f'{{"model": {json.dumps(deployment.served_model_name)}, {content}}}'
    typer.echo(f"\nServing {deployment.served_model_name} at {deployment.url}/v1\n\nTry it:")
    typer.echo(f"  curl {deployment.url}/v1/{path} -H 'Content-Type: application/json' -d {shlex.quote(body)}\n")


def _log_to(console: Console) -> None:
    """Our own lines go the way of the services' lines: past the progress line, not through it."""
    handler = _ConsoleHandler(console)
    handler.setFormatter(LineFormatter("serve", "", colour=False))  # `_coloured` does it
    logging.basicConfig(handlers=[handler], level="INFO", force=True)
    logging.getLogger("httpx").setLevel("WARNING")  # it logs every look at /health


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(_coloured(self.format(record)))


def _coloured(line: str) -> Text:
    """A log line by its level, which is its second word; anything else as it is."""
    words = line.split(maxsplit=2)
    return Text(line, LEVEL_STYLES.get(words[1], "") if len(words) > 1 else "")
