"""DFlash drafts of every published format, compared with the paper's formulas computed without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafting.cached_draft import PREFILL_ROWS
from paceline.drafting.heads.dflash_config import configured_layers
from paceline.drafting.methods.dflash import DFlashNetwork, DFlashSpeculator
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights
from tests.helpers.dense import HEADS, HIDDEN, KV_HEADS, SIZE, attention, heads_of, mlp, random, rms_norm
from tests.helpers.feeding import Feeding
from tests.helpers.head_methods import target_weights
from tests.helpers.llamas import VOCABULARY, peaked_llama
from tests.helpers.parallel import (
    BLOCK,
    DFLASH,
    DFLASH_OF_THE_LIBRARY,
    MASK,
    check_guesses,
    check_rounds,
    dflash_tensors,
    reduced_vocabulary,
    save,
)

NETWORK = peaked_llama()
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}


def drafting(checkpoint: Checkpoint, width: int = 2, target: TargetWeights | None = None) -> DFlashSpeculator:
    target = target or target_weights()
    return DFlashSpeculator(DFlashNetwork(checkpoint, target, 1024), target, width, 0.0)


@torch.no_grad()
def distributions(
    request: Feeding, weights: Mapping[str, Tensor], seen: Mapping[int, Any] | None = None, first: int = 1
) -> Tensor:
    """Log-probabilities [ahead, columns] of one block, from the states of all positions before the root.

    `seen`: by layer (window, causal), where that is not (0, False).
    """
    before = len(request.tokens) - 1
    states = request.states()[:before].flatten(1)
    context = rms_norm(states @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    own = weights.get("embed_tokens.weight", NETWORK.model.embed_tokens.weight)
    x = own[torch.tensor([request.tokens[-1], *[MASK] * (BLOCK - 1)])]
    if "mask_embedding" in weights:
        x = torch.cat((x[:1], weights["mask_embedding"].view(1, -1).expand(BLOCK - 1, -1)))
    positions = torch.arange(before + BLOCK)
    for n in range(2):
        window, causal = (seen or {}).get(n, (0, False))
        name = f"layers.{n}"
        y = rms_norm(x, weights[f"{name}.input_layernorm.weight"])
        both = torch.cat((context, y))
        query = heads_of(y, weights, f"{name}.self_attn.q", positions[before:])
        key = heads_of(both, weights, f"{name}.self_attn.k", positions)
        value = heads_of(both, weights, f"{name}.self_attn.v")
        mask = torch.ones(BLOCK, before + BLOCK, dtype=torch.bool)
        if window:
            mask[:, : max(0, before - window)] = False
        if causal:
            mask &= positions <= positions[before:, None]
        out = attention(query, key, value, mask) @ weights[f"{name}.self_attn.o_proj.weight"].T
        x = x + out + weights.get(f"{name}.self_attn.o_proj.bias", torch.zeros(HIDDEN))
        x = x + mlp(rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"]), weights, name)
    head = weights.get("lm_head.weight", NETWORK.lm_head.weight)
    return (rms_norm(x, weights["norm.weight"])[first:] @ head.T).log_softmax(-1)


def biased() -> dict[str, Tensor]:
    """With attention biases, o_proj's among them."""
    sizes = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE, "o": HIDDEN}
    added = {f"layers.{n}.self_attn.{p}_proj.bias": random(size) - 1 for n in range(2) for p, size in sizes.items()}
    return dflash_tensors() | added


@dataclass(frozen=True)
class Variant:
    """`seen` and `first`: see `distributions`. `ids`: the tokens of a reduced vocabulary."""

    config: Mapping[str, Any]
    weights: Mapping[str, Tensor] = field(default_factory=dflash_tensors)
    seen: Mapping[int, Any] = field(default_factory=dict)
    first: int = 1
    ids: Sequence[int] | None = None

    def distributions(self, request: Feeding) -> Tensor:
        return distributions(request, self.weights, self.seen, self.first)


def nested(**keys: Any) -> dict[str, Any]:
    return {
        **DFLASH_OF_THE_LIBRARY,
        "transformer_layer_config": {**DFLASH_OF_THE_LIBRARY["transformer_layer_config"], **keys},
    }


REDUCED, IDS = reduced_vocabulary(3)
VARIANTS = {
    "original": Variant(DFLASH),
    "library": Variant(DFLASH_OF_THE_LIBRARY),
    "block size nested": Variant(
        {**DFLASH, "block_size": None, "dflash_config": {**DFLASH["dflash_config"], "block_size": BLOCK}}
    ),
    "biases": Variant({**DFLASH, "attention_bias": True}, biased()),
    "a mask's own embedding": Variant(DFLASH, dflash_tensors() | {"mask_embedding": random(HIDDEN)}),
    "own embedding": Variant(
        DFLASH_OF_THE_LIBRARY, dflash_tensors() | {"embed_tokens.weight": random(VOCABULARY, HIDDEN)}
    ),
    "reduced vocabulary": Variant(DFLASH_OF_THE_LIBRARY, dflash_tensors() | REDUCED, ids=IDS),
    "from the anchor": Variant({**DFLASH_OF_THE_LIBRARY, "sample_from_anchor": True}, first=0),
    "causal": Variant(
        {**DFLASH, "dflash_config": {**DFLASH["dflash_config"], "causal": True}}, seen={0: (0, 1), 1: (0, 1)}
    ),
    "causal before nested": Variant(
        {**DFLASH, "is_causal": False, "dflash_config": {**DFLASH["dflash_config"], "causal": True}}
    ),
    "sliding": Variant({**DFLASH, **SLIDING}, seen={0: (6, True)}),
    "sliding, not causal": Variant({**DFLASH, **SLIDING, "is_causal": False}, seen={0: (6, False)}),
    "library, sliding": Variant(nested(**SLIDING), seen={0: (6, True)}),
    "library, sliding, not causal": Variant(
        {**nested(**SLIDING), "sliding_window_non_causal": True}, seen={0: (6, False)}
    ),
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Variant:
    return VARIANTS[request.param]


@pytest.mark.parametrize("length", [1, 2, 8, 63, 65])
def test_distributions_are_the_formulas(variant: Variant, tmp_path: Path, length: int) -> None:
    speculator = drafting(save(tmp_path, variant.config, variant.weights))
    request = Feeding(speculator, NETWORK, [(7 * i + i // 5) % VOCABULARY for i in range(length)])
    request.tell()
    expected = variant.distributions(request)
    assert len(expected) == BLOCK - variant.first
    check_guesses(request, request.grow(), expected, variant.ids)


def test_rounds_with_commits_between_are_those_without_a_cache(variant: Variant, tmp_path: Path) -> None:
    """A block's own keys and values are not kept."""
    speculator = drafting(save(tmp_path, variant.config, variant.weights))
    request = Feeding(speculator, NETWORK, PROMPT)
    check_rounds(request, speculator, lambda: variant.distributions(request), variant.ids)


@pytest.mark.parametrize("library", [False, True])
def test_the_last_layer_is_normed_in_the_original_format_alone(library: bool, tmp_path: Path) -> None:
    target = target_weights()
    checkpoint = save(tmp_path, DFLASH_OF_THE_LIBRARY if library else DFLASH, dflash_tensors())
    assert drafting(checkpoint, target=target).hidden_state_layers == ((0, 2) if library else (1, target.final_layer))


@pytest.mark.parametrize(
    ("count", "layers", "expected"),
    [(5, 36, (2, 10, 18, 26, 34)), (1, 36, (19,)), (2, 28, (2, 26)), (6, 48, (2, 11, 20, 28, 37, 46))],
)
def test_layers_that_are_not_configured_are_spread_evenly(
    tmp_path: Path, count: int, layers: int, expected: tuple[int, ...]
) -> None:
    config = {"num_hidden_layers": count, "num_target_layers": layers, "dflash_config": {}}
    deep = replace(target_weights(), config=SimpleNamespace(num_hidden_layers=layers, hidden_size=HIDDEN))
    assert configured_layers(save(tmp_path, config, dflash_tensors()), deep) == expected


def test_a_long_prompt_takes_several_rounds(tmp_path: Path) -> None:
    speculator = drafting(save(tmp_path, DFLASH, dflash_tensors()), width=1)
    request = Feeding(speculator, NETWORK, [i % VOCABULARY for i in range(PREFILL_ROWS + 30)])
    request.tell()
    assert speculator.grow() == {}
    assert speculator.behind
    check_guesses(request, request.grow(), distributions(request, dflash_tensors()))


def test_no_guess_is_at_or_beyond_the_targets_last_position(tmp_path: Path) -> None:
    """Though the block is."""
    target = replace(target_weights(), max_model_len=len(PROMPT) + 2)
    request = Feeding(drafting(save(tmp_path, DFLASH, dflash_tensors()), width=1, target=target), NETWORK, PROMPT)
    request.tell()
    guesses = request.grow()
    assert [len(path) for path, _ in sorted(guesses)] == [1, 2]
    assert guesses[0][1] == pytest.approx(float(distributions(request, dflash_tensors())[0].max()), abs=2e-3)


def changed(config: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    """A key that is None is left out."""
    return {key: value for key, value in (dict(config) | keys).items() if value is not None}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (changed(DFLASH_OF_THE_LIBRARY, speculators_model_type="dspark"), "dspark draft, which is not served yet"),
        (changed(DFLASH, markov_rank=8), "dspark draft"),
        (changed(DFLASH_OF_THE_LIBRARY, speculators_model_type="dflash2"), "dflash2 draft"),
        (changed(DFLASH, dflash_config={**DFLASH["dflash_config"], "use_swa": True}), "with use_swa"),
        (changed(DFLASH, is_neox_style=False), "with is_neox_style"),
        (changed(DFLASH, block_size=None), "names no block_size of 2 or more"),
        (changed(DFLASH, block_size=1), "names no block_size of 2 or more"),
        (changed(DFLASH, dflash_config={"target_layer_ids": [0, 1]}), "names no mask_token_id"),
        (
            changed(DFLASH_OF_THE_LIBRARY, mask_token_id=VOCABULARY),
            f"mask_token_id {VOCABULARY} .* is no row of its embedding",
        ),
        (changed(DFLASH_OF_THE_LIBRARY, aux_hidden_state_layer_ids=None), "lacks aux_hidden_state_layer_ids"),
        (changed(DFLASH_OF_THE_LIBRARY, aux_hidden_state_layer_ids=[1, 3]), r"states of layers \[1, 3\], target has 2"),
        (changed(DFLASH, num_target_layers=36), "is a draft for a model of 36 layers, target has 2"),
        (changed(DFLASH, hidden_size=None), "names no hidden_size"),
        (changed(DFLASH, hidden_size=32), "has shape"),
    ],
)
def test_an_unsuitable_configuration_is_refused(tmp_path: Path, config: dict[str, Any], complaint: str) -> None:
    checkpoint = save(tmp_path, config, dflash_tensors())
    with pytest.raises(CheckpointError, match=complaint) as refused:
        drafting(checkpoint)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ({k: v for k, v in dflash_tensors().items() if k != "hidden_norm.weight"}, "no tensor hidden_norm.weight"),
        (
            {k: v for k, v in dflash_tensors().items() if k != "layers.0.input_layernorm.weight"},
            "no tensor layers.0.input_layernorm.weight",
        ),
        (dflash_tensors(3), r"fc.weight .* has shape \[64, 192\] where \[64, 128\] is needed"),
        (dflash_tensors() | {"layers.0.self_attn.g_proj.weight": random(4, 4)}, "with g_proj"),
        (dflash_tensors() | {"markov_head.markov_w1.weight": random(4, 4)}, "dspark"),
        (dflash_tensors() | {"lm_head.weight": random(7, HIDDEN)}, "guesses 7 tokens and has no d2t"),
        (
            dflash_tensors() | REDUCED | {"lm_head.weight": random(len(IDS) - 1, HIDDEN)},
            f"guesses {len(IDS) - 1} tokens, and d2t names {len(IDS)}",
        ),
        (dflash_tensors() | {"embed_tokens.weight": random(9, HIDDEN)}, "no row of its embedding of 9 tokens"),
    ],
)
def test_unsuitable_tensors_are_refused(tmp_path: Path, weights: dict[str, Tensor], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        drafting(save(tmp_path, DFLASH, weights))


def test_a_draft_of_another_width_needs_matrices_of_its_own(tmp_path: Path) -> None:
    narrow = replace(target_weights(), config=SimpleNamespace(num_hidden_layers=2, hidden_size=128))
    weights = dflash_tensors(4) | {"embed_tokens.weight": random(VOCABULARY, HIDDEN)}
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        drafting(save(tmp_path, DFLASH, weights), target=narrow)
