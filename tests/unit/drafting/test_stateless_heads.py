"""Medusa heads and MLP speculators: every published format computes the authors' formula; which state is read.

`test_draft_guesses.py` has what they share with other methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.config import SamplingParams
from paceline.drafting.draw_prediction import MAX_ROWS
from paceline.drafting.heads.mlp_network import load_mlp_speculator
from paceline.drafting.methods import medusa, mlp_speculator
from paceline.drafting.methods.medusa import load_medusa
from paceline.drafting.methods.mlp_speculator import Levels
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import Commit, Context, DraftError, DraftingLimits, Limit, Opening, Speculator
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights
from tests.helpers.head_checkpoints import HIDDEN, read_tensors, save_head, seeded, without
from tests.helpers.head_formulas import lstm_logits, medusa_logits, mlp_logits
from tests.helpers.head_methods import (
    INNER,
    MATRICES,
    MEDUSA,
    MLP,
    NETWORK,
    STATELESS,
    STEPS,
    build_head,
    medusa_layers,
    medusa_tensors,
    mlp_tensors,
    save_method,
    target_weights,
)
from tests.helpers.llamas import LAWS, VOCABULARY
from tests.helpers.markov import mlp_config, trained
from tests.helpers.seen import nodes_of, root_of
from tests.unit.drafting.feeding import Feeding

Tensors = dict[str, Tensor]
GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]
ROOT = len(PROMPT) - 1
OUTPUT = MATRICES[1]
STATES = seeded(4, HIDDEN, seed=9) * 8


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    return target_weights()


def under(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


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


def of_medusa(*arguments: Any, ids: Tensor | None = None, **more: Any) -> Tensor:
    """[n, heads, V]: the formula's logits of STATES; -inf for tokens that the heads do not know."""
    logits = torch.stack([medusa_logits(*arguments, **{"state": state, **more}) for state in STATES])
    whole = torch.full((*logits.shape[:2], VOCABULARY), -math.inf)
    ids = torch.arange(logits.shape[-1]) if ids is None else ids
    return whole.index_copy_(2, ids, logits if len(ids) == logits.shape[-1] else logits[..., ids])


VERSION_2 = medusa_layers(0) | medusa_layers(1)
TWO_LAYERS, REPEATED = medusa_tensors(count=2), medusa_tensors(count=2, repeated=True)
ONCE = {name: tensor for name, tensor in REPEATED.items() if ".1.linear" not in name}
CONVERTED = converted(MEDUSA)
WITHOUT_BIAS = MEDUSA | {name: torch.zeros(HIDDEN) for name in MEDUSA if name.endswith("bias")}
MODEL = {"lm_head.weight": torch.zeros(VOCABULARY, HIDDEN), "model.layers.0.weight": torch.zeros(3)}
"""Tensors of a target that is merged with its heads; they are not read."""
MERGED = {"num_hidden_layers": 32, "medusa_num_heads": 2}
IDS = torch.tensor([40, 3, 17, 60, 9])
TRUNCATED = {name: tensor[IDS].clone() if name.startswith("lm_heads") else tensor for name, tensor in CONVERTED.items()}
COPIED_OUTPUT = {name: tensor for name, tensor in CONVERTED.items() if "lm_head" not in name} | {
    "lm_heads.0.weight": torch.zeros(VOCABULARY, HIDDEN)
}
ORIGINAL_OUTPUT = {"original_lm_head": True}
MEDUSA_FORMATS: dict[str, tuple[Tensors, dict[str, object], Tensor]] = {
    "five heads, configured as two": (medusa_tensors(5), MERGED, of_medusa(medusa_tensors(5))),
    "version 2": (VERSION_2, {"version": "2"}, of_medusa(VERSION_2, output=OUTPUT)),
    "version 1, merged": (under("medusa_head.", MEDUSA) | MODEL, MERGED, of_medusa(MEDUSA)),
    "version 2, merged": (under("medusa_head.", VERSION_2) | MODEL, MERGED, of_medusa(VERSION_2, output=OUTPUT)),
    "vLLM": (CONVERTED, {"model_type": "medusa"}, of_medusa(MEDUSA)),
    "vLLM, prefixed": (under("medusa_heads.", CONVERTED), {}, of_medusa(MEDUSA)),
    "vLLM without biases": (converted(MEDUSA, bias=False), {}, of_medusa(WITHOUT_BIAS)),
    "token map": (CONVERTED | {"token_map": IDS}, {}, of_medusa(MEDUSA, ids=IDS)),
    "token map, truncated matrices": (
        TRUNCATED | {"token_map": IDS},
        {"truncated_vocab_size": 5},
        of_medusa(MEDUSA, ids=IDS),
    ),
    "copied output": (COPIED_OUTPUT, ORIGINAL_OUTPUT, of_medusa(MEDUSA, output=OUTPUT)),
    "copied output, token map": (
        COPIED_OUTPUT | {"token_map": IDS},
        ORIGINAL_OUTPUT,
        of_medusa(MEDUSA, output=OUTPUT, ids=IDS),
    ),
    "two layers": (TWO_LAYERS, {}, of_medusa(TWO_LAYERS, count=2)),
    "a repeated layer stored once": (ONCE, {}, of_medusa(REPEATED, count=2)),
    "a repeated layer stored once, version 2": (
        {name: tensor for name, tensor in ONCE.items() if "linear" in name},
        {"medusa_num_layers": 2},
        of_medusa(REPEATED, output=OUTPUT, count=2),
    ),
    "fewer tokens than a padded target": (medusa_tensors(rows=50), {}, of_medusa(medusa_tensors(rows=50))),
    "no configuration": (MEDUSA, {}, of_medusa(MEDUSA)),
}


@pytest.mark.parametrize("name", MEDUSA_FORMATS)
def test_medusa_heads_of_a_format_compute_the_formula(name: str, tmp_path: Path, target: TargetWeights) -> None:
    tensors, config, expected = MEDUSA_FORMATS[name]
    if name == "no configuration":
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    else:
        save_head(tmp_path, tensors, config)
    checkpoint = Checkpoint(tmp_path)
    assert medusa.matches(checkpoint)
    heads = load_medusa(checkpoint, target)
    logits = heads(STATES)
    if heads.ids is not None:
        logits = torch.full_like(expected, -math.inf).index_copy_(2, heads.ids, logits)
    torch.testing.assert_close(logits, expected)


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
    numbered = {}
    for name, tensor in tensors.items():
        part, step, rest = name.split(".")
        numbered[name if part == "head" else f"{part}.{step}.0.{rest}"] = tensor
    return numbered


STATE = STATES[0]
TOKENS = (9, 63, 0)
LONGER = (*TOKENS, 7, 7)
WIDE = mlp_tensors(inner=HIDDEN)
TIED = tied(MLP)
TIED_LOGITS = mlp_logits(TIED, STATE, TOKENS, STEPS)
TIED_CONFIG = mlp_config(STEPS, tie_weights=True)
LSTM_CONFIG = {"method": "sum_lstm", "n_predict": STEPS, "tie_weights": True, "tie_lstm_embs": True}
RNN_CONFIG = {"method": "sum_rnn", "n_predict": STEPS, "tie_weights": True, "inner_dim": str(INNER)}
ARCTIC_CONFIG = TIED_CONFIG | {"architectures": ["ArcticMLPSpeculatorPreTrainedModel"], "num_lookahead_tokens": 5}
MLP_FORMATS: dict[str, tuple[Tensors, dict[str, object], Sequence[int], Tensor]] = {
    "IBM": (MLP, mlp_config(STEPS), TOKENS, mlp_logits(MLP, STATE, TOKENS, STEPS)),
    "IBM, prefixed": (under("speculator.", MLP), mlp_config(STEPS), TOKENS, mlp_logits(MLP, STATE, TOKENS, STEPS)),
    "IBM, scaled input": (
        MLP,
        mlp_config(STEPS, scale_input=True),
        TOKENS,
        mlp_logits(MLP, STATE, TOKENS, STEPS, scale=True),
    ),
    "IBM, as wide as the target": (
        WIDE,
        mlp_config(STEPS, scale_input=True),
        TOKENS,
        mlp_logits(WIDE, STATE, TOKENS, STEPS, scale=True),
    ),
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
        ARCTIC_CONFIG,
        LONGER,
        mlp_logits(tied(mlp_tensors(5)), STATE, LONGER, STEPS),
    ),
    "Arctic's sum_rnn": (sum_rnn(stored_once(TIED)), RNN_CONFIG, TOKENS, TIED_LOGITS),
    "Arctic's sum_lstm": (lstm(), LSTM_CONFIG, TOKENS, lstm_logits(lstm(), STATE, TOKENS, STEPS)),
}


@pytest.mark.parametrize("name", MLP_FORMATS)
def test_an_mlp_speculator_of_a_format_computes_the_formula(name: str, tmp_path: Path, target: TargetWeights) -> None:
    """In a batch with another chain."""
    tensors, config, tokens, expected = MLP_FORMATS[name]
    checkpoint = Checkpoint(save_head(tmp_path, tensors, config))
    assert mlp_speculator.matches(checkpoint)
    network = load_mlp_speculator(checkpoint, target)
    assert network.steps == len(tokens)
    inputs = network.begin(torch.stack([STATE, STATE.flip(0)]))
    for i, token in enumerate(tokens):
        logits, inputs = network.step(i, inputs, torch.tensor([token, 0]))
        torch.testing.assert_close(logits[0], expected[i])


def test_repeated_names_are_read_once(tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(save_head(tmp_path, TIED, TIED_CONFIG))
    names = read_tensors(monkeypatch)
    load_mlp_speculator(checkpoint, target)
    assert sorted(names) == sorted(stored_once(TIED))


@torch.inference_mode()
def test_trained_medusa_heads_are_served_alike(tmp_path: Path, target: TargetWeights) -> None:
    """Head s predicts the token s + 2 positions after its state, in training and in serving."""
    module, reading = trained("medusa", tmp_path)
    assert medusa.matches(Checkpoint(tmp_path))
    heads = load_medusa(Checkpoint(tmp_path), target)
    for step, logits in enumerate(module(reading, heads.tokens_per_pass)):
        served = heads(reading.states_BLSH[:, : logits.shape[1], 0].flatten(0, 1))[:, step]
        torch.testing.assert_close(served, logits.flatten(0, 1))


@torch.inference_mode()
def test_a_trained_mlp_speculator_is_served_alike(tmp_path: Path, target: TargetWeights) -> None:
    """Step 0 reads the token after the state's position, every later step the next one."""
    module, reading = trained("mlp_speculator", tmp_path)
    assert mlp_speculator.matches(Checkpoint(tmp_path))
    network = load_mlp_speculator(Checkpoint(tmp_path), target)
    fed = network.begin(reading.states_BLSH[:, 0, 0])
    for step, logits in enumerate(module(reading, network.steps)):
        served, fed = network.step(step, fed, reading.ids_BL[:, 1 + step])
        torch.testing.assert_close(served, logits[:, 0])


@pytest.mark.parametrize(
    ("matches", "tensors", "config"),
    [
        (medusa.matches, {"fc.weight": torch.zeros(4, 8), "layers.0.mlp.weight": torch.zeros(2)}, {}),
        (mlp_speculator.matches, MLP, {}),
        (mlp_speculator.matches, MLP, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
    ],
)
def test_other_checkpoints_do_not_match(
    matches: Callable[[Checkpoint], bool], tensors: Tensors, config: dict[str, object], tmp_path: Path
) -> None:
    assert not matches(Checkpoint(save_head(tmp_path, tensors, config)))


NINE = converted(medusa_tensors(rows=9)) | {"token_map": torch.arange(8)}
TWO_IN_ONE_STEP = MLP | {"emb.0.3.weight": torch.zeros(INNER, INNER)}
EACH_GATES_EMBEDDING = lstm() | {"input_emb.0.weight": torch.zeros(VOCABULARY, INNER)}
TOO_MANY = "trained for 65 tokens, target has 64: choose a speculator that was trained for"


@pytest.mark.parametrize(
    ("load", "tensors", "keys", "complaint"),
    [
        (load_medusa, medusa_tensors(rows=65), {}, "guesses 65 tokens, target has 64: choose heads that were trained"),
        (load_medusa, CONVERTED | {"token_map": torch.tensor([1, 64])}, {}, "names token 64, target has 64"),
        (load_medusa, NINE, {}, "guesses 9 tokens, and its token_map names 8: choose"),
        (load_medusa, without(MEDUSA, "2.1.weight"), {}, "has no tensor .*incomplete"),
        (load_medusa, without(MEDUSA, "0.1.weight"), {}, "has no tensor .*incomplete"),
        (load_medusa, {"fc.weight": torch.zeros(4, 8)}, {}, "has no Medusa heads.*choose a folder with medusa_lm_head"),
        (load_mlp_speculator, mlp_tensors(emb=65), {}, TOO_MANY),
        (load_mlp_speculator, mlp_tensors(head=65), {}, TOO_MANY),
        *(
            (load_mlp_speculator, without(MLP, name), {}, f"has no tensor {name}")
            for name in ("proj.1.weight", "emb.2.weight", "ln.0.weight")
        ),
        *(
            (load_mlp_speculator, MLP, {"n_predict": steps}, "config.json lacks n_predict.*add it")
            for steps in (None, 0, "3")
        ),
        (load_mlp_speculator, TWO_IN_ONE_STEP, {}, r"several layers in one step \(emb.0.3.weight\): choose"),
        (
            load_mlp_speculator,
            EACH_GATES_EMBEDDING,
            {"method": "sum_lstm"},
            "an embedding for each gate.*tie_lstm_embs",
        ),
    ],
)
def test_an_unsuitable_checkpoint_is_refused(
    load: Callable[[Checkpoint, TargetWeights], object],
    tensors: Tensors,
    keys: dict[str, object],
    complaint: str,
    tmp_path: Path,
    target: TargetWeights,
) -> None:
    config = {} if load is load_medusa else mlp_config(STEPS, **keys)
    checkpoint = Checkpoint(save_head(tmp_path, tensors, config))
    with pytest.raises(CheckpointError, match=complaint) as caught:
        load(checkpoint, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("params", [LAWS[0], LAWS[4]])
@pytest.mark.parametrize("method", STATELESS)
def test_with_a_padded_target_only_known_tokens_are_guessed(
    method: str, params: SamplingParams, tmp_path: Path
) -> None:
    """The output knows four tokens; the MLP speculator's embedding three, so the fourth is not expanded."""
    tensors = medusa_tensors(rows=4) if method == "medusa" else mlp_tensors(emb=3, head=4)
    folder = save_head(tmp_path, tensors, {} if method == "medusa" else mlp_config(STEPS))
    speculator = build_head(folder, method, tree_width=32)
    request = Feeding(speculator, NETWORK, [3, 1, 2], sampling=params)
    request.tell()
    request.grow()
    assert {node.token for node in nodes_of(request.tree)} == set(range(4))
    if method == "mlp_speculator":
        assert {node.token for node in nodes_of(request.tree) if node.children} == set(range(3))
        request = Feeding(speculator, NETWORK, [3, 1, 60])
        request.tell()
        assert not request.grow(), "the root has no embedding"


@pytest.fixture(params=STATELESS)
def speculator(request: pytest.FixtureRequest, tmp_path: Path, target: TargetWeights) -> Speculator:
    return build_head(save_method(tmp_path, request.param), request.param, target)


class TestState:
    """A method reads the state before the root, and no other."""

    @pytest.fixture(autouse=True)
    def _opened(self, speculator: Speculator) -> None:
        speculator.open(Opening(1, PROMPT, 0, GREEDY, 8, 1000))

    def test_one_from_beyond_the_root_is_not_used(self, speculator: Speculator) -> None:
        speculator.context(Context(1, 0, seeded(ROOT + 1, 1, HIDDEN)))
        assert not speculator.grow()
        speculator.commit(Commit(1, ROOT, [6], 0))
        assert speculator.grow(), "the root has moved behind it"

    def test_older_ones_do_not_replace_it(self, speculator: Speculator) -> None:
        speculator.context(Context(1, 0, seeded(ROOT, 1, HIDDEN)))
        speculator.context(Context(1, 0, seeded(2, 1, HIDDEN)))
        assert speculator.grow()
        speculator.commit(Commit(1, ROOT, [6], 0, seeded(1, 1, HIDDEN)))
        assert speculator.grow()

    def test_only_the_last_one_is_kept(self, speculator: Any) -> None:
        """Without the memory of the others, which came in the same tensor."""
        states = seeded(ROOT, 1, HIDDEN)
        speculator.context(Context(1, 0, states))
        [request] = speculator._requests.values()
        assert request.states.last.untyped_storage().nbytes() == HIDDEN * 4
        assert torch.equal(request.states.last, states[-1])

    @pytest.mark.parametrize("shape", [(2, 1, 32), (2, 2, HIDDEN), (2, HIDDEN)])
    def test_another_shape_is_refused(self, speculator: Speculator, shape: Sequence[int]) -> None:
        with pytest.raises(DraftError, match="hidden states of shape"):
            speculator.context(Context(1, 0, torch.zeros(*shape)))

    def test_a_full_tree_needs_no_pass(self, speculator: Speculator) -> None:
        speculator.limit(Limit(1, 8, 0))
        speculator.context(Context(1, 0, seeded(ROOT, 1, HIDDEN)))
        assert not speculator.grow()
        assert not speculator.behind


def crowd(speculator: Speculator, count: int) -> dict[int, Feeding]:
    requests = {}
    for key in range(count):
        sampling = SamplingParams(temperature=1.0, seed=key)
        requests[key] = Feeding(speculator, NETWORK, PROMPT, key=key, sampling=sampling, depth=8)
        requests[key].tell()
    return requests


class TestRounds:
    def test_medusa_runs_for_a_bounded_number_of_requests(self, tmp_path: Path, target: TargetWeights) -> None:
        speculator = build_head(save_method(tmp_path, "medusa"), "medusa", target)
        requests = crowd(speculator, 100)
        first, second = speculator.grow(), speculator.grow()
        assert len(first) == MAX_ROWS // STEPS
        assert set(first) | set(second) == set(requests)
        assert speculator.behind
        assert not speculator.grow()
        assert not speculator.behind

    def test_an_mlp_speculator_expands_the_likeliest_nodes_of_all_requests(
        self, tmp_path: Path, target: TargetWeights
    ) -> None:
        speculator = build_head(save_method(tmp_path, "mlp_speculator"), "mlp_speculator", target, tree_width=3)
        requests = crowd(speculator, 50)
        for key, growth in speculator.grow().items():
            requests[key].tree.graft(growth, 1000)
        nodes = [node for each in requests.values() for node in [root_of(each.tree), *nodes_of(each.tree)]]
        assert all(root_of(each.tree).children for each in requests.values())
        assert len([node for node in nodes if node.children]) == MAX_ROWS
        level = [node for node in nodes if node.position == ROOT + 2]
        expanded = [node.path_log_prob for node in level if node.children]
        assert expanded
        assert min(expanded) >= max(node.path_log_prob for node in level if not node.children)
        assert speculator.behind

    def test_no_more_nodes_are_expanded_than_fill_the_tree(
        self, tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        network = load_mlp_speculator(Checkpoint(save_method(tmp_path, "mlp_speculator")), target)
        rows: list[int] = []
        step = network.step
        monkeypatch.setattr(network, "step", lambda *inputs: (rows.append(len(inputs[2])), step(*inputs))[1])
        request = Feeding(NetworkSpeculator(Levels(network, DraftingLimits(3))), NETWORK, PROMPT, nodes=7)
        request.tell()
        assert len(request.grow()) == 7
        assert rows == [1, 2], "after the root's three children the tree lacks four nodes"
