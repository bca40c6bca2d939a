"""The shipped family at the cost of a larger one: the same function, padded with zeros to several times the width.

Speculation is for models whose step costs much more than their draft's; the shipped target is small enough for a
package. Widened, it keeps its acceptance and has the weights of a larger model: four times as wide, hidden size 256
becomes 1,024, inner size 512 becomes 2,048, and a pass costs what 188 million parameters cost. It adds no
knowledge: the copy is for benchmarks and the demo, which make it on the fly.

Why nothing changes: every matrix gets zero rows and columns, so the part of a state that was added stays zero. RMSNorm
divides by the root of the mean square over all dimensions plus epsilon. Over four times as many dimensions the mean
square is a quarter, so epsilon is made a quarter too; the root is then half, so the norm's weight is halved. Both are
exact in bfloat16. The number of heads and their size stay. Only rounding differs, because sums over
more terms have another order: equal to about 1e-5 in float32, while in bfloat16 some greedy choices flip.

Qwen3.5's heads have norms with the same epsilon, which has to stay, and its norms store the difference from 1. There
the state itself gets twice as large, and so its mean square is what it was: matrices that write to it are doubled,
those that take it are halved. The output matrix becomes one of its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from paceline import family
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model_names import resolve_model

TIMES = 4
"""The factor of the family's width. A norm's weight is divided by its root, a power of two: exact in bfloat16."""
HIDDEN_COLUMNS = (
    "embed_tokens",
    "lm_head",
    "q_proj",
    "k_proj",
    "v_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_a",
    "in_proj_b",
)
PADDED: Mapping[str, tuple[bool, bool]] = {
    **dict.fromkeys(HIDDEN_COLUMNS, (False, True)),
    **dict.fromkeys(("o_proj", "out_proj"), (True, False)),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (True, True)),
}
"""By the last part of a matrix's name, whether it gets more rows and more columns."""
OF_HEADS = ("q_norm.weight", "k_norm.weight", "linear_attn.norm.weight", "conv1d.weight", "A_log", "dt_bias")
"""Ends of names of tensors that stay."""
WRITE = ("embed_tokens", "o_proj", "out_proj", "down_proj")
"""Last parts of the names of matrices that write to the state."""
KINDS = ("llama", "qwen3_5_text")
EAGLE3 = "eagle3"
TARGET_README = """\
# {name}

`{source}` widened with zeros to {times} times its hidden and inner size, for benchmarks: the same function, in float32
to about 1e-5, at the cost of {parameters:,} parameters. It was not trained, and knows nothing that `{source}` does
not know. Made by `paceline_lab.training.family.widened_family`.
"""
HEAD_README = """\
# {name}

`{source}` for the widened target: the same head, of its own size, whose first matrix ignores the zeros in the target's
states. Made by `paceline_lab.training.family.widened_family` for benchmarks.
"""


def widened_family(folder: Path) -> tuple[Path, Path]:
    """The widened target and its EAGLE-3 head below `folder`; written unless they exist, atomically.

    The shipped draft needs no copy: it shares the tokens with both targets.
    """
    source = family.path(family.NAMES[0])
    target, head = folder / f"{source.name}-wide", folder / f"{source.name}-wide-{EAGLE3}"
    if not target.is_dir():
        write_target(source, target)
    if not head.is_dir():
        write_head(family.path(family.HEADS[EAGLE3]), source, head)
    return target, head


@contextmanager
def copy_of(model: str, times: int) -> Iterator[str]:
    """A shipped model, `times` as wide for as long as this is open; 1: the model itself. Raises `CheckpointError`."""
    if times == 1:
        yield model
        return
    with TemporaryDirectory() as folder:
        write_target(Path(resolve_model(model)), target := Path(folder) / f"{Path(model).name}-wide", times)
        yield str(target)


def write_target(source: Path, folder: Path, times: int = TIMES) -> None:
    """The checkpoint of a Llama or a dense Qwen3.5, widened, with the tokenizer's files. `times`: a power of four.

    Raises `CheckpointError` for other kinds, and ValueError for another number."""
    if times not in (4, 16, 64):
        raise ValueError(f"times is {times}, and has to be a power of four: 4, 16 or 64")
    checkpoint = Checkpoint(source)
    source_config = checkpoint.config
    if (
        source_config.get("model_type") not in KINDS
        or source_config.get("attention_bias")
        or source_config.get("mlp_bias")
    ):
        raise CheckpointError(f"{checkpoint} cannot be widened: only Llamas and dense Qwen3.5 without biases can")
    is_hybrid = source_config["model_type"] != "llama"
    if is_hybrid:
        weights = _widened_hybrid(checkpoint, times)
    else:
        weights = {name: _widened(name, checkpoint.tensor(name), times) for name in checkpoint.names}
    sizes = {
        "head_dim": source_config.get("head_dim")
        or source_config["hidden_size"] // source_config["num_attention_heads"]
    }
    sizes |= {key: source_config[key] * times for key in ("hidden_size", "intermediate_size")}
    own = {"tie_word_embeddings": False} if is_hybrid else {"rms_norm_eps": source_config["rms_norm_eps"] / times}
    config = {**source_config, **sizes, **own}
    parameters = sum(each.numel() for each in weights.values())
    readme = TARGET_README.format(name=folder.name, source=source.name, times=times, parameters=parameters)
    _write(folder, weights, config, readme, [path for path in source.iterdir() if _is_copied(path)])


def write_head(source: Path, target: Path, folder: Path) -> None:
    """An EAGLE-3 head for the widened copy of `target`: zero columns for the zeros in its input.

    It keeps its own hidden size, so it cannot use the target's embedding and has the narrow one.
    """
    checkpoint = Checkpoint(source)
    weights = {name: checkpoint.tensor(name) for name in checkpoint.names}
    width = int(checkpoint.config["hidden_size"])
    fc = weights["fc.weight"].unflatten(1, (-1, width))  # [h, layers, width]
    weights["fc.weight"] = F.pad(fc, (0, (TIMES - 1) * width)).flatten(1)
    embedding = Checkpoint(target)
    weights.setdefault("embed_tokens.weight", embedding.tensor(embedding.find_required("embed_tokens.weight")))
    config = {**checkpoint.config, "target_hidden_size": TIMES * width}
    _write(folder, weights, config, HEAD_README.format(name=folder.name, source=source.name))


def _widened_hybrid(checkpoint: Checkpoint, times: int) -> dict[str, Tensor]:
    larger = times**0.5
    weights: dict[str, Tensor] = {}
    for name in checkpoint.names:
        weight, part = checkpoint.tensor(name), _part(name)
        if name.endswith(OF_HEADS):
            weights[name] = weight
        elif weight.ndim == 1:  # a norm's
            weights[name] = F.pad(weight, (0, (times - 1) * len(weight)))
        elif part == "fc":  # takes an embedding and a state, and writes one
            columns = F.pad(weight.unflatten(1, (2, -1)), (0, (times - 1) * len(weight))).flatten(1)
            weights[name] = F.pad(columns, (0, 0, 0, (times - 1) * len(weight)))
        else:
            weights[name] = _widened(name, weight, times) * (larger if part in WRITE else 1 / larger)
    embedding = checkpoint.find_required("embed_tokens.weight")
    return {"lm_head.weight": weights[embedding] / times} | weights


def _part(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _widened(name: str, weight: Tensor, times: int) -> Tensor:
    part = _part(name)
    if weight.ndim == 1:  # a norm's
        return F.pad(weight / times**0.5, (0, (times - 1) * len(weight)))
    if part not in PADDED:
        raise CheckpointError(f"tensor {name} does not belong to a Llama or a Qwen3.5: it cannot be widened")
    taller, wider = PADDED[part]
    rows, columns = weight.shape
    return F.pad(weight, (0, (times - 1) * columns * wider, 0, (times - 1) * rows * taller))


def _is_copied(path: Path) -> bool:
    """The tokenizer's files, the chat template, and the generation config."""
    return path.suffix in (".json", ".jinja") and path.name != "config.json"


def _write(
    folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], readme: str, more: list[Path] | None = None
) -> None:
    """Write all files atomically."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        partial = Path(temporary) / folder.name
        partial.mkdir()
        for path in more or ():
            shutil.copy(path, partial)
        save_file(
            {name: each.contiguous() for name, each in weights.items()}, partial / "model.safetensors", {"format": "pt"}
        )
        (partial / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
        (partial / "README.md").write_text(readme)
        partial.rename(folder)
