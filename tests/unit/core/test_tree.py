"""The token tree: replicas agree over an unreliable network, and no growth corrupts a tree."""

from __future__ import annotations

import gc
import itertools
import math
import pickle
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.growth import ROOT_ID, Growth
from paceline.core.tree import RECENT_POSITIONS, ROOT, TokenTree
from tests.helpers.seen import FunctionTable

VOCABULARY = 3
MAX_NODES = 1000


def token_paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """Every node, as the tokens from the root down to it."""
    return {tuple(tree.path_tokens(node)) for node in tree.nodes()}


def check_consistency(tree: TokenTree) -> None:
    nodes = tree.nodes()
    lists = (tree.tokens, tree.parents, tree.depths, tree.path_log_probs, tree.sources, tree.calibration_cells)
    assert {len(each) for each in lists} == {tree.size + 1}
    assert (tree.parents[ROOT], tree.depths[ROOT], tree.path_log_probs[ROOT]) == (-1, 0, 0.0)
    assert len(token_paths(tree)) == tree.size, "each node once"
    for node in nodes:
        parent = tree.parents[node]
        assert ROOT <= parent < node
        assert tree.child(parent, tree.tokens[node]) == node
        assert tree.depths[node] == tree.depths[parent] + 1
        assert -math.inf < tree.path_log_probs[node] <= tree.path_log_probs[parent] <= 0
        assert tree.path_log_probs[node] == pytest.approx(tree.path_log_probs[parent] + tree.log_prob(node))
    tokens = range(VOCABULARY + 1)
    children = [child for node in (ROOT, *nodes) for token in tokens if (child := tree.child(node, token))]
    assert sorted(children) == [node for node in nodes if tree.tokens[node] in tokens]
    assert tree.distributions.keys() <= set(nodes)


def path_probs(tree: TokenTree) -> dict[int, float]:
    """Path probability by token, where all tokens differ."""
    return {tree.tokens[node]: math.exp(tree.path_log_probs[node]) for node in tree.best(99, 99)}


def chain(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    nodes: list[int] = []
    for token in tokens:
        nodes.append(tree.add(nodes[-1] if nodes else ROOT, token, -0.5))
    return nodes


def cells(tree: TokenTree) -> dict[int, dict[int, int]]:
    """Calibration cell by token, where all tokens differ, and draft."""
    found: dict[int, dict[int, int]] = {token: {} for token in tree.tokens[1:]}
    for node in (ROOT, *tree.nodes()):
        for guess, source, cell, _ in tree.outcomes(tree.path(node), [*tree.path_tokens(node), -1]):
            found[tree.tokens[guess]][source] = cell
    return found


def bytes_kept(tree: TokenTree) -> int:
    """How much a tree remembers."""
    return len(pickle.dumps(tree))


class TestCommits:
    def test_survivors_are_renumbered(self) -> None:
        tree = TokenTree(9, 0)
        first = tree.add(ROOT, 1, -0.1)
        other = tree.add(ROOT, 2, -0.2)
        tree.add(first, 3, -0.3)
        below, sibling = tree.add(other, 4, -0.4), tree.add(other, 5, -0.5)
        last = tree.add(below, 6, -0.6)

        assert tree.commit([2]) == ([other], [below, sibling, last])

        assert (tree.tokens, tree.position) == ([2, 4, 5, 6], 10)
        assert (tree.parents, tree.depths) == ([-1, ROOT, ROOT, 1], [0, 1, 1, 2])
        assert tree.path_log_probs == pytest.approx([0.0, -0.4, -0.5, -1.0])

    def test_a_miss_leaves_an_empty_tree(self) -> None:
        tree = TokenTree(9, 0)
        first, *_ = chain(tree, [1, 2, 3])
        assert tree.commit([1, 7]) == ([first], [])
        assert (tree.tokens, tree.position, tree.size) == ([7], 11, 0)

    def test_a_commit_leaves_no_reference_cycles(self) -> None:
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


class TestGrowth:
    def test_late_growth_joins_below_what_was_committed(self) -> None:
        """The draft sent 1 2 3 4 while the target drew 1 2 by itself: 3 and 4 can still be verified."""
        draft, target = TokenTree(9, 0), TokenTree(9, 0)
        late = draft.growth(chain(draft, [1, 2, 3, 4]))
        target.commit([1])
        target.commit([2])
        assert target.graft(late, MAX_NODES) == 2
        assert token_paths(target) == {(3,), (3, 4)}

    def test_late_growth_below_a_wrong_guess_is_dropped(self) -> None:
        """It guessed 5 where 1 was drawn, and then 2, which was drawn after 1: what follows belongs nowhere."""
        tree = TokenTree(9, 0)
        tree.commit([1, 2])
        assert tree.graft(Growth(9, 1, [0, 1, 2], [5, 2, 7], [-0.1, -0.1, -0.1]), MAX_NODES) == 0
        assert tree.graft(Growth(9, 4, [0, 4, 5], [1, 2, 7], [-0.1, -0.1, -0.1]), MAX_NODES) == 1
        assert token_paths(tree) == {(7,)}

    def test_another_draft_continues_the_tree(self) -> None:
        first, second, target = TokenTree(9, 0), TokenTree(9, 0), TokenTree(9, 0)
        target.graft(first.growth(chain(first, [1, 2])), MAX_NODES)
        target.forget_ids()
        assert target.graft(second.growth(chain(second, [1, 3])), MAX_NODES) == 1
        assert token_paths(target) == {(1,), (1, 2), (1, 3)}

    def test_growth_older_than_recent_positions_is_dropped(self) -> None:
        draft, target = TokenTree(0, 0), TokenTree(0, 0)
        late = draft.growth(chain(draft, [1] * (RECENT_POSITIONS + 2)))
        for _ in range(RECENT_POSITIONS - 1):
            target.commit([1])
        assert target.graft(late, MAX_NODES) == 3
        for _ in range(3):
            target.commit([1])
        assert target.graft(late, MAX_NODES) == 0

    def test_old_ids_are_forgotten(self) -> None:
        draft, target, sizes = TokenTree(0, 0), TokenTree(0, 0), []
        for i in range(5 * RECENT_POSITIONS):
            assert target.graft(draft.growth(chain(draft, [1])), MAX_NODES) == 1
            assert target.graft(Growth(i, 9 * RECENT_POSITIONS + i, [ROOT_ID], [1], [-0.5]), MAX_NODES) == 0
            for tree in (draft, target):
                tree.commit([1])
            sizes.append(bytes_kept(target))
        assert max(sizes) < 1.1 * max(sizes[: 2 * RECENT_POSITIONS])

    def test_max_size_bounds_the_tree(self) -> None:
        draft, target = TokenTree(9, 0), TokenTree(9, 0)
        growth = draft.growth(chain(draft, [1, 2, 3, 4]))
        assert [target.graft(growth, max_size) for max_size in (3, 3, MAX_NODES)] == [3, 0, 1]

    def test_a_second_child_for_a_token_is_rejected(self) -> None:
        tree = TokenTree(9, 0)
        tree.add(ROOT, 1, -0.5)
        with pytest.raises(ValueError, match="already has a child"):
            tree.add(ROOT, 1, -0.5)

    def test_in_a_chain_the_first_log_prob_counts(self) -> None:
        """Whether a sampled token is verified must not depend on its value."""
        tree = TokenTree(9, 0, chain=True)
        tree.graft(Growth(9, 1, [0], [1], [-1.0], [{1: 1, 2: 1}]), MAX_NODES, source=1)
        tree.graft(Growth(9, 1, [0], [1], [-0.1], [{1: 9, 2: 1}]), MAX_NODES)
        assert (tree.path_log_probs, tree.distributions) == ([0.0, -1.0], {1: {1: 1, 2: 1}})
        assert tree.graft(Growth(9, 2, [0], [2], [-0.1]), MAX_NODES) == 0, "nor a second child"


class TestCalibration:
    def test_calibrated_log_probs_count(self) -> None:
        """Calibration gets a node's rank and depth at its arrival."""
        weighed: list[tuple[float, int, int]] = []

        def weigh(log_prob: float, rank: int, depth: int) -> tuple[int, float]:
            weighed.append((log_prob, rank, depth))
            return len(weighed), 2 * log_prob

        tree = TokenTree(9, 0, {0: FunctionTable(weigh)})
        tree.graft(Growth(9, 1, [0, 1, 1], [1, 2, 3], [-0.1, -0.2, -0.3]), MAX_NODES)
        assert (tree.log_prob(2), tree.path_log_probs[2]) == (pytest.approx(-0.4), pytest.approx(-0.6))
        tree.commit([1])
        tree.graft(Growth(9, 4, [2], [4], [-0.4]), MAX_NODES)
        assert weighed == [(-0.1, 0, 1), (-0.2, 0, 2), (-0.3, 1, 2), (-0.4, 0, 2)]
        tree.commit([2])
        assert cells(tree) == {4: {0: 4}}, "as at its arrival"

    def test_ranks_are_counted_per_draft(self) -> None:
        """A node that another draft has sent before counts as a choice, too."""
        ranks = FunctionTable(lambda log_prob, rank, depth: (rank, log_prob))
        tree = TokenTree(9, 0, {0: ranks, 1: ranks})
        tree.graft(Growth(9, 1, [0, 0], [1, 2], [-0.5] * 2), MAX_NODES, source=0)
        tree.graft(Growth(9, 1, [0, 0, 0], [3, 2, 4], [-0.5] * 3), MAX_NODES, source=1)
        assert cells(tree) == {1: {0: 0}, 2: {0: 1, 1: 1}, 3: {1: 0}, 4: {1: 2}}

    def test_of_two_drafts_the_larger_log_prob_counts(self) -> None:
        tree = TokenTree(9, 0)
        tree.graft(Growth(9, 1, [0, 1], [1, 2], [math.log(0.6), math.log(0.5)]), MAX_NODES, source=1)
        assert path_probs(tree) == pytest.approx({1: 0.6, 2: 0.3})
        assert tree.graft(Growth(9, 1, [0], [1], [math.log(0.9)]), MAX_NODES) == 0
        check_consistency(tree)
        assert path_probs(tree) == pytest.approx({1: 0.9, 2: 0.45}), "nodes below follow"
        assert tree.sources[1:] == [0, 1], "the draft whose log-probability counts"
        tree.graft(Growth(9, 9, [0], [1], [0.0]), MAX_NODES)
        assert path_probs(tree)[1] == pytest.approx(0.9), "a draft counts once per node"
        tree.graft(Growth(9, 2, [1], [2], [math.log(0.1)]), MAX_NODES)
        assert path_probs(tree)[2] == pytest.approx(0.45), "the smaller log-probability does not count"
        assert cells(tree) == {1: {0: 0, 1: 0}, 2: {0: 0, 1: 0}}, "but its outcome is observed"
        assert all(tree.guessed_by(source, node) for source in (0, 1) for node in tree.nodes())
        assert not tree.guessed_by(2, 1)


class TestBest:
    @pytest.mark.parametrize("seed", range(30))
    def test_best_is_the_best_closed_set(self, seed: int) -> None:
        rng = random.Random(seed)
        tree = TokenTree(4, 0)
        while tree.size < 8:
            parent, token = rng.randrange(tree.size + 1), rng.randrange(VOCABULARY)
            if tree.child(parent, token) is None:
                # Multiples of a power of two: sums are exact, and ties do happen.
                tree.add(parent, token, -rng.randrange(5) / 4)
        count, max_depth = rng.randint(0, 9), rng.randint(0, 4)
        reachable = [n for n in tree.nodes() if tree.depths[n] <= max_depth]
        parents, paths = tree.parents, tree.path_log_probs

        def closed(nodes: Sequence[int]) -> bool:
            return all(parents[n] == ROOT or parents[n] in nodes for n in nodes)

        best = tree.best(count, max_depth)

        assert len(best) == min(count, len(reachable))
        assert all(closed(best[: i + 1]) for i in range(len(best)))
        closed_sets = filter(closed, itertools.combinations(reachable, len(best)))
        sums = [sum(math.exp(paths[n]) for n in nodes) for nodes in closed_sets]
        assert sum(math.exp(paths[n]) for n in best) == pytest.approx(max(sums))
        assert [paths[n] for n in best] == sorted((paths[n] for n in best), reverse=True)

    def test_best_follows_every_change(self) -> None:
        tree = TokenTree(0, 1)

        def best() -> list[int]:
            return [tree.tokens[node] for node in tree.best(4, 4)]

        first = tree.add(ROOT, 2, -0.2)
        assert best() == [2]
        tree.add(first, 3, -0.1)
        assert best() == [2, 3]
        tree.graft(Growth(0, 1, [0], [4], [-0.1]), MAX_NODES)
        assert best() == [4, 2, 3]
        tree.graft(Growth(0, 1, [0], [2], [-0.05]), MAX_NODES, source=2)
        assert best() == [2, 4, 3], "the larger log-probability of another draft counts"
        tree.commit([2])
        assert best() == [3]
        tree.commit([9])
        assert best() == []


@settings(deadline=None)
@given(st.data())
def test_replicas_converge(data: st.DataObject) -> None:
    """One draft, one target, and a network that delays, doubles, reorders and loses growth.

    Commits arrive in order, since both come from one stream, but as late as they like.
    """
    draft, target = TokenTree(0, 0), TokenTree(0, 0)
    committed: list[int] = [0]  # by the target
    delivered = 0  # commits that the draft knows of
    commits: list[list[int]] = []
    sent: list[Growth] = []
    guessed: set[tuple[int, ...]] = set()  # as whole sequences

    def grow() -> None:
        parent = data.draw(st.integers(0, draft.size))
        nodes: list[int] = []
        for token in data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4)):
            known = draft.child(parent, token)
            parent = known or draft.add(parent, token, -0.5)
            if known is None:
                nodes.append(parent)
        sent.append(draft.growth(nodes))
        before = sum(map(len, commits[:delivered])) + 1
        guessed.update((*committed[:before], *draft.path_tokens(node)) for node in nodes)

    def deliver_growth() -> None:
        if sent:
            target.graft(sent[data.draw(st.integers(0, len(sent) - 1))], MAX_NODES)

    def commit() -> None:
        node = ROOT
        while (children := target.children(node)) and data.draw(st.booleans()):
            node = data.draw(st.sampled_from(sorted(children, key=target.tokens.__getitem__)))
        tokens = [*target.path_tokens(node), data.draw(st.integers(0, VOCABULARY - 1))]
        target.commit(tokens)
        commits.append(tokens)
        committed.extend(tokens)

    def deliver_commit() -> None:
        nonlocal delivered
        if delivered < len(commits):
            draft.commit(commits[delivered])
            delivered += 1

    def check() -> None:
        check_consistency(draft)
        check_consistency(target)
        assert all((*committed, *guess) in guessed for guess in token_paths(target))

    acts = st.sampled_from([grow, grow, deliver_growth, deliver_growth, commit, deliver_commit])
    for act in data.draw(st.lists(acts, max_size=25)):
        act()
        check()
    while delivered < len(commits):
        deliver_commit()
    for growth in sent:
        target.graft(growth, MAX_NODES)
    check()
    assert token_paths(target) == token_paths(draft)
    assert (target.tokens[ROOT], target.position) == (draft.tokens[ROOT], draft.position)


class TestHostileGrowth:
    IDS = st.integers(0, 6) | st.integers(0, 2**32 - 1)
    LOG_PROBS = st.floats(allow_nan=False) | st.just(-math.inf) | st.just(1e308)

    @settings(deadline=None)
    @given(st.data())
    def test_any_growth_keeps_the_tree_consistent(self, data: st.DataObject) -> None:
        tree, limit = TokenTree(3, 0), 12
        for _ in range(data.draw(st.integers(1, 6))):
            nodes = st.tuples(self.IDS, st.integers(0, VOCABULARY), self.LOG_PROBS)
            drawn = data.draw(st.lists(nodes, max_size=12))
            growth = Growth(
                base_position=data.draw(st.integers(0, 8) | st.integers(0, 2**32 - 1)),
                first_id=data.draw(self.IDS.filter(bool)),
                parent_ids=[parent_id for parent_id, _, _ in drawn],
                tokens=[token for _, token, _ in drawn],
                log_probs=[log_prob for _, _, log_prob in drawn],
            )
            before = tree.size
            assert tree.graft(growth, limit) == tree.size - before
            assert tree.size <= limit
            check_consistency(tree)
            if data.draw(st.booleans()):
                tree.commit(data.draw(st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=3)))
                check_consistency(tree)
            assert len(tree.best(limit, limit)) == tree.size

    @pytest.mark.parametrize("base_position", [0, 1], ids=["a committed node", "a guess"])
    def test_many_ids_for_one_node_are_not_kept(self, base_position: int) -> None:
        tree, count = TokenTree(0, 0), 100_000
        tree.commit([1])
        tree.graft(Growth(base_position, 1, [ROOT_ID] * count, [1] * count, [-0.5] * count), 10)
        assert tree.size == base_position
        assert bytes_kept(tree) < 1000

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
    def test_invalid_growth_is_an_error(
        self, growth: tuple[int, int, Sequence[int], Sequence[int], Sequence[float]], complaint: str
    ) -> None:
        with pytest.raises(ValueError, match=complaint):
            Growth(*growth).check()

    def test_a_node_cannot_be_its_own_ancestor(self) -> None:
        tree = TokenTree(0, 0)
        assert tree.graft(Growth(0, 1, [2, 1, 3], [5, 5, 5], [-0.5] * 3), MAX_NODES) == 0
        assert tree.graft(Growth(0, 1, [0, 1], [5, 5], [-0.5] * 2), MAX_NODES) == 2
        assert tree.graft(Growth(0, 1, [2], [5], [-0.5]), MAX_NODES) == 0
        check_consistency(tree)
