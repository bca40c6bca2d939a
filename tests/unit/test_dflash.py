"""DFlash drafts: every published format, against a computation without a cache written from the paper's formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.drafting.cached_draft import PREFILL_ROWS
from paceline.drafting.heads.dflash_config import is_dflash, target_layers
from paceline.drafting.methods.dflash import DFlashNetwork, DFlashSpeculator
from paceline.drafting.speculator import Context, DraftError
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.loading import build
from paceline.model.target_weights import TargetWeights
from tests.helpers.dense import HEADS, HIDDEN, KV_HEADS, SIZE, attention, heads_of, mlp, random, rms_norm
from tests.helpers.feeding import Feeding, Guess
from tests.helpers.llamas import VOCABULARY, peaked_llama
from tests.helpers.parallel import BLOCK, DFLASH, DFLASH_OF_THE_LIBRARY, MASK, dflash_tensors, save
from tests.helpers.seen import nodes_of

NETWORK = peaked_llama()
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}


def lent() -> TargetWeights:
    return build(peaked_llama(), "target", EngineConfig(), "", []).target_weights()


def drafting(
    checkpoint: Checkpoint, width: int = 2, slots: int = 1024, target: TargetWeights | None = None
) -> DFlashSpeculator:
    target = target or lent()
    return DFlashSpeculator(DFlashNetwork(checkpoint, target, slots), target, width, 0.0)


@torch.no_grad()
def laws(request: Feeding, weights: Mapping[str, Tensor], seen: Mapping[int, Any], first: int = 1) -> Tensor:
    """Log-probabilities [laws, vocabulary] of one block, from the states of all positions before the root.

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
        window, causal = seen.get(n, (0, False))
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


def check(request: Feeding, guesses: Sequence[Guess], expected: Tensor, width: int, ids: Sequence[int] | None) -> None:
    """Each guess has its depth's log-probability, and the likeliest path is there."""
    columns = {token: column for column, token in enumerate(ids or range(VOCABULARY))}
    assert guesses
    for path, log_prob in guesses:
        assert log_prob == pytest.approx(float(expected[len(path) - 1, columns[path[-1]]]), abs=2e-3)
    best = [int(law.argmax()) for law in expected]
    likeliest = [ids[column] if ids else column for column in best]
    assert len(request.tree.match(likeliest)) == len(likeliest)


def biased() -> dict[str, Tensor]:
    """With attention biases, o_proj's among them."""
    sizes = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE, "o": HIDDEN}
    added = {f"layers.{n}.self_attn.{p}_proj.bias": random(size) - 1 for n in range(2) for p, size in sizes.items()}
    return dflash_tensors() | added


def reduced() -> tuple[dict[str, Tensor], list[int]]:
    """A vocabulary of every third token, with an output matrix for these."""
    ids = list(range(0, VOCABULARY, 3))
    offsets = torch.tensor(ids) - torch.arange(len(ids))
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[ids] = True
    return dflash_tensors() | {"lm_head.weight": random(len(ids), HIDDEN), "d2t": offsets, "t2d": known}, ids


class Variant:
    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor] | None = None,
        seen: Mapping[int, Any] | None = None,
        first: int = 1,
        ids: Sequence[int] | None = None,
    ) -> None:
        self.config, self.weights = config, weights or dflash_tensors()
        self.seen, self.first, self.ids = seen or {}, first, ids


def nested(**keys: Any) -> dict[str, Any]:
    return {
        **DFLASH_OF_THE_LIBRARY,
        "transformer_layer_config": {**DFLASH_OF_THE_LIBRARY["transformer_layer_config"], **keys},
    }


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
    "reduced vocabulary": Variant(DFLASH_OF_THE_LIBRARY, reduced()[0], ids=reduced()[1]),
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
def test_laws_are_those_of_the_formulas(variant: Variant, tmp_path: Path, length: int) -> None:
    """With the states of all positions before the root, and with none there are."""
    speculator = drafting(save(tmp_path, variant.config, variant.weights))
    request = Feeding(speculator, NETWORK, [(7 * i + i // 5) % VOCABULARY for i in range(length)])
    request.tell()
    expected = laws(request, variant.weights, variant.seen, variant.first)
    assert len(expected) == BLOCK - variant.first
    check(request, request.grow(), expected, 2, variant.ids)


def test_rounds_with_commits_between_are_those_without_a_cache(variant: Variant, tmp_path: Path) -> None:
    """Accepted guesses, misses, all of a block: the block's own keys and values are never seen again."""
    rng = Random(2)
    speculator = drafting(save(tmp_path, variant.config, variant.weights))
    request = Feeding(speculator, NETWORK, PROMPT)
    request.tell()
    for _ in range(12):
        check(request, request.grow(), laws(request, variant.weights, variant.seen, variant.first), 2, variant.ids)
        speculator.check_integrity()
        chosen = rng.choice(list(nodes_of(request.tree))).path()
        request.commit([*(node.token for node in chosen), *rng.choices(range(VOCABULARY), k=rng.randrange(2))])


def test_the_state_after_the_last_layer_is_the_one_that_the_format_means(tmp_path: Path) -> None:
    """The reference takes transformers' last hidden state, after the norm; the library what comes out of the layer."""
    target = lent()
    assert drafting(save(tmp_path / "a", DFLASH, dflash_tensors()), target=target).hidden_state_layers == (
        1,
        target.final_layer,
    )
    assert drafting(
        save(tmp_path / "b", DFLASH_OF_THE_LIBRARY, dflash_tensors()), target=target
    ).hidden_state_layers == (0, 2)


@pytest.mark.parametrize(
    ("count", "layers", "expected"),
    [(5, 36, (2, 10, 18, 26, 34)), (1, 36, (19,)), (2, 28, (2, 26)), (6, 48, (2, 11, 20, 28, 37, 46))],
)
def test_layers_that_are_not_named_are_spread_evenly(
    tmp_path: Path, count: int, layers: int, expected: tuple[int, ...]
) -> None:
    config = {"num_hidden_layers": count, "num_target_layers": layers, "dflash_config": {}}
    deep = replace(lent(), config=SimpleNamespace(num_hidden_layers=layers, hidden_size=HIDDEN))
    assert target_layers(save(tmp_path, config, dflash_tensors()), deep) == expected


def test_states_that_come_late_are_waited_for(tmp_path: Path) -> None:
    """Commits may come before them, and what is said twice is heard once."""
    speculator = drafting(save(tmp_path, DFLASH, dflash_tensors()))
    request = Feeding(speculator, NETWORK, PROMPT)
    assert request.grow() == []
    request.tell(3)
    assert request.grow() == []
    request.commit([7, 8])
    assert request.grow() == []
    request.told = 1
    request.tell()
    check(request, request.grow(), laws(request, dflash_tensors(), {}), 2, None)


def test_a_gap_in_the_states_is_refused(tmp_path: Path) -> None:
    request = Feeding(drafting(save(tmp_path, DFLASH, dflash_tensors())), NETWORK, PROMPT)
    request.told = 2
    with pytest.raises(DraftError, match="hidden states of position 2, but not of 0"):
        request.tell()


def test_several_requests_share_a_pass_and_not_their_contexts(tmp_path: Path) -> None:
    speculator = drafting(save(tmp_path, DFLASH, dflash_tensors()))
    prompts = {key: [(key * i) % VOCABULARY for i in range(3 * key)] for key in (1, 2, 5)}
    requests = {key: Feeding(speculator, NETWORK, prompt, key=key) for key, prompt in prompts.items()}
    for request in requests.values():
        request.tell()
    grown = speculator.grow()
    assert grown.keys() == requests.keys()
    for key, request in requests.items():
        request.tree.graft(grown[key], 1000)
        guesses = [(tuple(n.token for n in node.path()), node.log_prob) for node in nodes_of(request.tree)]
        check(request, guesses, laws(request, dflash_tensors(), {}), 2, None)


def test_a_long_prompt_takes_several_rounds(tmp_path: Path) -> None:
    speculator = drafting(save(tmp_path, DFLASH, dflash_tensors()), width=1)
    request = Feeding(speculator, NETWORK, [i % VOCABULARY for i in range(PREFILL_ROWS + 30)])
    request.tell()
    assert speculator.grow() == {}
    assert speculator.behind
    check(request, request.grow(), laws(request, dflash_tensors(), {}), 1, None)


def test_no_position_at_or_beyond_the_targets_last(tmp_path: Path) -> None:
    """Though the block reaches beyond it."""
    target = replace(lent(), max_model_len=len(PROMPT) + 2)
    request = Feeding(drafting(save(tmp_path, DFLASH, dflash_tensors()), width=1, target=target), NETWORK, PROMPT)
    request.tell()
    guesses = request.grow()
    assert [len(path) for path, _ in sorted(guesses)] == [1, 2]
    expected = laws(request, dflash_tensors(), {})
    assert guesses[0][1] == pytest.approx(float(expected[0].max()), abs=2e-3)


class TestMemory:
    def test_copies_of_the_targets_matrices_are_not_kept(self, tmp_path: Path) -> None:
        """As the library's converter writes them."""
        copies = {
            "embed_tokens.weight": NETWORK.model.embed_tokens.weight.detach().clone(),
            "lm_head.weight": NETWORK.lm_head.weight.detach().clone(),
        }
        target = lent()
        network = DFlashNetwork(save(tmp_path, DFLASH_OF_THE_LIBRARY, dflash_tensors() | copies), target, 64)
        assert network._embedding is target.embedding()
        assert network._output == target.output

    def test_matrices_of_its_own_are_used(self, tmp_path: Path) -> None:
        own = {"lm_head.weight": NETWORK.lm_head.weight.detach() + 1e-3}
        target = lent()
        network = DFlashNetwork(save(tmp_path, DFLASH_OF_THE_LIBRARY, dflash_tensors() | own), target, 64)
        assert network._output != target.output


def changed(config: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    """A key that is None is left out."""
    return {key: value for key, value in (dict(config) | keys).items() if value is not None}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed(DFLASH_OF_THE_LIBRARY, speculators_model_type="dspark"), "dspark draft, which is not served yet"),
        (changed(DFLASH, markov_rank=8), "dspark draft"),
        (changed(DFLASH_OF_THE_LIBRARY, speculators_model_type="dflash2"), "dflash2 draft"),
        (changed(DFLASH, dflash_config={**DFLASH["dflash_config"], "use_swa": True}), "with use_swa"),
        (changed(DFLASH, is_neox_style=False), "with is_neox_style"),
        (changed(DFLASH, block_size=None), "names no block_size of 2 or more"),
        (changed(DFLASH, block_size=1), "names no block_size of 2 or more"),
        (changed(DFLASH, dflash_config={"target_layer_ids": [0, 1]}), "names no mask_token_id"),
        (changed(DFLASH_OF_THE_LIBRARY, mask_token_id=VOCABULARY), f"mask_token_id {VOCABULARY} .* is no token"),
        (changed(DFLASH_OF_THE_LIBRARY, aux_hidden_state_layer_ids=None), "lacks aux_hidden_state_layer_ids"),
        (changed(DFLASH_OF_THE_LIBRARY, aux_hidden_state_layer_ids=[1, 3]), r"states of layers \[1, 3\], target has 2"),
        (changed(DFLASH, num_target_layers=36), "is a draft for a model of 36 layers, target has 2"),
        (changed(DFLASH, hidden_size=None), "names no hidden_size"),
        (changed(DFLASH, hidden_size=32), "has shape"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    checkpoint = save(tmp_path, config, dflash_tensors())
    assert is_dflash(checkpoint)
    with pytest.raises(CheckpointError, match=words) as refused:
        drafting(checkpoint)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({k: v for k, v in dflash_tensors().items() if k != "hidden_norm.weight"}, "no tensor hidden_norm.weight"),
        ({k: v for k, v in dflash_tensors().items() if "1.mlp.up" not in k}, "no tensor layers.1.mlp.up_proj.weight"),
        (dflash_tensors(3), r"fc.weight .* has shape \[64, 192\] where \[64, 128\] is needed"),
        (dflash_tensors() | {"layers.0.self_attn.g_proj.weight": random(4, 4)}, "with g_proj"),
        (dflash_tensors() | {"markov_head.markov_w1.weight": random(4, 4)}, "dspark"),
        (dflash_tensors() | {"lm_head.weight": random(7, HIDDEN)}, "guesses 7 tokens and has no d2t"),
        (dflash_tensors() | {"embed_tokens.weight": random(9, HIDDEN)}, "embed_tokens.weight .* has shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, weights: dict[str, Tensor], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        drafting(save(tmp_path, DFLASH, weights))


def test_a_draft_of_another_width_needs_matrices_of_its_own(tmp_path: Path) -> None:
    narrow = replace(lent(), config=SimpleNamespace(num_hidden_layers=2, hidden_size=128))
    weights = dflash_tensors(4) | {"embed_tokens.weight": random(VOCABULARY, HIDDEN)}
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        drafting(save(tmp_path, DFLASH, weights), target=narrow)


def test_a_vocabulary_larger_than_its_matrix_is_refused(tmp_path: Path) -> None:
    weights, ids = reduced()
    weights["lm_head.weight"] = weights["lm_head.weight"][1:]
    with pytest.raises(CheckpointError, match=f"guesses {len(ids) - 1} tokens, and d2t names {len(ids)}"):
        drafting(save(tmp_path, DFLASH_OF_THE_LIBRARY, weights))


def test_states_of_another_precision_are_taken(tmp_path: Path) -> None:
    """As a target in bfloat16 sends them to a draft that computes in float32."""
    speculator = drafting(save(tmp_path, DFLASH, dflash_tensors()))
    request = Feeding(speculator, NETWORK, PROMPT)
    speculator.context(Context(1, 0, request.states()[: len(PROMPT) - 1].bfloat16()))
    assert request.grow()


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    save(tmp_path, DFLASH, dflash_tensors())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        drafting(Checkpoint(tmp_path))
