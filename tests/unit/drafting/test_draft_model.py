"""Drafting with a model: which nodes, in which order, from which slots. `test_speculator_contract` has the rest."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import EngineConfig, SamplingParams
from paceline.core.growth import Growth
from paceline.core.policy.step_cost import RowCost
from paceline.core.tree import ROOT
from paceline.drafting.best_first import BestFirstRequest
from paceline.drafting.network_speculator import PREFILL_ROWS, NetworkSpeculator, round_robin
from paceline.drafting.speculator import Commit, DraftError, Opening
from paceline.engine.draft_client import LocalDraftClient
from paceline.model import Model
from paceline.model.loading import build
from paceline.model.model import ModelOutput
from paceline.model.rows import GROUP
from paceline.model.rows import Row as ModelRow
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers.drafts import model_draft
from tests.helpers.llamas import LAWS, VOCABULARY, peaked_llama
from tests.unit.drafting.drafted import GREEDY, DraftedRequest, decoded, drawn_tokens, finished

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def llama(request: pytest.FixtureRequest) -> Model:
    return build(peaked_llama().to(request.param), "llama", EngineConfig(slots=1024), "", [])


class Recording(TableModel):
    """Records the rows of each pass."""

    def __init__(self, slots: int = 2048, positions: int = 2048) -> None:
        super().__init__(VOCABULARY, slots, positions)
        self.passes: list[list[ModelRow]] = []

    def run(self, rows: Sequence[ModelRow], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        self.passes.append(list(rows))
        return super().run(rows, wanted, hidden_layers)


def table(
    width: int, slots: int = 2048, positions: int = 2048, cost: RowCost | None = None, least: float = 0.0
) -> NetworkSpeculator[BestFirstRequest]:
    return model_draft(Recording(slots, positions), width, cost, least)


def rounds(draft: NetworkSpeculator[BestFirstRequest]) -> Iterator[dict[int, Growth]]:
    """Until there is nothing more to draft."""
    while (grown := draft.grow()) or draft.behind:
        yield grown


def expanded(grown: dict[int, Growth]) -> dict[int, int]:
    """The number of nodes that a round expanded, by request."""
    return {key: len(set(growth.parent_ids)) for key, growth in grown.items()}


@pytest.mark.parametrize("prompt", [PROMPT, [1], [2, 2, 2], list(range(64)), [*range(64), 9]])
def test_a_chain_at_temperature_0_is_the_drafts_greedy_continuation(llama: Model, prompt: list[int]) -> None:
    request = finished(model_draft(llama, 1), prompt)
    assert max(request.guesses(), key=len) == tuple(decoded(llama, prompt, GREEDY, 6))
    assert request.tree.size == 6


@pytest.mark.parametrize("params", LAWS)
def test_a_draft_that_is_the_target_predicts_every_draw(llama: Model, params: SamplingParams) -> None:
    """With noise and penalties, the likeliest child of every node is the target's draw."""
    likeliest = finished(model_draft(llama, 3), PROMPT, sampling=params).likeliest()
    assert likeliest
    assert likeliest == decoded(llama, PROMPT, params, len(likeliest))


def test_the_greedy_strategy_ignores_temperature() -> None:
    hot = SamplingParams(temperature=5.0, seed=3)
    request = finished(table(1), PROMPT, sampling=hot, strategy="greedy")
    assert request.likeliest() == decoded(Recording(), PROMPT, GREEDY, 6)


def test_the_likeliest_nodes_of_all_requests_are_expanded_first() -> None:
    draft = table(3)
    requests = [DraftedRequest(draft, [key, key + 1], key=key, depth=4) for key in (1, 2, 3)]
    while grown := draft.grow():
        leaves = [
            (request, node, request.tree.path_log_probs[node])
            for request in requests
            for node in request.tree.nodes()
            if request.tree.depths[node] < 4 and not request.tree.children(node)
        ]
        for request in requests:
            request.graft(grown)
        taken = [log_prob for request, node, log_prob in leaves if request.tree.children(node)]
        left = [log_prob for request, node, log_prob in leaves if not request.tree.children(node)]
        assert not taken or not left or min(taken) >= max(left)
        assert len(taken) in (0, min(GROUP, len(leaves)))
    assert all(request.tree.size > 20 for request in requests)


def test_nodes_of_a_round_come_in_the_order_of_their_parents() -> None:
    """In which they are cheapest on the wire, see `paceline.wire.node_codec`."""
    draft = table(3)
    DraftedRequest(draft, PROMPT, depth=5)
    pushed = [list(grown[1].parent_ids) for grown in rounds(draft)]
    assert max(len(set(parents)) for parents in pushed) > 4
    assert all(parents == sorted(parents) for parents in pushed)


@pytest.mark.parametrize(
    ("cost", "most"), [(RowCost([8, 64, 65], [1.0, 1.0, 9.0]), 64), (RowCost([8, 64], [1.0, 8.0]), 8)]
)
def test_a_round_uses_free_rows_and_no_dear_ones(cost: RowCost, most: int) -> None:
    draft = table(3, cost=cost)
    DraftedRequest(draft, PROMPT, depth=8)
    assert max(expanded(grown)[1] for grown in rounds(draft)) == most


class TestFairness:
    """Links share the rows of a round, and none takes another's share."""

    DEAR = RowCost([8, 64], [1.0, 8.0])
    """A round gets eight rows of guesses."""

    def test_a_link_with_one_request_gets_its_share_and_leaves_the_rest(self) -> None:
        """There are many likelier requests of another link."""
        draft, crowd = table(3, cost=self.DEAR), range(100, 130)
        for key in crowd:
            DraftedRequest(draft, [key % VOCABULARY, 1], key=key, link=1)
        DraftedRequest(draft, [7, 8], key=1, sampling=SamplingParams(temperature=1.0, seed=3), link=2)
        roots = draft.grow()
        likeliest = {key: max(roots[key].log_probs) for key in (1, *crowd)}
        assert min(likeliest, key=likeliest.__getitem__) == 1, "otherwise it would come first anyway"
        spread = expanded(draft.grow())
        assert (spread.pop(1), sum(spread.values())) == (3, 5)

    def test_every_one_of_many_links_has_a_turn(self) -> None:
        """Eight rows for eleven links: in any two rounds each gets one."""
        draft = table(3, cost=self.DEAR)
        for key in range(1, 12):
            DraftedRequest(draft, [key, 1], key=key, link=key)
        draft.grow()
        pairs = [expanded(draft.grow()).keys() | expanded(draft.grow()).keys() for _ in range(6)]
        assert pairs == [set(range(1, 12))] * 6

    def test_a_prompt_does_not_wait_for_all_those_of_another_target(self) -> None:
        """The other target's prompts are a little shorter, and would come first."""
        draft = table(1, slots=4096)
        for key in range(2, 10):
            DraftedRequest(draft, [5] * (PREFILL_ROWS - 10), key=key, link=1)
        DraftedRequest(draft, [6] * PREFILL_ROWS, key=1, link=2)
        assert 1 in [draft.grow(), draft.grow()][1]

    def test_no_more_slots_than_needed_are_taken_from_the_link_that_holds_the_most(self) -> None:
        model = Recording(slots=300)
        draft = model_draft(model, 2)
        for key in range(2, 6):
            finished(draft, [key] * 10, key=key, depth=4, link=1)
        finished(draft, [1] * 40, key=1, depth=5, link=2)  # the largest tree, on the link with fewer slots
        free = model.slots - len({row.slot for rows in model.passes for row in rows})
        DraftedRequest(draft, [9] * (free + 5), key=9, depth=0, link=3)
        draft.check_integrity()
        draft.close(9)
        model.passes.clear()
        assert not any(rounds(draft)), "these nodes have children already"
        again = [row.position for rows in model.passes for row in rows]
        assert len(again) == 5
        assert max(again) < 40

    @given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 40))
    def test_dealing_is_max_min_fair(self, wanted: list[int], count: int) -> None:
        """A link that got less than it wanted got at most one item less than any other link."""
        hands = [iter([link] * size) for link, size in enumerate(wanted)]
        got = Counter(islice(round_robin(hands), count))
        assert got.total() == min(count, sum(wanted))
        most = max(got.values(), default=0)
        assert all(got[link] in (size, most, most - 1) for link, size in enumerate(wanted))


class TestLimits:
    def test_the_higher_of_both_least_path_probabilities_holds(self) -> None:
        """The draft's own, and the request's, which may change; nodes that are there get no more children."""
        request = finished(draft := table(3, least=0.01), PROMPT, depth=50, least_path_probability=0.05)
        generous = finished(table(3, least=0.01), PROMPT, depth=50)
        chances = [math.exp(log_prob) for log_prob in generous.path_log_probs()]
        assert 0.01 < min(chances) < 0.05
        assert request.tree.size == sum(chance > 0.05 for chance in chances)
        assert finished(table(3, least=0.05), PROMPT, depth=50).guesses() == request.guesses()

        request.limit(50, 1000, 0.001)
        request.commit([1])
        request.grow()
        assert 0.01 < math.exp(min(request.path_log_probs())) < 0.05
        draft.check_integrity()

    @pytest.mark.parametrize("nodes", [0, 1, 2, 3, 4, 10, 50])
    def test_a_tree_is_as_large_as_it_may_be(self, nodes: int) -> None:
        request = finished(table(3), PROMPT, nodes=nodes, depth=20)
        assert request.tree.size == nodes

    def test_a_tree_of_few_nodes_grows_ahead_too(self) -> None:
        """Otherwise a target that wants one draft token per step would wait for a round trip after each."""
        assert max(finished(table(3), PROMPT, nodes=4).tree.depths) == 2

    def test_positions_end(self) -> None:
        draft = table(1, positions=10)
        request = finished(draft, PROMPT[:7], depth=20)
        assert request.tree.size == 3, "positions 7, 8 and 9"
        request.commit([1, 1])
        with pytest.raises(DraftError, match="10 tokens; the draft's positions end at 10"):
            request.commit([1])
        with pytest.raises(DraftError, match="10 tokens"):
            DraftedRequest(draft, [*PROMPT, 1, 2], key=2)
        draft.close(1)
        draft.check_integrity()
        assert draft.grow() == {}

    def test_a_paused_request_is_not_computed_and_goes_on_at_once(self) -> None:
        model = Recording()
        draft = model_draft(model, 2)
        paused = DraftedRequest(draft, PROMPT)
        paused.limit(0, 0)
        other = finished(draft, [*PROMPT, 7], key=2, depth=2)
        paused.commit([3])
        assert not paused.grow()
        assert sum(map(len, model.passes)) == len(other.tokens) + 2, "one prompt, and its root's two children"
        paused.limit(2, 1000)
        paused.grow()
        assert paused.guesses() == finished(table(2), [*PROMPT, 3], depth=2).guesses()
        draft.check_integrity()


class TestContext:
    def test_short_prompts_do_not_wait_for_a_long_one_which_takes_several_rounds(self) -> None:
        draft = table(1)
        DraftedRequest(draft, [5] * (2 * PREFILL_ROWS + 1), key=1)
        DraftedRequest(draft, [6] * 10, key=2, depth=1)
        assert [set(draft.grow()) for _ in range(3)] == [{2}, set(), {1}]
        assert list(rounds(draft))
        assert not draft.behind

    def test_a_target_that_waits_gets_its_guesses(self) -> None:
        """A poll without time is one round; a poll with time goes on until there is growth."""
        client = LocalDraftClient(table(1))
        client.open(Opening(1, [5] * (4 * PREFILL_ROWS), 0, GREEDY, 6, 1000), ())
        assert not client.poll(0.0)
        assert client.poll(60.0).growths

    def test_a_commit_may_come_before_the_context_is_computed(self) -> None:
        draft = table(1)
        request = DraftedRequest(draft, [5] * (PREFILL_ROWS + 10))
        draft.grow()
        request.commit([6, 7])
        request.grow()
        assert request.likeliest() == decoded(Recording(), request.tokens, GREEDY, 6)


class TestCommits:
    @pytest.mark.parametrize("seed", range(6))
    def test_guesses_after_any_commits_are_those_of_a_fresh_start(self, llama: Model, seed: int) -> None:
        """Bit for bit: the cache holds nothing stale."""
        rng = random.Random(seed)
        draft = model_draft(llama, 2)
        limits = {"sampling": LAWS[seed], "depth": 5, "nodes": 40}
        request = DraftedRequest(draft, PROMPT, **limits)
        for _ in range(30):
            request.grow(rounds=rng.randrange(4))
            request.commit(drawn_tokens(request.tree, rng, VOCABULARY))
            draft.check_integrity()
        request.grow()
        draft.close(1)
        fresh = finished(draft, request.tokens, key=2, output=len(request.tokens) - len(PROMPT), **limits)
        assert request.children() == fresh.children()
        assert len(fresh.children()) == 2

    def test_an_accepted_draft_token_keeps_its_children(self) -> None:
        request = finished(table(1), PROMPT, depth=4)
        request.commit(path := request.likeliest()[:2])
        assert request.tree.size == 2
        request.grow()
        assert request.likeliest() == decoded(Recording(), PROMPT + path, GREEDY, 4)


class TestRewinding:
    @pytest.mark.parametrize(("length", "more"), [(130, 0), (70, 0), (63, 90), (64, 70), (65, 1), (1, 140)])
    def test_guesses_after_it_are_those_of_a_fresh_start(self, llama: Model, length: int, more: int) -> None:
        """Across borders of tiles, with slots in another order; penalties follow, too."""
        rng = random.Random(length)
        tokens, rest = rng.choices(range(VOCABULARY), k=130), rng.choices(range(VOCABULARY), k=more)
        for params in (GREEDY, SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.4)):
            draft = model_draft(llama, 2)
            request = finished(draft, tokens[:60], sampling=params)
            request.commit(tokens[60:])
            request.grow()
            draft.rewind(1, length)
            draft.check_integrity()
            if rest:
                draft.commit(Commit(1, length - 1, rest, 0))
            assert list(rounds(draft))
            draft.check_integrity()
            known = draft.tree(1)
            kept = [*tokens[:length], *rest]
            fresh = finished(model_draft(llama, 2), kept, sampling=params, output=len(kept) - min(60, length))
            assert {known.tokens[n]: known.log_prob(n) for n in known.children(ROOT)} == fresh.children()


class TestSlots:
    def test_a_request_that_cannot_fit_takes_no_slots(self) -> None:
        model = Recording(slots=40)
        draft = model_draft(model, 2)
        finished(draft, PROMPT, depth=4)
        model.passes.clear()
        with pytest.raises(DraftError, match="out of slots: 41 needed, 32 of 40 free"):
            DraftedRequest(draft, [9] * 41, key=2)
        assert not draft.grow()
        assert model.passes == []

    def test_committed_tokens_take_the_slots_of_draft_tokens(self) -> None:
        draft = table(3, slots=40)
        first = finished(draft, [1] * 10, key=1)
        finished(draft, [2] * 20, key=2)
        draft.check_integrity()
        assert finished(draft, [3] * 9, key=3).tree.size > 0
        first.commit(first.likeliest()[:1])
        draft.check_integrity()

    def test_a_request_that_lost_slots_grows_like_a_new_one(self) -> None:
        draft = table(2, slots=400)
        request = finished(draft, PROMPT, depth=4)
        DraftedRequest(draft, [1] * (400 - len(PROMPT)), key=9, depth=0)
        draft.close(9)
        request.commit(list(request.children())[:1])
        request.grow()
        draft.check_integrity()
        assert request.guesses().keys() == finished(table(2), request.tokens, depth=4).guesses().keys()

    def test_a_request_without_slots_is_dropped_and_others_go_on(self) -> None:
        draft = table(1, slots=20)
        first, second = (finished(draft, [key] * 9, key=key, depth=2) for key in (1, 2))
        first.commit([1, 2])
        with pytest.raises(DraftError, match="out of slots"):
            second.commit([3])
        draft.close(2)
        draft.check_integrity()
        first.grow()
        assert first.likeliest() == decoded(Recording(), first.tokens, GREEDY, 2)

    def test_the_engine_gets_the_lost_requests(self) -> None:
        client = LocalDraftClient(table(1, slots=10))
        assert client.open(Opening(1, [1] * 9, 0, GREEDY, 6, 1000), ()) == "local"
        assert client.open(Opening(2, [1] * 9, 0, GREEDY, 6, 1000), ()) is None
        client.commit(Commit(1, 8, [1, 2], 0))
        assert client.poll(0.0).lost == [1]
        assert client.poll(0.0).lost == []
