"""Drafting with a model: which nodes, in which order, from which slots. `test_speculator_contract` has the rest."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import EngineConfig, SamplingParams
from paceline.core.growth import Growth
from paceline.core.policy.step_cost import RowCost
from paceline.core.sampling import History, SamplingRow, draw
from paceline.core.tree import TokenTree
from paceline.drafting.cached_draft import PREFILL_ROWS, round_robin
from paceline.drafting.methods.draft_model import DraftModelSpeculator
from paceline.drafting.speculator import Commit, DraftError, Limit, Opening
from paceline.engine.draft_client import LocalDraftClient
from paceline.model import Model, SlotTable
from paceline.model.loading import build
from paceline.model.model import ModelOutput
from paceline.model.rows import GROUP
from paceline.model.rows import Row as ModelRow
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers.llamas import LAWS, VOCABULARY, peaked_llama
from tests.helpers.seen import Seen, nodes_of, root_of

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def llama(request: pytest.FixtureRequest) -> Model:
    return build(peaked_llama().to(request.param), "llama", EngineConfig(slots=1024), "", [])


def table(slots: int = 512, positions: int = 512) -> Model:
    return TableModel(VOCABULARY, slots, positions)


def opening(
    tokens: Sequence[int] = PROMPT,
    *,
    key: int = 1,
    sampling: SamplingParams = GREEDY,
    depth: int = 6,
    nodes: int = 1000,
    output: int = 0,
    link: int = 0,
) -> Opening:
    return Opening(key, tokens, output, sampling, depth, nodes, link=link)


class Replica:
    """The target's side of one drafted request, built from the draft's growth only."""

    def __init__(self, opening: Opening) -> None:
        self.opening = opening
        self.tokens = list(opening.tokens)
        self.tree = TokenTree(len(self.tokens) - 1, self.tokens[-1])

    def graft(self, growth: Growth) -> None:
        assert self.tree.graft(growth, 10_000) == len(growth.node_ids), "every node is new and has its parent"

    def commit(self, tokens: Sequence[int]) -> Commit:
        commit = Commit(self.opening.request_id, self.tree.position, tokens, 0)
        self.tree.commit(tokens)
        self.tokens += tokens
        return commit

    def reopened(self, key: int) -> Opening:
        """The opening of a request that is where this one is now."""
        output = len(self.tokens) - len(self.opening.tokens)
        return replace(self.opening, request_id=key, tokens=self.tokens, output_tokens=output)


def rounds(draft: DraftModelSpeculator) -> Iterator[dict[int, Growth]]:
    """Rounds of drafting until there is nothing more to draft."""
    while (grown := draft.grow()) or draft.behind:
        yield grown


def drafted(draft: DraftModelSpeculator, opening: Opening) -> Replica:
    replica = Replica(opening)
    draft.open(opening)
    for grown in rounds(draft):
        if grown:
            replica.graft(grown[opening.request_id])
    return replica


def chain(tree: TokenTree) -> list[Seen]:
    nodes: list[Seen] = []
    while (nodes[-1] if nodes else root_of(tree)).children:
        [node] = (nodes[-1] if nodes else root_of(tree)).children.values()
        nodes.append(node)
    return nodes


def decoded(model: Model, tokens: Sequence[int], sampling: SamplingParams, count: int) -> list[int]:
    """The model's own continuation of a prompt, one token at a time."""
    slot_table, path = SlotTable(), list(tokens)
    history = History(sampling, tokens, [], model.vocabulary_size)
    for position in range(len(tokens) + count - 1):
        slot_table.slots.append(position + 1)
        logits = model.run([slot_table.row(path[position], position)], [0]).logits
        if position == len(path) - 1:
            path += draw(logits, [SamplingRow(sampling, position + 1, history)]).tolist()
            history.extend(path[-1:])
    return path[len(tokens) :]


class TestGuesses:
    @pytest.mark.parametrize("prompt", [PROMPT, [1], [2, 2, 2], list(range(64)), [*range(64), 9]])
    def test_a_chain_at_temperature_0_is_the_drafts_greedy_continuation(self, llama: Model, prompt: list[int]) -> None:
        nodes = chain(drafted(DraftModelSpeculator(llama, 1), opening(prompt)).tree)
        assert [n.token for n in nodes] == decoded(llama, prompt, GREEDY, 6)

    @pytest.mark.parametrize("params", LAWS)
    def test_a_draft_that_is_the_target_predicts_every_draw(self, llama: Model, params: SamplingParams) -> None:
        """With noise and penalties, the likeliest child of every node is the target's draw."""
        expected = decoded(llama, PROMPT, params, 6)
        node = root_of(drafted(DraftModelSpeculator(llama, 3), opening(sampling=params)).tree)
        depth = 0
        while node.children:
            node = max(node.children.values(), key=lambda child: child.log_prob)
            assert node.token == expected[depth]
            depth += 1
        assert depth > 0

    def test_the_probabilities_of_siblings_sum_to_at_most_1(self, llama: Model) -> None:
        replica = drafted(DraftModelSpeculator(llama, 4), opening(sampling=LAWS[1]))
        for parent in [root_of(replica.tree), *nodes_of(replica.tree)]:
            assert sum(math.exp(child.log_prob) for child in parent.children.values()) <= 1 + 1e-5
            assert len(parent.children) in (0, 4)

    def test_a_forbidden_token_is_never_drafted(self, llama: Model) -> None:
        [first, *_] = decoded(llama, PROMPT, GREEDY, 1)
        barred = SamplingParams(temperature=0.0, bad_words=((first,),))
        replica = drafted(DraftModelSpeculator(llama, VOCABULARY), opening(sampling=barred, depth=1))
        assert len(root_of(replica.tree).children) == VOCABULARY - 1
        assert first not in root_of(replica.tree).children

    def test_the_likeliest_nodes_of_all_requests_are_expanded_first(self) -> None:
        draft = DraftModelSpeculator(table(), 3)
        replicas = {key: Replica(opening([key, key + 1], key=key, depth=4)) for key in (1, 2, 3)}
        for replica in replicas.values():
            draft.open(replica.opening)
        while grown := draft.grow():
            leaves = [
                (key, node)
                for key, r in replicas.items()
                for node in nodes_of(r.tree)
                if not node.children and node.position - r.tree.position < 4
            ]
            expanded = {(key, parent) for key, growth in grown.items() for parent in growth.parent_ids if parent}
            taken = [node.path_log_prob for key, node in leaves if (key, node.id) in expanded]
            left = [node.path_log_prob for key, node in leaves if (key, node.id) not in expanded]
            assert not taken or not left or min(taken) >= max(left)
            assert len(taken) in (0, min(GROUP, len(leaves)))
            for key, growth in grown.items():
                replicas[key].graft(growth)
        assert all(r.tree.size > 20 for r in replicas.values())

    def test_unlikely_nodes_are_not_sent(self) -> None:
        frugal = drafted(DraftModelSpeculator(table(), 3, least_path_probability=0.05), opening(depth=50))
        generous = drafted(DraftModelSpeculator(table(), 3, least_path_probability=0.01), opening(depth=50))
        chances = [math.exp(node.path_log_prob) for node in nodes_of(generous.tree)]
        assert min(chances) > 0.01
        assert frugal.tree.size == sum(chance > 0.05 for chance in chances) < len(chances)


class TestRounds:
    """How many nodes a round expands follows from the cost of rows."""

    @pytest.mark.parametrize(
        ("cost", "most"), [(RowCost([8, 64, 65], [1.0, 1.0, 9.0]), 64), (RowCost([8, 64], [1.0, 8.0]), 8)]
    )
    def test_free_rows_are_used_and_dear_ones_are_not(self, cost: RowCost, most: int) -> None:
        draft = DraftModelSpeculator(table(), 3, cost)
        draft.open(opening(depth=8))
        widths = [len(set(growth.parent_ids)) for grown in rounds(draft) for growth in grown.values()]
        assert max(widths) == most


class Recording(TableModel):
    """Records the rows of each pass."""

    def __init__(self, slots: int) -> None:
        super().__init__(VOCABULARY, slots, 512)
        self.passes: list[list[ModelRow]] = []

    def run(self, rows: Sequence[ModelRow], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        self.passes.append(list(rows))
        return super().run(rows, wanted, hidden_layers)


def expanded(grown: dict[int, Growth]) -> dict[int, int]:
    """The number of nodes that a round expanded, by request."""
    return {key: len(set(growth.parent_ids)) for key, growth in grown.items()}


def test_a_limit_that_is_raised_is_used_at_once() -> None:
    draft = DraftModelSpeculator(table(), 2)
    drafted(draft, opening(depth=1))
    assert not any(rounds(draft))
    draft.limit(Limit(1, 3, 1000))
    assert any(rounds(draft))


def test_a_paused_request_is_not_computed() -> None:
    model = Recording(512)
    draft = DraftModelSpeculator(model, 2)
    paused, other = opening(depth=2), opening([*PROMPT, 7], key=2, depth=2)
    draft.open(paused)
    draft.limit(Limit(1, 0, 0))
    drafted(draft, other)
    draft.commit(Commit(1, len(PROMPT) - 1, [3], 0))
    assert not any(rounds(draft))
    assert sum(map(len, model.passes)) == len(other.tokens) + 2, "one prompt, and its root's two children"

    draft.limit(Limit(1, 2, 1000))
    replica = Replica(opening([*PROMPT, 3]))
    for grown in rounds(draft):
        if grown:
            replica.graft(grown[1])
    alone = drafted(DraftModelSpeculator(table(), 2), opening([*PROMPT, 3], depth=2))
    assert [n.token for n in nodes_of(replica.tree)] == [n.token for n in nodes_of(alone.tree)]
    draft.check_integrity()


def test_a_request_that_lost_slots_grows_like_a_new_one() -> None:
    draft = DraftModelSpeculator(table(400), 2)
    replica = drafted(draft, opening(depth=4))
    draft.open(opening([1] * (400 - len(PROMPT)), key=9, depth=0))
    draft.close(9)
    token = next(iter(root_of(replica.tree).children))
    draft.commit(Commit(1, len(PROMPT) - 1, [token], 1))
    replica.tree.commit([token])
    for grown in rounds(draft):
        if grown:
            replica.graft(grown[1])
    draft.check_integrity()
    new = drafted(DraftModelSpeculator(table(400), 2), opening([*PROMPT, token], depth=4))
    known, expected = ([[n.token for n in node.path()] for node in nodes_of(each.tree)] for each in (replica, new))
    assert sorted(known) == sorted(expected)


def test_nodes_of_a_round_come_in_the_order_of_their_parents() -> None:
    """In which they are cheapest on the wire, see `paceline.wire.node_codec`."""
    draft = DraftModelSpeculator(table(), 3)
    draft.open(opening(depth=5))
    growths = [grown[1].parent_ids for grown in rounds(draft) if grown]
    assert max(len(set(parents)) for parents in growths) > 4
    assert all(list(parents) == sorted(parents) for parents in growths)


class TestFairness:
    """Links share the rows of a round, and none takes another's share."""

    DEAR = RowCost([8, 64], [1.0, 8.0])
    """A round gets eight rows of guesses."""
    CROWD = range(100, 130)

    def crowded(self, quiet: Opening) -> DraftModelSpeculator:
        """One request, and before it many likelier ones of another link; the roots are expanded."""
        draft = DraftModelSpeculator(table(), 3, self.DEAR)
        for key in self.CROWD:
            draft.open(opening([key % VOCABULARY, 1], key=key, link=1))
        draft.open(quiet)
        roots = draft.grow()
        assert len(roots) == len(self.CROWD) + (quiet.max_depth > 0)
        if quiet.max_depth:
            least = min(max(roots[key].log_probs) for key in self.CROWD)
            assert max(roots[quiet.request_id].log_probs) < least, "otherwise it would come first anyway"
        return draft

    def test_a_link_with_one_request_gets_its_share_of_a_round(self) -> None:
        hot = SamplingParams(temperature=1.0, seed=3)
        spread = expanded(self.crowded(opening([7, 8], key=1, sampling=hot, link=2)).grow())
        assert spread.pop(1) == 3
        assert sum(spread.values()) == 5

    def test_an_unused_share_goes_to_the_other_links(self) -> None:
        assert sum(expanded(self.crowded(opening(key=1, depth=0, link=2)).grow()).values()) == 8

    def test_every_one_of_many_links_has_a_turn(self) -> None:
        """Eight rows for eleven links: in any two rounds each gets one."""
        draft = DraftModelSpeculator(table(), 3, self.DEAR)
        for key in range(1, 12):
            draft.open(opening([key, 1], key=key, link=key))
        draft.grow()
        pairs = [expanded(draft.grow()).keys() | expanded(draft.grow()).keys() for _ in range(6)]
        assert pairs == [set(range(1, 12))] * 6

    def test_a_prompt_does_not_wait_for_all_those_of_another_target(self) -> None:
        """The other target's prompts are a little shorter, and would come first."""
        draft = DraftModelSpeculator(table(slots=4096), 1)
        for key in range(2, 10):
            draft.open(opening([5] * (PREFILL_ROWS - 10), key=key, link=1))
        draft.open(opening([6] * PREFILL_ROWS, key=1, link=2))
        assert 1 in [draft.grow(), draft.grow()][1]
        assert len({key for grown in rounds(draft) for key in grown}) == 9

    def test_no_more_slots_than_needed_are_taken_from_the_link_that_holds_the_most(self) -> None:
        model = Recording(slots=300)
        draft = DraftModelSpeculator(model, 2)
        for key in range(2, 6):
            drafted(draft, opening([key] * 10, key=key, depth=4, link=1))
        drafted(draft, opening([1] * 40, key=1, depth=5, link=2))  # the largest tree, on the link with fewer slots
        free = model.slots - len({row.slot for rows in model.passes for row in rows})
        draft.open(opening([9] * (free + 5), key=9, depth=0, link=3))
        draft.check_integrity()
        draft.close(9)
        model.passes.clear()
        assert not any(rounds(draft)), "these nodes have children already"
        again = [row.position for rows in model.passes for row in rows]
        assert len(again) == 5
        assert max(again) < 40

    def test_a_request_that_cannot_fit_takes_no_slots(self) -> None:
        model = Recording(slots=40)
        draft = DraftModelSpeculator(model, 2)
        drafted(draft, opening(depth=4))
        model.passes.clear()
        with pytest.raises(DraftError, match="out of slots: 41 needed, 32 of 40 free"):
            draft.open(opening([9] * 41, key=2))
        assert not any(rounds(draft))
        assert model.passes == []

    @given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 40))
    def test_dealing_is_max_min_fair(self, wanted: list[int], count: int) -> None:
        """A link that got less than it wanted got at most one item less than any other link."""
        hands = [iter([link] * size) for link, size in enumerate(wanted)]
        got = Counter(islice(round_robin(hands), count))
        assert got.total() == min(count, sum(wanted))
        most = max(got.values(), default=0)
        assert all(got[link] in (size, most, most - 1) for link, size in enumerate(wanted))


class TestLimits:
    def test_nodes_below_the_least_path_probability_are_not_made(self) -> None:
        """From the start and after a change; the draft's own limit holds too."""
        draft = DraftModelSpeculator(table(), 3, least_path_probability=0.01)
        replica = drafted(draft, replace(opening(depth=50), least_path_probability=0.05))
        chances = [math.exp(node.path_log_prob) for node in nodes_of(replica.tree)]
        assert (
            len(chances)
            == drafted(DraftModelSpeculator(table(), 3, least_path_probability=0.05), opening(depth=50)).tree.size
        )
        assert min(chances) > 0.05
        draft.limit(Limit(1, 50, 1000, 0.001))
        draft.commit(replica.commit([1]))  # nodes that were expanded before get no more children
        for grown in rounds(draft):
            for growth in grown.values():
                replica.graft(growth)
        chances = [math.exp(node.path_log_prob) for node in nodes_of(replica.tree)]
        assert 0.01 < min(chances) < 0.05

    @pytest.mark.parametrize("depth", [0, 1, 5])
    def test_depth(self, depth: int) -> None:
        replica = drafted(DraftModelSpeculator(table(), 1), opening(depth=depth))
        assert len(chain(replica.tree)) == depth

    @pytest.mark.parametrize("nodes", [0, 1, 2, 3, 4, 10, 50])
    def test_nodes(self, nodes: int) -> None:
        replica = drafted(DraftModelSpeculator(table(), 3), opening(nodes=nodes, depth=20))
        assert replica.tree.size == nodes

    def test_a_tree_of_few_nodes_grows_ahead_too(self) -> None:
        """Otherwise a target that wants one draft token per step would wait for a round trip after each."""
        replica = drafted(DraftModelSpeculator(table(), 3), opening(nodes=4))
        assert max(len(node.path()) for node in nodes_of(replica.tree)) == 2

    def test_no_position_at_or_beyond_the_limit(self) -> None:
        replica = drafted(DraftModelSpeculator(table(positions=10), 1), opening(PROMPT[:7], depth=20))
        assert [n.position for n in chain(replica.tree)] == [7, 8, 9]

    def test_a_prompt_beyond_the_drafts_positions_is_refused(self) -> None:
        draft = DraftModelSpeculator(table(positions=8), 1)
        with pytest.raises(DraftError, match="8 tokens; the draft's positions end at 8"):
            draft.open(opening(PROMPT))
        draft.check_integrity()
        assert draft.grow() == {}

    def test_a_commit_beyond_the_drafts_positions_is_refused(self) -> None:
        draft = DraftModelSpeculator(table(positions=10), 1)
        replica = drafted(draft, opening())
        draft.commit(replica.commit([1]))
        with pytest.raises(DraftError, match="10 tokens"):
            draft.commit(replica.commit([1]))
        draft.close(1)
        draft.check_integrity()

    def test_the_greedy_strategy_ignores_temperature(self) -> None:
        hot = SamplingParams(temperature=5.0, seed=3)
        replica = drafted(DraftModelSpeculator(table(), 1), replace(opening(sampling=hot), strategy="greedy"))
        assert [n.token for n in chain(replica.tree)] == decoded(table(), PROMPT, GREEDY, 6)


class TestContext:
    def test_a_long_prompt_takes_several_rounds(self) -> None:
        draft = DraftModelSpeculator(table(slots=2048, positions=2048), 1)
        draft.open(opening([5] * (2 * PREFILL_ROWS + 1)))
        assert [bool(grown) for grown in (draft.grow(), draft.grow(), draft.grow())] == [False, False, True]
        assert list(rounds(draft))
        assert not draft.behind

    def test_short_prompts_do_not_wait_for_a_long_one(self) -> None:
        draft = DraftModelSpeculator(table(slots=2048, positions=2048), 1)
        draft.open(opening([5] * (3 * PREFILL_ROWS), key=1))
        draft.open(opening([6] * 10, key=2))
        assert set(draft.grow()) == {2}

    def test_a_target_that_waits_gets_its_guesses(self) -> None:
        """A poll without time is one round; a poll with time goes on until there is growth."""
        drafting = LocalDraftClient(DraftModelSpeculator(table(slots=2048, positions=2048), 1))
        drafting.open(opening([5] * (4 * PREFILL_ROWS)), ())
        assert not drafting.poll(0.0)
        assert drafting.poll(60.0).growths

    def test_a_commit_may_come_before_the_context_is_computed(self) -> None:
        draft = DraftModelSpeculator(table(slots=2048, positions=2048), 1)
        replica = Replica(opening([5] * (PREFILL_ROWS + 10)))
        draft.open(replica.opening)
        draft.grow()
        draft.commit(replica.commit([6, 7]))
        for grown in rounds(draft):
            replica.graft(grown[1])
        assert [n.token for n in chain(replica.tree)] == decoded(
            table(slots=2048, positions=2048), replica.tokens, GREEDY, 6
        )


def children(replica: Replica) -> dict[int, float]:
    return {token: node.log_prob for token, node in root_of(replica.tree).children.items()}


class TestCommits:
    @pytest.mark.parametrize("seed", range(6))
    def test_guesses_after_any_commits_are_those_of_a_fresh_start(self, llama: Model, seed: int) -> None:
        """Bit for bit: the cache holds nothing stale."""
        rng = random.Random(seed)
        draft = DraftModelSpeculator(llama, 2)
        replica = Replica(opening(sampling=LAWS[seed], depth=5, nodes=40))
        draft.open(replica.opening)
        for _ in range(30):
            for _ in range(rng.randrange(4)):
                for growth in draft.grow().values():
                    replica.graft(growth)
            draft.commit(replica.commit(committed(replica.tree, rng)))
            draft.check_integrity()
        for grown in rounds(draft):
            replica.graft(grown[1])
        draft.close(1)
        fresh = drafted(draft, replica.reopened(2))
        assert children(replica) == children(fresh)
        assert len(children(fresh)) == 2

    def test_an_accepted_draft_token_keeps_its_children(self) -> None:
        draft = DraftModelSpeculator(table(), 1)
        replica = drafted(draft, opening(depth=4))
        path = [n.token for n in chain(replica.tree)]
        draft.commit(replica.commit(path[:2]))
        for grown in rounds(draft):
            replica.graft(grown[1])
        assert [n.token for n in chain(replica.tree)] == decoded(table(), PROMPT + path[:2], GREEDY, 4)


class TestRewinding:
    @pytest.mark.parametrize(("length", "more"), [(130, 0), (129, 0), (70, 0), (63, 90), (64, 70), (65, 1), (1, 140)])
    def test_guesses_after_it_are_those_of_a_fresh_start(self, llama: Model, length: int, more: int) -> None:
        """Across borders of tiles, with slots in another order."""
        rng = random.Random(length)
        tokens = rng.choices(range(VOCABULARY), k=130)
        draft = DraftModelSpeculator(llama, 2)
        drafted(draft, opening(tokens))
        draft.rewind(1, length)
        draft.check_integrity()
        rest = rng.choices(range(VOCABULARY), k=more)
        if rest:
            draft.commit(Commit(1, length - 1, rest, 0))
        assert list(rounds(draft))
        known, draft_of = draft.tree(1), DraftModelSpeculator(llama, 2)
        draft.check_integrity()
        draft.close(1)
        fresh = drafted(draft_of, opening([*tokens[:length], *rest]))
        assert {t: n.log_prob for t, n in root_of(known).children.items()} == children(fresh)

    def test_what_was_computed_is_kept(self) -> None:
        model = Recording(slots=300)
        draft = DraftModelSpeculator(model, 1)
        drafted(draft, opening([5] * 40, depth=3))
        model.passes.clear()
        draft.rewind(1, 30)
        draft.grow()
        assert [row.position for row in model.passes[0]][:1] == [29]

    def test_rewinding_rewinds_the_history(self) -> None:
        params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
        draft = DraftModelSpeculator(table(), 3)
        drafted(draft, opening([1, 2, 3], sampling=params))
        draft.commit(Commit(1, 2, [4, 5, 6], 0))
        draft.rewind(1, 4)
        assert list(rounds(draft))
        fresh = drafted(DraftModelSpeculator(table(), 3), opening([1, 2, 3, 4], sampling=params, output=1))
        assert {t: n.log_prob for t, n in root_of(draft.tree(1)).children.items()} == children(fresh)


class TestSlots:
    def test_a_prompt_that_does_not_fit_is_refused(self) -> None:
        draft = DraftModelSpeculator(table(slots=20), 1)
        draft.open(opening([1] * 15, key=1))
        with pytest.raises(DraftError, match="out of slots: 6 needed"):
            draft.open(opening([1] * 6, key=2))
        draft.check_integrity()

    def test_committed_tokens_take_the_slots_of_draft_tokens(self) -> None:
        draft = DraftModelSpeculator(table(slots=40), 3)
        first = drafted(draft, opening([1] * 10, key=1))
        drafted(draft, opening([2] * 20, key=2))
        draft.check_integrity()
        later = drafted(draft, opening([3] * 9, key=3))
        assert later.tree.size > 0
        draft.commit(first.commit([first.tree.tokens[n] for n in first.tree.best(2, 2)][:1]))
        draft.check_integrity()

    def test_a_request_without_slots_is_dropped_and_others_go_on(self) -> None:
        draft = DraftModelSpeculator(table(slots=20), 1)
        first, second = (drafted(draft, opening([key] * 9, key=key, depth=2)) for key in (1, 2))
        draft.commit(first.commit([1, 2]))
        with pytest.raises(DraftError, match="out of slots"):
            draft.commit(second.commit([3]))
        draft.close(2)
        draft.check_integrity()
        for grown in rounds(draft):
            first.graft(grown[1])
        assert [n.token for n in chain(first.tree)] == decoded(table(), first.tokens, GREEDY, 2)

    def test_the_engine_gets_the_lost_requests(self) -> None:
        drafting = LocalDraftClient(DraftModelSpeculator(table(slots=10), 1))
        assert drafting.open(opening([1] * 9, key=1), ()) == "local"
        assert drafting.open(opening([1] * 9, key=2), ()) is None
        drafting.commit(Commit(1, 8, [1, 2], 0))
        assert drafting.poll(0.0).lost == [1]
        assert drafting.poll(0.0).lost == []


def committed(tree: TokenTree, rng: random.Random) -> list[int]:
    """Tokens that a target may draw: some way down the tree, then often one that was not drafted."""
    tokens: list[int] = []
    node = root_of(tree)
    while node.children and rng.random() < 0.7:
        node = rng.choice(list(node.children.values()))
        tokens.append(node.token)
    return tokens if tokens and rng.random() < 0.4 else [*tokens, rng.randrange(VOCABULARY)]
