"""From a checkpoint to a `Model`: any transformers causal language model, or one without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from paceline import timed
from paceline.config import EngineConfig
from paceline.model.attention import ATTENTION, Heads, attention_interface
from paceline.model.decoder import make_decoder
from paceline.model.mimo import register_mimo
from paceline.model.model import Model, TransformersModel
from paceline.model.numerics import numerics_of
from paceline.model.probe import rows_invariant
from paceline.model.table import LONGEST, TableModel
from paceline.model.timed import SimulatedModel
from paceline.models import is_weightless, resolve_model
from paceline.text import vocabulary_fingerprint

if TYPE_CHECKING:  # which a model of one process need not load
    from paceline.model.sharding import Plan, Sharding
    from paceline.tensor_parallel.ranks import Ranks

CACHED_ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds of layers whose past is keys and values, by position."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

AttentionInterface.register(ATTENTION, attention_interface)
register_mimo()
disable_progress_bar()  # a service says in one line that it has loaded its model


def load(name: str, config: EngineConfig) -> Model:
    """Load the model called `name`, see `paceline.models`; with a tensor_parallel_size over 1, as rank 0 of its ranks.

    Raises `paceline.models.ModelNotFoundError` if there is none, ValueError if it cannot be run here, and what is in
    `paceline.tensor_parallel.errors` if the ranks do not come together.
    """
    resolve_model(name)
    if config.tensor_parallel_size > 1 and is_weightless(name):
        raise ValueError(f"{name} has no weights to share among ranks: set tensor_parallel_size to 1")
    if name.startswith(TableModel.SCHEME):
        return TableModel.parse(name, slots=config.slots, max_model_len=config.max_model_len)
    if name.startswith(timed.PREFIX):
        spec = timed.TimedModel.parse(name)
        return SimulatedModel(name, spec, slots=config.slots, max_model_len=config.max_model_len or LONGEST)
    model = _lead(name, config) if config.tensor_parallel_size > 1 else _load(name, config)
    model.rows_invariant = rows_invariant(model)
    return model


def settle_threads(model: Model) -> None:
    """Leave the cores to a native model's own threads.

    What is left to torch's operators is small, and a barrier between its threads costs more than they do.
    """
    if isinstance(model, TransformersModel) and model.native:
        torch.set_num_threads(1)


def load_part(name: str, config: EngineConfig, ranks: Ranks) -> TransformersModel:
    """The part that one of the ranks has of a model. Raises as `load` does."""
    return _load_part(name, config, _plan(name, config), ranks)


def _lead(name: str, config: EngineConfig) -> Model:
    from paceline.model.sharded import LeadingModel
    from paceline.tensor_parallel.meeting import Brief, lead

    plan = _plan(name, config)  # what cannot be shared need not be waited for
    replica = lead(Brief(model=name, engine=config))
    try:
        return LeadingModel(_load_part(name, config, plan, replica.ranks), replica)
    except BaseException:
        replica.abandon()
        raise


def _plan(name: str, config: EngineConfig) -> Plan:
    from paceline.model.sharding import plan_for

    if _device(config.device).type == "cpu" and torch.accelerator.is_available():
        raise ValueError(
            "transformers shares a model among the accelerators of a machine that has some: name them as devices, or "
            "hide them, as CUDA_VISIBLE_DEVICES= does"
        )
    settings = AutoConfig.from_pretrained(resolve_model(name), local_files_only=True)
    return plan_for(settings, config.tensor_parallel_size)


def _load_part(name: str, config: EngineConfig, plan: Plan, ranks: Ranks) -> TransformersModel:
    from paceline.model.sharding import Sharding

    part = _load(name, config, Sharding(plan, ranks))
    ranks.wait(part.numerics)
    return part


def _load(name: str, config: EngineConfig, sharding: Sharding | None = None) -> TransformersModel:
    path = Path(resolve_model(name))
    network = _read(path, DTYPES.get(config.dtype, "auto"), sharding, trusted=config.trust_remote_code)
    eos_token_ids = _eos_token_ids(path, network)
    return build(network, name, config, vocabulary_fingerprint(str(path)), eos_token_ids, path, sharding)


def build(
    network: nn.Module,
    name: str,
    config: EngineConfig,
    fingerprint: str,
    eos_token_ids: list[int],
    folder: Path | None = None,
    sharding: Sharding | None = None,
) -> TransformersModel:
    """Put a transformers network over a KV cache of its own. Its parameters are frozen and moved to the device.

    `sharding`: as the network is shared, if it is one rank's part.

    Raises ValueError if the configuration asks for more than there is.
    """
    settings: Any = network.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    network = network.to(_device(config.device)).eval().requires_grad_(False)
    head: nn.Linear = network.get_output_embeddings()  # type: ignore[operator]
    heads = Heads.of(settings) if sharding is None else sharding.heads(Heads.of(settings))
    longest = int(settings.max_position_embeddings)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ValueError(f"max_model_len {config.max_model_len} exceeds the {longest} positions of {name}: lower it")
    decoder = make_decoder(network, heads, config.slots, longest, sharding)
    return TransformersModel(
        name,
        decoder,
        vocabulary_size=head.out_features,
        max_model_len=config.max_model_len or longest,
        eos_token_ids=eos_token_ids,
        fingerprint=fingerprint,
        numerics=numerics_of(decoder, network.config),
        folder=Path(name if folder is None else folder),
        config=settings,
    )


def _read(path: Path, dtype: Any, sharding: Sharding | None = None, *, trusted: bool) -> nn.Module:
    """The network in a folder, or a rank's part of it. `trusted`: its own code may run; else only what transformers
    brings.

    Raises ValueError if it cannot be read, or lacks weights.
    """
    parts = {} if sharding is None else {"distributed_config": sharding.as_transformers_reads()}
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trusted)
        _check_layers(str(path), config.get_text_config(decoder=True))  # before reading what may be many gigabytes
        network, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=trusted,
            **parts,
        )
    except (OSError, ValueError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"the model in {path} brings code of its own, which would have all rights of this service: read it, "
                "and give --trust-remote-code if you trust it"
            ) from error
        raise ValueError(f"the model in {path} cannot be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"the model in {path} lacks weights ({', '.join(missing[:3])}, ...): download it again")
    if sharding is not None:
        sharding.localise(network)
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
