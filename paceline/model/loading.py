"""From a checkpoint to a `Model`: any transformers causal language model, or one without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from paceline import timed
from paceline.config import EngineConfig
from paceline.model.attention import Heads, KVCache, attention_interface
from paceline.model.decoder import make_decoder
from paceline.model.mimo import register_mimo
from paceline.model.model import Model, TransformersModel
from paceline.model.probe import rows_invariant
from paceline.model.rows import SPARE_SLOT
from paceline.model.table import LONGEST, TableModel
from paceline.model.timed import SimulatedModel
from paceline.models import resolve_model
from paceline.text import vocabulary_fingerprint

ATTENTION = "paceline"
CACHED_ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds of layers whose past is keys and values, by position."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

AttentionInterface.register(ATTENTION, attention_interface)
register_mimo()
disable_progress_bar()  # a service says in one line that it has loaded its model


def load(name: str, config: EngineConfig) -> Model:
    """Load the model called `name`, see `paceline.models`.

    Raises `paceline.models.ModelNotFoundError` if there is none, ValueError if it cannot be run here.
    """
    folder = resolve_model(name)
    if name.startswith(TableModel.SCHEME):
        return TableModel.parse(name, slots=config.slots, max_model_len=config.max_model_len)
    if name.startswith(timed.PREFIX):
        spec = timed.TimedModel.parse(name)
        return SimulatedModel(name, spec, slots=config.slots, max_model_len=config.max_model_len or LONGEST)
    path = Path(folder)
    network = _read(path, DTYPES.get(config.dtype, "auto"))
    model = build(network, name, config, vocabulary_fingerprint(folder), _eos_token_ids(path, network), path)
    model.rows_invariant = rows_invariant(model)
    return model


def build(
    network: nn.Module,
    name: str,
    config: EngineConfig,
    fingerprint: str,
    eos_token_ids: list[int],
    folder: Path | None = None,
) -> TransformersModel:
    """Put a transformers network over a KV cache of its own. Its parameters are frozen and moved to the device.

    Raises ValueError if the configuration asks for more than there is.
    """
    settings: Any = network.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    network = network.to(_device(config.device)).eval().requires_grad_(False)
    network.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    head: nn.Linear = network.get_output_embeddings()  # type: ignore[operator]
    heads = Heads.of(settings)
    longest = int(settings.max_position_embeddings)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ValueError(f"max_model_len {config.max_model_len} exceeds the {longest} positions of {name}: lower it")
    cache = KVCache(
        settings.num_hidden_layers,
        config.slots + 1 + SPARE_SLOT,
        heads,
        head.weight.dtype,
        head.weight.device,
    )
    return TransformersModel(
        name,
        make_decoder(network, heads, longest),
        cache,
        vocabulary_size=head.out_features,
        max_model_len=config.max_model_len or longest,
        eos_token_ids=eos_token_ids,
        fingerprint=fingerprint,
        folder=Path(name if folder is None else folder),
        config=settings,
    )


def _read(path: Path, dtype: Any) -> nn.Module:
    """The network in a folder. Raises ValueError if it cannot be read, or lacks weights."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        _check_layers(str(path), config.get_text_config(decoder=True))  # before reading what may be many gigabytes
        network, report = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"the model in {path} cannot be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"the model in {path} lacks weights ({', '.join(missing[:3])}, ...): download it again")
    loaded: nn.Module = network
    return loaded


def _check_layers(name: str, settings: Any) -> None:
    """Raises ValueError if some layer's past is a state, which could not go back to before a refused guess."""
    if others := sorted(set(getattr(settings, "layer_types", None) or ()) - CACHED_ATTENTION):
        raise ValueError(
            f"{name} has layers of the kind {others[0]}: choose a model with full or sliding attention in every layer, "
            "since others keep a state that cannot go back when a guess is refused"
        )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here, choose another such as 'cpu': {error}") from error
    return device


def _eos_token_ids(path: Path, network: nn.Module) -> list[int]:
    """As generation_config.json says, else as the model's own configuration does."""
    generation = path / "generation_config.json"
    eos: Any = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
    if eos is None:
        eos = getattr(network.config, "eos_token_id", None)
    if eos is None:
        return []
    return [int(e) for e in eos] if isinstance(eos, list) else [int(eos)]
