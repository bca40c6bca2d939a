"""Rotary settings of a GGUF file in transformers' terms: `rope_parameters`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.gguf.gguf_file import GgufError, GgufFile
from paceline.gguf.gguf_keys import Keys

if TYPE_CHECKING:  # most files take no numpy
    import numpy as np
    import numpy.typing as npt

DEFAULT_BASE = 10000.0
"""llama.cpp's base of rotary frequencies, where a file names none."""
LLAMA3_LENGTH, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0
"""Rotary scaling of Llama 3.1 to 3.3: the file has the resulting factors only."""


def rope(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a model that rotates whole heads. Raises `GgufError` for scaling of another kind."""
    rotated = keys.optional_count("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise keys.error("rope.dimension_count", f"is {rotated}, and not the size of a head, {config['head_dim']}")
    base = {"rope_theta": keys.optional_number("rope.freq_base", DEFAULT_BASE)}
    if keys.has_tensor("rope_freqs.weight"):
        return {**base, **_llama3_scaling(keys.file, config["head_dim"], base["rope_theta"] or DEFAULT_BASE)}
    return {**base, **scaling(keys)}


def scaling(keys: Keys) -> dict[str, Any]:
    kind, factor = keys.text("rope.scaling.type", "none"), keys.optional_number("rope.scaling.factor", 1.0)
    if kind == "none" or factor in (0.0, 1.0):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.error("rope.scaling.type", f"is {kind!r}, which is not read here: none, linear and yarn are")
    found = {
        "beta_fast": keys.optional_number("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.optional_number("rope.scaling.yarn_beta_slow"),
        "attention_factor": _yarn_attention_factor(keys, factor or 1.0),
        "mscale_all_dim": keys.optional_number("rope.scaling.yarn_log_multiplier"),
    }
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
        **{name: value for name, value in found.items() if value is not None},
        **({} if found["mscale_all_dim"] is None else {"mscale": 1.0}),
    }


def _yarn_attention_factor(keys: Keys, factor: float) -> float | None:
    """llama.cpp multiplies YaRN's own factor by the file's; None without one."""
    stored = keys.optional_number("rope.scaling.yarn_attn_factor", keys.optional_number("rope.scaling.attn_factor"))
    return None if stored in (None, 1.0) else (stored or 1.0) * (1 + 0.1 * math.log(factor))


def _llama3_scaling(file: GgufFile, head_dim: int, base: float) -> dict[str, Any]:
    """Raises `GgufError` if the factors are not those of Llama 3."""
    import numpy as np

    stored = floats(file, "rope_freqs.weight")
    settings = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_LENGTH,
    }
    expected = llama3_factors(head_dim, base, float(stored.max()))
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise GgufError(
            f"{file.path}: the tensor rope_freqs.weight has other factors than Llama 3, and is not read here"
        )
    return settings


def llama3_factors(head_dim: int, base: float, factor: float) -> npt.NDArray[np.float64]:
    """By how much Llama 3 divides each rotary frequency: not the high ones, the low ones by `factor`."""
    import numpy as np

    turns = LLAMA3_LENGTH * base ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    share = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    return np.asarray(1 / ((1 - share) / factor + share), np.float64)


def floats(file: GgufFile, name: str) -> npt.NDArray[np.float32]:
    import numpy as np

    tensor = file.tensor(name)
    if tensor.type.name != "F32":
        raise GgufError(f"{file.path}: the tensor {name} is of the type {tensor.type.name}, and not F32")
    return tensor.data.reshape(-1).view(np.float32)
