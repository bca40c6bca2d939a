"""A head gets the hidden states of every position of its context once and in order, whatever happens to a request.

Otherwise heads silently lose acceptance: after a hit in the prefix cache, a pause, a preemption or a move to another
worker, at the borders of prefill chunks, and where keys of draft tokens outlive the commit. After each of these a head
must grow what it grows undisturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.core.growth import Growth
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.best_first import BestFirstRequest
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import Commit, Context, DraftDescription, DraftError, Limit, Opening, Speculator
from paceline.engine.draft_gate import DraftGate
from paceline.engine.draft_manager import MAX_HIDDEN_STATES_SENT
from paceline.engine.engine import Engine
from paceline.engine.hidden_states import HiddenStates
from paceline.messages import GenerationRequest
from paceline.model.model import Model
from paceline.model.rows import SlotTable
from tests.helpers.engine_runs import EngineRun
from tests.helpers.head_checkpoints import HIDDEN, VOCABULARY, target_model
from tests.helpers.head_methods import build_head, save_method
from tests.helpers.moving import Moving
from tests.helpers.seen import nodes_of
from tests.helpers.targets import FREE

GREEDY = SamplingParams(temperature=0.0)
PROMPT, LENGTH = 60, 74  # tokens when it is opened, and when guesses are compared: a tile border lies between
TOKENS = torch.randint(60, (LENGTH,), generator=torch.Generator().manual_seed(31)).tolist()
STATES = torch.randn(LENGTH, 3, HIDDEN, generator=torch.Generator().manual_seed(37))
"""Of each position."""
Guesses = dict[tuple[int, ...], float]
"""Log-probabilities by path."""


class HeadClient:
    """The target's side of one request at a head. The request's tokens are the first of TOKENS."""

    def __init__(self, head: NetworkSpeculator[BestFirstRequest], length: int = PROMPT, key: int = 1) -> None:
        self.head, self.key, self.length = head, key, length
        self.tree = TokenTree(length - 1, TOKENS[length - 1])
        head.open(Opening(key, TOKENS[:length], 0, GREEDY, 3, 1000))

    def context(self, start: int, stop: int) -> None:
        layers = len(self.head.description.hidden_state_layers)
        self.head.context(Context(self.key, start, STATES[start:stop, :layers]))

    def commit(self, length: int, *, states: bool = True) -> None:
        """All tokens up to this many."""
        base, tokens = self.length - 1, TOKENS[self.length : length]
        layers = len(self.head.description.hidden_state_layers)
        hidden_states = STATES[base : length - 1, :layers] if states else None
        self.length = length
        self.tree.commit(tokens)
        self.head.commit(Commit(self.key, base, tokens, 0, hidden_states))

    def limit(self, nodes: int) -> None:
        self.head.limit(Limit(self.key, 3 if nodes else 0, nodes))

    def grow(self) -> Guesses:
        """All nodes that are new when there are no more."""
        known = set(nodes_of(self.tree))
        while (growth := self.head.grow()) or self.head.behind:
            if self.key in growth:
                assert self.tree.graft(growth[self.key], 10_000) == len(growth[self.key])
        self.head.check_integrity()
        return {tuple(n.token for n in node.path()): node.log_prob for node in nodes_of(self.tree) if node not in known}


Make = Callable[..., NetworkSpeculator[BestFirstRequest]]


@pytest.fixture(params=["eagle", "eagle3", "mtp"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Heads of the same weights."""
    folder, method = save_method(tmp_path, request.param), request.param

    def head() -> NetworkSpeculator[BestFirstRequest]:
        speculator = build_head(folder, method, slots=512)
        assert isinstance(speculator, NetworkSpeculator)
        return speculator

    return head


Step = tuple[Any, ...]
WHOLE: tuple[Step, ...] = (("context", 0, PROMPT - 1), ("grow",))
DISTURBANCES: dict[str, Sequence[Step]] = {
    "context in chunks": (
        *(
            step
            for start, stop in ((0, 1), (1, 7), (7, 32), (32, 33), (33, PROMPT - 1))
            for step in (("nothing",), ("context", start, stop))
        ),
        ("grow",),
        ("commit", LENGTH),
    ),
    "context after commits": (
        ("commit without states", LENGTH - 5),
        ("context", 0, 30),
        ("nothing",),
        ("commit without states", LENGTH),
        ("context", 30, LENGTH - 1),
    ),
    "context twice, and in part again": (
        ("context", 0, 20),
        ("context", 0, 20),
        ("grow",),
        ("context", 10, 40),
        ("context", 5, 9),
        ("context", 39, PROMPT - 1),
        ("grow",),
        ("commit", LENGTH - 3),
        ("context", 0, LENGTH - 4),
        ("commit", LENGTH),
    ),
    "states with some commits only": (
        *WHOLE,
        ("commit without states", PROMPT + 4),
        ("nothing",),
        ("context", PROMPT - 1, PROMPT + 3),
        ("grow",),
        ("commit", LENGTH),
    ),
    "a token at a time": (
        ("context", 0, PROMPT - 1),
        *(step for length in range(PROMPT + 1, LENGTH + 1) for step in (("grow",), ("commit", length))),
    ),
    "paused": (
        *WHOLE,
        ("limit", 0),
        ("commit", PROMPT + 2),
        ("nothing",),
        ("commit", PROMPT + 5),
        ("nothing",),
        ("limit", 1000),
        ("commit", LENGTH),
    ),
    "paused before the context came": (
        ("limit", 0),
        ("context", 0, 30),
        ("grow",),
        ("commit without states", PROMPT + 2),
        ("limit", 1000),
        ("context", 30, PROMPT + 1),
        ("commit", LENGTH),
    ),
    # No commit follows the pause: the last root was computed while the head was paused.
    "paused until now": (
        ("context", 0, PROMPT - 1),
        ("limit", 0),
        ("commit", LENGTH),
        ("nothing",),
        ("limit", 1000),
    ),
    "opened again": (*WHOLE, ("open", LENGTH), ("context", 0, LENGTH - 1)),
}


def run(client: HeadClient, steps: Sequence[Step]) -> HeadClient:
    for action, *arguments in steps:
        if action == "open":
            client = HeadClient(client.head, *arguments)
        elif action == "nothing":
            assert client.grow() == {}
        elif action == "commit without states":
            client.commit(*arguments, states=False)
        else:
            getattr(client, action)(*arguments)
    return client


def undisturbed(head: NetworkSpeculator[BestFirstRequest]) -> Guesses:
    guesses = run(HeadClient(head), DISTURBANCES["opened again"][-2:]).grow()
    assert len(guesses) == 2 + 4 + 8
    return guesses


class TestDisturbances:
    """What a head grows is the same to the last bit. No committed token was drafted before, so all nodes are new."""

    @pytest.mark.parametrize("name", DISTURBANCES)
    def test_of_one_request(self, name: str, make: Make) -> None:
        assert run(HeadClient(make()), DISTURBANCES[name]).grow() == undisturbed(make())

    def test_by_other_requests(self, make: Make) -> None:
        head = make()
        client, other, third = HeadClient(head), HeadClient(head, 33, key=2), HeadClient(head, 12, key=3)
        client.context(0, 20)
        other.context(0, 32)
        client.grow()
        third.context(0, 11)
        client.context(20, PROMPT - 1)
        client.grow()
        other.commit(50)
        client.commit(LENGTH)
        assert client.grow() == undisturbed(make())

    def test_by_requests_that_took_its_slots(self, make: Make) -> None:
        """Draft tokens give their slots to another request's tokens; a third request's draft tokens reuse them."""
        head = make()
        client = run(HeadClient(head), WHOLE)
        crowd = [HeadClient(head, length, key) for key, length in enumerate((LENGTH, LENGTH, 60, 60, 60, 60, 70), 2)]
        with pytest.raises(DraftError, match="out of slots"):
            HeadClient(head, 15, key=10)
        for each in crowd:
            each.context(0, each.length - 1)
        client.grow()
        head.close(crowd.pop().key)
        client.commit(LENGTH)
        for each in crowd:
            head.close(each.key)
        assert client.grow() == undisturbed(make())


class Recorder(Speculator):
    """Reads the states of three layers and records them by position for each opening.

    It drafts the last token again, so that steps have branches and commits are longer than one token.
    """

    description = DraftDescription("custom", hidden_state_layers=(0, 4, 9))

    def __init__(self) -> None:
        self.openings: list[tuple[int, int, list[Tensor]]] = []
        """(request, number of tokens at the opening, states by position)."""
        self._known: dict[int, list[Tensor]] = {}
        self._trees: dict[int, TokenTree] = {}

    def open(self, opening: Opening) -> None:
        self._known[opening.request_id] = []
        self._trees[opening.request_id] = TokenTree(len(opening.tokens) - 1, opening.tokens[-1])
        self.openings.append((opening.request_id, len(opening.tokens), self._known[opening.request_id]))

    def context(self, context: Context) -> None:
        assert 0 < len(context.hidden_states) <= MAX_HIDDEN_STATES_SENT
        self._receive(context.request_id, context.base_position, context.hidden_states)

    def commit(self, commit: Commit) -> None:
        if commit.request_id not in self._trees:
            return
        if commit.hidden_states is not None:
            assert len(commit.hidden_states) == len(commit.tokens)
            self._receive(commit.request_id, commit.base_position, commit.hidden_states)
        self._trees[commit.request_id].commit(commit.tokens)

    def close(self, request_id: int) -> None:
        self._known.pop(request_id, None)
        self._trees.pop(request_id, None)

    def grow(self) -> dict[int, Growth]:
        grown = {}
        for key, tree in self._trees.items():
            nodes = [tree.add(ROOT, t, -0.2 * i - 0.1) for i, t in self._guesses(tree)]
            if nodes:
                grown[key] = tree.growth(nodes)
        return grown

    def _guesses(self, tree: TokenTree) -> list[tuple[int, int]]:
        wanted = [tree.tokens[ROOT], (tree.tokens[ROOT] + 1) % VOCABULARY]
        return [(i, token) for i, token in enumerate(wanted) if tree.child(ROOT, token) is None]

    def _receive(self, key: int, position: int, states: Tensor) -> None:
        """Raises AssertionError unless these come next."""
        assert position == len(self._known[key]), f"states of {position} sent, {len(self._known[key])} expected"
        self._known[key] += states.unbind(0)


def generation_request(name: str, prompt: int, output: int, **options: Any) -> GenerationRequest:
    tokens = [(7 * i * i + 3 * i) % VOCABULARY for i in range(prompt)]
    return GenerationRequest(name, tokens, SamplingParams(temperature=0.0, max_tokens=output), **options)


@pytest.fixture(scope="module")
def model() -> Model:
    return target_model(slots=2048)


@dataclass
class Served:
    """Requests that an engine has decoded, and the hidden states their drafts received."""

    recorder: Recorder = field(default_factory=Recorder)
    requests: list[GenerationRequest] = field(default_factory=list)
    engine: EngineRun = field(default_factory=EngineRun)

    def run(self, engine: Engine, *requests: GenerationRequest) -> None:
        self.requests += requests
        self.engine.run(engine, *requests)

    def check(self, model: Model) -> None:
        """Every opening received the model's states; the last opening of each request all but the last step's.

        Repeated or unordered states raise in `_receive`.
        """
        last = {key: states for key, _, states in self.recorder.openings}
        tokens = {
            key: [*request.prompt, *request.committed, *self.engine.outputs[request.request_id].tokens]
            for key, request in enumerate(self.requests, 1)
        }
        for key in tokens:
            assert len(last[key]) >= len(tokens[key]) - 3
        for key, _, states in self.recorder.openings:
            expected = undisturbed_states(model, tokens[key])
            assert all(torch.equal(a, b) for a, b in zip(states, expected, strict=False))


def undisturbed_states(model: Model, tokens: Sequence[int]) -> Tensor:
    slot_table = SlotTable()
    slot_table.slots = list(range(1, len(tokens) + 1))
    rows = [slot_table.row(token, i) for i, token in enumerate(tokens)]
    hidden = model.run(rows, [], Recorder.description.hidden_state_layers).hidden
    assert hidden is not None
    return hidden


class TestEngine:
    """Every opening receives the states of every position once, in order and bit for bit."""

    @pytest.mark.parametrize(
        ("requests", "settings"),
        [
            ([generation_request("r", 100, 20)], {"max_num_batched_rows": 16}),
            ([generation_request(name, 40 + 9 * i, 20) for i, name in enumerate("abcde")], {}),
            # A target died, and this one goes on.
            ([generation_request("r", 40, 30, committed=[5, 9, 33, 2] * 4)], {}),
        ],
        ids=["prefill in chunks", "prefill of other requests", "tokens committed elsewhere"],
    )
    def test_undisturbed(self, requests: list[GenerationRequest], settings: dict[str, int], model: Model) -> None:
        serve(model, *requests, **settings).check(model)

    def test_of_a_request_without_a_draft_nothing_is_gathered(self, model: Model) -> None:
        """Nor expected: a prompt of one token has no state that a draft would lack."""

        class Nobody(Moving):
            def open(self, opening: Opening, drafts: Sequence[str]) -> str | None:
                return None

        request = generation_request("r", 1, 3)
        for client, speculative in ((Nobody(Recorder(), ()), None), (Moving(Recorder(), ()), False)):
            config = SpeculativeConfig(method="custom", speculator="-", num_speculative_tokens=1)
            this = Engine(model, EngineConfig(slots=model.slots), config, client, FREE)
            options = SpeculativeOptions(enabled=False) if speculative is False else SpeculativeOptions()
            run = EngineRun().run(this, replace(request, speculative=options))
            assert len(run.outputs["r"].tokens) == 3
        served = serve(model, generation_request("s", 1, 1))
        assert len(served.engine.outputs["s"].tokens) == 1

    @pytest.mark.parametrize("limit", [MAX_HIDDEN_STATES_SENT, 16])
    def test_after_a_hit_in_the_prefix_cache(self, limit: int, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """States of cached positions are sent, too; many of them over several steps."""
        served = Served()
        target = engine(model, served.recorder)
        served.run(target, generation_request("first", 100, 4))
        monkeypatch.setattr("paceline.engine.draft_manager.MAX_HIDDEN_STATES_SENT", limit)
        served.run(target, generation_request("second", 100, 30))
        assert served.engine.cached >= 64
        served.check(model)

    def test_of_all_requests_of_a_step_at_once(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a GPU each gather is kernels, and each copy of states for a draft elsewhere a wait."""
        gathered = list[int]()
        gather = HiddenStates.gather

        def count(states: HiddenStates, slots: Sequence[int]) -> Tensor:
            gathered.append(len(slots))
            return gather(states, slots)

        monkeypatch.setattr(HiddenStates, "gather", count)
        recorder = Recorder()
        target = engine(model, recorder)
        for name in "abc":
            target.submit(generation_request(name, 20, 20))
        steps = 0
        while target.busy:
            target.step()
            steps += 1
        assert len(gathered) == steps
        assert max(gathered) == 3 * 20, "the prompts, and the roots that were drawn from"

    def test_after_preemption(self, model: Model) -> None:
        small = target_model(slots=256)
        served = serve(small, *(generation_request(name, 60, 60) for name in "abc"))
        assert served.engine.preemptions > 0
        served.check(model)

    @pytest.mark.parametrize("losses", [[1], [3], [9], [2, 3], [4, 8, 12]])
    @pytest.mark.parametrize("rows", [16, 256])
    def test_after_a_move_to_another_draft(self, losses: list[int], rows: int, model: Model) -> None:
        requests = [generation_request("r", 100, 40), generation_request("s", 30, 40)]
        served = serve(model, *requests, losses=losses, max_num_batched_rows=rows)
        assert len(served.recorder.openings) == len(requests) + len(losses)
        served.check(model)

    def test_after_a_pause(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """A paused draft receives no states. When it is probed, it receives all missing ones."""
        monkeypatch.setattr(DraftGate, "PAUSE_LOCAL_BELOW", DraftGate.PAUSE_BELOW)  # it costs next to nothing here
        recorder = Useless()
        target = engine(model, recorder, gated=True)
        target.submit(generation_request("r", 40, 200))
        sent = []
        while target.busy:
            target.step()
            sent.append(len(recorder.openings[0][2]))
        gains = [after - before for before, after in pairwise(sent)]
        missed = max(len(list(some)) for gain, some in groupby(gains) if gain == 0)
        assert missed >= DraftGate.MIN_PAUSE_STEPS - 1
        assert missed <= max(gains)


class Useless(Recorder):
    """Hardly ever drafts the right token."""

    def _guesses(self, tree: TokenTree) -> list[tuple[int, int]]:
        return [(0, (tree.tokens[ROOT] + 7) % VOCABULARY)] if tree.size == 0 else []


def serve(model: Model, *requests: GenerationRequest, losses: Sequence[int] = (), **settings: Any) -> Served:
    served = Served()
    served.run(engine(model, served.recorder, losses, **settings), *requests)
    return served


def engine(
    model: Model, recorder: Recorder, losses: Sequence[int] = (), *, gated: bool = False, **settings: Any
) -> Engine:
    """`gated`: whether the draft is paused while it does not pay."""
    config = SpeculativeConfig(method="custom", speculator="-", num_speculative_tokens=1, row_budget=gated)
    return Engine(model, EngineConfig(slots=model.slots, **settings), config, Moving(recorder, losses), FREE)
