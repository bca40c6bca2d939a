"""Between a target and its drafts lies a bad network: slow, cut, silent, or one that lets the newer pass the older.

The real links and servicers, drafts and an engine, over table models. A target takes its time until the test has seen
what it waits for, so that every answer is long enough; what it says plainly is the reference.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from paceline.config import SpeculativeConfig
from paceline.core.messages import Delta, Submission
from paceline.drafting.methods.draft_model import DraftModelSpeculator
from paceline.drafting.speculator import Commit
from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline.wire.draft_link import NullLinkObserver
from paceline.wire.session_messages import ConnectDrafts
from paceline.wire.target_link import TargetLink
from paceline_lab.bench.impairment_proxy import Impairment, ImpairmentProxy
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers.targets import SLOTS, VOCABULARY, TargetWorker, linked, submission, target_worker
from tests.helpers.workers import DraftWorker, draft_worker, nodes, opening, target, until

DRAFTED = SpeculativeConfig(method="draft_model", model="table")
TOKENS = 700
COMMITS = 2000
HUNG_S = 0.3


class Unhurried(TableModel):
    """A pass takes `pause_s`."""

    pause_s = 0.0

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        time.sleep(self.pause_s)
        return super().run(rows, wanted, hidden_layers)


@dataclass
class Answer:
    """What has come so far."""

    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    last: Delta = field(default_factory=lambda: Delta(""))

    @property
    def drafts(self) -> list[str]:
        """The drafts that it had."""
        assert self.last.speculation is not None
        return self.last.speculation.drafts

    async def listen(self, link: TargetLink, wanted: Submission) -> None:
        async with aclosing(link.submit(wanted)) as deltas:
            async for delta in deltas:
                self.tokens += delta.tokens
                self.accepted += sum(delta.accepted)
                self.last = delta

    async def more(self, guessed: int = 0, tokens: int = 0) -> None:
        """Wait until more has come: so many tokens, and so many of them guessed."""
        now_guessed, now = self.accepted + guessed, len(self.tokens) + tokens
        await until(lambda: self.accepted >= now_guessed and len(self.tokens) >= now)
        assert len(self.tokens) < TOKENS, "or else nothing that is to happen now happens in mid-answer"


@dataclass
class Scene:
    """One target, its drafts, and the network between them."""

    target: TargetWorker
    drafts: list[DraftWorker]
    network: list[ImpairmentProxy]
    model: Unhurried
    link: TargetLink

    @asynccontextmanager
    async def answers(self, count: int = 1, pause_s: float = 0.02) -> AsyncIterator[list[Answer]]:
        """They begin while the target takes its time. In the end it hurries, and all have to say the plain tokens."""
        addresses = [each.address for each in self.network]
        await until(lambda: set(addresses) <= set(self.target.pool.connected))
        plain = Answer()
        await plain.listen(self.link, submission(max_tokens=TOKENS, plain=True))
        self.model.pause_s = pause_s
        answers = [Answer() for _ in range(count)]
        wanted = [submission(str(i), max_tokens=TOKENS, drafts=addresses) for i in range(count)]
        async with asyncio.TaskGroup() as tasks:
            for answer, each in zip(answers, wanted, strict=True):
                tasks.create_task(answer.listen(self.link, each))
            yield answers
            self.model.pause_s = 0.0
        assert all(answer.tokens == plain.tokens for answer in answers)


@asynccontextmanager
async def scene(
    *impairments: Impairment, draft_slots: Sequence[int] = (SLOTS,), hang_s: float = 10.0
) -> AsyncIterator[Scene]:
    """One draft worker behind each of these, "1" the first."""
    async with AsyncExitStack() as stack:
        model = Unhurried(VOCABULARY, SLOTS, SLOTS)
        here = await stack.enter_async_context(target_worker(DRAFTED, model, hang_s=hang_s))
        drafts = []
        for name, slots in enumerate(draft_slots, 1):
            speculator = DraftModelSpeculator(TableModel(VOCABULARY, slots, SLOTS, disagreement=0.2), 3)
            drafts.append(await stack.enter_async_context(draft_worker(speculator, str(name))))
        network = [
            stack.enter_context(ImpairmentProxy(place(draft.address), impairment))
            for draft, impairment in zip(drafts, impairments, strict=True)
        ]
        here.pool.connect(ConnectDrafts([each.address for each in network]))
        [link] = await stack.enter_async_context(linked(here))
        yield Scene(here, drafts, network, model, link)


def place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


class Frames(NullLinkObserver):
    """Counts those that left the target."""

    frames = 0

    def sent(self, size: int) -> None:
        self.frames += 1


async def test_a_link_of_a_few_kilobytes_per_second() -> None:
    """Guesses come in time while the target is slow, and too late when it hurries; the link endures both."""
    async with scene(Impairment(bytes_per_s=4000.0)) as here:
        async with here.answers(pause_s=0.05) as [answer]:
            await answer.more(guessed=10)
        assert answer.drafts == ["1"]


async def test_a_link_that_is_told_far_more_than_it_can_carry() -> None:
    """What is said faster than frames leave is merged. Growth comes late, and is where it should be."""
    seen = Frames()
    async with draft_worker() as worker, target(observer=seen) as here:
        with ImpairmentProxy(place(worker.address), Impairment()) as link:
            await here.reach(link.address)
            here.drafting.open(opening(1), [link.address])
            here.drafting.flush()
            await here.poll(lambda news: len(nodes(news, 1)) == 3)
            link.impair(Impairment(bytes_per_s=4000.0))
            for i in range(COMMITS):
                here.drafting.commit(Commit(1, 2 + 200 * i, [600 + (i == COMMITS - 1)] * 200, 0))
                here.drafting.flush()
                if i % 10 == 0:  # so much is said before the link gets to send
                    await asyncio.sleep(0)
            link.impair(Impairment())
            news = await here.poll(lambda news: nodes(news, 1)[-3:] == [602, 603, 604])
            assert news.lost == []
            assert seen.frames < COMMITS / 2


async def test_a_request_moves_from_one_draft_to_another_on_different_paths() -> None:
    """The first draft is far away, and runs out of slots in mid-answer; the second is near."""
    far, near = Impairment(jitter_s=0.02), Impairment(jitter_s=0.002)
    async with scene(far, near, draft_slots=(200, SLOTS)) as here:
        async with here.answers() as [answer]:
            await until(lambda: here.drafts[1].servicer.open_requests == 1)
            assert answer.accepted
            await answer.more(guessed=1)
        assert answer.drafts == ["1", "2"]
        assert set(here.target.pool.connected) == {each.address for each in here.network}, "no link broke"


async def test_growth_of_the_old_draft_that_comes_after_that_of_the_new_one_is_not_heard() -> None:
    async with draft_worker(worker_id="old") as old, draft_worker(worker_id="new") as new, target() as here:
        with ImpairmentProxy(place(old.address), Impairment(delay_s=0.05)) as far:
            await here.reach(far.address, new.address)
            assert here.drafting.open(opening(1), [far.address]) == "old"
            here.drafting.flush()
            await until(lambda: old.servicer.open_requests == 1)
            far.hang()
            assert here.drafting.open(opening(1, tokens=[50]), [new.address]) == "new"
            here.drafting.open(opening(2, tokens=[70]), [far.address])
            here.drafting.flush()
            assert nodes(await here.poll(lambda news: len(nodes(news, 1)) == 3), 1) == [51, 52, 53]
            far.go_on()
            news = await here.poll(lambda news: len(nodes(news, 2)) == 3)  # later on the same link
            assert nodes(news, 2) == [71, 72, 73]
            assert nodes(news, 1) == news.lost == []


async def test_a_cut_in_mid_answer() -> None:
    async with scene(Impairment(delay_s=0.002)) as here:
        [link], [draft] = here.network, here.drafts
        async with here.answers(2) as answers:
            for answer in answers:
                await answer.more(guessed=1)
            link.cut()
            await until(lambda: draft.servicer.open_requests == 0 and not here.target.pool.connected)
            for answer in answers:
                await answer.more(tokens=10)
            link.mend()
            await until(lambda: draft.servicer.open_requests == 2)
            for answer in answers:
                await answer.more(guessed=1)
        assert [answer.drafts for answer in answers] == [["1", "1"]] * 2


@pytest.mark.parametrize(("hang_s", "drafts"), [(10.0, ["1"]), (HUNG_S, ["1", "1"])], ids=["borne", "given up"])
async def test_a_network_that_hangs_in_mid_answer(hang_s: float, drafts: list[str]) -> None:
    """Nobody waits for it. A link that is silent for too long is given up, and found again."""
    async with scene(Impairment(), hang_s=hang_s) as here:
        [link], [draft] = here.network, here.drafts
        async with here.answers() as [answer]:
            await answer.more(guessed=1)
            link.hang()
            await answer.more(tokens=20)
            if hang_s == HUNG_S:
                await until(lambda: not here.target.pool.connected)
            link.go_on()
            await until(lambda: bool(here.target.pool.connected) and draft.servicer.open_requests == 1)
            await answer.more(guessed=5)
        assert answer.drafts == drafts
