"""What `Speculator` promises, checked for every registered method. A new method needs a recipe, and no test here."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from paceline import drafting
from paceline.config import DETECT, METHODS, EngineConfig, SamplingParams, SpeculativeConfig
from paceline.config.method_names import Method
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting import (
    Commit,
    Context,
    DraftError,
    Limit,
    Opening,
    Speculator,
    build_speculator,
    complete_config,
    hidden_state_layers,
    methods,
)
from paceline.drafting.method_registry import method_hook
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.retokenizing_speculator import RetokenizingSpeculator
from paceline.model.target_weights import TargetWeights, load_target_weights
from tests.helpers.method_recipes import RECIPES
from tests.helpers.seen import nodes_of, root_of

SLOTS = 256
ENGINE = EngineConfig(slots=SLOTS, dtype="float32")
VOCABULARY = 60
"""Every recipe's target has more tokens."""
PROMPT = [3, 1, 4, 3, 1, 5, 3, 1, 4, 3, 1]
"""Lookup methods find continuations, with branches."""
SAMPLING = SamplingParams(temperature=0.0)
KEYS = range(5)
"""Of all requests."""
DRAFTS_NOTHING = ("extract_hidden_states",)


@dataclass
class Target:
    """The target's side of a speculator's requests. The hidden states are random: only their shape matters here."""

    speculator: Speculator
    hidden_size: int
    trees: dict[int, TokenTree] = field(default_factory=dict)
    openings: dict[int, Opening] = field(default_factory=dict)

    def open(self, key: int, tokens: Sequence[int] = PROMPT, depth: int = 4, nodes: int = 12, **more: object) -> None:
        opening = replace(Opening(key, tokens, 0, SAMPLING, depth, nodes), **more)
        self.forget(key)
        self.speculator.open(opening)
        self.openings[key] = opening
        self.trees[key] = TokenTree(len(tokens) - 1, tokens[-1])
        if self.speculator.description.hidden_state_layers and len(tokens) > 1:
            self.speculator.context(Context(key, 0, self.states(len(tokens) - 1)))

    def commit(self, key: int, tokens: Sequence[int]) -> None:
        tree = self.trees[key]
        states = self.states(len(tokens)) if self.speculator.description.hidden_state_layers else None
        commit = Commit(key, tree.position, tokens, len(tree.match(tokens)), states)
        tree.commit(tokens)
        self.speculator.commit(commit)

    def limit(self, key: int, depth: int, nodes: int) -> None:
        self.openings[key] = replace(self.openings[key], max_depth=depth, max_nodes=nodes)
        self.speculator.limit(Limit(key, depth, nodes))

    def close(self, key: int) -> None:
        self.forget(key)
        self.speculator.close(key)

    def forget(self, key: int) -> None:
        self.trees.pop(key, None)
        self.openings.pop(key, None)

    def grow(self) -> int:
        """One round, grafted. Returns the number of new nodes."""
        grown = self.speculator.grow()
        for key, growth in grown.items():
            tree = self.trees[key]
            assert len(growth) > 0
            assert tree.graft(growth, 10_000) == len(growth), "every node is new, and its parent is known"
            self.check(key)
        return sum(map(len, grown.values()))

    def check(self, key: int) -> None:
        """The tree of a request is within its limits."""
        tree, opening = self.trees[key], self.openings[key]
        assert tree.size <= opening.max_nodes
        assert max(tree.depths) <= opening.max_depth
        size = self.speculator.description.vocabulary_size or VOCABULARY
        for node in (root_of(tree), *nodes_of(tree)):
            assert all(0 <= token < size for token in node.children)
            assert all(child.log_prob <= 0 for child in node.children.values())

    def grow_all(self) -> int:
        """Rounds until there is nothing to draft."""
        nodes = 0
        while (new := self.grow()) or self.speculator.behind:
            nodes += new
        assert self.speculator.grow() == {}, "nothing happened since"
        self.check_integrity()
        return nodes

    def paths(self, key: int) -> dict[tuple[int, ...], float]:
        tree = self.trees[key]
        return {tuple(tree.path_tokens(node)): tree.log_prob(node) for node in tree.nodes()}

    def check_integrity(self) -> None:
        getattr(self.speculator, "check_integrity", lambda: None)()

    def states(self, count: int) -> Tensor:
        generator, layers = torch.Generator().manual_seed(count), len(self.speculator.description.hidden_state_layers)
        return torch.randn(count, layers, self.hidden_size, generator=generator)


@dataclass(frozen=True)
class Built:
    """A registered method and what it was built from."""

    method: str
    config: SpeculativeConfig
    target_weights: Callable[[], TargetWeights]
    target_model: str
    speculator: Speculator


@pytest.fixture(scope="module", params=RECIPES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    recipe = RECIPES[request.param](tmp_path_factory.mktemp("method"))
    config = SpeculativeConfig.model_validate(
        {
            "method": request.param.split()[0],
            "num_speculative_tokens": 4,
            "least_path_probability": 0.0,
            **recipe.config,
        }
    )

    def target_weights() -> TargetWeights:
        return load_target_weights(str(recipe.target), torch.float32, "cpu")

    speculator = build_speculator(config, ENGINE, target_weights, str(recipe.target))
    return Built(config.method, config, target_weights, str(recipe.target), speculator)


@pytest.fixture
def target(built: Built) -> Iterator[Target]:
    """All tests of a method share its speculator, so a test also shows that the ones before left nothing."""
    target = Target(built.speculator, built.target_weights().hidden_size)
    yield target
    for key in KEYS:
        target.close(key)
    target.check_integrity()
    assert built.speculator.grow() == {}


def test_every_module_of_a_method_is_registered() -> None:
    modules = {path.stem for path in Path(methods.__path__[0]).glob("*.py")}
    assert {recipe.split()[0] for recipe in RECIPES} == METHODS.keys()
    assert {name for name in modules if method_hook(name, "build")} == METHODS.keys()
    assert set(get_args(Method)) == {"none", "auto", "detect", "pool", *METHODS}


def test_the_documented_parts_are_the_code_s(built: Built) -> None:
    """The row of every method names its speculator, its way to grow and its network."""
    rows = [line.split() for line in (drafting.__doc__ or "").split("\n\n")[1].splitlines()]
    speculator: Any = built.speculator
    for row in rows:
        if row[0] == built.method and not isinstance(speculator, RetokenizingSpeculator):
            assert row[1] == type(speculator).__name__
            if isinstance(speculator, NetworkSpeculator):
                assert row[2] == type(speculator._way).__name__
                assert type(speculator._network).__name__ in " ".join(row[3:]).replace(",", "").split()
    assert {row[0] for row in rows[1:]} | {"custom_class"} == METHODS.keys()


def test_the_registered_facts_are_the_speculators(built: Built) -> None:
    if built.method != "custom_class":
        assert built.speculator.description.method == built.method
    layers = hidden_state_layers(built.config, ENGINE, built.target_weights)
    assert tuple(layers) == tuple(built.speculator.description.hidden_state_layers)
    assert built.config.enabled


def test_a_checkpoint_is_detected_by_its_method(built: Built) -> None:
    if built.config.model is not None:
        found = complete_config(SpeculativeConfig(method=DETECT, model=built.config.model))
        assert found.method == built.method


class TestGrowth:
    def test_requests_get_nodes_within_their_limits(self, built: Built, target: Target) -> None:
        for key, (depth, nodes) in enumerate([(4, 12), (1, 12), (4, 1), (0, 12), (4, 0)]):
            target.open(key, depth=depth, nodes=nodes)
        target.grow_all()
        sizes = [target.trees[key].size for key in range(5)]
        assert sizes[3:] == [0, 0]
        assert all(sizes[:3]) or built.method in DRAFTS_NOTHING
        for tree in target.trees.values():
            for node in (root_of(tree), *nodes_of(tree)):
                assert sum(math.exp(child.log_prob) for child in node.children.values()) <= 1 + 1e-5

    def test_a_node_has_one_child_if_the_strategy_verifies_chains(self, built: Built) -> None:
        if built.method == "custom_class":  # its class decides
            return
        config = built.config.model_copy(update={"rejection_sampling_strategy": "residual"})
        speculator = build_speculator(config, ENGINE, built.target_weights, built.target_model)
        target = Target(speculator, built.target_weights().hidden_size)
        target.open(1, strategy="residual")
        target.grow_all()
        tree = target.trees[1]
        assert all(len(tree.children(node)) <= 1 for node in (ROOT, *tree.nodes()))
        assert tree.size or built.method in DRAFTS_NOTHING

    def test_opening_again_starts_afresh(self, target: Target) -> None:
        everything = {"depth": 2, "nodes": 1000}  # or else the order of expansion would matter
        target.open(1)
        target.open(2, [5, 4, *PROMPT], **everything)
        target.grow_all()
        target.open(1, [5, 4, *PROMPT], **everything)
        target.grow_all()
        assert target.paths(1) == target.paths(2)

    def test_a_closed_request_does_not_grow(self, target: Target) -> None:
        target.open(1)
        target.open(2)
        target.close(1)
        target.grow_all()
        assert 1 not in target.trees


class TestCommits:
    def test_growth_after_commits_continues_the_tree(self, built: Built, target: Target) -> None:
        """Along the drafted path, off it, and with several tokens at once."""
        target.open(1, nodes=8)
        target.grow_all()
        for tokens in ([next(iter(root_of(target.trees[1]).children), 4)], [7, 3, 1], [4], [3, 1]):
            target.commit(1, tokens)
            target.grow_all()
        assert target.trees[1].size or built.method in DRAFTS_NOTHING

    def test_a_commit_before_the_first_round_moves_the_root(self, target: Target) -> None:
        target.open(1)
        target.commit(1, [4, 3, 1])
        target.grow_all()

    def test_what_is_not_open_is_ignored(self, target: Target) -> None:
        states = target.states(1) if target.speculator.description.hidden_state_layers else None
        target.open(1)
        target.close(1)
        for key in (1, 99):
            target.speculator.commit(Commit(key, len(PROMPT) - 1, [1], 0, states))
            target.speculator.limit(Limit(key, 3, 3))
            target.speculator.close(key)
            if states is not None:
                target.speculator.context(Context(key, 0, states))
        assert target.grow_all() == 0

    @pytest.mark.parametrize("offset", [-1, 2])
    def test_a_commit_that_does_not_begin_at_the_root_is_refused(
        self, built: Built, target: Target, offset: int
    ) -> None:
        target.open(1)
        base = len(PROMPT) - 1
        with pytest.raises(DraftError, match=f"the root is at {base}, the commit at {base + offset}"):
            target.speculator.commit(Commit(1, base + offset, [1], 0))

    def test_tokens_outside_the_vocabulary_are_refused(self, target: Target) -> None:
        size = target.speculator.description.vocabulary_size
        target.open(2)
        for token in (-1, size) if size else ():
            with pytest.raises(DraftError, match=f"outside the vocabulary of {size}"):
                target.speculator.open(Opening(1, [1, token], 0, SAMPLING, 4, 4))
            with pytest.raises(DraftError, match="vocabulary"):
                target.speculator.commit(Commit(2, len(PROMPT) - 1, [token], 0))

    def test_an_unknown_strategy_is_refused(self, built: Built, target: Target) -> None:
        predicts_draws = METHODS[built.method].kind in ("model", "head")
        if predicts_draws and built.config.vocabulary_mapping != "strings":
            with pytest.raises(DraftError, match="unknown strategy 'other'"):
                target.speculator.open(Opening(1, PROMPT, 0, SAMPLING, 4, 4, strategy="other"))

    def test_the_greedy_strategy_has_no_noise(self, built: Built, target: Target) -> None:
        hot = SamplingParams(temperature=100.0, seed=4)
        target.open(1, depth=2, nodes=1000)
        target.open(2, depth=2, nodes=1000, strategy="greedy", sampling=hot)
        target.grow_all()
        assert target.paths(1) == pytest.approx(target.paths(2), abs=1e-4)

    def test_a_gap_in_the_hidden_states_is_refused(self, target: Target) -> None:
        if target.speculator.description.hidden_state_layers:
            target.open(1)
            with pytest.raises(DraftError, match=f"position 99, but not of {len(PROMPT) - 1} before"):
                target.speculator.context(Context(1, 99, target.states(2)))


class TestLimits:
    def test_a_paused_request_follows_commits_and_goes_on(self, built: Built, target: Target) -> None:
        target.open(1)
        target.limit(1, 0, 0)
        target.commit(1, [4, 3])
        assert target.grow_all() == 0
        target.limit(1, 3, 6)
        target.commit(1, [1])
        assert target.grow_all() or built.method in DRAFTS_NOTHING

    def test_a_lower_limit_holds_from_the_next_commit(self, target: Target) -> None:
        target.open(1, depth=6, nodes=20)
        target.grow_all()
        target.limit(1, 1, 2)
        target.commit(1, [9])
        target.grow_all()

    def test_a_prompt_beyond_the_draft_s_positions_or_slots_is_refused(self, target: Target) -> None:
        if getattr(target.speculator, "slots", 0):
            target.open(2)
            with pytest.raises(DraftError, match=r"out of slots|positions end"):
                target.speculator.open(Opening(1, [1] * 1000, 0, SAMPLING, 4, 4))
            target.check_integrity()


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_calls_keeps_trees_and_slots_in_order(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        key = rng.randrange(4)
        action = rng.choice(["open", "commit", "commit", "limit", "close", "grow", "grow", "grow"])
        try:
            if action == "open":
                prompt = rng.choices(range(5), k=rng.randint(2, 90))
                target.open(key, prompt, depth=rng.randint(0, 6), nodes=rng.choice([0, 1, 10, 40]), link=key % 2)
            elif action == "close":
                target.close(key)
            elif action == "grow":
                target.grow()
            elif key in target.trees and action == "limit":
                opening = target.openings[key]
                target.limit(key, opening.max_depth + rng.randint(0, 2), opening.max_nodes + rng.randint(0, 9))
            elif key in target.trees:
                target.commit(key, drawn_tokens(target.trees[key], rng))
        except DraftError:
            target.close(key)
        target.check_integrity()


def drawn_tokens(tree: TokenTree, rng: random.Random) -> list[int]:
    """Some way down the tree, then often a token that was not drafted."""
    tokens: list[int] = []
    node = root_of(tree)
    while node.children and rng.random() < 0.7:
        node = rng.choice(list(node.children.values()))
        tokens.append(node.token)
    return tokens if tokens and rng.random() < 0.4 else [*tokens, rng.randrange(5)]
