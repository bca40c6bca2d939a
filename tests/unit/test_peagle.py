"""P-EAGLE heads: against a computation without a cache written from the paper's formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.drafting.cached_draft import PREFILL_ROWS
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.drafting.methods.peagle import PEagleSpeculator, is_peagle
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.loading import build
from paceline.model.target_weights import TargetWeights
from tests.helpers.dense import HIDDEN, attention, heads_of, mlp, random, rms_norm
from tests.helpers.feeding import Feeding, Guess
from tests.helpers.llamas import VOCABULARY, peaked_llama
from tests.helpers.parallel import MASK, PEAGLE, peagle_tensors, save
from tests.helpers.seen import nodes_of

NETWORK = peaked_llama()
AHEAD = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def reduced() -> tuple[dict[str, Tensor], list[int]]:
    ids = list(range(1, VOCABULARY, 4))
    offsets = torch.tensor(ids) - torch.arange(len(ids))
    return peagle_tensors() | {"lm_head.weight": random(len(ids), HIDDEN), "d2t": offsets}, ids


def lent() -> TargetWeights:
    return build(peaked_llama(), "target", EngineConfig(), "", []).target_weights()


def drafting(checkpoint: Checkpoint, ahead: int = AHEAD, width: int = 2) -> PEagleSpeculator:
    target = lent()
    return PEagleSpeculator(Eagle3Network(checkpoint, target, 1024), checkpoint, target, ahead, width, 0.0)


@torch.no_grad()
def laws(
    request: Feeding, weights: Mapping[str, Tensor], ahead: int = AHEAD, *, normed_residual: bool = False
) -> Tensor:
    """Log-probabilities [ahead, columns] of the last real row and of the mask rows behind it."""
    before = len(request.tokens) - 1
    told = request.states()[:before].flatten(1)
    states = torch.cat((told, weights["mask_hidden"].view(1, -1).expand(ahead - 1, -1)))
    if "input_norm.weight" in weights:
        states = rms_norm(states, weights["input_norm.weight"])
    elif "fc_norm.0.weight" in weights:
        chunks = states.chunk(3, -1)
        states = torch.cat([rms_norm(x, weights[f"fc_norm.{i}.weight"]) for i, x in enumerate(chunks)], -1)
    g = states @ weights["fc.weight"].T
    embedding = weights.get("embed_tokens.weight", NETWORK.model.embed_tokens.weight)
    tokens = embedding[torch.tensor([*request.tokens[1:], *[MASK] * (ahead - 1)])]
    u = rms_norm(g, weights["layers.0.hidden_norm.weight"])
    e = rms_norm(tokens, weights["layers.0.input_layernorm.weight"])
    x = layer(u if normed_residual else g, torch.cat((e, u), -1), weights, 0)
    x = layer(x, rms_norm(x, weights["layers.1.input_layernorm.weight"]), weights, 1)
    head = weights.get("lm_head.weight", NETWORK.lm_head.weight)
    return (rms_norm(x[before - 1 :], weights["norm.weight"]) @ head.T).log_softmax(-1)


def layer(x: Tensor, y: Tensor, weights: Mapping[str, Tensor], n: int) -> Tensor:
    """A causal layer with residual `x` and attention over `y`."""
    name, positions = f"layers.{n}", torch.arange(len(y))
    query, key = (heads_of(y, weights, f"{name}.self_attn.{p}", positions) for p in ("q", "k"))
    value = heads_of(y, weights, f"{name}.self_attn.v")
    seen = positions <= positions[:, None]
    x = x + attention(query, key, value, seen) @ weights[f"{name}.self_attn.o_proj.weight"].T
    return x + mlp(rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"]), weights, name)


def check(request: Feeding, guesses: Sequence[Guess], expected: Tensor, ids: Sequence[int] | None) -> None:
    """Each guess has its depth's log-probability, and the likeliest path is there."""
    columns = {token: column for column, token in enumerate(ids or range(VOCABULARY))}
    assert guesses
    for path, log_prob in guesses:
        assert log_prob == pytest.approx(float(expected[len(path) - 1, columns[path[-1]]]), abs=2e-3)
    best = [int(law.argmax()) for law in expected]
    likeliest = [ids[column] if ids else column for column in best]
    assert len(request.tree.match(likeliest)) == len(likeliest)


class Variant:
    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor] | None = None,
        ids: Sequence[int] | None = None,
        *,
        normed_residual: bool = False,
    ) -> None:
        self.config, self.weights, self.ids = config, weights or peagle_tensors(), ids
        self.normed_residual = normed_residual


def without(mapping: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


VARIANTS = {
    "library": Variant(PEAGLE),
    "residual not said": Variant(without(PEAGLE, "norm_before_residual")),
    "normed residual": Variant({**PEAGLE, "norm_before_residual": True}, normed_residual=True),
    "norm before fc": Variant(
        {**PEAGLE, "norm_before_fc": True}, peagle_tensors() | {"input_norm.weight": random(192)}
    ),
    "norms before fc": Variant(
        {**PEAGLE, "fc_norm": True}, peagle_tensors() | {f"fc_norm.{i}.weight": random(HIDDEN) for i in range(3)}
    ),
    "the target's matrices": Variant(PEAGLE, without(peagle_tensors(), "embed_tokens.weight", "lm_head.weight")),
    "reduced vocabulary": Variant(PEAGLE, *reduced()),
    "the mask's other name": Variant({**without(PEAGLE, "mask_token_id"), "pard_token": MASK}),
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Variant:
    return VARIANTS[request.param]


@pytest.mark.parametrize("length", [2, 8, 62, 64, 65])
def test_laws_are_those_of_the_formulas(variant: Variant, tmp_path: Path, length: int) -> None:
    request = Feeding(
        drafting(save(tmp_path, variant.config, variant.weights)),
        NETWORK,
        [(7 * i + i // 5) % VOCABULARY for i in range(length)],
    )
    request.tell()
    expected = laws(request, variant.weights, normed_residual=variant.normed_residual)
    assert len(expected) == AHEAD
    check(request, request.grow(), expected, variant.ids)


def test_rounds_with_commits_between_are_those_without_a_cache(variant: Variant, tmp_path: Path) -> None:
    """Masks leave nothing behind; accepted tokens are run with the target's states."""
    rng = Random(3)
    speculator = drafting(save(tmp_path, variant.config, variant.weights))
    request = Feeding(speculator, NETWORK, PROMPT)
    request.tell()
    for _ in range(12):
        expected = laws(request, variant.weights, normed_residual=variant.normed_residual)
        check(request, request.grow(), expected, variant.ids)
        speculator.check_integrity()
        chosen = rng.choice(list(nodes_of(request.tree))).path()
        request.commit([*(node.token for node in chosen), *rng.choices(range(VOCABULARY), k=rng.randrange(2))])


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_the_laws_are_as_many_as_are_asked_for(tmp_path: Path, ahead: int) -> None:
    request = Feeding(drafting(save(tmp_path, PEAGLE, peagle_tensors()), ahead, 1), NETWORK, PROMPT)
    request.tell()
    guesses = request.grow()
    assert len(guesses) == ahead
    check(request, guesses, laws(request, peagle_tensors(), ahead), None)


def test_a_first_token_alone_has_no_row(tmp_path: Path) -> None:
    """Until there is one after it, and its state."""
    request = Feeding(drafting(save(tmp_path, PEAGLE, peagle_tensors())), NETWORK, [5])
    assert request.grow() == []
    request.commit([7])
    check(request, request.grow(), laws(request, peagle_tensors()), None)


def test_states_that_come_late_are_waited_for(tmp_path: Path) -> None:
    request = Feeding(drafting(save(tmp_path, PEAGLE, peagle_tensors())), NETWORK, PROMPT)
    request.tell(len(PROMPT) - 2)
    assert request.grow() == []
    request.commit([7, 8])
    assert request.grow() == []
    request.tell()
    check(request, request.grow(), laws(request, peagle_tensors()), None)


def test_several_requests_share_a_pass(tmp_path: Path) -> None:
    speculator = drafting(save(tmp_path, PEAGLE, peagle_tensors()))
    requests = {
        key: Feeding(speculator, NETWORK, [(key * i) % VOCABULARY for i in range(3 * key)], key=key)
        for key in (1, 2, 5)
    }
    for request in requests.values():
        request.tell()
    grown = speculator.grow()
    assert grown.keys() == requests.keys()
    for key, request in requests.items():
        request.tree.graft(grown[key], 1000)
        guesses = [(tuple(n.token for n in node.path()), node.log_prob) for node in nodes_of(request.tree)]
        check(request, guesses, laws(request, peagle_tensors()), None)


def test_a_long_prompt_takes_several_rounds(tmp_path: Path) -> None:
    request = Feeding(
        drafting(save(tmp_path, PEAGLE, peagle_tensors())), NETWORK, [i % VOCABULARY for i in range(PREFILL_ROWS + 70)]
    )
    request.tell()
    check(request, request.grow(), laws(request, peagle_tensors()), None)


def test_the_first_guess_stands_on_the_state_before_the_root(tmp_path: Path) -> None:
    """A head that lets through the last layer's output says in the root's row what the target says before the root."""
    through = {name: torch.zeros_like(tensor) for name, tensor in peagle_tensors().items()}
    through["fc.weight"] = torch.cat((torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)), 1)
    through["lm_head.weight"] = NETWORK.lm_head.weight.detach().clone()
    through["norm.weight"] = NETWORK.model.norm.weight.detach().clone()
    with torch.no_grad():
        said = NETWORK(torch.tensor([PROMPT])).logits[0].argmax(-1).tolist()
    request = Feeding(drafting(save(tmp_path, PEAGLE, through), 1, 1), NETWORK, PROMPT)
    request.tell()
    assert [path for path, _ in request.grow()] == [(said[-2],)]
    assert len(set(said[-3:])) == 3


def test_a_head_without_mask_hidden_is_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, PEAGLE, without(peagle_tensors(), "mask_hidden"))
    assert is_peagle(checkpoint)
    with pytest.raises(CheckpointError, match="no tensor mask_hidden: it is an EAGLE-3 head"):
        drafting(checkpoint)


@pytest.mark.parametrize(
    ("config", "weights", "words"),
    [
        (without(PEAGLE, "mask_token_id"), peagle_tensors(), "names no mask_token_id"),
        ({**PEAGLE, "mask_token_id": VOCABULARY}, peagle_tensors(), f"no id in an embedding of {VOCABULARY} tokens"),
        (PEAGLE, peagle_tensors() | {"mask_hidden": torch.zeros(1, 1, 64)}, "has 64 values where 3 states of 64"),
        (PEAGLE, without(peagle_tensors(), "fc.weight"), "no tensor fc.weight"),
        ({**PEAGLE, "target_hidden_size": 128}, peagle_tensors(), "hidden size 128, target has 64"),
    ],
)
def test_what_cannot_be_served_is_refused(
    tmp_path: Path, config: dict[str, Any], weights: dict[str, Tensor], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        drafting(save(tmp_path, config, weights))


def test_a_head_is_recognised_by_its_mask(tmp_path: Path) -> None:
    assert is_peagle(save(tmp_path, without(PEAGLE, "speculators_model_type", "architectures"), peagle_tensors()))
    plain = without(PEAGLE, "speculators_model_type", "architectures")
    assert not is_peagle(save(tmp_path / "other", plain, without(peagle_tensors(), "mask_hidden")))
