"""MiMo-7B, which transformers does not have: Qwen2, with a multi-token-prediction layer in the checkpoint."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
    config: MiMoConfig
    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = (r"^model\.mtp_layers\.",)


def register_mimo() -> None:
    """Make transformers' Auto classes load such a checkpoint without code from its folder."""
    AutoConfig.register(MiMoConfig.model_type, MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
