"""PARD, P-EAGLE and DFlash: their published formats compute the papers' formulas; how masks use rows and slots.

`test_draft_guesses.py` has what they share with other methods.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.drafting.block import BlockRequest
from paceline.drafting.draw_prediction import MAX_ROWS
from paceline.drafting.heads.dflash_config import configured_layers
from paceline.drafting.methods import dflash, pard, peagle
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import DraftError, Speculator
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.loading import build
from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.head_checkpoints import HEADS, HIDDEN, KV_HEADS, random, without
from tests.helpers.head_methods import NETWORK, Logits, build_head, dflash_formula, peagle_formula, target_weights
from tests.helpers.llamas import VOCABULARY, peaked_llama
from tests.helpers.parallel import (
    BLOCK,
    DFLASH,
    DFLASH_OF_THE_LIBRARY,
    MASK,
    PEAGLE,
    dflash_tensors,
    pard_draft,
    peagle_tensors,
    reduced_vocabulary,
    save,
)
from tests.unit.drafting.drafting_formulas import Drafting, prompt_of
from tests.unit.drafting.feeding import Feeding

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GENERATOR = torch.Generator().manual_seed(8)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
CAUSAL = {**DFLASH, "dflash_config": {**DFLASH["dflash_config"], "causal": True}}


@dataclass(frozen=True)
class Variant:
    """`ids`: the tokens of a reduced vocabulary."""

    method: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    logits: Logits
    ids: Sequence[int] | None = None


def of_peagle(
    config: Mapping[str, Any] = PEAGLE,
    tensors: Mapping[str, Tensor] | None = None,
    ids: Sequence[int] | None = None,
    **formula: Any,
) -> Variant:
    tensors = tensors or peagle_tensors()
    return Variant("peagle", config, tensors, peagle_formula(tensors, **formula), ids)


def of_dflash(
    config: Mapping[str, Any] = DFLASH,
    tensors: Mapping[str, Tensor] | None = None,
    ids: Sequence[int] | None = None,
    **formula: Any,
) -> Variant:
    tensors = tensors or dflash_tensors()
    return Variant("dflash", config, tensors, dflash_formula(tensors, **formula), ids)


def biased() -> dict[str, Tensor]:
    """With attention biases, o_proj's among them."""
    sizes = {"q": HIDDEN, "k": KV_HEADS * HIDDEN // HEADS, "v": KV_HEADS * HIDDEN // HEADS, "o": HIDDEN}
    named = {f"layers.{n}.self_attn.{p}_proj.bias": size for n in range(2) for p, size in sizes.items()}
    return dflash_tensors() | {name: random(GENERATOR, size) - 1 for name, size in named.items()}


def library(**layer: Any) -> dict[str, Any]:
    nested = {**DFLASH_OF_THE_LIBRARY["transformer_layer_config"], **layer}
    return {**DFLASH_OF_THE_LIBRARY, "transformer_layer_config": nested}


REDUCED_BY_3, IDS_BY_3 = reduced_vocabulary(3)
REDUCED_BY_4, IDS_BY_4 = reduced_vocabulary(4)
STATE_NORMS = {f"fc_norm.{i}.weight": random(GENERATOR, HIDDEN) for i in range(3)}
EMBEDDING = {"embed_tokens.weight": random(GENERATOR, VOCABULARY, HIDDEN)}
VARIANTS = {
    "peagle, residual not configured": of_peagle(without(PEAGLE, "norm_before_residual")),
    "peagle, normed residual": of_peagle({**PEAGLE, "norm_before_residual": True}, norm_before_residual=True),
    "peagle, norm before fc": of_peagle(
        {**PEAGLE, "norm_before_fc": True}, peagle_tensors() | {"input_norm.weight": random(GENERATOR, 192)}
    ),
    "peagle, norms before fc": of_peagle({**PEAGLE, "fc_norm": True}, peagle_tensors() | STATE_NORMS),
    "peagle, the target's matrices": of_peagle(
        PEAGLE, without(peagle_tensors(), "embed_tokens.weight", "lm_head.weight")
    ),
    "peagle, reduced vocabulary": of_peagle(PEAGLE, peagle_tensors() | REDUCED_BY_4, IDS_BY_4),
    "peagle, the mask's other name": of_peagle({**without(PEAGLE, "mask_token_id"), "pard_token": MASK}),
    "dflash, library": of_dflash(DFLASH_OF_THE_LIBRARY),
    "dflash, block size nested": of_dflash(
        {**DFLASH, "block_size": None, "dflash_config": {**DFLASH["dflash_config"], "block_size": BLOCK}}
    ),
    "dflash, biases": of_dflash({**DFLASH, "attention_bias": True}, biased()),
    "dflash, a mask's own embedding": of_dflash(
        DFLASH, dflash_tensors() | {"mask_embedding": random(GENERATOR, HIDDEN)}
    ),
    "dflash, own embedding": of_dflash(DFLASH_OF_THE_LIBRARY, dflash_tensors() | EMBEDDING),
    "dflash, reduced vocabulary": of_dflash(DFLASH_OF_THE_LIBRARY, dflash_tensors() | REDUCED_BY_3, IDS_BY_3),
    "dflash, from the anchor": of_dflash({**DFLASH_OF_THE_LIBRARY, "sample_from_anchor": True}, first=0),
    "dflash, causal": of_dflash(CAUSAL, seen={0: (0, 1), 1: (0, 1)}),
    "dflash, causal before nested": of_dflash({**CAUSAL, "is_causal": False}),
    "dflash, sliding": of_dflash({**DFLASH, **SLIDING}, seen={0: (6, True)}),
    "dflash, sliding, not causal": of_dflash({**DFLASH, **SLIDING, "is_causal": False}, seen={0: (6, False)}),
    "dflash, library, sliding": of_dflash(library(**SLIDING), seen={0: (6, True)}),
    "dflash, library, sliding, not causal": of_dflash(
        {**library(**SLIDING), "sliding_window_non_causal": True}, seen={0: (6, False)}
    ),
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


@pytest.mark.parametrize("first", [0, 1])
def test_a_block_guesses_from_its_anchor_or_after_it(first: int, tmp_path: Path) -> None:
    config = {**DFLASH_OF_THE_LIBRARY, "sample_from_anchor": first == 0}
    speculator = build_head(save(tmp_path, config, dflash_tensors()).folder, "dflash", tree_width=1)
    request = Feeding(speculator, NETWORK, PROMPT)
    request.tell()
    assert len(request.grow()) == BLOCK - first


@pytest.mark.parametrize(("config", "layers"), [(DFLASH_OF_THE_LIBRARY, (0, 2)), (DFLASH, (1, 3))])
def test_the_last_layer_is_normed_in_the_original_format_alone(
    config: dict[str, Any], layers: tuple[int, ...], tmp_path: Path
) -> None:
    assert (
        build_head(save(tmp_path, config, dflash_tensors()).folder, "dflash").description.hidden_state_layers == layers
    )


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


def changed(config: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    """A key that is None is left out."""
    return {key: value for key, value in (dict(config) | keys).items() if value is not None}


LIBRARY, FLASH, EAGLE = DFLASH_OF_THE_LIBRARY, dflash_tensors(), peagle_tensors()
SWA = {**DFLASH["dflash_config"], "use_swa": True}
ONE_ROW_LESS = REDUCED_BY_3 | {"lm_head.weight": REDUCED_BY_3["lm_head.weight"][1:]}
SMALL_EMBEDDING = {"embed_tokens.weight": EMBEDDING["embed_tokens.weight"][:9]}


@pytest.mark.parametrize(
    ("method", "config", "tensors", "complaint"),
    [
        ("peagle", PEAGLE, without(EAGLE, "mask_hidden"), "no tensor mask_hidden: it is an EAGLE-3 head"),
        ("peagle", without(PEAGLE, "mask_token_id"), EAGLE, "names no mask_token_id"),
        ("peagle", {**PEAGLE, "mask_token_id": 64}, EAGLE, "no row of its embedding of 64 tokens"),
        ("peagle", PEAGLE, EAGLE | {"mask_hidden": torch.zeros(1, 1, 64)}, "has 64 values where 3 states of 64"),
        ("peagle", {**PEAGLE, "target_hidden_size": 128}, EAGLE, "hidden size 128, target has 64"),
        (
            "dflash",
            changed(LIBRARY, speculators_model_type="dspark"),
            FLASH,
            "is a draft for method dspark: set that one",
        ),
        ("dflash", changed(DFLASH, markov_rank=8), FLASH, "for method dspark"),
        ("dflash", changed(LIBRARY, speculators_model_type="dflash2"), FLASH, "for method dflash2"),
        ("dflash", changed(LIBRARY, speculators_model_type="xpress"), FLASH, "for method xpress"),
        ("dflash", changed(DFLASH, xpress_rank=256), FLASH, "for method xpress"),
        ("dflash", changed(DFLASH, dflash_config=SWA), FLASH, "with use_swa"),
        ("dflash", changed(DFLASH, is_neox_style=False), FLASH, "with is_neox_style"),
        ("dflash", changed(DFLASH, block_size=None), FLASH, "names no block_size of 2 or more"),
        ("dflash", changed(DFLASH, block_size=1), FLASH, "names no block_size of 2 or more"),
        ("dflash", changed(DFLASH, dflash_config={"target_layer_ids": [0, 1]}), FLASH, "names no mask_token_id"),
        ("dflash", changed(LIBRARY, mask_token_id=64), FLASH, "mask_token_id 64 .* is no row of its embedding"),
        ("dflash", changed(LIBRARY, aux_hidden_state_layer_ids=None), FLASH, "lacks aux_hidden_state_layer_ids"),
        (
            "dflash",
            changed(LIBRARY, aux_hidden_state_layer_ids=[1, 3]),
            FLASH,
            r"states of layers \[1, 3\], target has 2",
        ),
        ("dflash", changed(DFLASH, num_target_layers=36), FLASH, "is a draft for a model of 36 layers, target has 2"),
        ("dflash", changed(DFLASH, hidden_size=None), FLASH, "names no hidden_size"),
        ("dflash", changed(DFLASH, hidden_size=32), FLASH, "has shape"),
        ("dflash", DFLASH, without(FLASH, "hidden_norm.weight"), "no tensor hidden_norm.weight"),
        (
            "dflash",
            DFLASH,
            without(FLASH, "layers.0.input_layernorm.weight"),
            "no tensor layers.0.input_layernorm.weight",
        ),
        ("dflash", DFLASH, dflash_tensors(3), r"fc.weight .* has shape \[64, 192\] where \[64, 128\] is needed"),
        ("dflash", DFLASH, FLASH | {"layers.0.self_attn.g_proj.weight": torch.zeros(4, 4)}, "with g_proj"),
        ("dflash", DFLASH, FLASH | {"markov_head.markov_w1.weight": torch.zeros(4, 4)}, "for method dspark"),
        (
            "dflash",
            DFLASH,
            FLASH | {"head.weight": torch.zeros(4, 4)},
            "has head.weight, which is no part of the dflash",
        ),
        ("dflash", DFLASH, FLASH | {"lm_head.weight": torch.zeros(7, HIDDEN)}, "guesses 7 tokens and has no d2t"),
        ("dflash", DFLASH, FLASH | ONE_ROW_LESS, "guesses 20 tokens, and d2t names 21"),
        ("dflash", DFLASH, FLASH | SMALL_EMBEDDING, "no row of its embedding of 9 tokens"),
    ],
)
def test_an_unsuitable_checkpoint_is_refused(
    method: str, config: dict[str, Any], tensors: dict[str, Tensor], complaint: str, tmp_path: Path
) -> None:
    checkpoint = save(tmp_path, config, tensors)
    assert peagle.matches(checkpoint) == ("mask_hidden" in tensors)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        build_head(checkpoint.folder, method)
    assert "\n" not in str(caught.value)


def test_a_draft_of_another_width_needs_matrices_of_its_own(tmp_path: Path) -> None:
    wide = replace(target_weights(), config=SimpleNamespace(num_hidden_layers=2, hidden_size=128))
    checkpoint = save(tmp_path, DFLASH, dflash_tensors(4) | EMBEDDING)
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        dflash.DFlashNetwork(checkpoint, wide, 1024)


class Recording(TableModel):
    """Records the rows of each pass."""

    def __init__(self, slots: int, positions: int) -> None:
        super().__init__(VOCABULARY, slots, positions)
        self.passes: list[list[Row]] = []

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        self.passes.append(list(rows))
        return super().run(rows, wanted, hidden_layers)


def drafting(model: TableModel, ahead: int = 4, width: int = 1) -> NetworkSpeculator[BlockRequest]:
    return pard_draft(model, ahead, width)


def opened(speculator: Speculator, tokens: Sequence[int] = PROMPT, **limits: int) -> Feeding:
    return Feeding(speculator, NETWORK, tokens, **limits)  # type: ignore[arg-type]


class TestPasses:
    """With PARD, whose model is one of tests."""

    def test_a_raised_limit_needs_no_pass(self) -> None:
        model = Recording(512, 512)
        request = opened(drafting(model, width=3), nodes=5)
        assert len(request.grow()) == 5
        passes = len(model.passes)
        request.limit(20, 12)
        assert len(request.grow()) == 7
        assert len(model.passes) == passes

    def test_a_paused_request_runs_each_token_once(self) -> None:
        model = Recording(512, 512)
        request = opened(drafting(model), nodes=0)
        for token in (7, 8, 9):
            assert request.grow() == []
            request.commit([token])
        assert not any(row.token == MASK for rows in model.passes for row in rows)
        request.limit(20, 1000)
        assert len(request.grow()) == 4
        request.commit([10, 11])
        request.grow()
        positions = [row.position for rows in model.passes for row in rows if row.token != MASK]
        assert positions == list(range(len(request.tokens))), "each token ran once"

    def test_many_requests_take_turns_by_link(self) -> None:
        """A link's only request is in the first round, though another link has many."""
        speculator = drafting(TableModel(VOCABULARY, 8192, 512), ahead=32)
        for key in range(2, 32):
            opened(speculator, [key, 1], key=key, owner=1)
        opened(speculator, [1, 1], key=1, owner=2)
        first = speculator.grow()
        assert len(first) == MAX_ROWS // 32
        assert 1 in first
        seen = set(first)
        while grown := speculator.grow():
            assert not seen & set(grown)
            seen |= set(grown)
        assert seen == set(range(1, 32))
        assert not speculator.behind

    def test_links_take_turns(self) -> None:
        """If a round has one request, the next round has another link's."""
        speculator = drafting(TableModel(VOCABULARY, 8192, 512), ahead=256)
        for key in range(6):
            opened(speculator, [key + 1, 1], key=key, owner=key // 3)
        order = [key // 3 for _ in range(6) for key in speculator.grow()]
        assert order[:2] in ([0, 1], [1, 0])
        assert len(order) == 6

    def test_masks_use_free_slots_and_free_them(self) -> None:
        speculator = pard_draft(build(peaked_llama(), "llama", EngineConfig(slots=256), "", []), 4, 1)
        request = opened(speculator, [1] * 253)
        assert len(request.grow()) == 4
        speculator.check_integrity()
        request.commit([1])
        assert request.grow() == [], "two are free, three are needed"
        assert not speculator.behind
        speculator.check_integrity()
        request.commit([2, 3])
        with pytest.raises(DraftError, match="out of slots: 1 needed, 0 of 256 free"):
            request.commit([4])


class TestPardsConfiguration:
    def folder(self, path: Path, **keys: object) -> Checkpoint:
        config = json.loads((save_checkpoint(path) / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | keys))
        return Checkpoint(path)

    @pytest.mark.parametrize("key", ["pard_token", "ptd_token_id"])
    def test_it_names_the_mask(self, tmp_path: Path, key: str) -> None:
        checkpoint = self.folder(tmp_path, **{key: 17})
        assert pard.matches(checkpoint)
        assert pard.mask_token_of(checkpoint) == 17

    @pytest.mark.parametrize(
        ("keys", "complaint"),
        [
            ({}, "names no pard_token"),
            ({"pard_token": VOCABULARY}, f"no row of its embedding of {VOCABULARY}"),
            ({"pard_token": -1}, "no row of its embedding"),
            ({"pard_token": "<m>"}, "'<m>'"),
            ({"pard_token": 5, "pard2_target_layers": [1, 2]}, "PARD-2"),
        ],
    )
    def test_an_unsuitable_model_is_refused(self, tmp_path: Path, keys: dict[str, object], complaint: str) -> None:
        checkpoint = self.folder(tmp_path, **keys)
        assert pard.matches(checkpoint) == bool(keys)
        with pytest.raises(CheckpointError, match=complaint):
            pard.mask_token_of(checkpoint)
