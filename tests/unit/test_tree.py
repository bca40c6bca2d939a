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

from paceline.tree import ROOT_ID, TRAIL, Growth, Node, TokenTree

VOCABULARY = 3
ROOM = 1000


def guesses(tree: TokenTree) -> set[tuple[int, ...]]:
    """The tree's content: every guess as the tokens from the root down to it."""
    return {tuple(n.token for n in node.path()) for node in tree.nodes()}


def check_books(tree: TokenTree) -> None:
    """What must hold after any message whatsoever."""
    nodes = list(tree.nodes())
    assert tree.size == len(nodes) == len(set(map(id, nodes)))
    assert tree.root.parent is None
    for parent in (tree.root, *nodes):
        for token, child in parent.children.items():
            assert (child.token, child.position) == (token, parent.position + 1)
            assert child.parent is parent
            assert -math.inf < child.path_log_prob <= parent.path_log_prob <= 0
            assert child.path_log_prob == pytest.approx(parent.path_log_prob + child.log_prob)
    assert all(node.parent is tree.root or node.parent in nodes[:i] for i, node in enumerate(nodes))
    named = [node for names in tree._by_id.values() for node in names.values()]
    assert all(node in (tree.root, *nodes) or tree._trail[node.position] is node for node in named)


def chances(tree: TokenTree) -> dict[int, float]:
    """By token, where all differ: the probability of the path down to it."""
    return {node.token: math.exp(node.path_log_prob) for node in tree.best(99, 99)}


def chain(tree: TokenTree, tokens: Sequence[int]) -> list[Node]:
    nodes: list[Node] = []
    for token in tokens:
        nodes.append(tree.add(nodes[-1] if nodes else tree.root, token, -0.5))
    return nodes


class TestExamples:
    def test_the_committed_path_survives_and_its_siblings_do_not(self) -> None:
        tree = TokenTree(9, 0)
        first, second, third = chain(tree, [1, 2, 3])
        tree.add(tree.root, 4, -1.0)
        tree.add(first, 5, -1.0)

        committed = tree.commit([1, 2])

        assert committed.path == [first, second]
        assert committed.missed is None
        assert (tree.root, tree.root.position) == (second, 11)
        assert guesses(tree) == {(3,)}
        assert third.path_log_prob == third.log_prob
        check_books(tree)

    def test_a_miss_leaves_an_empty_tree_at_the_drawn_token(self) -> None:
        tree = TokenTree(9, 0)
        first, *_ = chain(tree, [1, 2, 3])

        committed = tree.commit([1, 7])

        assert committed.path == [first]
        assert committed.missed == 7
        assert (tree.root.token, tree.root.position, tree.size) == (7, 11, 0)

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
        late = draft.growth(chain(draft, [1] * (TRAIL + 2)))
        for _ in range(TRAIL - 1):
            target.commit([1])
        assert target.graft(late, ROOM) == 3

        for _ in range(3):
            target.commit([1])
        assert target.graft(late, ROOM) == 0
        assert len(target._by_id[0]) <= TRAIL

    def test_a_full_tree_takes_no_more(self) -> None:
        draft, target = TokenTree(9, 0), TokenTree(9, 0)
        growth = draft.growth(chain(draft, [1, 2, 3, 4]))

        assert target.graft(growth, max_size=3) == 3
        assert target.graft(growth, max_size=3) == 0
        assert target.graft(growth, max_size=ROOM) == 1

    def test_a_second_child_for_a_token_is_refused(self) -> None:
        tree = TokenTree(9, 0)
        tree.add(tree.root, 1, -0.5)
        with pytest.raises(ValueError, match="already has a child"):
            tree.add(tree.root, 1, -0.5)

    def test_a_weighed_tree_ranks_by_the_corrected_value(self) -> None:
        tree = TokenTree(9, 0, lambda source: lambda log_prob, rank, depth: (0, 2 * log_prob))
        first = tree.add(tree.root, 1, -0.5)
        second = tree.add(first, 2, -0.25)
        assert (second.log_prob, second.path_log_prob) == (-0.5, -1.5)

        tree.commit([1])
        assert second.path_log_prob == -0.5

    def test_a_guess_remembers_which_choice_it_was_and_how_far_ahead(self) -> None:
        weighed: list[tuple[float, int, int]] = []

        def weigh(log_prob: float, rank: int, depth: int) -> tuple[int, float]:
            weighed.append((log_prob, rank, depth))
            return len(weighed), log_prob

        tree = TokenTree(9, 0, lambda source: weigh)
        tree.graft(Growth(9, 1, [0, 1, 1], [1, 2, 3], [-0.1, -0.2, -0.3]), ROOM)
        tree.commit([1])
        tree.graft(Growth(9, 4, [2], [4], [-0.4]), ROOM)
        assert weighed == [(-0.1, 0, 1), (-0.2, 0, 2), (-0.3, 1, 2), (-0.4, 0, 2)]
        tree.commit([2])
        [node] = tree.nodes()
        assert (node.token, node.cells) == (4, {0: 4}), "as when it came"

    def test_each_draft_has_first_choices_of_its_own(self) -> None:
        """One that guesses what another has guessed made that choice all the same."""
        tree = TokenTree(9, 0, lambda source: lambda log_prob, rank, depth: (rank, log_prob))
        tree.graft(Growth(9, 1, [0, 0], [1, 2], [-0.5] * 2), ROOM, source=0)
        tree.graft(Growth(9, 1, [0, 0, 0], [3, 2, 4], [-0.5] * 3), ROOM, source=1)
        ranks = {node.token: node.cells for node in tree.nodes()}
        assert ranks == {1: {0: 0}, 2: {0: 1, 1: 1}, 3: {1: 0}, 4: {1: 2}}

    def test_of_two_who_guess_the_same_the_surer_one_counts(self) -> None:
        tree = TokenTree(9, 0)
        tree.graft(Growth(9, 1, [0, 1], [1, 2], [math.log(0.6), math.log(0.5)]), ROOM, source=1)
        assert chances(tree) == pytest.approx({1: 0.6, 2: 0.3})
        assert tree.graft(Growth(9, 1, [0], [1], [math.log(0.9)]), ROOM) == 0
        check_books(tree)
        assert chances(tree) == pytest.approx({1: 0.9, 2: 0.45}), "not as remembered"
        assert {node.token: node.source for node in tree.nodes()} == {1: 0, 2: 1}, "who is surest"
        tree.graft(Growth(9, 9, [0], [1], [0.0]), ROOM)
        assert chances(tree)[1] == pytest.approx(0.9), "a draft guesses each once"
        tree.graft(Growth(9, 2, [1], [2], [math.log(0.1)]), ROOM)
        assert chances(tree)[2] == pytest.approx(0.45), "the less sure does not count"
        assert [sorted(node.cells) for node in tree.nodes()] == [[0, 1], [0, 1]], "but is learned of"

    def test_the_best_are_others_once_somebody_is_surer(self) -> None:
        tree = TokenTree(9, 0)
        tree.graft(Growth(9, 1, [0], [1], [math.log(0.4)]), ROOM, source=1)
        tree.graft(Growth(9, 1, [0], [2], [math.log(0.5)]), ROOM)
        assert [node.token for node in tree.best(9, 9)] == [2, 1]
        tree.graft(Growth(9, 1, [0], [1], [math.log(0.9)]), ROOM, source=2)
        assert [node.token for node in tree.best(9, 9)] == [1, 2], "what was remembered is out of date"

    def test_in_a_chain_nobody_is_believed_for_having_drawn_it_again(self) -> None:
        """What is drawn from a law must be verified whatever was drawn."""
        tree = TokenTree(9, 0, width=1)
        tree.graft(Growth(9, 1, [0], [1], [-1.0], [{1: 1, 2: 1}]), ROOM, source=1)
        tree.graft(Growth(9, 1, [0], [1], [-0.1], [{1: 9, 2: 1}]), ROOM)
        [node] = tree.nodes()
        assert (node.path_log_prob, node.law) == (-1.0, {1: 1, 2: 1})


class TestBest:
    @staticmethod
    def random_tree(rng: random.Random, size: int) -> TokenTree:
        tree = TokenTree(4, 0)
        nodes = [tree.root]
        while tree.size < size:
            parent, token = rng.choice(nodes), rng.randrange(VOCABULARY)
            if token not in parent.children:
                # Multiples of a power of two: sums are exact, and ties do happen.
                nodes.append(tree.add(parent, token, -rng.randrange(5) / 4))
        return tree

    @pytest.mark.parametrize("seed", range(30))
    def test_no_closed_set_of_that_size_is_worth_more(self, seed: int) -> None:
        rng = random.Random(seed)
        tree = self.random_tree(rng, 8)
        count, max_depth = rng.randint(0, 9), rng.randint(0, 4)
        reachable = [n for n in tree.nodes() if n.position - 4 <= max_depth]

        def closed(nodes: tuple[Node, ...]) -> bool:
            return all(n.parent is tree.root or n.parent in nodes for n in nodes)

        best = tree.best(count, max_depth)

        assert len(best) == min(count, len(reachable))
        assert all(n.parent is tree.root or n.parent in best[:i] for i, n in enumerate(best))
        worths = [
            sum(math.exp(n.path_log_prob) for n in nodes)
            for nodes in itertools.combinations(reachable, len(best))
            if closed(nodes)
        ]
        assert sum(math.exp(n.path_log_prob) for n in best) == pytest.approx(max(worths))
        assert [n.path_log_prob for n in best] == sorted((n.path_log_prob for n in best), reverse=True)


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
            parents = [draft.root, *draft.nodes()]
            parent = parents[data.draw(st.integers(0, len(parents) - 1))]
            tokens = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4))
            nodes: list[Node] = []
            for token in tokens:
                known = parent.children.get(token)
                parent = known or draft.add(parent, token, -0.5)
                if known is None:
                    nodes.append(parent)
            sent.append(draft.growth(nodes))
            before = sum(map(len, commits[:told])) + 1
            guessed.update((*committed[:before], *(n.token for n in node.path())) for node in nodes)

        def deliver() -> None:
            if sent:
                target.graft(sent[data.draw(st.integers(0, len(sent) - 1))], ROOM)

        def commit() -> None:
            tokens, node = [], target.root
            while node.children and data.draw(st.booleans()):
                node = node.children[data.draw(st.sampled_from(sorted(node.children)))]
                tokens.append(node.token)
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
        assert (target.root.token, target.root.position) == (draft.root.token, draft.root.position)


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
        assert len(tree._by_id[0]) == 2

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
            Growth(*growth)

    def test_a_node_cannot_be_its_own_ancestor(self) -> None:
        tree = TokenTree(0, 0)
        assert tree.graft(Growth(0, 1, [2, 1, 3], [5, 5, 5], [-0.5] * 3), ROOM) == 0
        assert tree.graft(Growth(0, 1, [0, 1], [5, 5], [-0.5] * 2), ROOM) == 2
        assert tree.graft(Growth(0, 1, [2], [5], [-0.5]), ROOM) == 0
        check_books(tree)


def test_the_best_are_those_of_the_tree_as_it_is() -> None:
    tree = TokenTree(0, 1)
    first = tree.add(tree.root, 2, -0.1)
    assert tree.best(4, 4) == [first]
    second = tree.add(first, 3, -0.1)
    assert tree.best(4, 4) == [first, second]
    tree.commit([2])
    assert tree.best(4, 4) == [second]
    tree.commit([9])
    assert tree.best(4, 4) == []


def test_what_is_forgotten_is_free_without_the_garbage_collector() -> None:
    tree = TokenTree(9, 0)
    chain(tree, [1, 2, 3])
    tree.add(tree.root, 4, -1.0)
    gc.collect()
    gc.disable()
    try:
        tree.commit([4])
        assert gc.collect() == 0
    finally:
        gc.enable()
