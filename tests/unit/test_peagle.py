"""P-EAGLE heads, compared with the paper's formulas computed without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafting.cached_draft import PREFILL_ROWS
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.drafting.methods.peagle import PEagleSpeculator, matches
from paceline.model.checkpoint import Checkpoint, CheckpointError
from tests.helpers.dense import HIDDEN, attention, heads_of, mlp, random, rms_norm
from tests.helpers.feeding import Feeding
from tests.helpers.head_methods import target_weights
from tests.helpers.llamas import VOCABULARY, peaked_llama
from tests.helpers.parallel import (
    MASK,
    PEAGLE,
    check_guesses,
    check_rounds,
    peagle_tensors,
    reduced_vocabulary,
    save,
)

NETWORK = peaked_llama()
AHEAD = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def drafting(checkpoint: Checkpoint, ahead: int = AHEAD, width: int = 2) -> PEagleSpeculator:
    target = target_weights()
    return PEagleSpeculator(Eagle3Network(checkpoint, target, 1024), checkpoint, target, ahead, width, 0.0)


@torch.no_grad()
def distributions(
    request: Feeding, weights: Mapping[str, Tensor], ahead: int = AHEAD, *, normed_residual: bool = False
) -> Tensor:
    """Log-probabilities [ahead, columns] of the last real row and of the mask rows behind it."""
    before = len(request.tokens) - 1
    known = request.states()[:before].flatten(1)
    states = torch.cat((known, weights["mask_hidden"].view(1, -1).expand(ahead - 1, -1)))
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


@dataclass(frozen=True)
class Variant:
    """`ids`: the tokens of a reduced vocabulary."""

    config: Mapping[str, Any]
    weights: Mapping[str, Tensor] = field(default_factory=peagle_tensors)
    ids: Sequence[int] | None = None
    normed_residual: bool = False

    def distributions(self, request: Feeding) -> Tensor:
        return distributions(request, self.weights, normed_residual=self.normed_residual)


def without(mapping: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


REDUCED, IDS = reduced_vocabulary(4)
VARIANTS = {
    "library": Variant(PEAGLE),
    "residual not configured": Variant(without(PEAGLE, "norm_before_residual")),
    "normed residual": Variant({**PEAGLE, "norm_before_residual": True}, normed_residual=True),
    "norm before fc": Variant(
        {**PEAGLE, "norm_before_fc": True}, peagle_tensors() | {"input_norm.weight": random(192)}
    ),
    "norms before fc": Variant(
        {**PEAGLE, "fc_norm": True}, peagle_tensors() | {f"fc_norm.{i}.weight": random(HIDDEN) for i in range(3)}
    ),
    "the target's matrices": Variant(PEAGLE, without(peagle_tensors(), "embed_tokens.weight", "lm_head.weight")),
    "reduced vocabulary": Variant(PEAGLE, peagle_tensors() | REDUCED, IDS),
    "the mask's other name": Variant({**without(PEAGLE, "mask_token_id"), "pard_token": MASK}),
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Variant:
    return VARIANTS[request.param]


@pytest.mark.parametrize("length", [2, 8, 62, 64, 65])
def test_distributions_are_the_formulas(variant: Variant, tmp_path: Path, length: int) -> None:
    prompt = [(7 * i + i // 5) % VOCABULARY for i in range(length)]
    request = Feeding(drafting(save(tmp_path, variant.config, variant.weights)), NETWORK, prompt)
    request.tell()
    check_guesses(request, request.grow(), variant.distributions(request), variant.ids)


def test_rounds_with_commits_between_are_those_without_a_cache(variant: Variant, tmp_path: Path) -> None:
    """Masks leave nothing behind; accepted tokens are run with the target's states."""
    speculator = drafting(save(tmp_path, variant.config, variant.weights))
    request = Feeding(speculator, NETWORK, PROMPT)
    check_rounds(request, speculator, lambda: variant.distributions(request), variant.ids)


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_a_pass_has_as_many_distributions_as_configured(tmp_path: Path, ahead: int) -> None:
    request = Feeding(drafting(save(tmp_path, PEAGLE, peagle_tensors()), ahead, 1), NETWORK, PROMPT)
    request.tell()
    guesses = request.grow()
    assert len(guesses) == ahead
    check_guesses(request, guesses, distributions(request, peagle_tensors(), ahead))


def test_a_long_prompt_takes_several_rounds(tmp_path: Path) -> None:
    prompt = [i % VOCABULARY for i in range(PREFILL_ROWS + 70)]
    request = Feeding(drafting(save(tmp_path, PEAGLE, peagle_tensors())), NETWORK, prompt)
    request.tell()
    check_guesses(request, request.grow(), distributions(request, peagle_tensors()))


def test_the_first_guess_comes_from_the_state_before_the_root(tmp_path: Path) -> None:
    """A head that passes on the last layer's state predicts in the root's row what the target predicts before it."""
    passing = {name: torch.zeros_like(tensor) for name, tensor in peagle_tensors().items()}
    passing["fc.weight"] = torch.cat((torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)), 1)
    passing["lm_head.weight"] = NETWORK.lm_head.weight.detach().clone()
    passing["norm.weight"] = NETWORK.model.norm.weight.detach().clone()
    with torch.no_grad():
        predicted = NETWORK(torch.tensor([PROMPT])).logits[0].argmax(-1).tolist()
    request = Feeding(drafting(save(tmp_path, PEAGLE, passing), 1, 1), NETWORK, PROMPT)
    request.tell()
    assert [path for path, _ in request.grow()] == [(predicted[-2],)]
    assert len(set(predicted[-3:])) == 3


@pytest.mark.parametrize(
    ("config", "weights", "complaint"),
    [
        (PEAGLE, without(peagle_tensors(), "mask_hidden"), "no tensor mask_hidden: it is an EAGLE-3 head"),
        (without(PEAGLE, "mask_token_id"), peagle_tensors(), "names no mask_token_id"),
        ({**PEAGLE, "mask_token_id": VOCABULARY}, peagle_tensors(), f"no row of its embedding of {VOCABULARY} tokens"),
        (PEAGLE, peagle_tensors() | {"mask_hidden": torch.zeros(1, 1, 64)}, "has 64 values where 3 states of 64"),
        ({**PEAGLE, "target_hidden_size": 128}, peagle_tensors(), "hidden size 128, target has 64"),
    ],
)
def test_an_unsuitable_checkpoint_is_refused(
    tmp_path: Path, config: dict[str, Any], weights: dict[str, Tensor], complaint: str
) -> None:
    checkpoint = save(tmp_path, config, weights)
    assert matches(checkpoint) == ("mask_hidden" in weights)
    with pytest.raises(CheckpointError, match=complaint):
        drafting(checkpoint)
