"""A head knows every position of its context, whatever happens to a request: nothing is told late, twice or never.

Heads that others serve lose acceptance without a word: after a hit in the prefix cache, a pause, a preemption, a move
to another worker; at the borders of prefill chunks; and where guesses' keys outlive the commit. Here what a head grows
after each of these is what it grows when nothing happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.growth import Growth
from paceline.core.messages import Submission
from paceline.core.policy.draft_gate import DraftGate
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.heads.head_speculator import HeadSpeculator
from paceline.drafting.methods.eagle import EagleNetwork
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.drafting.speculator import Commit, Context, Limit, Opening, Speculator
from paceline.engine.engine import MAX_HIDDEN_STATES_SENT, Engine
from paceline.model.checkpoint import Checkpoint
from paceline.model.model import Model
from paceline.model.rows import SlotTable
from tests.helpers.head_checkpoints import (
    HIDDEN,
    VOCABULARY,
    eagle3_tensors,
    eagle_tensors,
    lent,
    llama_config,
    save_head,
    target_model,
)
from tests.helpers.moving import Moving
from tests.helpers.seen import nodes_of
from tests.helpers.targets import FREE

GREEDY = SamplingParams(temperature=0.0)
PROMPT, LENGTH = 60, 74  # tokens when it is opened, and when guesses are compared: a tile border lies between
TOKENS = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(31)).tolist()
STATES = torch.randn(LENGTH, 3, HIDDEN, generator=torch.Generator().manual_seed(37))
"""Of each position."""
Guesses = dict[tuple[int, ...], float]
"""Log-probabilities by path."""


class Told:
    """The target's side of one request at a head. Its tokens are the first of TOKENS, however they are committed."""

    def __init__(self, head: HeadSpeculator, length: int = PROMPT, key: int = 1) -> None:
        self.head, self.key, self.length = head, key, length
        self.tree = TokenTree(length - 1, TOKENS[length - 1])
        head.open(Opening(key, TOKENS[:length], 0, GREEDY, 3, 1000))

    def tell(self, start: int, stop: int) -> None:
        layers = len(self.head.hidden_state_layers)
        self.head.context(Context(self.key, start, STATES[start:stop, :layers]))

    def commit(self, length: int, *, states: bool = True) -> None:
        """All tokens up to this many."""
        base, tokens = self.length - 1, TOKENS[self.length : length]
        layers = len(self.head.hidden_state_layers)
        told = STATES[base : length - 1, :layers] if states else None
        self.length = length
        self.tree.commit(tokens)
        self.head.commit(Commit(self.key, base, tokens, 0, told))

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


Make = Callable[..., HeadSpeculator]


@pytest.fixture(params=["EAGLE-1", "EAGLE-3"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Heads of the same weights."""
    kind, tensors = {"EAGLE-1": (EagleNetwork, eagle_tensors()), "EAGLE-3": (Eagle3Network, eagle3_tensors())}[
        request.param
    ]
    checkpoint = Checkpoint(save_head(tmp_path, tensors, llama_config()))

    def head() -> HeadSpeculator:
        network: Any = kind(checkpoint, lent(), 512)
        return HeadSpeculator("eagle", network, "", VOCABULARY, 2, least_path_probability=0.0)

    return head


def undisturbed(head: HeadSpeculator) -> Guesses:
    told = Told(head, LENGTH)
    told.tell(0, LENGTH - 1)
    guesses = told.grow()
    assert len(guesses) == 2 + 4 + 8
    return guesses


def context_in_chunks(head: HeadSpeculator, make: Make) -> Told:
    told = Told(head)
    for start, stop in ((0, 1), (1, 7), (7, 32), (32, 33), (33, PROMPT - 1)):
        assert told.grow() == {}
        told.tell(start, stop)
    told.grow()
    told.commit(LENGTH)
    return told


def context_after_commits(head: HeadSpeculator, make: Make) -> Told:
    told = Told(head)
    told.commit(LENGTH - 5, states=False)
    told.tell(0, 30)
    assert told.grow() == {}
    told.commit(LENGTH, states=False)
    told.tell(30, LENGTH - 1)
    return told


def context_twice_and_in_part_again(head: HeadSpeculator, make: Make) -> Told:
    told = Told(head)
    told.tell(0, 20)
    told.tell(0, 20)
    told.grow()
    told.tell(10, 40)
    told.tell(5, 9)
    told.tell(39, PROMPT - 1)
    told.grow()
    told.commit(LENGTH - 3)
    told.tell(0, LENGTH - 4)
    told.commit(LENGTH)
    return told


def states_with_some_commits_only(head: HeadSpeculator, make: Make) -> Told:
    """What was left out with a commit comes as context."""
    told = Told(head)
    told.tell(0, PROMPT - 1)
    told.grow()
    told.commit(PROMPT + 4, states=False)
    assert told.grow() == {}
    told.tell(PROMPT - 1, PROMPT + 3)
    told.grow()
    told.commit(LENGTH)
    return told


def a_token_at_a_time(head: HeadSpeculator, make: Make) -> Told:
    told = Told(head)
    told.tell(0, PROMPT - 1)
    for length in range(PROMPT + 1, LENGTH + 1):
        told.grow()
        told.commit(length)
    return told


def paused(head: HeadSpeculator, make: Make) -> Told:
    told = Told(head)
    told.tell(0, PROMPT - 1)
    told.grow()
    told.limit(0)
    told.commit(PROMPT + 2)
    assert told.grow() == {}
    told.commit(PROMPT + 5)
    assert told.grow() == {}
    told.limit(1000)
    told.commit(LENGTH)
    return told


def paused_before_the_context_came(head: HeadSpeculator, make: Make) -> Told:
    told = Told(head)
    told.limit(0)
    told.tell(0, 30)
    told.grow()
    told.commit(PROMPT + 2, states=False)
    told.limit(1000)
    told.tell(30, PROMPT + 1)
    told.commit(LENGTH)
    return told


def paused_until_now(head: HeadSpeculator, make: Make) -> Told:
    """No commit comes after the pause: the last root was computed while nobody wanted its children."""
    told = Told(head)
    told.tell(0, PROMPT - 1)
    told.limit(0)
    told.commit(LENGTH)
    assert told.grow() == {}
    told.limit(1000)
    return told


def opened_again_elsewhere(head: HeadSpeculator, make: Make) -> Told:
    before = Told(make())
    before.tell(0, PROMPT - 1)
    before.grow()
    before.commit(LENGTH)
    told = Told(head, LENGTH)
    told.tell(0, LENGTH - 1)
    return told


def opened_again_here(head: HeadSpeculator, make: Make) -> Told:
    before = Told(head)
    before.tell(0, PROMPT - 1)
    before.grow()
    told = Told(head, LENGTH)
    told.tell(0, LENGTH - 1)
    return told


def among_others(head: HeadSpeculator, make: Make) -> Told:
    told, other, third = Told(head), Told(head, 33, key=2), Told(head, 12, key=3)
    told.tell(0, 20)
    other.tell(0, 32)
    told.grow()
    third.tell(0, 11)
    told.tell(20, PROMPT - 1)
    told.grow()
    other.commit(50)
    told.commit(LENGTH)
    return told


def after_its_slots_were_taken(head: HeadSpeculator, make: Make) -> Told:
    """Guesses give way to another request's tokens; those of a third are in the slots they had."""
    told = Told(head)
    told.tell(0, PROMPT - 1)
    told.grow()
    crowd = [Told(head, length, key) for key, length in enumerate((LENGTH, LENGTH, 60, 60, 60, 60, 70), 2)]
    assert not head._free
    for each in crowd:
        each.tell(0, each.length - 1)
    told.grow()
    head.close(crowd.pop().key)
    told.commit(LENGTH)
    for each in crowd:
        head.close(each.key)
    return told


DISTURBED = [
    context_in_chunks,
    context_after_commits,
    context_twice_and_in_part_again,
    states_with_some_commits_only,
    a_token_at_a_time,
    paused,
    paused_before_the_context_came,
    paused_until_now,
    opened_again_elsewhere,
    opened_again_here,
    among_others,
    after_its_slots_were_taken,
]


@pytest.mark.parametrize("disturb", DISTURBED, ids=lambda each: each.__name__)
def test_a_head_grows_what_it_grows_undisturbed(disturb: Callable[[HeadSpeculator, Make], Told], make: Make) -> None:
    """To the last bit. The tokens committed are none that had been guessed, so that all guesses are new."""
    assert disturb(make(), make).grow() == undisturbed(make())


class Recorder(Speculator):
    """Asks for the states of three layers, and keeps what it is told of each position, opening by opening.

    It guesses that the last token comes again, so that steps have branches and commits are longer than one token.
    """

    method = "custom"
    hidden_state_layers = (0, 4, 9)

    def __init__(self) -> None:
        self.openings: list[tuple[int, int, list[Tensor]]] = []
        """Request, tokens it was opened with, and states by position."""
        self._known: dict[int, list[Tensor]] = {}
        self._trees: dict[int, TokenTree] = {}

    def open(self, opening: Opening) -> None:
        self._known[opening.request_id] = []
        self._trees[opening.request_id] = TokenTree(len(opening.tokens) - 1, opening.tokens[-1])
        self.openings.append((opening.request_id, len(opening.tokens), self._known[opening.request_id]))

    def context(self, context: Context) -> None:
        assert 0 < len(context.hidden_states) <= MAX_HIDDEN_STATES_SENT
        self._hear(context.request_id, context.base_position, context.hidden_states)

    def commit(self, commit: Commit) -> None:
        if commit.request_id not in self._trees:
            return
        if commit.hidden_states is not None:
            assert len(commit.hidden_states) == len(commit.tokens)
            self._hear(commit.request_id, commit.base_position, commit.hidden_states)
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

    def _hear(self, key: int, position: int, states: Tensor) -> None:
        """Raises AssertionError unless these come next."""
        assert position == len(self._known[key]), f"{position} told, {len(self._known[key])} wanted"
        self._known[key] += states.unbind(0)


def submission(name: str, prompt: int, output: int, **options: Any) -> Submission:
    tokens = [(7 * i * i + 3 * i) % VOCABULARY for i in range(prompt)]
    return Submission(name, tokens, SamplingParams(temperature=0.0, max_tokens=output), **options)


@pytest.fixture(scope="module")
def model() -> Model:
    return target_model(slots=2048)


@dataclass
class Served:
    """Requests that an engine has decoded, and what their drafts were told."""

    recorder: Recorder = field(default_factory=Recorder)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """All, by request, in the order of submission."""
    cached: int = 0
    preemptions: int = 0

    def run(self, engine: Engine, *requests: Submission) -> None:
        for request in requests:
            self.tokens[request.request_id] = [*request.prompt, *request.committed]
            engine.submit(request)
        while engine.busy:
            for delta in engine.step():
                self.tokens[delta.request_id] += delta.tokens
                self.cached += delta.usage.cached_tokens if delta.usage else 0
            self.preemptions += engine.last_step.preemptions
            engine.check_integrity()

    def check(self, model: Model) -> None:
        """Every opening was told what the model makes of its request; the last one of each, all but the last step's.

        What was told twice or out of order would have raised before.
        """
        requests = list(self.tokens.values())
        told = {key: states for key, _, states in self.recorder.openings}
        for key, tokens in enumerate(requests, 1):
            assert len(told[key]) >= len(tokens) - 3
        for key, _, states in self.recorder.openings:
            expected = undisturbed_states(model, requests[key - 1])
            assert all(torch.equal(a, b) for a, b in zip(states, expected, strict=False))


def undisturbed_states(model: Model, tokens: Sequence[int]) -> Tensor:
    lane = SlotTable()
    lane.slots = list(range(1, len(tokens) + 1))
    rows = [lane.row(token, i) for i, token in enumerate(tokens)]
    hidden = model.run(rows, [], Recorder.hidden_state_layers).hidden
    assert hidden is not None
    return hidden


class TestWhatTheEngineTells:
    """Every opening is told the states of every position: once, in order, and bit for bit what they ever are."""

    def test_in_chunks_of_the_prompt(self, model: Model) -> None:
        serve(model, submission("r", 100, 20), max_num_batched_rows=16).check(model)

    def test_when_others_are_prefilled_beside_it(self, model: Model) -> None:
        serve(model, *(submission(name, 40 + 9 * i, 20) for i, name in enumerate("abcde"))).check(model)

    @pytest.mark.parametrize("told_at_once", [MAX_HIDDEN_STATES_SENT, 16])
    def test_after_a_hit_in_the_prefix_cache(
        self, told_at_once: int, model: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Positions that are not computed again are told all the same, by and by if they are many."""
        served = Served()
        target = engine(model, served.recorder)
        served.run(target, submission("first", 100, 4))
        monkeypatch.setattr("paceline.engine.engine.MAX_HIDDEN_STATES_SENT", told_at_once)
        served.run(target, submission("second", 100, 30))
        assert served.cached >= 64
        served.check(model)

    def test_after_preemption(self, model: Model) -> None:
        small = target_model(slots=256)
        served = serve(small, *(submission(name, 60, 60) for name in "abc"))
        assert served.preemptions > 0
        served.check(model)

    @pytest.mark.parametrize("losses", [[1], [3], [9], [2, 3], [4, 8, 12]])
    @pytest.mark.parametrize("rows", [16, 256])
    def test_after_a_move_to_another_draft(self, losses: list[int], rows: int, model: Model) -> None:
        requests = [submission("r", 100, 40), submission("s", 30, 40)]
        served = serve(model, *requests, losses=losses, max_num_batched_rows=rows)
        assert len(served.recorder.openings) == len(requests) + len(losses)
        served.check(model)

    def test_what_was_committed_elsewhere_is_told_too(self, model: Model) -> None:
        """A target died, and this one goes on."""
        serve(model, submission("r", 40, 30, committed=[5, 9, 33, 2] * 4)).check(model)

    def test_after_a_pause(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """A paused draft is told nothing. When it is tried again, it is told of all that it missed."""
        monkeypatch.setattr(DraftGate, "PAUSE_LOCAL_BELOW", DraftGate.PAUSE_BELOW)  # it costs next to nothing here
        recorder = Useless()
        target = engine(model, recorder, judged=True)
        target.submit(submission("r", 40, 200))
        told = []
        while target.busy:
            target.step()
            told.append(len(recorder.openings[0][2]))
        gains = [after - before for before, after in pairwise(told)]
        missed = max(len(list(some)) for gain, some in groupby(gains) if gain == 0)
        assert missed >= DraftGate.MIN_PAUSE_STEPS - 1
        assert missed <= max(gains)


class Useless(Recorder):
    """Never guesses right, or hardly ever."""

    def _guesses(self, tree: TokenTree) -> list[tuple[int, int]]:
        return [(0, (tree.tokens[ROOT] + 7) % VOCABULARY)] if tree.size == 0 else []


def serve(model: Model, *requests: Submission, losses: Sequence[int] = (), **settings: Any) -> Served:
    served = Served()
    served.run(engine(model, served.recorder, losses, **settings), *requests)
    return served


def engine(
    model: Model, recorder: Recorder, losses: Sequence[int] = (), *, judged: bool = False, **settings: Any
) -> Engine:
    """`judged`: whether the draft is paused while it does not pay."""
    config = SpeculativeConfig(method="custom", speculator="-", num_speculative_tokens=1, row_budget=judged)
    return Engine(model, EngineConfig(slots=model.slots, **settings), config, Moving(recorder, losses), FREE)
