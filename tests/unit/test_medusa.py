"""Medusa heads: every published format computes the authors' formula, and the likeliest paths become the tree."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.drafting.draw_prediction import MAX_ROWS
from paceline.drafting.heads.medusa_heads import load_medusa
from paceline.drafting.methods.medusa import MedusaSpeculator, matches
from paceline.drafting.speculator import Commit, Context, Opening
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights
from tests.helpers.head_methods import STEPS, medusa_layers, medusa_tensors, seeded, target_weights
from tests.helpers.llamas import VOCABULARY, peaked_llama
from tests.helpers.markov import HIDDEN, final_states, logits_after, markov_model, save_head, trained
from tests.helpers.seen import nodes_of
from tests.helpers.stateless import GREEDY, STATE, grown, opening, replica, send_states
from tests.helpers.stateless_formulas import medusa_logits

Tensors = dict[str, Tensor]
OUTPUT = peaked_llama().lm_head.weight.detach()
"""The target's output matrix."""


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    return target_weights()


def converted(tensors: Tensors, *, bias: bool = True) -> Tensors:
    """By vLLM's names."""
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        if rest[0] == "linear" and (bias or rest[1] == "weight"):
            renamed[f"blocks.{head}.layers.{layer}.{rest[1]}"] = tensor
        elif rest[0] == "weight":
            renamed[f"lm_heads.{head}.weight"] = tensor
    return renamed


def check(folder: Path, target: TargetWeights, expected: Tensor) -> None:
    """The heads in `folder` give these logits of `STATES`, [n, heads, V]; -inf for tokens that they do not know."""
    checkpoint = Checkpoint(folder)
    assert matches(checkpoint)
    heads = load_medusa(checkpoint, target)
    logits = heads(STATES)
    if heads.ids is not None:
        whole = torch.full((*logits.shape[:2], VOCABULARY), -math.inf)
        logits = whole.index_copy_(2, heads.ids, logits)
    torch.testing.assert_close(logits, expected)


STATES = seeded(4, HIDDEN, seed=9) * 8
VERSION_1, VERSION_2 = medusa_tensors(), medusa_layers(0) | medusa_layers(1)
TWO_LAYERS, REPEATED = medusa_tensors(count=2), medusa_tensors(count=2, repeated=True)
ONCE = {name: tensor for name, tensor in REPEATED.items() if ".1.linear" not in name}
CONVERTED = converted(VERSION_1)
WITHOUT_BIAS = VERSION_1 | {name: torch.zeros(HIDDEN) for name in VERSION_1 if name.endswith("bias")}
MODEL = {"lm_head.weight": torch.zeros(VOCABULARY, HIDDEN), "model.layers.0.weight": torch.zeros(3)}
"""Tensors of a target that is merged with its heads; they are not read."""
MERGED = {"num_hidden_layers": 32, "medusa_num_heads": 2}
IDS = torch.tensor([40, 3, 17, 60, 9])
TRUNCATED = {name: tensor[IDS].clone() if name.startswith("lm_heads") else tensor for name, tensor in CONVERTED.items()}
COPIED_OUTPUT = {name: tensor for name, tensor in CONVERTED.items() if "lm_head" not in name} | {
    "lm_heads.0.weight": torch.zeros(VOCABULARY, HIDDEN)
}
ORIGINAL_OUTPUT = {"original_lm_head": True}


def under(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def among(ids: Tensor, logits: Tensor) -> Tensor:
    """The logits of these tokens; -inf for all others."""
    return torch.full_like(logits, -math.inf).index_copy_(2, ids, logits[..., ids])


FORMATS = {
    "five heads, configured as two": (medusa_tensors(5), MERGED, medusa_logits(medusa_tensors(5), STATES)),
    "version 2": (VERSION_2, {"version": "2"}, medusa_logits(VERSION_2, STATES, OUTPUT)),
    "version 1, merged": (under("medusa_head.", VERSION_1) | MODEL, MERGED, medusa_logits(VERSION_1, STATES)),
    "version 2, merged": (under("medusa_head.", VERSION_2) | MODEL, MERGED, medusa_logits(VERSION_2, STATES, OUTPUT)),
    "vLLM": (CONVERTED, {"model_type": "medusa"}, medusa_logits(VERSION_1, STATES)),
    "vLLM, prefixed": (under("medusa_heads.", CONVERTED), {}, medusa_logits(VERSION_1, STATES)),
    "vLLM without biases": (converted(VERSION_1, bias=False), {}, medusa_logits(WITHOUT_BIAS, STATES)),
    "token map": (CONVERTED | {"token_map": IDS}, {}, among(IDS, medusa_logits(VERSION_1, STATES))),
    "token map, truncated matrices": (
        TRUNCATED | {"token_map": IDS},
        {"truncated_vocab_size": 5},
        among(IDS, medusa_logits(VERSION_1, STATES)),
    ),
    "copied output": (COPIED_OUTPUT, ORIGINAL_OUTPUT, medusa_logits(VERSION_1, STATES, OUTPUT)),
    "copied output, token map": (
        COPIED_OUTPUT | {"token_map": IDS},
        ORIGINAL_OUTPUT,
        among(IDS, medusa_logits(VERSION_1, STATES, OUTPUT)),
    ),
    "two layers": (TWO_LAYERS, {}, medusa_logits(TWO_LAYERS, STATES, count=2)),
    "a repeated layer stored once": (ONCE, {}, medusa_logits(REPEATED, STATES, count=2)),
    "a repeated layer stored once, version 2": (
        {name: tensor for name, tensor in ONCE.items() if "linear" in name},
        {"medusa_num_layers": 2},
        medusa_logits(REPEATED, STATES, OUTPUT, count=2),
    ),
    "fewer tokens than a padded target": (medusa_tensors(rows=50), {}, medusa_logits(medusa_tensors(rows=50), STATES)),
}


@pytest.mark.parametrize(("tensors", "config", "expected"), FORMATS.values(), ids=FORMATS)
def test_a_format_computes_the_formula(
    tensors: Tensors, config: dict[str, object], expected: Tensor, tmp_path: Path, target: TargetWeights
) -> None:
    check(save_head(tmp_path, tensors, config), target, expected)


def test_a_configuration_is_not_needed(tmp_path: Path, target: TargetWeights) -> None:
    save_file(VERSION_1, tmp_path / "medusa_lm_head.safetensors")
    check(tmp_path, target, medusa_logits(VERSION_1, STATES))


def test_other_checkpoints_do_not_match(tmp_path: Path) -> None:
    tensors = {"fc.weight": torch.zeros(4, 8), "layers.0.mlp.weight": torch.zeros(2)}
    assert not matches(Checkpoint(save_head(tmp_path, tensors, {})))


def without(name: str) -> Tensors:
    return {key: tensor for key, tensor in VERSION_1.items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        (medusa_tensors(rows=65), "guesses 65 tokens, target has 64: choose heads that were trained for this model"),
        (CONVERTED | {"token_map": torch.tensor([1, 64])}, "names token 64, target has 64"),
        (
            converted(medusa_tensors(rows=9)) | {"token_map": torch.arange(8)},
            "guesses 9 tokens, and its token_map names 8: choose",
        ),
        (without("2.1.weight"), "has no tensor .*incomplete"),
        (without("0.1.weight"), "has no tensor .*incomplete"),
        ({"fc.weight": torch.zeros(4, 8)}, "has no Medusa heads.*choose a folder with medusa_lm_head"),
    ],
)
def test_unsuitable_tensors_are_refused(
    tensors: Tensors, complaint: str, tmp_path: Path, target: TargetWeights
) -> None:
    checkpoint = Checkpoint(save_head(tmp_path, tensors, {}))
    with pytest.raises(CheckpointError, match=complaint) as caught:
        load_medusa(checkpoint, target)
    assert "\n" not in str(caught.value)


def speculator(folder: Path, target: TargetWeights, width: int = 3) -> MedusaSpeculator:
    heads = load_medusa(Checkpoint(save_head(folder, VERSION_1, {})), target)
    return MedusaSpeculator(heads, target, width, 0.0)


@pytest.mark.parametrize("nodes", [1, 2, 5, 17, 1000])
@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize("width", [1, 3])
def test_the_tree_has_the_likeliest_of_all_paths(
    tmp_path: Path, target: TargetWeights, nodes: int, depth: int, width: int
) -> None:
    medusa, tree = speculator(tmp_path, target, width), replica()
    medusa.open(opening(nodes=nodes, depth=depth))
    send_states(medusa, STATE)
    grown(medusa, tree)
    values, tokens = medusa_logits(VERSION_1, STATE[None])[0, :depth].log_softmax(-1).topk(width)
    expected = {
        tuple(int(tokens[i, rank]) for i, rank in enumerate(ranks)): sum(
            float(values[i, rank]) for i, rank in enumerate(ranks)
        )
        for length in range(1, len(values) + 1)
        for ranks in itertools.product(range(width), repeat=length)
    }
    likeliest = sorted(expected.items(), key=lambda path: -path[1])[:nodes]
    paths = {tuple(each.token for each in node.path()): node.path_log_prob for node in nodes_of(tree)}
    assert paths == pytest.approx(dict(likeliest), abs=1e-4)


def test_many_requests_take_several_rounds_of_bounded_size(tmp_path: Path, target: TargetWeights) -> None:
    medusa = speculator(tmp_path, target)
    for key in range(100):
        medusa.open(opening(key=key))
        send_states(medusa, STATE, key)
    first, second = medusa.grow(), medusa.grow()
    assert len(first) == MAX_ROWS // STEPS
    assert set(first) | set(second) == set(range(100))
    assert medusa.behind
    assert not medusa.grow()
    assert not medusa.behind


def test_a_head_that_repeats_the_target_guesses_the_root_again(tmp_path: Path) -> None:
    """Layers of zeros and the target's output give the logits that the root was drawn from. The root's own state would
    give the token after it."""
    target = markov_model().target_weights()
    tensors = {"0.0.linear.weight": torch.zeros(HIDDEN, HIDDEN), "0.0.linear.bias": torch.zeros(HIDDEN)}
    medusa = MedusaSpeculator(load_medusa(Checkpoint(save_head(tmp_path, tensors, {})), target), target, 1, 0.0)
    successor = logits_after().argmax(-1).tolist()
    tokens = [11]
    for _ in range(8):
        tokens.append(successor[tokens[-1]])
    assert len(set(tokens)) > 4
    states = final_states().float()[torch.tensor(tokens)].unsqueeze(1)
    medusa.open(Opening(1, tokens[:4], 0, GREEDY, 4, 10))
    medusa.context(Context(1, 0, states[:3]))
    assert medusa.grow()[1].tokens == [tokens[3]]
    medusa.commit(Commit(1, 3, tokens[4:6], 1, states[3:5]))
    assert medusa.grow()[1].tokens == [tokens[5]]


@torch.inference_mode()
def test_what_is_trained_is_what_is_served(tmp_path: Path, target: TargetWeights) -> None:
    """Head s predicts the token s + 2 positions after its state, in training and in serving."""
    module, reading = trained("medusa", tmp_path)
    assert matches(Checkpoint(tmp_path))
    heads = load_medusa(Checkpoint(tmp_path), target)
    for step, logits in enumerate(module(reading, len(heads))):
        served = heads(reading.states_BLSH[:, : logits.shape[1], 0].flatten(0, 1))[:, step]
        torch.testing.assert_close(served, logits.flatten(0, 1))
