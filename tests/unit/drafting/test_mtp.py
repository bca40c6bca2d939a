"""Multi-token-prediction layers: every family's published tensors give the logits of its formula."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from paceline.drafting.heads.head_network import HeadNetwork
from paceline.drafting.methods.mtp import load_mtp
from paceline.model.checkpoint import Checkpoint
from paceline.model.rows import SlotTable
from paceline.model.target_weights import TargetWeights, load_target_weights
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.device_passes import use_torch
from tests.helpers.gpu_kernels import use_stand_ins
from tests.helpers.head_checkpoints import read_tensors
from tests.helpers.mtp_checkpoints import (
    CONFIGS,
    SIZE,
    VOCABULARY,
    layer_tensors,
    save_matrices,
    save_speculators,
    target_tensors,
)
from tests.helpers.mtp_formula import OWN, PREFIX, QWEN, MtpFormula
from tests.unit.drafting.head_rounds import compare

SLOTS = 256
IN_THE_TARGET = [family for family in CONFIGS if family != "qwen3"]
EXACT = 2e-5
"""Largest error of float32, relative to the largest value."""


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


def formula(family: str, tensors: dict[str, Tensor]) -> MtpFormula:
    matrices = target_tensors()
    return MtpFormula(family, tensors, matrices["embed_tokens.weight"], matrices["lm_head.weight"])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_familys_layer_computes_the_formula(family: str, tmp_path: Path) -> None:
    tensors = layer_tensors(family)
    ours = network(tmp_path, family, tensors)
    compare(ours, formula(family, tensors), EXACT)
    if family in IN_THE_TARGET:
        assert ours.description.model == tmp_path.name
    assert ours.description.hidden_state_layers == (3,), "behind the final norm of two layers"
    assert (ours.description.position_limit, ours.slots, ours.ids) == (512, SLOTS, None)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_layer_may_be_dense_where_its_family_has_experts(family: str, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in layer_tensors(family).items() if ".mlp." not in name}
    block = PREFIX[family] + ("layers.0." if family == "qwen3_next" else "")
    for name, tensor in layer_tensors("mimo").items():
        if ".mlp." in name:
            tensors[name.replace(PREFIX["mimo"], block)] = tensor
    of_the_target = {"model.layers.1.mlp.experts.0.up_proj.weight": torch.zeros(1)}
    compare(network(tmp_path, family, tensors | of_the_target), formula(family, tensors), EXACT)


def test_a_layer_has_its_targets_dtype_except_the_routers_correction(tmp_path: Path) -> None:
    folder = save_matrices(tmp_path, "glm4_moe", layer_tensors("glm4_moe"))
    ours = load_mtp(Checkpoint(folder), load_target_weights(str(folder), torch.bfloat16, "cpu"), SLOTS)
    dtypes = {name: tensor.dtype for name, tensor in ours._layer.state_dict().items()}
    assert dtypes.pop("block.mlp.gate.e_score_correction_bias") is torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    table = SlotTable()
    table.slots = [1]
    output = ours.run([table.row(1, 0)], torch.zeros(1, SIZE, dtype=torch.bfloat16), [0])
    assert (output.logits.dtype, output.features.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("family", ["mimo", "qwen3_next", "deepseek_v3"])
def test_a_gpu_pads_whole_groups_further(family: str, tmp_path: Path) -> None:
    """40 rows to 48, so that products have a number of rows that is probed; features, too."""
    tensors, outputs = layer_tensors(family), []
    torch.manual_seed(1)
    features = torch.randn(40, SIZE)
    for use in (use_torch, use_stand_ins):
        with pytest.MonkeyPatch.context() as patch:
            use_torch(patch)
            use(patch)
            ours = network(tmp_path / use.__name__, family, tensors)
        table = SlotTable(range(1, 41))
        with torch.inference_mode():
            outputs.append(ours.run([table.row(n % VOCABULARY, n) for n in range(40)], features, range(40)))
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(outputs[1].features, outputs[0].features, rtol=0, atol=1e-4)


def test_the_targets_configuration_is_not_changed(tmp_path: Path) -> None:
    target = target_of(save_matrices(tmp_path, "qwen3_next", layer_tensors("qwen3_next")))
    before = target.config.to_dict()
    load_mtp(Checkpoint(target.folder), target, SLOTS)
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
        spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: tensor.shape[0], : tensor.shape[1]]
        stored[name] = (tensor / spread).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        exact[name] = stored[name].float() * spread
    folder = save_matrices(tmp_path, "deepseek_v3", stored)
    if rows != 128:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
        (folder / "config.json").write_text(json.dumps(config))
    compare(in_the_target(folder), formula("deepseek_v3", exact), EXACT)


def test_embedding_and_output_matrix_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's checkpoints repeat the target's. A copy would be several gigabytes."""
    names = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
    repeated = {name: torch.zeros(VOCABULARY, SIZE) for name in names}
    tensors = layer_tensors("deepseek_v3")
    target = target_of(save_matrices(tmp_path, "deepseek_v3", tensors | repeated))
    read = read_tensors(monkeypatch)
    load_mtp(Checkpoint(target.folder), target, SLOTS)
    assert set(read) == set(tensors)


@pytest.mark.parametrize(
    ("key", "family"), [("num_nextn_predict_layers", "glm4_moe"), ("mtp_num_hidden_layers", "qwen3_5_text")]
)
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


MISTAKES: dict[str, Callable[[dict[str, Tensor], tuple[str, ...]], object]] = {
    "norms exchanged": lambda t, own: t.update({own[0]: t[own[1]], own[1]: t[own[0]]}),
    "halves exchanged": lambda t, own: t.update({own[2]: t[own[2]].roll(SIZE, 1)}),
    "norms centred elsewhere": lambda t, own: t.update({own[0]: t[own[0]] + 1}),
}


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mimo", "qwen3_next"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_catches_common_mistakes(family: str, mistake: str, tmp_path: Path) -> None:
    tensors = layer_tensors(family)
    mistaken = tensors.copy()
    MISTAKES[mistake](mistaken, tuple(f"{PREFIX[family]}{name}.weight" for name in OWN.get(family, QWEN)))
    with pytest.raises(AssertionError, match="not close"):
        compare(network(tmp_path, family, mistaken), formula(family, tensors), EXACT)
