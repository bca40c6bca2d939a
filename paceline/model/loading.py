"""From a checkpoint to a `Model`: any transformers causal language model, or one without weights."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from paceline.config import EngineConfig
from paceline.core.sampling import CANDIDATE_FINDERS
from paceline.model.attention import ATTENTION, Heads, attention_interface
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.decoder import make_decoder
from paceline.model.mimo import register_mimo
from paceline.model.model import Model, TransformersModel
from paceline.model.native.draw_candidates import draw_candidates
from paceline.model.network_factory import log_once
from paceline.model.numerics import numerics_of
from paceline.model.parallel.rank_errors import RankLostError, RendezvousError
from paceline.model.quantization import dequantized_weights, is_dequantized_at_load
from paceline.model.rope import fix_rope_frequencies
from paceline.model.row_probe import is_row_invariant
from paceline.model_names import fake_model, resolve_model
from paceline.text import vocabulary_fingerprint

if TYPE_CHECKING:  # which a model of one process need not load
    from paceline.model.parallel.sharding import Sharding, TpPlan
    from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHED_ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds of layers whose past is keys and values, by position."""
TEXT_KEY_MAPPING = {
    r"^(model\.)?language_model\.model\.": "model.",
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.": "model.",
}
"""Names of a multimodal checkpoint's tensors, by pattern, and what a text model calls them."""
TEXT_MODEL_TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Text models that differ from these only in that a token has three positions, which are equal where it is text."""
IGNORED_WEIGHTS = re.compile(
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$"  # tables that everybody computes
    r"|attn(ention)?\.(masked_)?bias$|\.attention\.masked_bias$"  # GPT-2's and GPT-NeoX's triangles
    r"|(^|\.)mtp(_layers)?\."  # heads for drafting
    r"|\.[kv]_(proj\.output_)?scale$"  # for a cache of eight bits
)
"""What a checkpoint may hold without its model having a place for it: it takes no part in the model's own forward."""
NON_TEXT_WEIGHTS = re.compile(
    r"(^|\.)(vision|visual|audio|image|multi_modal|embed_vision|embed_audio|mm_|aligner|connector)"
)
"""Likewise, of a multimodal checkpoint whose text model is loaded alone."""

AttentionInterface.register(ATTENTION, attention_interface)
register_mimo()
CANDIDATE_FINDERS.append(draw_candidates)
disable_progress_bar()  # a service says in one line that it has loaded its model


def load(name: str, config: EngineConfig) -> Model:
    """Load the model called `name`, see `paceline.model_names`; with a tensor_parallel_size over 1, as rank 0 of its
    ranks.

    Raises `paceline.model_names.ModelNotFoundError` if there is none, ValueError if it cannot be run here, and what
    is in `paceline.model.parallel.rank_errors` if the ranks do not come together.
    """
    resolve_model(name)
    if (scheme := fake_model(name)) is not None:
        if config.tensor_parallel_size > 1:
            raise ValueError(f"{name} has no weights to share among ranks: set tensor_parallel_size to 1")
        fake: Model = scheme.load(name, config)
        return fake
    model = _load_tensor_parallel(name, config) if config.tensor_parallel_size > 1 else _load(name, config)
    model.rows_invariant = is_row_invariant(model)
    return model


def limit_torch_threads(model: Model) -> None:
    """Leave the cores to a native model's own threads.

    What is left to torch's operators is small, and a barrier between its threads costs more than they do.
    """
    if isinstance(model, TransformersModel) and model.native:
        torch.set_num_threads(1)


def load_shard(name: str, config: EngineConfig, ranks: TensorParallelGroup) -> TransformersModel:
    """The part that one of the ranks has of a model. Raises as `load` does."""
    return _load_shard(name, config, _plan(name, config), ranks)


def _load_tensor_parallel(name: str, config: EngineConfig) -> Model:
    from paceline.model.parallel.rendezvous import RankConfig, create_rank_group
    from paceline.model.tensor_parallel_model import TensorParallelModel

    plan = _plan(name, config)  # what cannot be shared need not be waited for
    replica = create_rank_group(RankConfig(model=name, engine=config))
    try:
        return TensorParallelModel(_load_shard(name, config, plan, replica.ranks), replica)
    except BaseException:
        replica.abort()
        raise


def _plan(name: str, config: EngineConfig) -> TpPlan:
    from paceline.model.parallel.sharding import tp_plan_for

    if _device(config.device).type == "cpu" and torch.accelerator.is_available():
        raise ValueError(
            "transformers shares a model among the accelerators of a machine that has some: name them as devices, or "
            "hide them, as CUDA_VISIBLE_DEVICES= does"
        )
    settings = AutoConfig.from_pretrained(resolve_model(name), local_files_only=True)
    return tp_plan_for(settings, config.tensor_parallel_size)


def _load_shard(name: str, config: EngineConfig, plan: TpPlan, ranks: TensorParallelGroup) -> TransformersModel:
    from paceline.model.parallel.sharding import Sharding

    part = _load(name, config, Sharding(plan, ranks))
    ranks.barrier(part.numerics)
    return part


def _load(name: str, config: EngineConfig, sharding: Sharding | None = None) -> TransformersModel:
    path = Path(resolve_model(name))
    network = _read(path, config, sharding)
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
    longest = _positions(settings, name, config.max_model_len)
    max_model_len = config.max_model_len or longest
    fix_rope_frequencies(network, max_model_len)
    try:
        heads = Heads.of(settings) if sharding is None else sharding.heads(Heads.of(settings))
        decoder = make_decoder(network, heads, config.slots, longest, sharding)
    except (RendezvousError, RankLostError):
        raise
    except Exception as error:
        # Whatever an architecture does that is not foreseen here: its model is refused, and not tried again.
        log.debug("%s is refused", name, exc_info=True)
        kind = type(network).__name__
        foreign = "" if isinstance(error, ValueError) else "its own code fails when it is called as here: "
        raise ValueError(f"{name} is a {kind}, which cannot be run here: {foreign}{_first_line(error)}") from error
    head: nn.Linear = network.get_output_embeddings()  # type: ignore[operator]
    return TransformersModel(
        name,
        decoder,
        vocabulary_size=head.out_features,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        fingerprint=fingerprint,
        numerics=numerics_of(decoder, network.config),
        folder=Path(name if folder is None else folder),
        config=settings,
    )


def _positions(settings: Any, name: str, max_model_len: int | None) -> int:
    """How many positions a model has. Raises ValueError if there are fewer than asked for, or nobody says."""
    said = int(getattr(settings, "max_position_embeddings", None) or 0)
    longest = said if said > 0 else max_model_len
    if longest is None:
        raise ValueError(f"{name} does not say how many positions it has: set max_model_len")
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(f"max_model_len {max_model_len} exceeds the {longest} positions of {name}: lower it")
    return longest


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _read(path: Path, engine: EngineConfig, sharding: Sharding | None = None) -> nn.Module:
    """The network in a folder, or a rank's part of it. Its own code runs only if it is trusted.

    Raises ValueError if it cannot be read, lacks weights, or has weights that it has no place for.
    """
    parts: dict[str, Any] = {} if sharding is None else {"distributed_config": sharding.distributed_config()}
    trusted = engine.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trusted)
        text = config.get_text_config(decoder=True)
        _check_layers(str(path), text)  # before reading what may be many gigabytes
        dtype = _dtype(config, engine)
        tower = text is not config and _text_kind(text) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if tower:
            parts["key_mapping"] = TEXT_KEY_MAPPING
        asked: Any = _tower_config(config, text) if tower else config
        kind: Any = AutoModelForCausalLM
        folder: Path | None = path
        if (weights := _dequantized(path, config, text, dtype)) is not None:
            if sharding is not None:
                raise ValueError("a quantised checkpoint cannot be shared by ranks yet: set tensor_parallel_size to 1")
            parts["state_dict"] = weights
            kind, folder = MODEL_FOR_CAUSAL_LM_MAPPING[type(asked)], None  # to the other transformers gives no weights
        network, report = kind.from_pretrained(
            folder,
            config=asked,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=trusted,
            **parts,
        )
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"the model in {path} brings code of its own, which would have all rights of this service: read it, "
                "and give --trust-remote-code if you trust it"
            ) from error
        raise ValueError(f"the model in {path} cannot be loaded: {_first_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"the model in {path} lacks weights ({', '.join(missing[:3])}, ...): download it again")
    if unknown := sorted(key for key in report["unexpected_keys"] if not _is_harmless(key, text, tower=tower)):
        raise ValueError(
            f"the model in {path} has weights that {type(network).__name__} has no place for "
            f"({', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}), so that it would answer wrongly: "
            "its format is not known here"
        )
    if sharding is not None:
        sharding.unwrap_dtensors(network)
    loaded: nn.Module = network
    return loaded


def _dequantized(path: Path, config: Any, text: Any, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """The weights of a checkpoint that is quantised in a way known here, whose configuration then says so no more."""
    settings = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    aside = path / "hf_quant_config.json"  # where ModelOpt wrote it first
    if settings is None and aside.is_file():
        settings = {"quant_method": "modelopt", **json.loads(aside.read_text()).get("quantization", {})}
    if settings is None or not is_dequantized_at_load(settings):
        return None
    weights = dequantized_weights(Checkpoint(path), settings, dtype)
    for each in (config, text):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    log_once(f"{settings['quant_method']} weights are multiplied out to {str(dtype).removeprefix('torch.')}")
    return weights


def _text_kind(text: Any) -> str:
    """The kind of model that computes what a multimodal checkpoint's text model does where there is only text."""
    return TEXT_MODEL_TYPES.get(text.model_type, str(text.model_type))


def _tower_config(whole: Any, text: Any) -> Any:
    """The configuration of a multimodal checkpoint's text model, alone."""
    said = text.to_dict()
    kind = _text_kind(text)
    if kind != text.model_type:
        rope = {key: value for key, value in (said.get("rope_parameters") or {}).items() if not key.startswith("mrope")}
        said = {**said, "model_type": kind, "rope_parameters": rope, "architectures": None}
    said["tie_word_embeddings"] = whole.tie_word_embeddings
    return AutoConfig.for_model(**said)


def _is_harmless(key: str, settings: Any, *, tower: bool) -> bool:
    """Whether a model computes the same without this tensor. `tower`: it is the text model of a multimodal one."""
    if IGNORED_WEIGHTS.search(key) or (tower and NON_TEXT_WEIGHTS.search(key)):
        return True
    layer = re.search(r"\blayers\.(\d+)\.", key)  # DeepSeek's and GLM's heads for drafting follow the layers
    return layer is not None and int(layer[1]) >= settings.num_hidden_layers and _has_heads(settings)


def _has_heads(settings: Any) -> bool:
    return bool(getattr(settings, "num_nextn_predict_layers", 0) or getattr(settings, "mtp_num_hidden_layers", 0))


def _dtype(config: Any, engine: EngineConfig) -> torch.dtype:
    """Of weights, keys and values. Raises ValueError for float16 on a CPU."""
    on_cpu = _device(engine.device).type == "cpu"
    if engine.dtype != "auto":
        chosen = DTYPES[engine.dtype]
        if chosen == torch.float16 and on_cpu:
            raise ValueError("float16 takes a GPU: set dtype to bfloat16 or float32")
        return chosen
    stored = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype or torch.float32
    if stored == torch.float16 and on_cpu:
        stored = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
        log_once(f"a CPU has no products of float16: {str(stored).removeprefix('torch.')} instead")
    result: torch.dtype = stored
    return result


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
