"""The tensor names and decoder classes of each model family's multi-token-prediction layer.

Names and order as published: DeepSeek-V3's README_WEIGHTS, and vLLM's `deepseek_mtp`, `glm4_moe_mtp`,
`qwen3_next_mtp`, `qwen3_5_mtp` and `mimo_mtp`. The `speculators` library writes such a layer to a folder of its own.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Tensor names. All begin with `prefix`, where {layers} is the number of the target's layers. `block` is the prefix
    of the decoder layer's names; the other fields name the parts around it, without ".weight".
    """

    prefix: str
    token_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    block: str = ""
    hidden_first: bool = False
    """The projection's input is [hidden, embedding] instead of [embedding, hidden]."""

    def name(self, part: str, layers: int) -> str:
        """The checkpoint's name of a parameter of `paceline.drafting.methods.mtp.MtpLayer`."""
        owner, _, rest = part.partition(".")
        name = self.block + rest if owner == "block" else f"{getattr(self, owner)}.{rest}"
        return self.prefix.format(layers=layers) + name


DEEPSEEK = MtpLayout("model.layers.{layers}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = MtpLayout("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", block="layers.0.")
MIMO = MtpLayout(
    "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", hidden_first=True
)
SPECULATORS_LIBRARY = MtpLayout("mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
"""Of the `speculators` library, for every family: MiMo's names in DeepSeek's order."""


@dataclass(frozen=True, slots=True)
class MtpFamily:
    """`name`: for messages. `module` and `classes`: the transformers module of the decoder layer, and its class prefix.
    `layout`: of the layer in the target's own checkpoint; None: there is none. `count_key`: the configuration's key of
    the number of such layers.
    """

    name: str
    module: str
    classes: str
    layout: MtpLayout | None
    count_key: str = "num_nextn_predict_layers"
    rotary: str = "RotaryEmbedding"

    def find(self, suffix: str) -> type[nn.Module]:
        """The family's class with this suffix, such as "DecoderLayer"."""
        module = importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        found: type[nn.Module] = getattr(module, self.classes + suffix)
        return found


MTP_FAMILIES = {
    "deepseek_v3": MtpFamily("DeepSeek-V3", "deepseek_v3", "DeepseekV3", DEEPSEEK),
    "glm4_moe": MtpFamily("GLM-4.5", "glm4_moe", "Glm4Moe", DEEPSEEK),
    "mimo": MtpFamily("MiMo", "qwen2", "Qwen2", MIMO),
    "llama": MtpFamily("Llama", "llama", "Llama", None),
    "qwen3": MtpFamily("Qwen3", "qwen3", "Qwen3", None),
    "qwen3_next": MtpFamily("Qwen3-Next", "qwen3_next", "Qwen3Next", QWEN),
    "qwen3_5_text": MtpFamily("Qwen3.5", "qwen3_5", "Qwen3_5", QWEN, "mtp_num_hidden_layers", "TextRotaryEmbedding"),
    "qwen3_5_moe_text": MtpFamily(
        "Qwen3.5 MoE", "qwen3_5_moe", "Qwen3_5Moe", QWEN, "mtp_num_hidden_layers", "TextRotaryEmbedding"
    ),
}
"""By `model_type` of the target's text configuration."""


def family_of(config: Any) -> MtpFamily:
    """Raises ValueError if the configuration's family has no known multi-token-prediction layer."""
    family = MTP_FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(each.name for each in MTP_FAMILIES.values() if each.layout)
        raise ValueError(
            f"method mtp knows the multi-token-prediction layers of {known}, not of {config.model_type!r}: "
            "choose another method"
        )
    return family
