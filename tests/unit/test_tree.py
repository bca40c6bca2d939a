"""The token tree: replicas agree whatever the network does, and no growth can corrupt one."""

from __future__ import annotations

import gc
import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.growth import ROOT_ID, Growth
from paceline.core.tree import RECENT_POSITIONS, ROOT, TokenTree
from tests.helpers.seen import Weighing

VOCABULARY = 3
ROOM = 1000


def guesses(tree: TokenTree) -> set[tuple[int, ...]]:
    """The tree's content: every guess as the tokens from the root down to it."""
    return {tuple(tree.path_tokens(node)) for node in tree.nodes()}


def check_books(tree: TokenTree) -> None:
    """What must hold after any message whatsoever."""
    nodes = tree.nodes()
    lists = (tree.tokens, tree.parents, tree.depths, tree.path_log_probs, tree.sources, tree.calibration_cells)
    assert {len(each) for each in lists} == {tree.size + 1} == {len(nodes) + 1}
    assert (tree.parents[ROOT], tree.depths[ROOT], tree.path_log_probs[ROOT]) == (-1, 0, 0.0)
    assert tree._children == {(tree.parents[node], tree.tokens[node]): node for node in nodes}, "each guess once"
    for node in nodes:
        parent = tree.parents[node]
        assert ROOT <= parent < node
        assert tree.child(parent, tree.tokens[node]) == node
        assert tree.depths[node] == tree.depths[parent] + 1
        assert -math.inf < tree.path_log_probs[node] <= tree.path_log_probs[parent] <= 0
        assert tree.path_log_probs[node] == pytest.approx(tree.path_log_probs[parent] + tree.log_prob(node))
    for names in tree._draft_ids.values():
        assert set(names.nodes.values()) <= set(nodes)
        assert len(set(names.nodes.values())) == len(names.nodes), "one id each"
        assert max(names.ids, default=0) <= tree.position
        assert names.committed == {id_: position for position, id_ in names.ids.items()}
        assert set(names.child_counts) <= {ROOT, *nodes}
    assert tree._recent_tokens[-1] == tree.tokens[ROOT]
    assert tree.distributions.keys() | tree._other_sources.keys() | tree._wire_ids.keys() <= set(nodes)


def chances(tree: TokenTree) -> dict[int, float]:
    """By token, where all differ: the probability of the path down to it."""
    return {tree.tokens[node]: math.exp(tree.path_log_probs[node]) for node in tree.best(99, 99)}


def chain(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    nodes: list[int] = []
    for token in tokens:
        nodes.append(tree.add(nodes[-1] if nodes else ROOT, token, -0.5))
    return nodes


def best_tokens(tree: TokenTree) -> list[int]:
    return [tree.tokens[node] for node in tree.best(9, 9)]


def cells(tree: TokenTree) -> dict[int, dict[int, int]]:
    """By token, where all differ, and draft: with which guesses the outcome is counted."""
    found: dict[int, dict[int, int]] = {token: {} for token in tree.tokens[1:]}
    for node in (ROOT, *tree.nodes()):
        for guess, source, cell, _ in tree.outcomes(tree.path(node), [*tree.path_tokens(node), -1]):
            found[tree.tokens[guess]][source] = cell
    return found


class TestExamples:
    def test_the_committed_path_survives_and_its_siblings_do_not(self) -> None:
        tree = TokenTree(9, 0)
        first, second, third = chain(tree, [1, 2, 3])
        tree.add(ROOT, 4, -1.0)
        tree.add(first, 5, -1.0)

        committed = tree.commit([1, 2])

        assert committed.path == [first, second]
        assert committed.kept == [third]
        assert (tree.tokens[ROOT], tree.position) == (2, 11)
        assert guesses(tree) == {(3,)}
        assert tree.path_log_probs[1] == tree.log_prob(1) == -0.5
        check_books(tree)

    def test_a_commit_tells_what_each_survivor_was(self) -> None:
        tree = TokenTree(9, 0)
        first = tree.add(ROOT, 1, -0.1)
        other = tree.add(ROOT, 2, -0.2)
        tree.add(first, 3, -0.3)
        below, beside = tree.add(other, 4, -0.4), tree.add(other, 5, -0.5)
        last = tree.add(below, 6, -0.6)
        kept_beside_the_tree = {node: tree.tokens[node] for node in tree.nodes()}

        committed = tree.commit([2])

        assert (committed.path, committed.kept) == ([other], [below, beside, last])
        assert [kept_beside_the_tree[old] for old in committed.kept] == tree.tokens[1:] == [4, 5, 6]
        assert (tree.parents, tree.depths) == ([-1, ROOT, ROOT, 1], [0, 1, 1, 2])
        check_books(tree)

    def test_a_miss_leaves_an_empty_tree_at_the_drawn_token(self) -> None:
        tree = TokenTree(9, 0)
        first, *_ = chain(tree, [1, 2, 3])

        committed = tree.commit([1, 7])

        assert (committed.path, committed.kept) == ([first], [])
        assert (tree.tokens[ROOT], tree.position, tree.size) == (7, 11, 0)

    def test_growth_that_names_committed_parents_finds_its_place(self) -> None:
        """The draft guessed 1 2 3 4 while the target drew 1 2 by itself: 3 and 4 are still good guesses."""
        draft, target = TokenTree(9, 0), TokenTree(9, 0)
        late = draft.growth(chain(draft, [1, 2, 3, 4]))
        target.commit([1])
        target.commit([2])

        assert target.graft(late, ROOM) == 2
        assert guesses(target) == {(3,), (3, 4)}

    def test_growth_that_names_a_wrong_turn_is_dropped(self) -> None:
        draft, target = TokenTree(9, 0), TokenTree(9, 0)
        late = draft.growth(chain(draft, [1, 2, 3]))
        target.commit([1, 7])

        assert target.graft(late, ROOM) == 0
        assert guesses(target) == set()

    def test_growth_below_a_forgotten_guess_is_dropped(self) -> None:
        draft, target = TokenTree(9, 0), TokenTree(9, 0)
        known = chain(draft, [1, 2])
        target.graft(draft.growth(known), ROOM)
        late = [draft.growth([draft.add(node, 3, -0.5)]) for node in known]
        target.commit([7])

        assert [target.graft(growth, ROOM) for growth in late] == [0, 0]
        check_books(target)

    def test_growth_after_a_commit_the_target_made_may_hang_from_its_root(self) -> None:
        draft, target = TokenTree(9, 0), TokenTree(9, 0)
        draft.commit([5])
        target.commit([5])

        assert target.graft(draft.growth(chain(draft, [6, 7])), ROOM) == 2
        assert guesses(target) == {(6,), (6, 7)}

    def test_another_draft_continues_from_the_guesses_of_the_first(self) -> None:
        first, second, target = TokenTree(9, 0), TokenTree(9, 0), TokenTree(9, 0)
        target.graft(first.growth(chain(first, [1, 2])), ROOM)
        target.forget_ids()

        assert target.graft(second.growth(chain(second, [1, 3])), ROOM) == 1
        assert guesses(target) == {(1,), (1, 2), (1, 3)}

    def test_growth_behind_the_trail_is_dropped(self) -> None:
        draft, target = TokenTree(0, 0), TokenTree(0, 0)
        late = draft.growth(chain(draft, [1] * (RECENT_POSITIONS + 2)))
        for _ in range(RECENT_POSITIONS - 1):
            target.commit([1])
        assert target.graft(late, ROOM) == 3

        for _ in range(3):
            target.commit([1])
        assert target.graft(late, ROOM) == 0

    def test_old_names_are_forgotten(self) -> None:
        draft, target = TokenTree(0, 0), TokenTree(0, 0)
        for i in range(5 * RECENT_POSITIONS):
            growth = draft.growth(chain(draft, [1]))
            assert target.graft(growth, ROOM) == 1
            assert target.graft(Growth(i, 9 * RECENT_POSITIONS + i, [ROOT_ID], [1], [-0.5]), ROOM) == 0
            for tree in (draft, target):
                tree.commit([1])
            names = target._draft_ids[0]
            assert not names.nodes
            assert names.committed[growth.first_id] == target.position
            assert max(len(names.committed), len(names.ids), len(target._recent_tokens)) <= 2 * RECENT_POSITIONS

    def test_a_full_tree_takes_no_more(self) -> None:
        draft, target = TokenTree(9, 0), TokenTree(9, 0)
        growth = draft.growth(chain(draft, [1, 2, 3, 4]))

        assert target.graft(growth, max_size=3) == 3
        assert target.graft(growth, max_size=3) == 0
        assert target.graft(growth, max_size=ROOM) == 1

    def test_a_second_child_for_a_token_is_refused(self) -> None:
        tree = TokenTree(9, 0)
        tree.add(ROOT, 1, -0.5)
        with pytest.raises(ValueError, match="already has a child"):
            tree.add(ROOT, 1, -0.5)

    def test_a_weighed_tree_ranks_by_the_corrected_value(self) -> None:
        tree = TokenTree(9, 0, {0: Weighing(lambda log_prob, rank, depth: (0, 2 * log_prob))})
        tree.graft(Growth(9, 1, [0, 1], [1, 2], [-0.5, -0.25]), ROOM)
        assert (tree.log_prob(2), tree.path_log_probs[2]) == (-0.5, -1.5)

        tree.commit([1])
        assert tree.path_log_probs[1] == -0.5

    def test_a_guess_remembers_which_choice_it_was_and_how_far_ahead(self) -> None:
        weighed: list[tuple[float, int, int]] = []

        def weigh(log_prob: float, rank: int, depth: int) -> tuple[int, float]:
            weighed.append((log_prob, rank, depth))
            return len(weighed), log_prob

        tree = TokenTree(9, 0, {0: Weighing(weigh)})
        tree.graft(Growth(9, 1, [0, 1, 1], [1, 2, 3], [-0.1, -0.2, -0.3]), ROOM)
        tree.commit([1])
        tree.graft(Growth(9, 4, [2], [4], [-0.4]), ROOM)
        assert weighed == [(-0.1, 0, 1), (-0.2, 0, 2), (-0.3, 1, 2), (-0.4, 0, 2)]
        tree.commit([2])
        assert cells(tree) == {4: {0: 4}}, "as when it came"

    def test_each_draft_has_first_choices_of_its_own(self) -> None:
        """One that guesses what another has guessed made that choice all the same."""
        ranks = Weighing(lambda log_prob, rank, depth: (rank, log_prob))
        tree = TokenTree(9, 0, {0: ranks, 1: ranks})
        tree.graft(Growth(9, 1, [0, 0], [1, 2], [-0.5] * 2), ROOM, source=0)
        tree.graft(Growth(9, 1, [0, 0, 0], [3, 2, 4], [-0.5] * 3), ROOM, source=1)
        assert cells(tree) == {1: {0: 0}, 2: {0: 1, 1: 1}, 3: {1: 0}, 4: {1: 2}}

    def test_of_two_who_guess_the_same_the_surer_one_counts(self) -> None:
        tree = TokenTree(9, 0)
        tree.graft(Growth(9, 1, [0, 1], [1, 2], [math.log(0.6), math.log(0.5)]), ROOM, source=1)
        assert chances(tree) == pytest.approx({1: 0.6, 2: 0.3})
        assert tree.graft(Growth(9, 1, [0], [1], [math.log(0.9)]), ROOM) == 0
        check_books(tree)
        assert chances(tree) == pytest.approx({1: 0.9, 2: 0.45}), "not as remembered"
        assert dict(zip(tree.tokens[1:], tree.sources[1:], strict=True)) == {1: 0, 2: 1}, "who is surest"
        tree.graft(Growth(9, 9, [0], [1], [0.0]), ROOM)
        assert chances(tree)[1] == pytest.approx(0.9), "a draft guesses each once"
        tree.graft(Growth(9, 2, [1], [2], [math.log(0.1)]), ROOM)
        assert chances(tree)[2] == pytest.approx(0.45), "the less sure does not count"
        assert cells(tree) == {1: {0: 0, 1: 0}, 2: {0: 0, 1: 0}}, "but is learned of"
        assert all(tree.guessed_by(source, node) for source in (0, 1) for node in tree.nodes())
        assert not tree.guessed_by(2, 1)

    def test_the_best_are_others_once_somebody_is_surer(self) -> None:
        tree = TokenTree(9, 0)
        tree.graft(Growth(9, 1, [0], [1], [math.log(0.4)]), ROOM, source=1)
        tree.graft(Growth(9, 1, [0], [2], [math.log(0.5)]), ROOM)
        assert best_tokens(tree) == [2, 1]
        tree.graft(Growth(9, 1, [0], [1], [math.log(0.9)]), ROOM, source=2)
        assert best_tokens(tree) == [1, 2], "what was remembered is out of date"

    def test_in_a_chain_nobody_is_believed_for_having_drawn_it_again(self) -> None:
        """What is drawn from a law must be verified whatever was drawn."""
        tree = TokenTree(9, 0, chain=True)
        tree.graft(Growth(9, 1, [0], [1], [-1.0], [{1: 1, 2: 1}]), ROOM, source=1)
        tree.graft(Growth(9, 1, [0], [1], [-0.1], [{1: 9, 2: 1}]), ROOM)
        assert (tree.path_log_probs, tree.distributions) == ([0.0, -1.0], {1: {1: 1, 2: 1}})


class TestBest:
    @staticmethod
    def random_tree(rng: random.Random, size: int) -> TokenTree:
        tree = TokenTree(4, 0)
        while tree.size < size:
            parent, token = rng.randrange(tree.size + 1), rng.randrange(VOCABULARY)
            if tree.child(parent, token) is None:
                # Multiples of a power of two: sums are exact, and ties do happen.
                tree.add(parent, token, -rng.randrange(5) / 4)
        return tree

    @pytest.mark.parametrize("seed", range(30))
    def test_no_closed_set_of_that_size_is_worth_more(self, seed: int) -> None:
        rng = random.Random(seed)
        tree = self.random_tree(rng, 8)
        count, max_depth = rng.randint(0, 9), rng.randint(0, 4)
        reachable = [n for n in tree.nodes() if tree.depths[n] <= max_depth]
        parents, paths = tree.parents, tree.path_log_probs

        def closed(nodes: tuple[int, ...]) -> bool:
            return all(parents[n] == ROOT or parents[n] in nodes for n in nodes)

        best = tree.best(count, max_depth)

        assert len(best) == min(count, len(reachable))
        assert all(parents[n] == ROOT or parents[n] in best[:i] for i, n in enumerate(best))
        worths = [
            sum(math.exp(paths[n]) for n in nodes)
            for nodes in itertools.combinations(reachable, len(best))
            if closed(nodes)
        ]
        assert sum(math.exp(paths[n]) for n in best) == pytest.approx(max(worths))
        assert [paths[n] for n in best] == sorted((paths[n] for n in best), reverse=True)


class TestReplicas:
    """One draft, one target, and a network that delays, doubles, reorders and loses growth.

    Commits arrive in order, since both come from one stream, but as late as they like.
    """

    @settings(deadline=None)
    @given(st.data())
    def test_replicas_converge(self, data: st.DataObject) -> None:
        draft, target = TokenTree(0, 0), TokenTree(0, 0)
        committed: list[int] = [0]  # by the target
        told = 0  # commits that the draft knows of
        commits: list[list[int]] = []
        sent: list[Growth] = []
        guessed: set[tuple[int, ...]] = set()  # as whole sequences

        def grow() -> None:
            parent = data.draw(st.integers(0, draft.size))
            tokens = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4))
            nodes: list[int] = []
            for token in tokens:
                known = draft.child(parent, token)
                parent = known or draft.add(parent, token, -0.5)
                if known is None:
                    nodes.append(parent)
            sent.append(draft.growth(nodes))
            before = sum(map(len, commits[:told])) + 1
            guessed.update((*committed[:before], *draft.path_tokens(node)) for node in nodes)

        def deliver() -> None:
            if sent:
                target.graft(sent[data.draw(st.integers(0, len(sent) - 1))], ROOM)

        def commit() -> None:
            node = ROOT
            while (children := target.children(node)) and data.draw(st.booleans()):
                node = data.draw(st.sampled_from(sorted(children, key=target.tokens.__getitem__)))
            tokens = target.path_tokens(node)
            tokens.append(data.draw(st.integers(0, VOCABULARY - 1)))
            target.commit(tokens)
            commits.append(tokens)
            committed.extend(tokens)

        def tell() -> None:
            nonlocal told
            if told < len(commits):
                draft.commit(commits[told])
                told += 1

        def check() -> None:
            check_books(draft)
            check_books(target)
            assert all((*committed, *guess) in guessed for guess in guesses(target))

        acts = st.sampled_from([grow, grow, deliver, deliver, commit, tell])
        for act in data.draw(st.lists(acts, max_size=25)):
            act()
            check()
        while told < len(commits):
            tell()
        for growth in sent:
            target.graft(growth, ROOM)
        check()
        assert guesses(target) == guesses(draft)
        assert (target.tokens[ROOT], target.position) == (draft.tokens[ROOT], draft.position)


class TestHostileGrowth:
    IDS = st.integers(0, 6) | st.integers(0, 2**32 - 1)
    LOG_PROBS = st.floats(allow_nan=False) | st.just(-math.inf) | st.just(1e308)

    @settings(deadline=None)
    @given(st.data())
    def test_whatever_arrives_the_tree_stays_whole(self, data: st.DataObject) -> None:
        tree, limit = TokenTree(3, 0), 12
        for _ in range(data.draw(st.integers(1, 6))):
            count = data.draw(st.integers(0, 12))

            def many(values: st.SearchStrategy[int], count: int = count) -> list[int]:
                return data.draw(st.lists(values, min_size=count, max_size=count))

            growth = Growth(
                base_position=data.draw(st.integers(0, 8) | st.integers(0, 2**32 - 1)),
                first_id=data.draw(self.IDS.filter(bool)),
                parent_ids=many(self.IDS),
                tokens=many(st.integers(0, VOCABULARY)),
                log_probs=data.draw(st.lists(self.LOG_PROBS, min_size=count, max_size=count)),
            )
            before = tree.size
            assert tree.graft(growth, limit) == tree.size - before
            assert tree.size <= limit
            check_books(tree)
            if data.draw(st.booleans()):
                tree.commit(data.draw(st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=3)))
                check_books(tree)
            assert len(tree.best(limit, limit)) == tree.size

    def test_a_million_names_for_one_node_are_not_remembered(self) -> None:
        tree = TokenTree(0, 0)
        tree.commit([1])
        count = 100_000
        for parent_position in (0, 1):  # a committed node, and a guess
            first_id = 1 + parent_position * count
            tree.graft(Growth(parent_position, first_id, [ROOT_ID] * count, [1] * count, [-0.5] * count), 10)
        assert tree.size == 1
        assert len(tree._draft_ids[0].committed) == len(tree._draft_ids[0].nodes) == 1

    @pytest.mark.parametrize(
        ("growth", "complaint"),
        [
            ((0, 1, [0], [5, 5], [-0.5, -0.5]), "lengths"),
            ((0, 1, range(10**6), [5], [-0.5]), "lengths"),
            ((0, 1, [0], [5], []), "lengths"),
            ((0, 0, [0], [5], [-0.5]), "not positive"),
            ((0, -1, [0], [5], [-0.5]), "not positive"),
            ((0, 1, [0], [5], [math.nan]), "not a number"),
        ],
    )
    def test_growth_that_breaks_the_contract_is_an_error(
        self, growth: tuple[int, int, Sequence[int], Sequence[int], Sequence[float]], complaint: str
    ) -> None:
        with pytest.raises(ValueError, match=complaint):
            Growth(*growth).check()

    def test_a_node_cannot_be_its_own_ancestor(self) -> None:
        tree = TokenTree(0, 0)
        assert tree.graft(Growth(0, 1, [2, 1, 3], [5, 5, 5], [-0.5] * 3), ROOM) == 0
        assert tree.graft(Growth(0, 1, [0, 1], [5, 5], [-0.5] * 2), ROOM) == 2
        assert tree.graft(Growth(0, 1, [2], [5], [-0.5]), ROOM) == 0
        check_books(tree)


def test_the_best_are_those_of_the_tree_as_it_is() -> None:
    tree = TokenTree(0, 1)
    first = tree.add(ROOT, 2, -0.1)
    assert tree.best(4, 4) == [first]
    second = tree.add(first, 3, -0.1)
    assert tree.best(4, 4) == [first, second]
    tree.graft(Growth(0, 1, [0], [4], [-0.05]), ROOM)
    assert [tree.tokens[node] for node in tree.best(4, 4)] == [4, 2, 3]
    tree.commit([2])
    assert [tree.tokens[node] for node in tree.best(4, 4)] == [3]
    tree.commit([9])
    assert tree.best(4, 4) == []


def test_what_is_forgotten_is_free_without_the_garbage_collector() -> None:
    tree = TokenTree(9, 0)
    chain(tree, [1, 2, 3])
    tree.add(ROOT, 4, -1.0)
    gc.collect()
    gc.disable()
    try:
        tree.commit([4])
        assert gc.collect() == 0
    finally:
        gc.enable()
