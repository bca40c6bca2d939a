"""Who drafts for this target: workers of the pool, a speculator in this process, or nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.engine.drafting import Drafting, LocalDrafting, NoDrafting
from paceline.model import Model
from paceline.speculators import Speculator, build
from paceline.state import Registered, Store, Watcher
from paceline.wire.draft_link import Terms
from paceline.wire.drafting import RemoteDrafting
from services.process import StartError


@asynccontextmanager
async def opened_drafting(
    speculation: SpeculativeConfig, engine: EngineConfig, model: Model, store: Store
) -> AsyncIterator[Drafting]:
    """What `speculation` asks for. Draft workers in the registry are reached for before a request names them.

    Raises `StartError` if a local speculator cannot be built or knows another vocabulary.
    """
    if not speculation.enabled:
        yield NoDrafting()
    elif speculation.draft_placement == "target":
        speculator = await asyncio.to_thread(_speculator, speculation, engine)
        if speculator.vocabulary_fingerprint not in ("", model.fingerprint):
            raise StartError(
                f"{speculator.model} and {model.name} have different vocabularies: "
                f"choose a draft model that shares the target's tokenizer"
            )
        yield LocalDrafting(speculator)
    else:
        layers = await asyncio.to_thread(_hidden_state_layers, speculation, engine)
        drafting = RemoteDrafting(Terms(model.fingerprint, model.vocabulary_size), layers)
        async with store.watcher("draft") as workers:
            following = asyncio.create_task(_follow(workers, drafting), name="follow the drafts")
            try:
                yield drafting
            finally:
                following.cancel()
                await drafting.stop()


async def _follow(workers: Watcher, drafting: RemoteDrafting) -> None:
    """Reach for every draft worker that appears."""
    known: set[str] = set()

    def news(registered: Sequence[Registered]) -> bool:
        return known != {worker.record.address for worker in registered}

    while True:
        known = {worker.record.address for worker in await workers.until(news)}
        drafting.connect(known)


def _hidden_state_layers(speculation: SpeculativeConfig, engine: EngineConfig) -> Sequence[int]:
    """The layers that workers with this configuration will ask for: the engine must know before it starts."""
    return _speculator(speculation, engine).hidden_state_layers if speculation.method == "custom" else ()


def _speculator(speculation: SpeculativeConfig, engine: EngineConfig) -> Speculator:
    try:
        return build(speculation, engine)
    except (ValueError, OSError) as error:
        raise StartError(f"the {speculation.method} speculator cannot be built: {error}") from error
