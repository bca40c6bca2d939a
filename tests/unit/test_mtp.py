"""Multi-token-prediction layers: every family's published tensors give the logits of its formula."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from paceline.drafting.heads.head_network import HeadNetwork
from paceline.drafting.methods.mtp import load_mtp, mtp_layer_config
from paceline.model.checkpoint import Checkpoint
from paceline.model.rows import SlotTable
from paceline.model.target_weights import TargetWeights, load_target_weights
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.mtp_checkpoints import (
    CONFIGS,
    SIZE,
    VOCABULARY,
    layer_tensors,
    save_matrices,
    save_speculators,
    target_tensors,
)
from tests.helpers.mtp_formula import PREFIX, Formula

SLOTS = 256
IN_THE_TARGET = [family for family in CONFIGS if family != "qwen3"]
NAMES = {"num_nextn_predict_layers": "glm4_moe", "mtp_num_hidden_layers": "qwen3_5_text"}


def target_of(folder: Path) -> TargetWeights:
    return load_target_weights(str(folder), torch.float32, "cpu")


def in_the_target(folder: Path) -> HeadNetwork:
    return load_mtp(Checkpoint(folder), target_of(folder), SLOTS)


def network(folder: Path, family: str, tensors: dict[str, Tensor]) -> HeadNetwork:
    """From the target's checkpoint; Qwen3's layer is in a folder of its own."""
    if family != "qwen3":
        return in_the_target(save_matrices(folder, family, tensors))
    own = Checkpoint(save_speculators(folder / "own", tensors))
    return load_mtp(own, target_of(save_matrices(folder / "target", family, {})), SLOTS)


def formula(family: str, tensors: dict[str, Tensor]) -> Formula:
    matrices = target_tensors()
    return Formula(family, tensors, matrices["embed_tokens.weight"], matrices["lm_head.weight"])


def drawn(count: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def states(count: int) -> Tensor:
    return torch.randn(count, 1, SIZE, generator=torch.Generator().manual_seed(2))


def scattered(count: int) -> SlotTable:
    """The last slot first."""
    slots = SlotTable()
    slots.slots = [SLOTS, *random.Random(6).sample(range(1, SLOTS), count - 1)]
    return slots


def check(ours: HeadNetwork, family: str, tensors: dict[str, Tensor], count: int = 5) -> None:
    """The logits of `count` rows are the formula's."""
    logits, expected = rows_of(ours, family, tensors, count)
    assert same(logits, expected)


def rows_of(ours: HeadNetwork, family: str, tensors: dict[str, Tensor], count: int = 5) -> tuple[Tensor, Tensor]:
    """Logits of `count` rows: the network's, and the formula's."""
    tokens, features, slots = drawn(count), states(count), scattered(count)
    output = ours.run([slots.row(t, i) for i, t in enumerate(tokens)], features[:, 0], range(count))
    return output.logits, formula(family, tensors)(tokens, features[:, 0])[0]


def same(ours: Tensor, exact: Tensor) -> bool:
    return bool((ours - exact).abs().max() < 2e-5 * exact.abs().max())


@pytest.mark.parametrize("family", CONFIGS)
def test_every_row_is_the_formulas(family: str, tmp_path: Path) -> None:
    tensors = layer_tensors(family)
    ours, tokens, features = network(tmp_path, family, tensors), drawn(70), states(70)
    slots = scattered(70)
    rows = [slots.row(token, i) for i, token in enumerate(tokens)]
    logits, after = formula(family, tensors)(tokens, features[:, 0])
    together = ours.run(rows, ours.encode(features), range(70))
    assert same(together.logits, logits)
    assert same(together.features, after)
    one_by_one = [ours.run([row], ours.encode(state[None]), [0]) for row, state in zip(rows, features, strict=True)]
    assert same(torch.cat([output.logits for output in one_by_one]), logits)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_feature_of_a_draft_token_is_its_parents_output(family: str, tmp_path: Path) -> None:
    """Two branches of four draft tokens, in the same passes, after 62 rows: both cross a tile's border."""
    tensors = layer_tensors(family)
    ours, exact = network(tmp_path, family, tensors), formula(family, tensors)
    tokens, features, table = drawn(62), states(62), scattered(70)
    free, table.slots = table.slots[62:], table.slots[:62]
    rows = [table.row(token, i) for i, token in enumerate(tokens)]
    root = ours.run(rows, ours.encode(features), [61]).features[0]
    _, outputs = exact(tokens, features[:, 0])
    branches = [drawn(4, seed=7), drawn(4, seed=8)]
    parents, slots = [root, root], [free[:4], free[4:]]
    exact_features = [torch.cat((features[:, 0].double(), outputs[-1:]))] * 2
    for depth in range(4):
        step = [table.branch_row(b[depth], s[: depth + 1]) for b, s in zip(branches, slots, strict=True)]
        output = ours.run(step, torch.stack(parents), [1, 0])
        for branch, row in ((0, 1), (1, 0)):
            logits, outputs = exact(tokens + branches[branch][: depth + 1], exact_features[branch])
            assert same(output.logits[row], logits[-1])
            parents[branch] = output.features[row]
            exact_features[branch] = torch.cat((exact_features[branch], outputs[-1:]))


@pytest.mark.parametrize("family", IN_THE_TARGET)
def test_a_layer_is_read_under_the_name_of_its_family(family: str, tmp_path: Path) -> None:
    folder = save_matrices(tmp_path / "t", family, layer_tensors(family))
    ours = in_the_target(folder)
    assert ours.model == "t"
    assert ours.hidden_state_layers == (3,), "behind the final norm of two layers"
    assert (ours.position_limit, ours.slots, ours.ids) == (512, SLOTS, None)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_layer_may_be_dense_where_its_family_has_experts(family: str, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in layer_tensors(family).items() if ".mlp." not in name}
    block = PREFIX[family] + ("layers.0." if family == "qwen3_next" else "")
    for name, tensor in layer_tensors("mimo").items():
        if ".mlp." in name:
            tensors[name.replace(PREFIX["mimo"], block)] = tensor
    of_the_target = {"model.layers.1.mlp.experts.0.up_proj.weight": torch.zeros(1)}
    check(network(tmp_path, family, tensors | of_the_target), family, tensors, 9)


def test_a_layer_has_its_targets_dtype_except_the_routers_correction(tmp_path: Path) -> None:
    folder = save_matrices(tmp_path, "glm4_moe", layer_tensors("glm4_moe"))
    ours = load_mtp(Checkpoint(folder), load_target_weights(str(folder), torch.bfloat16, "cpu"), SLOTS)
    dtypes = {name: tensor.dtype for name, tensor in ours._layer.state_dict().items()}
    assert dtypes.pop("block.mlp.gate.e_score_correction_bias") is torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    slots = scattered(3)
    output = ours.run([slots.row(t, i) for i, t in enumerate((1, 2, 3))], states(3)[:, 0].bfloat16(), [2])
    assert (output.logits.dtype, output.features.dtype) == (torch.bfloat16, torch.bfloat16)


def test_the_targets_configuration_is_not_changed(tmp_path: Path) -> None:
    target = target_of(save_matrices(tmp_path, "qwen3_next", layer_tensors("qwen3_next")))
    before = target.config.to_dict()
    own = mtp_layer_config(target.config, sparse=True)
    assert own._experts_implementation == "eager", "transformers sets none before it builds a model"
    assert target.config.to_dict() == before


@pytest.mark.parametrize(("rows", "columns"), [(16, 24), (128, 128)])
def test_fp8_weights_are_multiplied_by_the_scales_of_their_blocks(rows: int, columns: int, tmp_path: Path) -> None:
    """Blocks that divide neither side of every weight; those of 128 x 128 need not be complaint."""
    tensors, exact = layer_tensors("deepseek_v3"), {}
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or "eh_proj" in name or "mlp.gate." in name:
            stored[name] = exact[name] = tensor
            continue
        blocks = (-(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns))
        scale = torch.rand(blocks, generator=torch.Generator().manual_seed(len(name))) * 0.01 + 0.005
        spread = torch.stack([torch.stack([scale[i // rows, j // columns] for j in range(tensor.shape[1])])
                              for i in range(tensor.shape[0])])  # fmt: skip
        stored[name] = (tensor / spread).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        exact[name] = stored[name].float() * spread
    folder = save_matrices(tmp_path, "deepseek_v3", stored)
    if rows != 128:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
        (folder / "config.json").write_text(json.dumps(config))
    check(in_the_target(folder), "deepseek_v3", exact)


def test_embedding_and_output_matrix_are_the_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's checkpoints repeat them. A copy would be several gigabytes."""
    folder = save_matrices(tmp_path, "deepseek_v3", layer_tensors("deepseek_v3") | repeated("model.layers.2."))
    target, read = target_of(folder), []
    tensor = Checkpoint.tensor

    def noted(self: Checkpoint, name: str, *rest: object) -> Tensor:
        read.append(name)
        return tensor(self, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpoint, "tensor", noted)
    ours = load_mtp(Checkpoint(target.folder), target, SLOTS)
    assert set(read) == set(layer_tensors("deepseek_v3"))
    assert not [name for name, each in ours._layer.state_dict().items() if VOCABULARY in each.shape]
    assert ours._embedding is target.embedding()


def repeated(prefix: str) -> dict[str, Tensor]:
    names = (f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight")
    return {name: torch.zeros(VOCABULARY, SIZE) for name in names}


@pytest.mark.parametrize(("key", "family"), NAMES.items())
def test_of_several_layers_the_first_one_drafts_and_the_log_says_so(
    key: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_matrices(tmp_path, family, layer_tensors(family))
    in_the_target(folder)
    assert not caplog.messages
    text = (folder / "config.json").read_text()
    assert f'"{key}": 1' in text
    (folder / "config.json").write_text(text.replace(f'"{key}": 1', f'"{key}": 3'))
    with caplog.at_level(logging.WARNING):
        in_the_target(folder)
    assert caplog.messages == [f"of 3 multi-token-prediction layers of {folder} the first one drafts"]


Damage = Callable[[dict[str, Tensor]], object]
REFUSED: dict[str, tuple[str, Damage, str]] = {
    "no layer": ("deepseek_v3", dict.clear, "looked for model.layers.2.eh_proj.weight; download"),
    "no layer of Qwen's": ("qwen3_next", dict.clear, "looked for mtp.fc.weight"),
    "another depth": (
        "glm4_moe",
        lambda t: [t.update({n.replace("layers.2.", "layers.3."): t.pop(n)}) for n in list(t)],
        "looked for model.layers.2.eh_proj.weight",
    ),
    "a norm missing": (
        "mimo",
        lambda t: t.pop("model.mtp_layers.0.final_layernorm.weight"),
        "lacks model.mtp_layers.0.final_layernorm.weight of its multi-token-prediction layer: download it again",
    ),
    "an expert missing": (
        "qwen3_next",
        lambda t: t.pop("mtp.layers.0.mlp.experts.7.up_proj.weight"),
        "lacks mtp.layers.0.mlp.experts.7.up_proj.weight",
    ),
    "another size": (
        "mimo",
        lambda t: t.update({"model.mtp_layers.0.input_proj.weight": torch.zeros(40, 80)}),
        r"0.input_proj.weight in .* has the shape \[40, 80\], .* asks for \[32, 64\]: choose the layer of this target",
    ),
    "an expert of another size": (
        "deepseek_v3",
        lambda t: t.update({"model.layers.2.mlp.experts.1.down_proj.weight": torch.zeros(32, 25)}),
        r"experts.1.down_proj.weight in .* has the shape \[32, 25\], .* asks for \[32, 24\]",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_layer_that_does_not_fit_is_refused(what: str, tmp_path: Path) -> None:
    family, damage, complaint = REFUSED[what]
    tensors = layer_tensors(family)
    damage(tensors)
    target = target_of(save_matrices(tmp_path, family, tensors))
    with pytest.raises(ValueError, match=complaint) as caught:
        load_mtp(Checkpoint(target.folder), target, SLOTS)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_family_that_has_no_such_layer_is_refused(tmp_path: Path) -> None:
    target = replace(target_of(save_checkpoint(tmp_path)), config=SimpleNamespace(model_type="gemma2"))
    with pytest.raises(
        ValueError, match=r"method mtp knows .* DeepSeek-V3, GLM-4.5, MiMo, Qwen3-Next, .*, not of 'gemma2': choose"
    ):
        load_mtp(Checkpoint(target.folder), target, SLOTS)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_target_without_such_a_layer_needs_one_of_the_speculators_library(family: str, tmp_path: Path) -> None:
    target = target_of(save_checkpoint(tmp_path) if family == "llama" else save_matrices(tmp_path, family, {}))
    with pytest.raises(
        ValueError, match=f"checkpoints of {family.title()} have no multi-token-prediction layer, and .* is not"
    ):
        load_mtp(Checkpoint(target.folder), target, SLOTS)


def swapped(family: str) -> tuple[str, str]:
    """Names of the two norms before the projection."""
    own = {
        "qwen3_next": ("pre_fc_norm_embedding", "pre_fc_norm_hidden"),
        "mimo": ("token_layernorm", "hidden_layernorm"),
    }
    first, second = own.get(family, ("enorm", "hnorm"))
    return f"{PREFIX[family]}{first}.weight", f"{PREFIX[family]}{second}.weight"


def exchange(tensors: dict[str, Tensor], names: Sequence[str]) -> None:
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mimo", "qwen3_next"])
@pytest.mark.parametrize("mutant", ["norms exchanged", "halves exchanged", "norms centred elsewhere"])
def test_mutants_of_a_layer_are_caught(family: str, mutant: str, tmp_path: Path) -> None:
    """Each common mistake changes every row."""
    tensors = layer_tensors(family)
    mistaken = {name: tensor.clone() for name, tensor in tensors.items()}
    if mutant == "norms exchanged":
        exchange(mistaken, swapped(family))
    elif mutant == "halves exchanged":
        name = next(name for name, tensor in mistaken.items() if tensor.shape == (SIZE, 2 * SIZE))
        mistaken[name] = mistaken[name].roll(SIZE, 1)
    else:
        mistaken[swapped(family)[0]] += 1
    logits, expected = rows_of(network(tmp_path, family, mistaken), family, tensors)
    assert not any(same(a, b) for a, b in zip(logits, expected, strict=True))
