"""DFlash2, DSpark and XPress: variants of their checkpoints, and what is refused.

`test_draft_guesses.py` has what they share with all methods, `tests/speculators_library` what the package guesses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import SpeculativeConfig
from paceline.drafting import complete_config
from paceline.model.checkpoint import CheckpointError
from tests.helpers.head_checkpoints import HIDDEN, without
from tests.helpers.head_methods import (
    NETWORK,
    Logits,
    build_head,
    dflash2_formula,
    dflash_formula,
    dspark_formula,
    xpress_formula,
)
from tests.helpers.parallel import (
    BLOCK,
    CANDIDATES,
    DFLASH,
    DFLASH2,
    DSPARK,
    RANK,
    XPRESS,
    dflash2_tensors,
    dflash_tensors,
    dspark_tensors,
    reduced_vocabulary,
    save,
    xpress_tensors,
)
from tests.unit.drafting.drafting_formulas import Drafting, prompt_of
from tests.unit.drafting.feeding import Feeding

REDUCED, IDS = reduced_vocabulary(3)
ANCHOR, AFTER = {"sample_from_anchor": True}, {"sample_from_anchor": False}
LIBRARY_KEYS = ("speculators_model_type", "transformer_layer_config", "aux_hidden_state_layer_ids", "draft_vocab_size")
SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SLIDING = DFLASH2["transformer_layer_config"] | {
    "layer_types": ["sliding_attention", "full_attention"],
    **{"sliding_window": 6, "use_sliding_window": True},
}
BASE_KERNEL = "layers.0.mlp_conv.base_kernel"
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


def original(library: Mapping[str, Any], *nested: str) -> dict[str, Any]:
    """z-lab's or DeepSeek's form of a configuration; keys that are `nested` stand in `dflash_config`."""
    own = {key: value for key, value in library.items() if key not in DFLASH and key not in LIBRARY_KEYS}
    section = {**DFLASH["dflash_config"], **{key: own.pop(key) for key in nested}}
    return {**DFLASH, **own, "dflash_config": section}


@dataclass(frozen=True)
class Variant:
    method: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    logits: Logits
    ids: Sequence[int] | None = None


def dflash2(config: Mapping[str, Any], tensors: Mapping[str, Tensor], **formula: Any) -> Variant:
    return Variant("dflash2", config, tensors, dflash2_formula(tensors, **formula))


def dspark(config: Mapping[str, Any], tensors: Mapping[str, Tensor], ids: Any = None, **formula: Any) -> Variant:
    return Variant("dspark", config, tensors, dspark_formula(tensors, **formula), ids)


def of_kind(kind: str, first: int = 0, **config: Any) -> Variant:
    return dspark({**DSPARK, "markov_head_type": kind, **config}, dspark_tensors(kind), kind=kind, first=first)


FEW = dspark_tensors(columns=len(IDS)) | REDUCED
PADDED = dspark_tensors() | {W1: torch.cat([dspark_tensors()[W1]] * 2)}
CONFIDENT = dspark_tensors() | {"confidence_head.proj.weight": torch.ones(1, HIDDEN + RANK)}
REFINED = xpress_tensors() | REDUCED | {"refiner_head.readout.weight": torch.randn(len(IDS), RANK)}
VARIANTS = {
    "dflash2, three taps": dflash2({**DFLASH2, "conv_kernel_size": 3}, dflash2_tensors(3)),
    "dflash2, one tap and one group": dflash2(DFLASH2, dflash2_tensors(1, HIDDEN)),
    "dflash2, from the anchor": dflash2(DFLASH2 | ANCHOR, dflash2_tensors(), first=0),
    "dflash2, sliding": dflash2(
        DFLASH2 | {"transformer_layer_config": SLIDING}, dflash2_tensors(), seen={0: (6, False)}
    ),
    "dflash2, original": dflash2(original(DFLASH2, *SELECTOR), dflash2_tensors()),
    "dflash2, original, sliding": dflash2(
        {**original(DFLASH2, *SELECTOR), **SLIDING}, dflash2_tensors(), seen={0: (6, False)}
    ),
    "dspark, gated": of_kind("gated"),
    "dspark, recurrent": of_kind("rnn"),
    "dspark, after the anchor": of_kind("vanilla", 1, **AFTER),
    "dspark, recurrent, after the anchor": of_kind("rnn", 1, **AFTER),
    "dspark, reduced vocabulary": dspark(DSPARK, FEW, IDS),
    "dspark, a matrix with padding": dspark(DSPARK, PADDED),
    "dspark, with a confidence head": dspark(DSPARK, CONFIDENT),
    "dspark, original": dspark(without(original(DSPARK), "sample_from_anchor"), dspark_tensors()),
    "dspark, original, nested": dspark(
        original({**DSPARK, "markov_head_type": "gated"}, "markov_rank", "markov_head_type"),
        dspark_tensors("gated"),
        kind="gated",
    ),
    "dspark, no Markov head": Variant(
        "dspark", {**DSPARK, "markov_rank": 0}, dflash_tensors(), dflash_formula(dflash_tensors(), first=0)
    ),
    "xpress, from the anchor": Variant(
        "xpress", XPRESS | ANCHOR, xpress_tensors(), xpress_formula(xpress_tensors(), first=0)
    ),
    "xpress, reduced vocabulary": Variant("xpress", XPRESS, REFINED, xpress_formula(REFINED), IDS),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_computes_the_formula(name: str, tmp_path: Path) -> None:
    """With prompts of a few tokens, up to the border of a tile and across it, and with commits between."""
    variant = VARIANTS[name]
    folder = save(tmp_path, variant.config, variant.tensors).folder
    drafting = Drafting(build_head(folder, variant.method), variant.logits, variant.ids)
    for length in (2, 8, 63, 65):
        drafting.check_whole(drafting.request(prompt_of(length)))
    drafting.check_rounds()


@pytest.mark.parametrize(
    ("config", "tensors", "tokens"),
    [
        (DFLASH2, dflash2_tensors(), BLOCK - 1),
        (DFLASH2 | ANCHOR, dflash2_tensors(), BLOCK),
        (DSPARK, dspark_tensors(), BLOCK),
        (without(DSPARK, "sample_from_anchor"), dspark_tensors(), BLOCK),
        (DSPARK | AFTER, dspark_tensors(), BLOCK - 1),
        (XPRESS, xpress_tensors(), BLOCK - 1),
    ],
)
def test_a_draft_is_as_long_as_its_block(
    config: dict[str, Any], tensors: dict[str, Tensor], tokens: int, tmp_path: Path
) -> None:
    folder = save(tmp_path, config, tensors).folder
    found = complete_config(SpeculativeConfig(model=str(folder)))
    assert (found.method, found.num_speculative_tokens) == (config["speculators_model_type"], tokens)
    request = Feeding(build_head(folder, found.method, tree_width=1), NETWORK, prompt_of(9))
    request.tell()
    assert len(request.grow()) == tokens


def test_dflash2_is_also_called_dflash(tmp_path: Path) -> None:
    """By vLLM and SGLang."""
    folder = save(tmp_path, DFLASH2, dflash2_tensors()).folder
    assert complete_config(SpeculativeConfig(method="dflash", model=str(folder))).method == "dflash2"
    folder = save(tmp_path, DSPARK, dspark_tensors()).folder
    assert complete_config(SpeculativeConfig(method="dflash", model=str(folder))).method == "dflash"


def test_a_token_that_is_no_candidate_is_not_guessed(tmp_path: Path) -> None:
    folder = save(tmp_path, {**DFLASH2, "selector_top_k": 3}, dflash2_tensors()).folder
    request = Feeding(build_head(folder, "dflash2", tree_width=CANDIDATES), NETWORK, prompt_of(9), depth=2)
    request.tell()
    assert len(request.grow()) == 3 + 3 * 3


def test_a_request_keeps_no_tensor_of_another(tmp_path: Path) -> None:
    speculator: Any = build_head(save(tmp_path, DSPARK, dspark_tensors()).folder, "dspark")
    for key in range(2):
        Feeding(speculator, NETWORK, prompt_of(9), key=key).tell()
    speculator.grow()
    block = speculator._requests[0].block
    for tensor in (block.logits, block.states):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize(
    ("method", "config", "tensors", "complaint"),
    [
        ("dspark", DFLASH, dflash_tensors(), "is a draft for method dflash: set that one, or leave the method out"),
        ("dflash2", DSPARK, dspark_tensors(), "is a draft for method dspark: set that one"),
        ("dflash2", without(DFLASH2, "selector_top_k"), dflash2_tensors(), "has selector_top_k None, and no number"),
        ("dflash2", {**DFLASH2, "selector_rank": 0}, dflash2_tensors(), "has selector_rank 0, and no number of 1"),
        ("dflash2", {**DFLASH2, "selector_rank": 5}, dflash2_tensors(), r"has shape \[64, 6\] where \[64, 5\]"),
        (
            "dflash2",
            DFLASH2,
            dflash2_tensors() | REDUCED,
            "guesses 21 tokens: a dflash2 draft needs the whole vocabulary",
        ),
        (
            "dflash2",
            DFLASH2,
            dflash2_tensors() | {BASE_KERNEL: torch.zeros(2, 3, HIDDEN)},
            "give no conv_kernel_size up to 5 and no conv_group_size that divides 64",
        ),
        ("dflash2", DFLASH2, dflash2_tensors(6), "give no conv_kernel_size up to 5"),
        ("dflash2", DFLASH2, without(dflash2_tensors(), BASE_KERNEL), f"no tensor {BASE_KERNEL}"),
        (
            "dflash2",
            original(DFLASH2 | {"final_logit_softcapping": 30.0}, *SELECTOR, "final_logit_softcapping"),
            dflash2_tensors(),
            "is a variant of dflash2 with final_logit_softcapping",
        ),
        (
            "dspark",
            {**DSPARK, "markov_head_type": "lstm"},
            dspark_tensors(),
            "has markov_head_type 'lstm': known are vani",
        ),
        ("dspark", {**DSPARK, "markov_head_type": "rnn"}, dspark_tensors(), r"no tensor markov_head\.joint_proj"),
        ("dspark", DSPARK, dspark_tensors("gated"), r"has markov_head\.gate_proj.* and 1 more, which is no part of"),
        (
            "dspark",
            {**DSPARK, "markov_rank": 0},
            dspark_tensors(),
            r"has markov_head\.markov_w1.*, which is no part of",
        ),
        ("dspark", {**original(DSPARK), "logit_scale": 0.5}, dspark_tensors(), "variant of dspark with logit_scale"),
        ("dspark", {**DSPARK, "markov_order": 2}, dspark_tensors(), "variant of dspark with markov_order"),
        ("dspark", DSPARK, dspark_tensors() | {W1: torch.zeros(576, RANK)}, r"has shape \[576, 6\] where \[64, 6\]"),
        ("dspark", DSPARK, dspark_tensors() | {W2: torch.zeros(9, RANK)}, r"has shape \[9, 6\] where \[64, 6\]"),
        ("dspark", DSPARK, without(dspark_tensors(), W1), f"no tensor {W1}"),
        ("xpress", {**XPRESS, "block_size": 4}, xpress_tensors(), r"mix_l .* has shape \[6, 5, 5\] where \[6, 4, 4\]"),
        ("xpress", without(XPRESS, "xpress_rank"), xpress_tensors(), "has xpress_rank None"),
    ],
)
def test_an_unsuitable_checkpoint_is_refused(
    method: str, config: dict[str, Any], tensors: dict[str, Tensor], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=complaint) as caught:
        build_head(save(tmp_path, config, tensors).folder, method)
    assert "\n" not in str(caught.value)
