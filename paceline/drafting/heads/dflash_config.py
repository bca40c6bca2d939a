"""Which DFlash a checkpoint is, by its config.json: z-lab's own format, or that of the speculators library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.drafting.heads.head_config import is_speculators_format
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.target_weights import TargetWeights

MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""In the order in which vLLM looks, after `dflash_config.mask_token_id`."""
UNSUPPORTED_RELATIVES = {
    "dspark": ("markov_rank", "markov_head_type"),
    "dflash2": ("conv_kernel_size", "selector_rank"),
}
"""Keys of relatives, which need more than one pass of a DFlash."""
UNSUPPORTED_KEYS = ("use_swa", "attention_sink_bias", "attention_value_scale")
"""Keys of `dflash_config` for other kinds of attention."""


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """`layers`: of the target, as `hidden_state_layers`. `windows` and `causal`: of each layer of the draft."""

    layers: Sequence[int]
    block: int
    """Places of one pass, the root's among them."""
    mask_token: int
    first_offset: int
    """The first place that guesses: 1 gives the token at its own position, 0 the one after it."""
    windows: Sequence[int]
    """How many positions before the root are seen; 0: all."""
    causal: Sequence[bool]
    """Whether a place of the block sees only those before it."""

    @property
    def ahead(self) -> int:
        """Laws of one pass."""
        return self.block - self.first_offset

    @classmethod
    def of(cls, checkpoint: Checkpoint, lent: TargetWeights, config: Any) -> DFlashConfig:
        """`config`: of the draft's layers. Raises `CheckpointError` if it is another kind, or not for this target."""
        return cls(
            target_layers(checkpoint, lent),
            _block(checkpoint),
            _mask_token(checkpoint),
            _first_predicted_offset(checkpoint),
            [int(config.sliding_window) if sliding else 0 for sliding in _sliding(config)],
            _causal(checkpoint, config),
        )


def is_dflash(checkpoint: Checkpoint) -> bool:
    """It, or a relative that is refused by name."""
    said = checkpoint.config
    kind = str(said.get("speculators_model_type", ""))
    named = any(str(name).startswith(("DFlash", "DSpark")) for name in said.get("architectures") or ())
    return "dflash_config" in said or named or kind in ("dflash", *UNSUPPORTED_RELATIVES)


def tokens_per_pass(checkpoint: Checkpoint) -> int:
    """Tokens that it guesses in one pass. Raises `CheckpointError` if it does not say."""
    return _block(checkpoint) - _first_predicted_offset(checkpoint)


def target_layers(checkpoint: Checkpoint, lent: TargetWeights) -> Sequence[int]:
    """Which states of the target it is fed with. Raises `CheckpointError`."""
    _refuse_unsupported(checkpoint)
    said = checkpoint.config
    if is_speculators_format(checkpoint):
        layers = [int(n) for n in said.get("aux_hidden_state_layer_ids") or ()]
        if not layers:
            raise CheckpointError(f"config.json in {checkpoint} lacks aux_hidden_state_layer_ids: it is incomplete")
    else:
        layers = [n + 1 for n in _zlab_target_layers(checkpoint, lent)]
    if any(not 0 <= layer <= lent.layers for layer in layers):
        raise CheckpointError(
            f"{checkpoint} wants the states of layers {layers}, {lent.name} has {lent.layers}: "
            "choose a draft for this model"
        )
    if is_speculators_format(checkpoint):
        return tuple(layers)
    # The reference takes transformers' last hidden state for the last layer's, which is after the norm.
    return tuple(lent.final_layer if layer == lent.layers else layer for layer in layers)


def _refuse_unsupported(checkpoint: Checkpoint) -> None:
    """Raises `CheckpointError` for a checkpoint that is no plain DFlash."""
    said = checkpoint.config
    for name, keys in UNSUPPORTED_RELATIVES.items():
        tensor = checkpoint.find("markov_head.markov_w1.weight") if name == "dspark" else None
        if said.get("speculators_model_type") == name or any(key in said for key in keys) or tensor:
            raise CheckpointError(f"{checkpoint} is a {name} draft, which is not served yet: take a dflash one")
    other = next((key for key in UNSUPPORTED_KEYS if _dflash_section(said).get(key)), None)
    if other is None and said.get("is_neox_style") is False:
        other = "is_neox_style"
    if other is None and (checkpoint.find("g_proj.weight") or checkpoint.find("aux_hidden_norms.0.weight")):
        other = "g_proj"
    if other is not None:
        raise CheckpointError(f"{checkpoint} is a variant of dflash with {other}, which is not served yet")


def _zlab_target_layers(checkpoint: Checkpoint, lent: TargetWeights) -> Sequence[int]:
    """In z-lab's format: layers whose outputs it wants, counted from 0."""
    said = checkpoint.config
    layers = int(said.get("num_target_layers") or lent.layers)
    if layers != lent.layers:
        raise CheckpointError(
            f"{checkpoint} is a draft for a model of {layers} layers, {lent.name} has {lent.layers}: choose one for it"
        )
    named = _dflash_section(said).get("target_layer_ids") or said.get("target_layer_ids")
    if named:
        return [int(n) for n in named]
    count = int(said.get("num_hidden_layers", 1))
    if count == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]


def _dflash_section(said: Mapping[str, Any]) -> Mapping[str, Any]:
    own: Mapping[str, Any] = said.get("dflash_config") or {}
    return own


def _first_predicted_offset(checkpoint: Checkpoint) -> int:
    said = checkpoint.config
    return 0 if _dflash_section(said).get("sample_from_anchor") or said.get("sample_from_anchor") else 1


def _block(checkpoint: Checkpoint) -> int:
    said = checkpoint.config
    block = said.get("block_size") or _dflash_section(said).get("block_size")
    if not isinstance(block, int) or block < 2:
        raise CheckpointError(f"config.json in {checkpoint} names no block_size of 2 or more: it is incomplete")
    return block


def _mask_token(checkpoint: Checkpoint) -> int:
    said = checkpoint.config
    named = [_dflash_section(said).get("mask_token_id"), *(said.get(key) for key in MASK_KEYS)]
    token = next((each for each in named if each is not None), None)
    if not isinstance(token, int) or token < 0:
        raise CheckpointError(f"config.json in {checkpoint} names no mask_token_id: it is incomplete")
    return token


def _sliding(config: Any) -> list[bool]:
    types = getattr(config, "layer_types", None) or ["full_attention"] * int(config.num_hidden_layers)
    return [kind == "sliding_attention" and bool(config.sliding_window) for kind in types]


def _causal(checkpoint: Checkpoint, config: Any) -> list[bool]:
    """As vLLM reads the original format, and as the speculators library trains."""
    said, sliding = checkpoint.config, _sliding(config)
    whole = said.get("is_causal", _dflash_section(said).get("causal"))
    if whole is not None:
        return [bool(whole)] * len(sliding)
    return [each and not said.get("sliding_window_non_causal", False) for each in sliding]
