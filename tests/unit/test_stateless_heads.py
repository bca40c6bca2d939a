"""Medusa and MLP speculators: the tree that they grow from one hidden state, and which state that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.sampling import History, SamplingRow, draw
from paceline.core.tree import TokenTree
from paceline.drafting.heads.medusa_heads import load_medusa
from paceline.drafting.heads.mlp_network import load_mlp_speculator
from paceline.drafting.methods.medusa import MedusaSpeculator
from paceline.drafting.methods.mlp_speculator import MlpSpeculator
from paceline.drafting.speculator import Commit, Context, DraftError, Opening, Speculator
from paceline.model.checkpoint import Checkpoint
from paceline.model.target_weights import TargetWeights
from tests.helpers.head_methods import HEAD_METHODS, STEPS, medusa_tensors, mlp_tensors, seeded, target_weights
from tests.helpers.llamas import LAWS, VOCABULARY
from tests.helpers.markov import HIDDEN, mlp_config, save_head
from tests.helpers.seen import Seen, nodes_of, root_of
from tests.helpers.stateless import GREEDY, PROMPT, ROOT, STATE, grown, opening, replica, send_states
from tests.helpers.stateless_formulas import medusa_logits, mlp_logits


@dataclass(frozen=True)
class Method:
    """`logits`: after a root and a path below it, by the formula."""

    speculator: Callable[..., Speculator]
    logits: Callable[[Tensor, int, Sequence[int]], Tensor]

    def logits_at(self, node: Seen, state: Tensor) -> Tensor:
        return self.logits(state, root_of(node.tree).token, [each.token for each in node.path()])


def medusa(checkpoint: Checkpoint, target: TargetWeights, width: int = 3, least: float = 0.0) -> Speculator:
    return MedusaSpeculator(load_medusa(checkpoint, target), target, width, least)


def mlp(checkpoint: Checkpoint, target: TargetWeights, width: int = 3, least: float = 0.0) -> Speculator:
    return MlpSpeculator(load_mlp_speculator(checkpoint, target), target, width, least)


METHODS = {
    "medusa": Method(medusa, lambda state, _, path: medusa_logits(medusa_tensors(), state[None])[0, len(path)]),
    "mlp_speculator": Method(mlp, lambda state, root, path: mlp_logits(mlp_tensors(), state, [root, *path], STEPS)[-1]),
}
Make = Callable[..., Speculator]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Method:
    return METHODS[request.param]


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    return target_weights()


@pytest.fixture
def make(request: pytest.FixtureRequest, method: Method, target: TargetWeights, tmp_path: Any) -> Make:
    """A speculator of the method; `width` and `least` as in its constructor."""
    case = HEAD_METHODS["medusa" if method is METHODS["medusa"] else "mlp_speculator"]
    checkpoint = Checkpoint(save_head(tmp_path, case.tensors, case.config))
    return lambda **options: method.speculator(checkpoint, target, **options)


class TestTree:
    @pytest.mark.parametrize("params", LAWS)
    def test_every_draw_is_predicted_with_its_noise_and_rules(
        self, method: Method, make: Make, params: SamplingParams
    ) -> None:
        """The likeliest child of every node is the target's draw from the formula's logits."""
        speculator, tree = make(), replica()
        speculator.open(opening(sampling=params))
        send_states(speculator, STATE)
        grown(speculator, tree)
        history = History(params, PROMPT, [], VOCABULARY)
        parents = [node for node in [root_of(tree), *nodes_of(tree)] if node.children]
        assert max(node.position for node in parents) == ROOT + STEPS - 1
        for parent in parents:
            row = SamplingRow(params, parent.position + 1, history, [node.token for node in parent.path()])
            [drawn] = draw(method.logits_at(parent, STATE)[None], [row]).tolist()
            assert max(parent.children.values(), key=lambda child: child.log_prob).token == drawn

    @pytest.mark.parametrize("depth", [1, 2, 8])
    def test_all_likely_paths_are_guessed_with_their_probabilities(
        self, method: Method, make: Make, depth: int
    ) -> None:
        speculator, tree = make(least=0.001), replica()
        speculator.open(opening(depth=depth))
        send_states(speculator, STATE)
        grown(speculator, tree)
        nodes = [root_of(tree), *nodes_of(tree)]
        assert max(node.position - ROOT for node in nodes) == min(depth, STEPS)
        for node in nodes:
            if node.position - ROOT < min(depth, STEPS):
                values, tokens = method.logits_at(node, STATE).log_softmax(-1).topk(3)
                likely = {
                    token: value
                    for token, value in zip(tokens.tolist(), values.tolist(), strict=True)
                    if node.path_log_prob + value > math.log(0.001)
                }
                children = {token: child.log_prob for token, child in node.children.items()}
                assert children == pytest.approx(likely, abs=1e-4)

    def test_after_a_commit_it_is_grown_again_from_the_new_state(self, method: Method, make: Make) -> None:
        """Nodes that remain keep their probabilities, and get the children that the new state predicts."""
        speculator, tree = make(), replica()
        speculator.open(opening())
        send_states(speculator, STATE)
        grown(speculator, tree)
        committed = max(root_of(tree).children.values(), key=lambda node: node.log_prob).token
        tree.commit([committed])
        before = {node: node.path_log_prob for node in nodes_of(tree)}
        assert before
        state = seeded(HIDDEN, seed=6) * 8
        speculator.commit(Commit(1, ROOT, [committed], 1, state[None, None]))
        assert grown(speculator, tree) > 0
        assert {node: node.path_log_prob for node in nodes_of(tree) if node in before} == before
        for node in [root_of(tree), *nodes_of(tree)]:
            if node.position - tree.position < STEPS:
                assert set(method.logits_at(node, state).topk(3).indices.tolist()) <= set(node.children)

    def test_rules_see_the_output_the_path_and_every_commit(self, method: Method, make: Make) -> None:
        """Log-probabilities are of the penalised logits. Tokens of the prompt are not penalised."""
        params = SamplingParams(temperature=0.0, frequency_penalty=0.5)
        speculator, tree = make(width=VOCABULARY), replica()
        speculator.open(Opening(1, PROMPT, 3, params, 2, 400))
        send_states(speculator, STATE)
        output, state = PROMPT[2:], STATE
        for _ in range(2):
            count = grown(speculator, tree)
            history = History(params, PROMPT[:2], output, VOCABULARY)
            new = nodes_of(tree)[-count:]
            assert any(node.token in output for node in new)
            for node in new:
                path = [each.token for each in node.parent.path()]
                logits = history.apply_logits_rules(method.logits_at(node.parent, state), path)
                assert node.log_prob == pytest.approx(float(logits.log_softmax(-1)[node.token]), abs=1e-4)
            root = tree.position
            token = max(root_of(tree).children.values(), key=lambda node: node.log_prob).token
            output, state = [*output, token], seeded(HIDDEN, seed=8) * 8
            tree.commit([token])
            speculator.commit(Commit(1, root, [token], 1, state[None, None]))

    def test_the_strategy_decides_the_noise(self, method: Method, make: Make) -> None:
        speculator, tree = make(width=1), replica()
        hot = SamplingParams(temperature=100.0, seed=4)
        speculator.open(Opening(1, PROMPT, 0, hot, 1, 10, strategy="greedy"))
        send_states(speculator, STATE)
        grown(speculator, tree)
        assert set(root_of(tree).children) == {int(method.logits(STATE, PROMPT[-1], ()).argmax())}


@pytest.mark.parametrize("params", [LAWS[0], LAWS[4]])
@pytest.mark.parametrize("name", METHODS)
def test_with_a_padded_target_only_known_tokens_are_guessed(
    name: str, params: SamplingParams, target: TargetWeights, tmp_path: Any
) -> None:
    """The output knows four tokens; the MLP speculator's embedding three, so the fourth is not expanded."""
    tensors = medusa_tensors(rows=4) if name == "medusa" else mlp_tensors(emb=3, head=4)
    config = {} if name == "medusa" else mlp_config(STEPS)
    speculator = METHODS[name].speculator(Checkpoint(save_head(tmp_path, tensors, config)), target, width=32)
    tree = TokenTree(ROOT, 2)
    speculator.open(opening(root=2, sampling=params))
    send_states(speculator, STATE)
    grown(speculator, tree)
    assert {node.token for node in nodes_of(tree)} == set(range(4))
    if name == "mlp_speculator":
        assert {node.token for node in nodes_of(tree) if node.children} == set(range(3))
        speculator.open(opening(root=60))
        send_states(speculator, STATE)
        assert not speculator.grow(), "the root has no embedding"


class TestState:
    """A method reads the state before the root, and no other."""

    def test_one_from_beyond_the_root_is_not_used(self, make: Make) -> None:
        speculator = make()
        speculator.open(opening())
        speculator.context(Context(1, 0, seeded(ROOT + 1, 1, HIDDEN)))
        assert not speculator.grow()
        speculator.commit(Commit(1, ROOT, [6], 0))
        assert speculator.grow(), "the root has moved behind it"

    def test_older_ones_do_not_replace_it(self, make: Make) -> None:
        speculator = make()
        speculator.open(opening())
        send_states(speculator, STATE)
        speculator.context(Context(1, 0, seeded(2, 1, HIDDEN)))
        assert speculator.grow()
        speculator.commit(Commit(1, ROOT, [6], 0, STATE[None, None]))
        assert speculator.grow()

    def test_only_the_last_one_is_kept(self, make: Make) -> None:
        """Without the memory of the others, which came in the same tensor."""
        speculator: Any = make()
        speculator.open(opening())
        send_states(speculator, STATE)
        [draft] = speculator._drafts.values()
        assert draft.state.untyped_storage().nbytes() == HIDDEN * 4
        assert torch.equal(draft.state, STATE)

    @pytest.mark.parametrize("shape", [(2, 1, 32), (2, 2, HIDDEN), (2, HIDDEN)])
    def test_another_shape_is_refused(self, make: Make, shape: Sequence[int]) -> None:
        speculator = make()
        speculator.open(opening())
        with pytest.raises(DraftError, match="hidden states of shape"):
            speculator.context(Context(1, 0, torch.zeros(*shape)))

    def test_a_full_tree_needs_no_pass(self, make: Make) -> None:
        speculator = make()
        speculator.open(Opening(1, PROMPT, 0, GREEDY, 8, 0))
        send_states(speculator, STATE)
        assert not speculator.grow()
        assert not speculator.behind
