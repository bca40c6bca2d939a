"""A bad network between a target and its drafts: slow, cut, hanging, or reordering between connections.

The links, servicers, drafts and engine are real, over table models. The target is slowed down until the test has seen
what it waits for, so that every request is long enough. The reference are the target's own tokens without speculation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from paceline.config import SpeculativeConfig
from paceline.drafting.speculator import Commit
from paceline.messages import Delta, GenerationRequest
from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline.wire.draft_stream_messages import ConnectDrafts
from paceline.wire.target_link import TargetLink
from paceline_lab.bench.impairment_proxy import Impairment, ImpairmentProxy
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers.drafts import model_draft
from tests.helpers.targets import SLOTS, VOCABULARY, TargetWorker, generation_request, linked, target_worker
from tests.helpers.waiting import until
from tests.helpers.workers import DraftWorker, LinkTraffic, draft_worker, host_and_port, nodes, opening, target

DRAFTED = SpeculativeConfig(method="draft_model", model="table")
TOKENS = 700
COMMITS = 2000
HUNG_S = 0.3


class SlowModel(TableModel):
    """A pass takes `pause_s` longer."""

    pause_s = 0.0

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        time.sleep(self.pause_s)
        return super().run(rows, wanted, hidden_layers)


@dataclass
class Response:
    """What has arrived of a request so far."""

    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    last: Delta = field(default_factory=lambda: Delta(""))

    @property
    def drafts(self) -> list[str]:
        """Ids of the drafts that served it, in order."""
        return self.last.speculation.drafts if self.last.speculation else []

    async def run(self, link: TargetLink, generation_request: GenerationRequest) -> None:
        async with aclosing(link.submit(generation_request)) as deltas:
            async for delta in deltas:
                self.tokens += delta.tokens
                self.accepted += sum(delta.accepted)
                self.last = delta

    async def more(self, accepted: int = 0, tokens: int = 0) -> None:
        """Wait for so many more tokens, and so many more accepted ones."""
        accepted, tokens = self.accepted + accepted, len(self.tokens) + tokens
        await until(lambda: self.accepted >= accepted and len(self.tokens) >= tokens)
        assert len(self.tokens) < TOKENS, "the request must not have ended"


@dataclass
class Scene:
    """One target, its drafts, and the network between them."""

    target: TargetWorker
    drafts: list[DraftWorker]
    network: list[ImpairmentProxy]
    model: SlowModel
    link: TargetLink

    @asynccontextmanager
    async def responses(self, count: int = 1, pause_s: float = 0.02) -> AsyncIterator[list[Response]]:
        """Requests on a slow target. At the end of the context it is fast, and all must give the plain tokens."""
        addresses = [each.address for each in self.network]
        await until(lambda: set(addresses) <= set(self.target.pool.connected))
        plain = Response()
        await plain.run(self.link, generation_request(max_tokens=TOKENS, plain=True))
        self.model.pause_s = pause_s
        responses = [Response() for _ in range(count)]
        generation_requests = [
            generation_request(str(i), max_tokens=TOKENS, draft_addresses=addresses) for i in range(count)
        ]
        async with asyncio.TaskGroup() as tasks:
            for response, each in zip(responses, generation_requests, strict=True):
                tasks.create_task(response.run(self.link, each))
            yield responses
            self.model.pause_s = 0.0
        assert all(response.tokens == plain.tokens for response in responses)


@asynccontextmanager
async def scene(
    *impairments: Impairment, draft_slots: Sequence[int] = (SLOTS,), hang_s: float = 10.0
) -> AsyncIterator[Scene]:
    """One draft worker per impairment, called "1", "2" and so on."""
    async with AsyncExitStack() as stack:
        model = SlowModel(VOCABULARY, SLOTS, SLOTS)
        here = await stack.enter_async_context(target_worker(DRAFTED, model, hang_s=hang_s))
        drafts = []
        for name, slots in enumerate(draft_slots, 1):
            speculator = model_draft(TableModel(VOCABULARY, slots, SLOTS, disagreement=0.2), 3)
            drafts.append(await stack.enter_async_context(draft_worker(speculator, str(name))))
        network = [
            stack.enter_context(ImpairmentProxy(host_and_port(draft.address), impairment))
            for draft, impairment in zip(drafts, impairments, strict=True)
        ]
        here.pool.connect(ConnectDrafts([each.address for each in network]))
        [link] = await stack.enter_async_context(linked(here))
        yield Scene(here, drafts, network, model, link)


async def test_a_link_of_a_few_kilobytes_per_second() -> None:
    """Growth is in time while the target is slow, and too late when it is fast; the link endures both."""
    async with scene(Impairment(bytes_per_s=4000.0)) as here:
        async with here.responses(pause_s=0.05) as [response]:
            await response.more(accepted=10)
        assert response.drafts == ["1"]


async def test_frames_are_merged_on_a_link_that_is_too_slow() -> None:
    """Growth arrives late and is still correct."""
    traffic = LinkTraffic()
    async with draft_worker() as worker, target(metrics=traffic) as here:
        with ImpairmentProxy(host_and_port(worker.address), Impairment()) as link:
            await here.reach(link.address)
            here.drafting.open(opening(1), [link.address])
            here.drafting.flush()
            await here.poll(lambda updates: len(nodes(updates, 1)) == 3)
            link.impair(Impairment(bytes_per_s=4000.0))
            for i in range(COMMITS):
                here.drafting.commit(Commit(1, 2 + 200 * i, [600 + (i == COMMITS - 1)] * 200, 0))
                here.drafting.flush()
                if i % 10 == 0:  # ten commits before the link can send
                    await asyncio.sleep(0)
            link.impair(Impairment())
            updates = await here.poll(lambda updates: nodes(updates, 1)[-3:] == [602, 603, 604])
            assert updates.lost == []
            assert traffic.frames_sent < COMMITS / 2


async def test_a_request_moves_from_one_draft_to_another_on_different_paths() -> None:
    """The first draft is far and runs out of slots during the request; the second is near."""
    far, near = Impairment(jitter_s=0.02), Impairment(jitter_s=0.002)
    async with scene(far, near, draft_slots=(200, SLOTS)) as here:
        async with here.responses() as [response]:
            await until(lambda: here.drafts[1].servicer.open_requests == 1)
            assert response.accepted
            await response.more(accepted=1)
        assert response.drafts == ["1", "2"]
        assert set(here.target.pool.connected) == {each.address for each in here.network}, "no link broke"


async def test_late_growth_of_the_previous_draft_is_ignored() -> None:
    async with draft_worker(worker_id="old") as old, draft_worker(worker_id="new") as new, target() as here:
        with ImpairmentProxy(host_and_port(old.address), Impairment(delay_s=0.05)) as far:
            await here.reach(far.address, new.address)
            assert here.drafting.open(opening(1), [far.address]) == "old"
            here.drafting.flush()
            await until(lambda: old.servicer.open_requests == 1)
            far.hang()
            assert here.drafting.open(opening(1, tokens=[50]), [new.address]) == "new"
            here.drafting.open(opening(2, tokens=[70]), [far.address])
            here.drafting.flush()
            assert nodes(await here.poll(lambda updates: len(nodes(updates, 1)) == 3), 1) == [51, 52, 53]
            far.go_on()
            updates = await here.poll(lambda updates: len(nodes(updates, 2)) == 3)  # later on the same link
            assert nodes(updates, 2) == [71, 72, 73]
            assert nodes(updates, 1) == updates.lost == []


async def test_a_cut_during_a_request() -> None:
    async with scene(Impairment(delay_s=0.002)) as here:
        [link], [draft] = here.network, here.drafts
        async with here.responses(2) as responses:
            for response in responses:
                await response.more(accepted=1)
            link.cut()
            await until(lambda: draft.servicer.open_requests == 0 and not here.target.pool.connected)
            for response in responses:
                await response.more(tokens=10)
            link.mend()
            await until(lambda: draft.servicer.open_requests == 2)
            for response in responses:
                await response.more(accepted=1)
        assert [response.drafts for response in responses] == [["1", "1"]] * 2


@pytest.mark.parametrize(("hang_s", "drafts"), [(10.0, ["1"]), (HUNG_S, ["1", "1"])], ids=["kept", "closed"])
async def test_a_network_that_hangs_during_a_request(hang_s: float, drafts: list[str]) -> None:
    """The target does not wait for it. A link that hangs for too long is closed, and connected again."""
    async with scene(Impairment(), hang_s=hang_s) as here:
        [link], [draft] = here.network, here.drafts
        async with here.responses() as [response]:
            await response.more(accepted=1)
            link.hang()
            await response.more(tokens=20)
            if hang_s == HUNG_S:
                await until(lambda: not here.target.pool.connected)
            link.go_on()
            await until(lambda: bool(here.target.pool.connected) and draft.servicer.open_requests == 1)
            await response.more(accepted=5)
        assert response.drafts == drafts
