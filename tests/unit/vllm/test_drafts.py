"""Drafts for a batch as vLLM shows it: rows of token ids that move, end and are replaced."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.core.growth import Growth
from paceline.core.tree import TokenTree
from paceline.drafting.speculator import Commit, Context, Limit, Opening
from paceline.engine.draft_client import DraftClient, PollResult
from paceline.engine.draft_manager import MAX_HIDDEN_STATES_SENT
from paceline.ipc.pipe import PipeClosedError
from paceline.vllm import draft_links, remote_drafts
from paceline.vllm.batch import MAX_ABSENT_STEPS, RowDescription
from paceline.vllm.draft_links import PoolLinks
from paceline.vllm.pooled_drafts import PLAIN_STEPS, PooledDrafts
from paceline.vllm.remote_drafts import RemoteDrafts
from paceline.vllm.remote_drafts_settings import DRAFTS_VARIABLE, LinkOptions, RemoteDraftsSettings
from paceline.vllm.target_facts import TargetFacts
from tests.helpers.service_processes import service_process
from tests.helpers.waiting import within

VOCABULARY = 1000
DEPTH = 4


def following(token: int) -> int:
    """What the target draws after `token`."""
    return (7 * token + 3) % VOCABULARY


class OracleClient(DraftClient):
    """Drafts the next tokens at once: the right ones, or others by `error`."""

    def __init__(self, error: int = 0, nodes: int = 2 * DEPTH) -> None:
        """`nodes`: of a tree."""
        self.trees: dict[int, TokenTree] = {}
        self.prompts: dict[int, Sequence[int]] = {}
        self.openings: list[Opening] = []
        self.limits: dict[int, Limit] = {}
        self.fault: Exception | None = None
        self._error = error
        self._nodes = nodes

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        self.trees[opening.request_id] = TokenTree(len(opening.tokens) - 1, opening.tokens[-1])
        self.prompts[opening.request_id] = opening.tokens
        self.openings.append(opening)
        return "oracle" if drafts else None

    def commit(self, commit: Commit) -> None:
        assert commit.base_position == self.trees[commit.request_id].position
        self.trees[commit.request_id].commit(commit.tokens)

    def limit(self, limit: Limit) -> None:
        self.limits[limit.request_id] = limit

    def close(self, request_id: int) -> None:
        del self.trees[request_id], self.prompts[request_id]

    def poll(self, timeout_s: float) -> PollResult:
        if self.fault is not None:
            raise self.fault
        wanted = [key for key in self.trees if key not in self.limits or self.limits[key].max_nodes]
        return PollResult([(key, self._chain(self.trees[key])) for key in wanted], may_continue=False)

    def _chain(self, tree: TokenTree) -> Growth:
        new = []
        while tree.size < self._nodes:
            new.append(tree.add(tree.size, (following(tree.tokens[-1]) + self._error) % VOCABULARY, -0.1))
        return tree.growth(new)


@dataclass
class Links:
    client: OracleClient
    opened: int = 0
    closed: int = 0

    def open(self) -> DraftClient:
        self.opened += 1
        return self.client

    def close(self) -> None:
        self.closed += 1

    def addresses(self) -> Sequence[str]:
        return ("oracle",)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeVllm:
    """Runs steps as vLLM does: it verifies the proposed tokens, and keeps its rows in arrays that it overwrites."""

    drafts: PooledDrafts
    clock: Clock
    rows: list[list[int]] = field(default_factory=list)
    proposed: list[list[int]] = field(default_factory=list)
    accepted: int = 0

    @classmethod
    def warm(cls, client: OracleClient) -> tuple[FakeVllm, Links]:
        """One that has made its first steps, which have no drafts."""
        vllm, links = cls.cold(client)
        vllm.rows = [[500]]
        for _ in range(PLAIN_STEPS + 1):
            vllm.step()
        vllm.rows, vllm.proposed = [], []
        return vllm, links

    @classmethod
    def cold(cls, client: OracleClient, **speculation: Any) -> tuple[FakeVllm, Links]:
        links, clock = Links(client), Clock()
        config = SpeculativeConfig(method="pool", num_speculative_tokens=DEPTH, **speculation)
        return cls(PooledDrafts(links, config, VOCABULARY, 512, clock), clock), links

    def step(self, seconds: float = 0.01) -> list[list[int]]:
        """All rows draw."""
        self.clock.now += seconds
        sampled = []
        for row, draft in zip(self.rows, self.proposed or [[] for _ in self.rows], strict=True):
            drawn = [following(row[-1])]
            for token in draft:
                if token != drawn[-1]:
                    break
                drawn.append(following(token))
            self.accepted += len(drawn) - 1
            row += drawn
            sampled.append(drawn)
        return self.propose(sampled)

    def propose(self, sampled: Sequence[Sequence[int]]) -> list[list[int]]:
        ids = np.full((8, 512), 77, dtype=np.int32)
        for index, row in enumerate(self.rows):
            ids[index, : len(row)] = row
        lengths = np.array([*map(len, self.rows), *[0] * (8 - len(self.rows))], dtype=np.int32)
        self.proposed = self.drafts.propose(sampled, lengths, ids)
        assert len(self.proposed) == len(self.rows)
        assert all(len(each) <= DEPTH for each in self.proposed)
        return self.proposed


def test_all_draft_tokens_of_a_good_draft_are_accepted() -> None:
    vllm, _ = FakeVllm.warm(OracleClient())
    vllm.rows = [[1, 2, 3], [9] * 70, [5]]
    for _ in range(12):
        vllm.step()
    assert vllm.accepted == 11 * 3 * DEPTH
    for row in vllm.rows:
        start = next(i for i in range(1, len(row)) if row[i] == following(row[i - 1]))
        assert all(row[i] == following(row[i - 1]) for i in range(start, len(row)))


def test_a_tree_has_room_for_other_paths_than_the_one_that_a_step_verifies() -> None:
    _, links = FakeVllm.warm(OracleClient())
    assert [opening.max_nodes for opening in links.client.openings] == [8 * DEPTH]


def test_a_wait_does_not_end_with_the_growth_of_an_earlier_tree() -> None:
    """Else waits would seem to be short, and end before the growth that they are for."""

    class Busy(OracleClient):
        """After a commit comes twice what was grown before it, then the growth for it. Nothing comes unasked."""

        stale: Sequence[PollResult] = ()

        def commit(self, commit: Commit) -> None:
            before = Growth(commit.base_position, 90, [0], [1], [-3.0])
            self.stale = (PollResult([(commit.request_id, before)], may_continue=True),) * 2
            super().commit(commit)

        def poll(self, timeout_s: float) -> PollResult:
            takes_s = 0.0001 if self.stale else 0.001
            vllm.clock.now += min(timeout_s, takes_s)
            if timeout_s < takes_s:
                return PollResult()
            if not self.stale:
                return super().poll(timeout_s)
            first, *self.stale = self.stale
            return first

    vllm, _ = FakeVllm.cold(Busy(nodes=DEPTH))
    vllm.rows = [[1, 2, 3]]
    for _ in range(PLAIN_STEPS + 40):
        vllm.step()
    assert vllm.accepted >= 38 * DEPTH


def test_a_request_may_limit_the_nodes_of_a_step() -> None:
    vllm, _ = FakeVllm.cold(OracleClient())
    few = SpeculativeOptions(max_tree_nodes=2)
    vllm.drafts.predict_draws(lambda row: RowDescription(SamplingParams(), speculative=few))
    vllm.rows = [[1, 2, 3]]
    assert {len(vllm.step()[0]) for _ in range(PLAIN_STEPS + 5)} == {0, 2}


def test_rows_that_move_end_and_are_replaced_keep_their_requests() -> None:
    vllm, links = FakeVllm.warm(OracleClient())
    vllm.rows = [[1, 2, 3], [4, 5], [6]]
    vllm.step()
    vllm.rows.reverse()
    vllm.proposed.reverse()
    vllm.step()
    assert len(links.client.trees) == 1 + 3
    vllm.rows[1:2], vllm.proposed[1:2] = [], []
    vllm.step()
    vllm.rows.append([8, 8])
    vllm.proposed.append([])
    vllm.step()
    assert len(links.client.trees) == 1 + 4  # the one without a row may come back
    assert all(map(len, vllm.proposed))
    for _ in range(MAX_ABSENT_STEPS + 1):
        vllm.step()
        vllm.rows = [row[-100:] if len(row) > 400 else row for row in vllm.rows]
    assert [4, 5] not in [tokens[:2] for tokens in links.client.prompts.values()]


def test_a_request_that_was_preempted_goes_on() -> None:
    """vLLM computes it again in parts, which draw nothing, and shows all its tokens meanwhile."""
    vllm, links = FakeVllm.warm(OracleClient())
    vllm.rows = [[1, 2, 3]]
    vllm.step()
    away, vllm.rows, vllm.proposed = vllm.rows, [[9, 9]], [[]]
    vllm.step()
    vllm.rows = [*vllm.rows, *away]
    assert vllm.propose([[], []])[1] == []
    vllm.proposed = [[], []]
    vllm.step()
    assert len(links.client.trees) == 1 + 2
    assert all(len(each) == DEPTH for each in vllm.proposed)


def test_a_row_that_moved_is_not_the_request_of_another_row_with_its_tokens() -> None:
    """A request ends and another moves into its row. Where that was, a new one has the same tokens as its prompt."""
    vllm, links = FakeVllm.warm(OracleClient())
    vllm.rows = [[1, 2, 3], [4, 5]]
    vllm.step()
    vllm.rows, vllm.proposed = [vllm.rows[1], list(vllm.rows[1])], [vllm.proposed[1], []]
    vllm.step()
    assert [len(each) for each in vllm.proposed] == [DEPTH, DEPTH]
    assert (links.closed, len(links.client.trees)) == (0, 1 + 3)


def test_a_row_that_continues_the_text_of_another_row_is_a_request_of_its_own() -> None:
    """Its row was free, and comes before the other row."""
    vllm, links = FakeVllm.warm(OracleClient())
    vllm.rows = [[1, 2, 3], [4, 5]]
    vllm.step()
    vllm.rows[0], vllm.proposed[0] = [*vllm.rows[1], 8], []
    vllm.step()
    assert len(links.client.trees) == 1 + 3
    assert links.client.openings[-1].tokens == vllm.rows[0]
    assert [len(each) for each in vllm.proposed] == [DEPTH, DEPTH]


def test_steps_without_a_question_are_caught_up() -> None:
    """vLLM asks for no drafts while one of its requests is about to end."""
    vllm, links = FakeVllm.warm(OracleClient())
    vllm.rows = [[1, 2, 3], [4, 5]]
    vllm.step()
    for row in vllm.rows:
        row += [following(row[-1]), following(following(row[-1]))]
    vllm.proposed = [[], []]
    vllm.step()
    assert len(links.client.trees) == 1 + 2
    assert all(len(each) == DEPTH for each in vllm.proposed)


def test_the_same_prompt_twice_is_two_requests() -> None:
    vllm, links = FakeVllm.warm(OracleClient())
    vllm.rows = [[1, 2, 3], [1, 2, 3]]
    for _ in range(3):
        vllm.step()
    assert len(links.client.trees) == 1 + 2
    assert vllm.accepted == 2 * 2 * DEPTH


def test_a_row_with_the_same_tokens_and_another_salt_is_another_request() -> None:
    vllm, links = FakeVllm.cold(OracleClient())
    salts = ["one"]
    vllm.drafts.predict_draws(lambda row: RowDescription(SamplingParams(), cache_salt=salts[row]))
    vllm.rows = [[1, 2, 3]]
    vllm.step()
    salts[0] = "other"
    vllm.step()
    assert [opening.cache_salt for opening in links.client.openings] == ["one", "other"]


@pytest.mark.parametrize("salt", ["one", "other"])
def test_what_lookups_learned_serves_requests_of_the_same_salt_only(salt: str) -> None:
    config = SpeculativeConfig(method="pool", beside=("suffix",), num_speculative_tokens=DEPTH)
    clock, salts = Clock(), ["one"]
    links = PoolLinks(LinkOptions((), None, "any", None))
    vllm = FakeVllm(PooledDrafts(links, config, VOCABULARY, 512, clock), clock)
    vllm.drafts.predict_draws(lambda row: RowDescription(SamplingParams(), prompt_tokens=3, cache_salt=salts[row]))
    vllm.rows = [[1, 2, 3]]
    for _ in range(PLAIN_STEPS + 10):
        vllm.step()
    vllm.rows, vllm.proposed = [], []
    for _ in range(MAX_ABSENT_STEPS + 1):
        vllm.step()
    salts[0], vllm.rows = salt, [[1, 2, 3]]
    for _ in range(5):
        vllm.step()
    assert (vllm.accepted > 0) == (salt == "one")


class StatesClient(OracleClient):
    """Reads hidden states: here the number of their position."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: dict[int, list[int]] = {}

    def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
        self.positions[opening.request_id] = []
        return super().open(opening, drafts)

    def context(self, context: Context) -> None:
        self._add(context.request_id, context.base_position, context.hidden_states)

    def commit(self, commit: Commit) -> None:
        if commit.hidden_states is not None:
            assert len(commit.hidden_states) == len(commit.tokens)
            self._add(commit.request_id, commit.base_position, commit.hidden_states)
        super().commit(commit)

    def _add(self, request_id: int, start: int, states: torch.Tensor) -> None:
        known = self.positions[request_id]
        assert start == len(known)
        known += states.flatten().tolist()


def test_hidden_states_are_sent_once_and_without_a_gap() -> None:
    """Of a long prompt in parts, then those that tokens were drawn from; none if the draft reads none."""
    for layers in ((2,), ()):
        client = StatesClient()
        client.hidden_state_layers = layers
        vllm, _ = FakeVllm.cold(client)
        asked: list[int] = []

        def gather(row: int, start: int, stop: int, asked: list[int] = asked) -> torch.Tensor:
            asked.append(row)
            return torch.arange(start, stop).reshape(-1, 1, 1)

        vllm.drafts.read_hidden_states(gather)
        vllm.rows = [[500] * (MAX_HIDDEN_STATES_SENT + 40), [7, 8]]
        for _ in range(PLAIN_STEPS + 6):
            vllm.step()
        lengths = [len(row) - 1 if layers else 0 for row in vllm.rows]
        assert [client.positions[key] for key in sorted(client.positions)] == [list(range(each)) for each in lengths]
        assert set(asked) == ({0, 1} if layers else set())
        assert vllm.accepted > 10


def test_a_wrong_draft_is_paused() -> None:
    """Tokens without hits cost rows: vLLM's steps grow longer by them."""
    vllm, links = FakeVllm.warm(OracleClient(error=1))
    vllm.rows = [[1, 2, 3]]
    for _ in range(200):
        vllm.step(0.01 + 0.005 * sum(map(len, vllm.proposed)))
    assert vllm.proposed == [[]]
    assert [*links.client.limits.values()][-1].max_nodes == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_good_draft_keeps_long_paths_while_the_machine_changes_its_speed(seed: int) -> None:
    """The first steps with drafts are slow by chance."""
    draws = random.Random(seed)
    vllm, _ = FakeVllm.cold(OracleClient())
    vllm.rows = [[1, 2, 3], [9], [5, 6]]
    for step in range(80):
        factor = 2.0 if PLAIN_STEPS <= step < PLAIN_STEPS + 3 else draws.uniform(0.7, 1.4)
        vllm.step(factor * (0.01 + 0.0002 * sum(map(len, vllm.proposed))))
    assert vllm.accepted > 0.9 * (80 - PLAIN_STEPS) * 3 * DEPTH


def test_a_machine_that_slows_down_pauses_no_draft() -> None:
    """Here one draft token is accepted in each step: fewer than slow steps seem to lose."""
    vllm, links = FakeVllm.cold(OracleClient(nodes=1))
    vllm.rows = [[1, 2, 3]]
    for seconds in [0.01] * 60 + [0.04] * 60:
        vllm.step(seconds)
    assert vllm.accepted >= 110
    assert not any(limit.max_nodes == 0 for limit in links.client.limits.values())


def test_no_more_tokens_than_pay() -> None:
    """Where every row costs as much as a step, guessing four tokens at once loses."""
    vllm, _ = FakeVllm.cold(OracleClient(error=1))
    vllm.rows = [[1, 2, 3]]
    for _ in range(12):
        vllm.step(0.01 * (1 + sum(map(len, vllm.proposed))))
    assert sum(map(len, vllm.proposed)) < DEPTH


@pytest.mark.parametrize(("given", "most"), [({}, 0), ({"row_budget": False}, DEPTH)], ids=["paused", "steady"])
def test_for_comparisons_a_draft_goes_on_though_it_does_not_pay(given: dict[str, Any], most: int) -> None:
    vllm, _ = FakeVllm.cold(OracleClient(error=1), **given)
    vllm.rows = [[1, 2, 3]]
    for _ in range(200):
        vllm.step(0.01 * (1 + sum(map(len, vllm.proposed))))
    assert [len(tokens) for tokens in vllm.proposed] == [most]


@pytest.mark.parametrize(("given", "paused"), [({}, True), ({"row_budget": False}, False)], ids=["default", "steady"])
def test_row_budget_in_additional_config_reaches_the_drafts(
    given: dict[str, Any], paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = OracleClient(error=1)
    monkeypatch.setattr(remote_drafts, "PoolLinks", lambda options: Links(client))
    settings = RemoteDraftsSettings.read({"paceline": {"drafts": ["a:1"], **given}})
    vllm = FakeVllm(remote_drafts.pooled_drafts(settings, TargetFacts("", VOCABULARY, 512, True), DEPTH), Clock())
    vllm.rows = [[1, 2, 3]]
    for _ in range(100):
        vllm.step()
    assert bool(client.limits) is paused


@pytest.mark.parametrize("fault", [PipeClosedError(), KeyError("a bug")], ids=["links", "bug"])
def test_a_fault_costs_drafts_for_a_while_and_nothing_else(fault: Exception) -> None:
    vllm, links = FakeVllm.warm(OracleClient())
    vllm.rows = [[1, 2, 3]]
    vllm.step()
    links.client.fault = fault
    assert vllm.step() == [[]]
    assert links.closed == 1
    links.client.fault = None
    assert vllm.step() == [[]]
    vllm.clock.now += 60.0
    vllm.step()
    assert links.opened == 2
    assert len(vllm.proposed[0]) == DEPTH


def test_the_time_of_propose_leaves_waits_out() -> None:
    """Here every step computes for 2 ms, and waits for growth besides."""

    class Late(OracleClient):
        """Has growth for those that wait for it."""

        waits = 0

        def commit(self, commit: Commit) -> None:
            vllm.clock.now += 0.002
            super().commit(commit)

        def poll(self, timeout_s: float) -> PollResult:
            if timeout_s == 0.0:
                return PollResult()
            self.waits += 1
            vllm.clock.now += timeout_s / 2
            return super().poll(timeout_s)

    late = Late(nodes=DEPTH)  # a step uses up the tree, so the next one waits again
    vllm, _ = FakeVllm.cold(late)
    assert vllm.drafts.propose_ms == 0.0
    vllm.rows = [[1, 2, 3]]
    for _ in range(PLAIN_STEPS + 20):
        vllm.step()
    assert late.waits >= 20, "in most steps, or the median shows nothing"
    assert vllm.accepted > 19
    assert vllm.drafts.propose_ms == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("environment", "given", "drafts"),
    [
        ({DRAFTS_VARIABLE: "a:1, b:2,"}, {}, ("a:1", "b:2")),
        ({}, {"paceline": {"drafts": ["c:3"]}}, ("c:3",)),
        ({DRAFTS_VARIABLE: "a:1"}, {"paceline": {"drafts": "c:3"}, "others": 1}, ("c:3",)),
        ({}, {"paceline": {"lookups": ["suffix"]}}, ()),
    ],
)
def test_settings(
    environment: Mapping[str, str],
    given: Mapping[str, object],
    drafts: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert RemoteDraftsSettings.read(given).drafts == drafts


def test_the_manual_names_every_setting() -> None:
    manual = (Path(remote_drafts.__file__).parents[2] / "docs/vllm.md").read_text(encoding="utf-8")
    assert [name for name in RemoteDraftsSettings.model_fields if f"`{name}`" not in manual] == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "set PACELINE_DRAFTS=HOST:PORT"),
        ({"paceline": {"draft": ["a:1"]}}, "draft"),
        ({"paceline": {"drafts": ["a:1"], "tls_cert": "cert.pem"}}, "tls_key"),
    ],
)
def test_wrong_settings(given: Mapping[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RemoteDraftsSettings.read(given)


@pytest.fixture
def pool() -> Iterator[PoolLinks]:
    with service_process("draft", "--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}') as draft:
        links = PoolLinks(LinkOptions((draft.address,), None, "any", None))
        yield links
        links.close()


def test_a_real_draft_through_a_process_of_links(pool: PoolLinks) -> None:
    """The process is killed; another one takes its place."""
    params = SamplingParams(temperature=0.0)
    for key in (1, 2):
        client = pool.open()
        grown: list[int] = []
        for _ in within():
            if not grown:
                client.open(Opening(key, [5, 6, 7, 8, 5, 6], 0, params, DEPTH, 8), pool.addresses())
                client.flush()
            updates = client.poll(0.2)
            grown += [token for number, growth in updates.growths if number == key for token in growth.tokens]
            if grown:
                break
        assert grown[:2] == [7, 8]
        assert pool.process_id is not None
        os.kill(pool.process_id, signal.SIGKILL)
        with pytest.raises(PipeClosedError):
            client.poll(20.0)
        pool.close()


@pytest.mark.timeout(60)
def test_links_that_hang_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their process reads nothing, and the pipe is full."""
    monkeypatch.setattr(draft_links, "SEND_TIMEOUT_S", 1)
    far = [f"127.0.0.1:{port}" for port in range(1, 60_000)]  # as a message more than a pipe holds
    pool = PoolLinks(LinkOptions(("127.0.0.1:9",), None, "any", None))
    client = pool.open()
    try:
        assert pool.process_id is not None
        os.kill(pool.process_id, signal.SIGSTOP)
        with pytest.raises(PipeClosedError):
            client.open(Opening(1, [5, 6], 0, SamplingParams(), DEPTH, 8), far)
    finally:
        pool.close()


def test_importing_the_links_loads_no_torch() -> None:
    code = "import sys, paceline.vllm.link_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_layers_without_a_worker_that_computes_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_drafts, "read_target_facts", lambda config: TargetFacts("", VOCABULARY, 64, False))
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=DEPTH),
        additional_config={"paceline": {"drafts": ["a:1"], "hidden_state_layers": [2]}},
    )
    with pytest.raises(ValueError, match="hidden_state_layers needs --worker-cls") as refused:
        RemoteDrafts(config).load_model(None)
    module, _, worker = str(refused.value).split()[-1].rpartition(".")
    spec = find_spec(module)  # not imported: it needs vLLM
    assert spec is not None
    assert spec.origin is not None
    assert f"class {worker}(" in Path(spec.origin).read_text()
    gathered = RemoteDrafts(config)
    gathered.read_hidden_states(lambda row, start, stop: torch.zeros(stop - start, 1, 1))
    gathered.load_model(None)
