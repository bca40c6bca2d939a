"""The configuration of a DFlash draft or a relative of it, in z-lab's original format or the speculators library's.

Sources: z-lab's dflash at 44947fbf; speculators 0.9.0; of DSpark and DFlash2 outside the library, vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.drafting.heads.head_config import is_speculators_format, mask_token, require_layers, windows
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights

MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""In vLLM's order."""
RELATIVES = {
    "dspark": (("markov_rank", "markov_head_type"), "markov_head.markov_w1.weight"),
    "dflash2": (("selector_rank", "selector_top_k"), "candidate_selector.successor_codebook"),
    "xpress": (("xpress_rank", "xpress_mlp_ratio"), "refiner_head.readout.weight"),
}
"""Methods that correct what a DFlash network predicts: their configuration keys, and a tensor that only they have."""
NEUTRAL = {
    **{"use_swa": False, "attention_sink_bias": False, "attention_value_scale": None},
    **{"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0},
}
"""Keys of `dflash_config` for variants, and the value without effect."""
RELATIVES_FIELDS = {
    *("speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config"),
    *("draft_vocab_size", "block_size", "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id"),
    *("sliding_window_non_causal", "sample_from_anchor", "is_causal"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes"),
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "tie_word_embeddings"),
    *("_name_or_path", "has_no_defaults_at_init"),
}
"""Keys of the library's relatives that are used here or change no guess."""


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """`layers`: of the target, as `hidden_state_layers`. `windows` and `causal` have one entry per draft layer."""

    layers: Sequence[int]
    block: int
    """Positions in one pass, including the root."""
    mask_token: int
    first_offset: int
    """The first position of a block that predicts: position n predicts its own token, so 1 skips the root."""
    windows: Sequence[int]
    """Number of positions before the root that attention sees; 0: all."""
    causal: Sequence[bool]
    """Whether a position of the block sees only earlier positions of it."""

    @property
    def tokens_per_pass(self) -> int:
        """Distributions from one pass."""
        return self.block - self.first_offset

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, target: TargetWeights, decoder: Any, rows: int | None, method: str
    ) -> DFlashConfig:
        """`decoder`: the configuration of the draft's layers. `rows`: of the embedding that has the mask token; None:
        the mask has an embedding of its own. Raises `CheckpointError` for another method or target, or an unsupported
        variant."""
        sizes = windows(decoder)
        # Original drafts set one flag for all layers. The library trains sliding layers as causal by default, but those
        # of DFlash2.
        config = checkpoint.config
        all_causal = config.get("is_causal", _dflash_section(config).get("causal"))
        if all_causal is None:
            non_causal = config.get("sliding_window_non_causal", method == "dflash2")
            causal = [size > 0 and not non_causal for size in sizes]
        else:
            causal = [bool(all_causal)] * len(sizes)
        return cls(
            configured_layers(checkpoint, target, method),
            _block(checkpoint),
            mask_token(checkpoint, {**config, **_dflash_section(config)}, MASK_KEYS, rows),
            _first_offset(checkpoint),
            sizes,
            causal,
        )


def tokens_per_pass(checkpoint: Checkpoint) -> int:
    """Draft tokens from one pass. Raises `CheckpointError` if the configuration has no block size."""
    return _block(checkpoint) - _first_offset(checkpoint)


def configured_layers(checkpoint: Checkpoint, target: TargetWeights, method: str = "dflash") -> Sequence[int]:
    """The target's layers whose hidden states the draft needs. Raises `CheckpointError`."""
    _refuse_unsupported(checkpoint, method)
    advice = "choose a draft for this model"
    if is_speculators_format(checkpoint):
        layers = [int(n) for n in checkpoint.config.get("aux_hidden_state_layer_ids") or ()]
        if not layers:
            raise CheckpointError(f"config.json in {checkpoint} lacks aux_hidden_state_layer_ids: it is incomplete")
        require_layers(checkpoint, target, layers, advice)
        return tuple(layers)
    layers = [n + 1 for n in _zlab_target_layers(checkpoint, target)]
    require_layers(checkpoint, target, layers, advice)
    # z-lab reads transformers' `hidden_states`, whose last entry is the output of the final norm.
    return tuple(target.final_layer if layer == target.layers else layer for layer in layers)


def _zlab_target_layers(checkpoint: Checkpoint, target: TargetWeights) -> Sequence[int]:
    """In z-lab's format: the layers whose outputs the draft needs, counted from 0."""
    config = checkpoint.config
    layers = int(config.get("num_target_layers") or target.layers)
    if layers != target.layers:
        raise CheckpointError(
            f"{checkpoint} is a draft for a model of {layers} layers, {target.name} has {target.layers}: "
            "choose one for it"
        )
    named = _dflash_section(config).get("target_layer_ids") or config.get("target_layer_ids")
    if named:
        return [int(n) for n in named]
    count = int(config.get("num_hidden_layers", 1))
    if count == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]


def setting(checkpoint: Checkpoint, key: str, default: Any = None) -> Any:
    """A value in config.json, where z-lab's own keys may stand in `dflash_config`."""
    config = checkpoint.config
    return config.get(key, _dflash_section(config).get(key, default))


def size_setting(checkpoint: Checkpoint, key: str) -> int:
    """A size that config.json must name. Raises `CheckpointError` if it is no positive number."""
    value = setting(checkpoint, key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json in {checkpoint} has {key} {value!r}, and no number of 1 or more")
    return value


def relative_of(checkpoint: Checkpoint) -> str:
    """`dflash`, or the relative of it that the checkpoint is for, if it is for any of them."""
    config = checkpoint.config
    if is_speculators_format(checkpoint):
        return str(config["speculators_model_type"])
    for name, (keys, tensor) in RELATIVES.items():
        if checkpoint.find(tensor) or any(key in config or key in _dflash_section(config) for key in keys):
            return name
    return "dflash"


def _refuse_unsupported(checkpoint: Checkpoint, method: str) -> None:
    """Raises `CheckpointError` for a checkpoint of another method, or a variant."""
    config = checkpoint.config
    if (name := relative_of(checkpoint)) != method:
        raise CheckpointError(f"{checkpoint} is a draft for method {name}: set that one, or leave the method out")
    section = _dflash_section(config)
    variant = next((key for key, neutral in NEUTRAL.items() if section.get(key, neutral) != neutral), None)
    if is_speculators_format(checkpoint) and method in RELATIVES:
        variant = next((key for key, value in config.items() if value and key not in RELATIVES_FIELDS), variant)
    if variant is None and config.get("is_neox_style") is False:
        variant = "is_neox_style"
    if variant is None and (config.get("logit_scale") or 1.0) != 1.0:
        variant = "logit_scale"
    if variant is None and (checkpoint.find("g_proj.weight") or checkpoint.find("aux_hidden_norms.0.weight")):
        variant = "g_proj"
    if variant is not None:
        raise CheckpointError(f"{checkpoint} is a variant of {method} with {variant}, which is not served yet")


def _dflash_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """z-lab's own keys, nulls left out."""
    return {key: value for key, value in (config.get("dflash_config") or {}).items() if value is not None}


def _block(checkpoint: Checkpoint) -> int:
    config = checkpoint.config
    block = config.get("block_size") or _dflash_section(config).get("block_size")
    if not isinstance(block, int) or block < 2:
        raise CheckpointError(f"config.json in {checkpoint} names no block_size of 2 or more: it is incomplete")
    return block


def _first_offset(checkpoint: Checkpoint) -> int:
    config = checkpoint.config
    default = relative_of(checkpoint) == "dspark"
    return 0 if _dflash_section(config).get("sample_from_anchor", config.get("sample_from_anchor", default)) else 1
