"""`paceline serve`: everything on this machine under one supervisor."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import typer
from rich.console import Console
from rich.text import Text

from paceline.cli.deployment import Deployment, DeploymentOptions, plan_deployment
from paceline.cli.local_stack import LocalStack, running_stack
from paceline.cli.model_download import offers
from paceline.cli.supervisor import Supervisor
from paceline.config import SpeculativeConfig
from paceline.family import NAMES
from paceline.launcher import StartError
from paceline.model_names import BROKEN, PUBLISHED
from paceline.telemetry.logs import LineFormatter

log = logging.getLogger(__name__)

LEVEL_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}
DRAFT_KEYS = {"method", "beside", "model", "draft_placement", "draft_tensor_parallel_size", "vocabulary_mapping"}
"""The keys of a configuration that say which draft there is, and where it runs."""
KILLED = 1
"""Exit code after a second Ctrl-C, which kills everything at once."""


def serve(options: DeploymentOptions, redis_url: str | None) -> int:
    """Serve until Ctrl-C or SIGTERM, and return the exit code. Raises `StartError` or `StateError`."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    _log_to(console)
    deployment = _planned(options)
    if not deployment.speculation.enabled:
        log.info('decoding plainly; to speculate, give --speculative-config \'{"method": "ngram"}\', or a draft_model')
    if shared := deployment.shared_accelerators:
        inside = "" if options.vllm is not None else ', or put it into the target with "draft_placement": "target"'
        log.warning(
            "target and draft worker take turns on %s, so drafting delays verification: give the draft other devices "
            "with draft_devices in --speculative-config%s",
            *(", ".join(shared), inside),
        )
    return asyncio.run(_serve(deployment, redis_url, console))


def _planned(options: DeploymentOptions) -> Deployment:
    """As `plan_deployment`, but without a draft whose files cannot be read."""
    try:
        return plan_deployment(options)
    except StartError as error:
        if options.speculation is None or not isinstance(error.__cause__, BROKEN):
            raise
        log.error("%s: the others serve without it", error)
        return plan_deployment(replace(options, speculation=_lookups(options.speculation)))


def _lookups(speculation: SpeculativeConfig) -> SpeculativeConfig:
    """The methods of a configuration that need no model, with their settings and its strategy."""
    if not speculation.beside:
        return SpeculativeConfig()
    first, *others = speculation.beside
    kept = speculation.model_dump(exclude_unset=True, exclude=DRAFT_KEYS)
    return SpeculativeConfig(method=first, beside=tuple(others), draft_placement="target", **kept)


async def _serve(deployment: Deployment, redis_url: str | None, console: Console) -> int:
    signals = _Signals()
    async with running_stack(deployment, lambda line: console.print(_coloured(line)), redis_url) as stack:
        signals.supervisor = stack.supervisor
        with _progress(console) as missing:
            ready = await _done_before(signals.stop, stack.ready(missing, without_drafts=True))
        if ready:
            _announce(stack)
        await signals.stop.wait()
        log.info("stopping when running requests have finished; Ctrl-C again to cut them off")
    log.info("stopped")
    return KILLED if signals.killed else 0


class _Signals:
    """The first SIGINT or SIGTERM sets `stop`; the second one kills all services."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.killed = False
        self.supervisor: Supervisor | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._received)

    def _received(self) -> None:
        if self.stop.is_set() and self.supervisor is not None:
            self.killed = True
            self.supervisor.kill()
        self.stop.set()


async def _done_before(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """Await `work`, but cancel it at `stop`; return whether it was done. Raises what `work` raises."""
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
    """Yields a function that shows which services are still loading; it does so only on a terminal."""
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield lambda missing: status.update(f"loading: {', '.join(missing)}")


def _announce(stack: LocalStack) -> None:
    """Print the URL, the pages, and a command that tries it."""
    deployment = stack.deployment
    offered = deployment.served_model_name in (*NAMES, *PUBLISHED)
    if offered:
        path, content = "chat/completions", '"messages": [{"role": "user", "content": "What does json.dumps do?"}]'
    else:
        path, content = "completions", '"prompt": "1 2 3", "max_tokens": 32'
    body = f'{{"model": {json.dumps(deployment.served_model_name)}, {content}}}'
    typer.echo(f"\nServing {deployment.served_model_name} at {deployment.url}/v1")
    typer.echo(f"Drafts: {deployment.drafts_named}\n\nTry it in a browser:")
    typer.echo(f"  {deployment.url}/          the playground\n  {deployment.url}/operator  workers, queues, acceptance")
    typer.echo("\nOr from a terminal:")
    typer.echo(f"  curl {deployment.url}/v1/{path} -H 'Content-Type: application/json' -d {shlex.quote(body)}\n")
    if offered:
        typer.echo("Other models are downloaded once: `paceline serve NAME`, or name a GGUF file or a folder of yours")
        typer.echo("".join(f"  {offer}\n" for offer in offers()))


def _log_to(console: Console) -> None:
    """Print this process's log on the console, as the services' log, so that the progress line stays intact."""
    handler = _ConsoleHandler(console)
    handler.setFormatter(LineFormatter("serve", "", colour=False))  # `_coloured` adds the colour
    logging.basicConfig(handlers=[handler], level="INFO", force=True)
    logging.getLogger("httpx").setLevel("WARNING")  # it logs every request to /health


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(_coloured(self.format(record)))


def _coloured(line: str) -> Text:
    """A log line in the colour of its level, which is its second field; any other line unchanged."""
    fields = line.split(maxsplit=2)
    return Text(line, LEVEL_STYLES.get(fields[1], "") if len(fields) > 1 else "")
