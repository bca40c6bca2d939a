"""The shipped family at the cost of a larger one: the same function, padded with zeros to four times the width.

Speculation is for models whose step costs much more than their draft's; the shipped target is small enough for a
package. Widened, it keeps its acceptance and has the weights of a larger model: hidden size 256 becomes 1,024,
inner size 512 becomes 2,048, and a pass costs what 188 million parameters cost. It adds no
knowledge: the copy is for benchmarks and the demo, which make it on the fly.

Why nothing changes: every matrix gets zero rows and columns, so the three quarters of a state that were added stay
zero. RMSNorm divides by the root of the mean square over all dimensions plus epsilon. Over four times as many
dimensions the mean square is a quarter, so epsilon is made a quarter too; the root is then half, so the norm's weight
is halved. Both are exact in bfloat16. The number of heads and their size stay. Only rounding differs, because sums over
more terms have another order: equal to about 1e-5 in float32, while in bfloat16 some greedy choices flip.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from paceline import family
from paceline.model.checkpoint import Checkpoint, CheckpointError

TIMES = 4
"""The factor of the width. A norm's weight is divided by its root, which is a power of two: exact in bfloat16."""
PADDED = {
    "embed_tokens.weight": (1, TIMES),
    "lm_head.weight": (1, TIMES),
    "q_proj.weight": (1, TIMES),
    "k_proj.weight": (1, TIMES),
    "v_proj.weight": (1, TIMES),
    "o_proj.weight": (TIMES, 1),
    "gate_proj.weight": (TIMES, TIMES),
    "up_proj.weight": (TIMES, TIMES),
    "down_proj.weight": (TIMES, TIMES),
}
"""By the end of a matrix's name, the factors of its rows and columns."""
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


def write_target(source: Path, folder: Path) -> None:
    """The checkpoint of a Llama, widened, with the tokenizer's files. Raises `CheckpointError` for other kinds."""
    checkpoint = Checkpoint(source)
    source_config = checkpoint.config
    if (
        source_config.get("model_type") != "llama"
        or source_config.get("attention_bias")
        or source_config.get("mlp_bias")
    ):
        raise CheckpointError(f"{checkpoint} cannot be widened: only Llamas without biases can")
    weights = {name: _widened(name, checkpoint.tensor(name)) for name in checkpoint.names}
    sizes = {
        "head_dim": source_config.get("head_dim")
        or source_config["hidden_size"] // source_config["num_attention_heads"]
    }
    sizes |= {key: source_config[key] * TIMES for key in ("hidden_size", "intermediate_size")}
    config = {**source_config, **sizes, "rms_norm_eps": source_config["rms_norm_eps"] / TIMES}
    parameters = sum(each.numel() for each in weights.values())
    readme = TARGET_README.format(name=folder.name, source=source.name, times=TIMES, parameters=parameters)
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


def _widened(name: str, weight: Tensor) -> Tensor:
    if weight.ndim == 1:  # a norm's
        return F.pad(weight / TIMES**0.5, (0, (TIMES - 1) * len(weight)))
    taller, wider = next((times for ending, times in PADDED.items() if name.endswith(ending)), (0, 0))
    if not taller:
        raise CheckpointError(f"tensor {name} does not belong to a Llama: it cannot be widened")
    rows, columns = weight.shape
    return F.pad(weight, (0, (wider - 1) * columns, 0, (taller - 1) * rows))


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
