"""One small head of every method for the peaked Llama: random tensors by their published names, and its formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.drafting import build_speculator
from paceline.drafting.speculator import Speculator
from paceline.model.loading import build
from paceline.model.target_weights import TargetWeights
from tests.helpers import head_checkpoints
from tests.helpers.head_checkpoints import HIDDEN, eagle3_tensors, eagle_tensors, llama_config, save_head, seeded
from tests.helpers.head_formulas import (
    DFlash,
    Eagle1,
    Eagle3,
    Formula,
    after,
    dflash2_logits,
    dspark_logits,
    medusa_logits,
    mlp_logits,
    peagle_logits,
    xpress_logits,
)
from tests.helpers.llamas import VOCABULARY, peaked_llama
from tests.helpers.markov import mlp_config
from tests.helpers.mtp_formula import MtpFormula
from tests.helpers.parallel import (
    BLOCK,
    CANDIDATES,
    DFLASH,
    DFLASH2,
    DSPARK,
    MASK,
    PEAGLE,
    XPRESS,
    dflash2_tensors,
    dflash_tensors,
    dspark_tensors,
    peagle_tensors,
    xpress_tensors,
)

Tensors = dict[str, Tensor]
Logits = Callable[[Sequence[int], Tensor, Sequence[int]], Tensor]
"""The tokens of a request, the target's states of all but the last, and a path below it: what is next, [columns]."""
NETWORK = peaked_llama()
MATRICES = NETWORK.model.embed_tokens.weight.detach(), NETWORK.lm_head.weight.detach()
"""The target's embedding and output matrix."""
INNER = 24
STEPS = 3
"""Medusa heads, and steps of an MLP speculator."""
AHEAD = 4


def target_weights(slots: int = 256) -> TargetWeights:
    return build(peaked_llama(), "target", EngineConfig(slots=slots), "print", []).target_weights()


def medusa_layers(head: int, count: int = 1, *, repeated: bool = False) -> Tensors:
    """The residual layers of one head, by the original's names."""
    tensors = {}
    for n in range(count):
        seed = 100 * head + (0 if repeated else n)
        tensors[f"{head}.{n}.linear.weight"] = seeded(HIDDEN, HIDDEN, seed=seed)
        tensors[f"{head}.{n}.linear.bias"] = seeded(HIDDEN, seed=seed)
    return tensors


def medusa_tensors(heads: int = STEPS, count: int = 1, rows: int = VOCABULARY, *, repeated: bool = False) -> Tensors:
    """The original's version 1: every head has an output matrix with `rows` rows."""
    tensors = {}
    for head in range(heads):
        tensors |= medusa_layers(head, count, repeated=repeated)
        tensors[f"{head}.{count}.weight"] = 4 * seeded(rows, HIDDEN, seed=head)
    return tensors


def mlp_tensors(steps: int = STEPS, inner: int = INNER, emb: int = VOCABULARY, head: int = VOCABULARY) -> Tensors:
    """IBM's names. `emb` and `head`: rows of the embeddings and output matrices."""
    tensors = {}
    for i in range(steps):
        tensors[f"emb.{i}.weight"] = seeded(emb, inner, seed=i)
        tensors[f"proj.{i}.weight"] = seeded(inner, inner if i else HIDDEN, seed=10 + i)
        tensors[f"ln.{i}.weight"] = 1 + seeded(inner, seed=20 + i)
        tensors[f"ln.{i}.bias"] = seeded(inner, seed=30 + i)
        tensors[f"head.{i}.weight"] = 5 * seeded(head, inner, seed=40 + i)
    return tensors


def mtp_tensors() -> Tensors:
    """As the speculators library writes a layer for a Llama."""
    generator = torch.Generator().manual_seed(21)
    tensors = head_checkpoints.layer(generator, "mtp_layers.0", into=HIDDEN)
    for name in ("input_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"mtp_layers.0.{name}.weight"] = head_checkpoints.random(generator, HIDDEN)
    tensors["mtp_layers.0.input_proj.weight"] = head_checkpoints.random(generator, HIDDEN, 2 * HIDDEN)
    return tensors


def token_by_token(formula: Formula) -> Logits:
    return lambda tokens, states, path: after(formula, tokens, states, path)[0]


def peagle_formula(tensors: Mapping[str, Tensor], ahead: int = AHEAD, **options: Any) -> Logits:
    """`options`: of `Eagle3`."""
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    head = Eagle3(named, *MATRICES, others=["layers.1"], **options)
    return lambda tokens, states, path: peagle_logits(head, tokens, states, MASK, ahead)[len(path)]


def dflash_formula(tensors: Mapping[str, Tensor], **options: Any) -> Logits:
    """`options`: of `DFlash`."""
    draft = DFlash(tensors, *MATRICES, MASK, BLOCK, **options)
    return lambda tokens, states, path: draft.logits(tokens, states)[len(path)]


def dflash2_formula(tensors: Mapping[str, Tensor], candidates: int = CANDIDATES, **options: Any) -> Logits:
    """`options`: of `DFlash`."""
    draft = DFlash(tensors, *MATRICES, MASK, BLOCK, **options)
    return lambda tokens, states, path: dflash2_logits(draft, tokens, states, path, candidates)


def dspark_formula(tensors: Mapping[str, Tensor], kind: str = "vanilla", first: int = 0, **options: Any) -> Logits:
    """`options`: of `DFlash`."""
    draft = DFlash(tensors, *MATRICES, MASK, BLOCK, first=first, **options)
    return lambda tokens, states, path: dspark_logits(draft, tokens, states, path, kind)


def xpress_formula(tensors: Mapping[str, Tensor], **options: Any) -> Logits:
    """`options`: of `DFlash`."""
    draft = DFlash(tensors, *MATRICES, MASK, BLOCK, **options)
    return lambda tokens, states, path: xpress_logits(draft, tokens, states, path)


@dataclass(frozen=True)
class HeadMethod:
    """`required`: a tensor without which the checkpoint is refused."""

    tensors: Mapping[str, Tensor]
    config: dict[str, Any]
    required: str
    logits: Logits


EAGLE, EAGLE3, MTP = eagle_tensors(bias=True), eagle3_tensors(columns=VOCABULARY), mtp_tensors()
MEDUSA, MLP = medusa_tensors(), mlp_tensors()
EAGLE3_CONFIG = llama_config(eagle_aux_hidden_state_layer_ids=[0, 1, 2])
HEAD_METHODS: dict[str, HeadMethod] = {
    "eagle": HeadMethod(
        EAGLE, llama_config(), "layers.0.self_attn.k_proj.weight", token_by_token(Eagle1(EAGLE, *MATRICES))
    ),
    "eagle3": HeadMethod(EAGLE3, EAGLE3_CONFIG, "norm.weight", token_by_token(Eagle3(EAGLE3, *MATRICES))),
    "mtp": HeadMethod(
        MTP,
        {"speculators_model_type": "mtp"},
        "mtp_layers.0.mlp.up_proj.weight",
        token_by_token(MtpFormula("qwen3", MTP, *MATRICES, eps=1e-6)),
    ),
    "peagle": HeadMethod(peagle_tensors(), PEAGLE, "fc.weight", peagle_formula(peagle_tensors())),
    "dflash": HeadMethod(dflash_tensors(), DFLASH, "layers.1.mlp.up_proj.weight", dflash_formula(dflash_tensors())),
    "dflash2": HeadMethod(
        dflash2_tensors(), DFLASH2, "layers.1.mlp_conv.kernel_projection.weight", dflash2_formula(dflash2_tensors())
    ),
    "dspark": HeadMethod(dspark_tensors(), DSPARK, "markov_head.markov_w1.weight", dspark_formula(dspark_tensors())),
    "xpress": HeadMethod(xpress_tensors(), XPRESS, "refiner_head.mix_l", xpress_formula(xpress_tensors())),
    "medusa": HeadMethod(
        MEDUSA,
        {"medusa_num_heads": 2},
        "1.0.linear.weight",
        lambda _, states, path: medusa_logits(MEDUSA, states[-1, 0])[len(path)],
    ),
    "mlp_speculator": HeadMethod(
        MLP,
        mlp_config(STEPS),
        "ln.2.bias",
        lambda tokens, states, path: mlp_logits(MLP, states[-1, 0], [tokens[-1], *path], STEPS)[-1],
    ),
}
STATELESS = ("medusa", "mlp_speculator")
PARALLEL = ("peagle", "dflash", "medusa")
"""Their guesses at a depth do not depend on the guesses before."""
CORRECTED = ("dflash2", "dspark", "xpress")
"""They correct what one pass guesses by the guesses before."""


def save_method(folder: Path, method: str) -> Path:
    return save_head(folder, HEAD_METHODS[method].tensors, HEAD_METHODS[method].config)


def build_head(
    folder: Path, method: str, target: TargetWeights | None = None, *, slots: int = 1024, **settings: Any
) -> Speculator:
    """As a service builds it, with every guess likely enough."""
    options = {"num_speculative_tokens": AHEAD, "tree_width": 2, "least_path_probability": 0} | settings
    config = SpeculativeConfig(method=method, model=str(folder), **options)  # type: ignore[arg-type]
    return build_speculator(config, EngineConfig(slots=slots), lambda: target or target_weights())
