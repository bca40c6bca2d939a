"""Demo mode's socket: kills a draft worker for the gateway's page, and the supervisor starts it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.cli.supervised_process import SupervisedProcess
from paceline.launcher import KILL_DRAFT


@dataclass(slots=True)
class DraftKiller:
    """Made by `open_draft_killer`. It kills none until it is given `workers`."""

    socket: Path
    """Only this user can connect to it."""
    workers: Sequence[SupervisedProcess] = ()

    def kill(self) -> str:
        """Kill the first draft worker that runs, and return its name; "" if none runs."""
        return next((worker.program.name for worker in self.workers if worker.crash()), "")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection."""
        try:
            if await reader.readline() == KILL_DRAFT:
                writer.write(f"{self.kill()}\n".encode())
                await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def open_draft_killer() -> AsyncIterator[DraftKiller]:
    """Listens at a socket in a folder of its own while the context lasts."""
    with TemporaryDirectory(prefix="paceline-page-") as folder:  # readable by this user alone
        killer = DraftKiller(Path(folder, "launcher"))
        server = await asyncio.start_unix_server(killer.serve, killer.socket)
        try:
            yield killer
        finally:
            server.close()
