"""MLP speculators: every published format computes the authors' formula; the likeliest nodes are expanded first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.drafting.draw_prediction import MAX_ROWS
from paceline.drafting.heads.mlp_network import load_mlp_speculator
from paceline.drafting.methods.mlp_speculator import MlpSpeculator, matches
from paceline.drafting.speculator import Commit, Context, Limit, Opening
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights
from tests.helpers.head_methods import INNER, STEPS, mlp_tensors, seeded, target_weights
from tests.helpers.llamas import VOCABULARY
from tests.helpers.markov import (
    HIDDEN,
    final_states,
    logits_after,
    markov_model,
    mlp_config,
    projecting,
    save_head,
    seeing_mlp,
    trained,
)
from tests.helpers.seen import nodes_of, root_of
from tests.helpers.stateless import GREEDY, ROOT, grown, opening, replica, send_states
from tests.helpers.stateless import STATE as TREE_STATE
from tests.helpers.stateless_formulas import lstm_logits, mlp_logits

Tensors = dict[str, Tensor]
STATE = seeded(HIDDEN, seed=3) * 8
TOKENS = (9, 63, 0)


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    return target_weights()


def tied(tensors: Tensors) -> Tensors:
    """With every name, as in a `.bin`: steps share all but the first projection."""
    shared = {}
    for name in tensors:
        part, index, *rest = name.split(".")
        source = str(min(int(index), 1)) if part == "proj" else "0"
        shared[name] = tensors[".".join([part, source, *rest])]
    return shared


def stored_once(tensors: Tensors) -> Tensors:
    """Without repeated names, as in safetensors."""
    return {name: t for name, t in tensors.items() if ".0." in name or name == "proj.1.weight"}


def lstm(inner: int = INNER) -> Tensors:
    tensors = {"forget_emb.0.weight": seeded(VOCABULARY, inner), "head.0.weight": 5 * seeded(VOCABULARY, inner, seed=1)}
    tensors |= {"projs.0.weight": seeded(4 * inner, HIDDEN), "projs.1.weight": seeded(4 * inner, inner)}
    for n, name in enumerate(("cell_ln.0", "state_ln.0")):
        tensors |= {f"{name}.weight": 1 + seeded(inner, seed=n), f"{name}.bias": seeded(inner, seed=5 + n)}
    return tensors


def sum_rnn(tensors: Tensors) -> Tensors:
    """Arctic's names, which number the layers of a step."""
    names = {}
    for name in tensors:
        part, step, rest = name.split(".")
        names[name] = name if part == "head" else f"{part}.{step}.0.{rest}"
    return {names[name]: tensor for name, tensor in tensors.items()}


def ibm(inner: int, *, scale: bool, prefix: str = "") -> tuple[Tensors, dict[str, object], Sequence[int], Tensor]:
    tensors = mlp_tensors(inner=inner)
    stored = {prefix + name: tensor for name, tensor in tensors.items()}
    logits = mlp_logits(tensors, STATE, TOKENS, STEPS, scale=scale)
    return stored, mlp_config(STEPS, scale_input=scale), TOKENS, logits


TIED = tied(mlp_tensors())
TIED_LOGITS = mlp_logits(TIED, STATE, TOKENS, STEPS)
TIED_CONFIG = mlp_config(STEPS, tie_weights=True)
LSTM_CONFIG = {"method": "sum_lstm", "n_predict": STEPS, "tie_weights": True, "tie_lstm_embs": True}
RNN_CONFIG = {"method": "sum_rnn", "n_predict": STEPS, "tie_weights": True, "inner_dim": str(INNER)}
LONGER = (*TOKENS, 7, 7)
LONGER_CONFIG = TIED_CONFIG | {
    "architectures": ["ArcticMLPSpeculatorPreTrainedModel"],
    "num_lookahead_tokens": len(LONGER),
}
FORMATS = {
    "IBM": ibm(INNER, scale=False),
    "IBM, prefixed": ibm(INNER, scale=False, prefix="speculator."),
    "IBM, scaled input": ibm(INNER, scale=True),
    "IBM, as wide as the target": ibm(HIDDEN, scale=True),
    "tied": (TIED, TIED_CONFIG, TOKENS, TIED_LOGITS),
    "tied, stored once": (stored_once(TIED), TIED_CONFIG, TOKENS, TIED_LOGITS),
    "a single tied step": (
        mlp_tensors(1),
        mlp_config(1, tie_weights=True),
        [9],
        mlp_logits(mlp_tensors(1), STATE, [9], 1),
    ),
    # The weights of the sum are those of the training.
    "Arctic, more steps than trained": (
        stored_once(TIED),
        LONGER_CONFIG,
        LONGER,
        mlp_logits(tied(mlp_tensors(5)), STATE, LONGER, STEPS),
    ),
    "Arctic's sum_rnn": (sum_rnn(stored_once(TIED)), RNN_CONFIG, TOKENS, TIED_LOGITS),
    "Arctic's sum_lstm": (lstm(), LSTM_CONFIG, TOKENS, lstm_logits(lstm(), STATE, TOKENS, STEPS)),
}


@pytest.mark.parametrize(("tensors", "config", "tokens", "expected"), FORMATS.values(), ids=FORMATS)
def test_a_format_computes_the_formula(
    tensors: Tensors,
    config: dict[str, object],
    tokens: Sequence[int],
    expected: Tensor,
    tmp_path: Path,
    target: TargetWeights,
) -> None:
    """In a batch with another chain."""
    checkpoint = Checkpoint(save_head(tmp_path, tensors, config))
    assert matches(checkpoint)
    network = load_mlp_speculator(checkpoint, target)
    assert network.steps == len(tokens)
    inputs = network.begin(torch.stack([STATE, STATE.flip(0)]))
    for i, token in enumerate(tokens):
        logits, inputs = network.step(i, inputs, torch.tensor([token, 0]))
        torch.testing.assert_close(logits[0], expected[i])


def test_it_may_know_fewer_tokens_than_a_padded_target(tmp_path: Path, target: TargetWeights) -> None:
    folder = save_head(tmp_path, mlp_tensors(emb=50, head=50), mlp_config(STEPS))
    network = load_mlp_speculator(Checkpoint(folder), target)
    assert network.vocabulary_limit == 50
    assert network.ids is not None
    assert network.ids.tolist() == list(range(50))


@pytest.mark.parametrize("config", [{}, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}])
def test_other_checkpoints_do_not_match(tmp_path: Path, config: dict[str, object]) -> None:
    assert not matches(Checkpoint(save_head(tmp_path, mlp_tensors(), config)))


def test_repeated_names_are_read_once(tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    take = Checkpoint.tensor
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name, *to: (names.append(name), take(self, name, *to))[1])
    load_mlp_speculator(Checkpoint(save_head(tmp_path, TIED, TIED_CONFIG)), target)
    assert sorted(names) == sorted(stored_once(TIED))


def without(name: str) -> Tensors:
    return {key: tensor for key, tensor in mlp_tensors().items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "keys", "complaint"),
    [
        (mlp_tensors(emb=65), {}, "trained for 65 tokens, target has 64: choose a speculator that was trained for"),
        (mlp_tensors(head=65), {}, "trained for 65 tokens, target has 64: choose a speculator that was trained for"),
        *((without(name), {}, f"has no tensor {name}") for name in ("proj.1.weight", "emb.2.weight", "ln.0.weight")),
        *((mlp_tensors(), {"n_predict": steps}, "config.json lacks n_predict.*add it") for steps in (None, 0, "3")),
        (
            mlp_tensors() | {"emb.0.3.weight": torch.zeros(INNER, INNER)},
            {},
            r"several layers in one step \(emb.0.3.weight\): choose",
        ),
        (
            lstm() | {"input_emb.0.weight": torch.zeros(VOCABULARY, INNER)},
            {"method": "sum_lstm"},
            "an embedding for each gate.*tie_lstm_embs",
        ),
    ],
)
def test_an_unsuitable_checkpoint_is_refused(
    tensors: Tensors, keys: dict[str, object], complaint: str, tmp_path: Path, target: TargetWeights
) -> None:
    checkpoint = Checkpoint(save_head(tmp_path, tensors, mlp_config(STEPS, **keys)))
    with pytest.raises(CheckpointError, match=complaint) as caught:
        load_mlp_speculator(checkpoint, target)
    assert "\n" not in str(caught.value)


class TestTree:
    @pytest.fixture
    def mlp(self, tmp_path: Path, target: TargetWeights) -> MlpSpeculator:
        checkpoint = Checkpoint(save_head(tmp_path, mlp_tensors(), mlp_config(STEPS)))
        return MlpSpeculator(load_mlp_speculator(checkpoint, target), target, 3, 0.0)

    @pytest.mark.parametrize("nodes", [1, 4, 10])
    def test_there_are_no_more_nodes_than_wanted(self, mlp: MlpSpeculator, nodes: int) -> None:
        tree = replica()
        mlp.open(opening(nodes=nodes))
        send_states(mlp, TREE_STATE)
        assert grown(mlp, tree) == nodes
        mlp.limit(Limit(1, 8, nodes + 3))
        assert grown(mlp, tree) == 3

    def test_no_more_nodes_are_expanded_than_fill_the_tree(
        self, mlp: MlpSpeculator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows: list[int] = []
        step = mlp._network.step
        monkeypatch.setattr(mlp._network, "step", lambda *inputs: (rows.append(len(inputs[2])), step(*inputs))[1])
        mlp.open(opening(nodes=7))
        send_states(mlp, TREE_STATE)
        assert grown(mlp, replica()) == 7
        assert rows == [1, 2], "after the root's three children the tree lacks four nodes"

    def test_the_likeliest_node_is_expanded_first(self, mlp: MlpSpeculator) -> None:
        tree = replica()
        mlp.open(opening(nodes=3))
        send_states(mlp, TREE_STATE)
        assert grown(mlp, tree) == 3
        mlp.limit(Limit(1, 8, 4))
        assert grown(mlp, tree) == 1
        [expanded] = [node for node in root_of(tree).children.values() if node.children]
        assert expanded.log_prob == max(node.log_prob for node in root_of(tree).children.values())

    def test_a_round_is_bounded_and_expands_the_likeliest_of_all_requests(self, mlp: MlpSpeculator) -> None:
        trees = {key: replica() for key in range(50)}
        for key in trees:
            mlp.open(opening(key=key, sampling=SamplingParams(temperature=1.0, seed=key)))
            send_states(mlp, TREE_STATE, key)
        first = mlp.grow()
        for key, growth in first.items():
            trees[key].graft(growth, 1000)
        assert set(first) == set(trees)
        nodes = [node for tree in trees.values() for node in [root_of(tree), *nodes_of(tree)]]
        assert len([node for node in nodes if node.children]) == MAX_ROWS
        level = [node for node in nodes if node.position == ROOT + 2]
        expanded = [node.path_log_prob for node in level if node.children]
        assert expanded
        assert min(expanded) >= max(node.path_log_prob for node in level if not node.children)
        assert mlp.behind
        while mlp.grow() or mlp.behind:
            pass
        assert not mlp.behind


class TestAlignment:
    """Which position's state and which token a step reads, on a target whose next token is known."""

    def chain(self, tmp_path: Path, tensors: Tensors) -> tuple[list[int], list[int], list[int]]:
        """A greedy target's tokens, the draft tokens after four of them, and those after six."""
        target = markov_model().target_weights()
        folder = save_head(tmp_path, tensors, mlp_config(1 + max(int(name.split(".")[1]) for name in tensors)))
        mlp = MlpSpeculator(load_mlp_speculator(Checkpoint(folder), target), target, 1, 0.0)
        successor = logits_after().argmax(-1).tolist()
        tokens = [11]
        for _ in range(12):
            tokens.append(successor[tokens[-1]])
        assert len(set(tokens)) > 4
        states = final_states().float()[torch.tensor(tokens)].unsqueeze(1)
        mlp.open(Opening(1, tokens[:4], 0, GREEDY, 4, 10))
        mlp.context(Context(1, 0, states[:3]))
        first = list(mlp.grow()[1].tokens)
        mlp.commit(Commit(1, 3, [tokens[4], tokens[5]], 1, states[3:5]))
        return tokens, first, list(mlp.grow()[1].tokens)

    def test_the_token_is_the_root_and_then_each_guess(self, tmp_path: Path) -> None:
        tokens, first, second = self.chain(tmp_path, seeing_mlp(3))
        assert first == tokens[4:7]
        assert second == tokens[7:9], "the first of three remains in the tree; two more follow it"

    def test_the_state_is_the_one_that_the_root_was_drawn_from(self, tmp_path: Path) -> None:
        """A network that ignores the token guesses the root again."""
        states = final_states()
        normed = states / (states.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        tensors = {
            "emb.0.weight": torch.zeros(VOCABULARY, HIDDEN),
            "proj.0.weight": torch.eye(HIDDEN),
            "ln.0.weight": torch.ones(HIDDEN),
            "ln.0.bias": torch.zeros(HIDDEN),
            "head.0.weight": projecting(torch.nn.functional.gelu(normed), logits_after()),
        }
        tokens, first, second = self.chain(tmp_path, tensors)
        assert (first, second) == ([tokens[3]], [tokens[5]])


@torch.inference_mode()
def test_what_is_trained_is_what_is_served(tmp_path: Path, target: TargetWeights) -> None:
    """Step 0 reads the token after the state's position, every later step the next one."""
    module, reading = trained("mlp_speculator", tmp_path)
    assert matches(Checkpoint(tmp_path))
    network = load_mlp_speculator(Checkpoint(tmp_path), target)
    fed = network.begin(reading.states_BLSH[:, 0, 0])
    for step, logits in enumerate(module(reading, network.steps)):
        served, fed = network.step(step, fed, reading.ids_BL[:, 1 + step])
        torch.testing.assert_close(served, logits[:, 0])
