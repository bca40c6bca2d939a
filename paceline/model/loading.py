"""Load a checkpoint with transformers: any causal language model, or a GGUF file that is dequantised."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.config import EngineConfig
from paceline.gguf.gguf_file import GgufError, GgufFile, is_gguf
from paceline.model.checkpoint import (
    BrokenCheckpointError,
    Checkpoint,
    CheckpointError,
    check_files,
    check_sizes,
    first_sentence,
)
from paceline.model.decoder import make_model
from paceline.model.device_memory import gigabytes, use_device
from paceline.model.layers import use_whole_sums
from paceline.model.model import Model, ModelInfo, TransformersModel
from paceline.model.network_factory import log_once
from paceline.model.numerics import numerics_of, quantization_of
from paceline.model.parallel import RankLostError, RendezvousError
from paceline.model.quantization import dequantized_weights, is_dequantized_at_load
from paceline.model.rope import check_rope, fix_rope_frequencies, positions_in
from paceline.model.transformers_setup import model_config, set_up_transformers
from paceline.model_names import BrokenFileError, ModelNotFoundError, json_object, resolve_model
from paceline.telemetry.logs import load_phase
from paceline.text import gguf_tokenizer, vocabulary_fingerprint
from paceline.text.tokenizer import existing_ends

if TYPE_CHECKING:  # a model of one process does not load them
    from paceline.model.parallel.sharding import Sharding, TpPlan
    from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KNOWN_LAYERS = frozenset(
    ["attention", "conv", "full_attention", "hybrid", "linear_attention", "mamba", "mlp", "moe", "sliding_attention"]
)
"""Kinds of layers that cache keys and values by position, keep a state that is known here, or keep nothing."""
FLOAT32_WEIGHTS = re.compile(r"\.expert_bias$")
"""Weights of a GGUF file that transformers keeps in float32, whatever the model's dtype is."""
TEXT_KEY_MAPPING = {
    r"^(model\.)?language_model\.model\.": "model.",
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.": "model.",
}
"""Patterns of tensor names in a multimodal checkpoint, and the text model's names for them."""
TEXT_MODEL_TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Text models of multimodal checkpoints, and the model that computes the same where all tokens are text: the former
have three positions for each token, which are then equal."""
IGNORED_WEIGHTS = re.compile(
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$"  # tables that the model computes
    r"|attn(ention)?\.(masked_)?bias$|\.attention\.masked_bias$"  # causal masks of GPT-2 and GPT-NeoX
    r"|(^|\.)mtp(_layers)?\."  # heads for drafting
    r"|\.[kv]_(proj\.output_)?scale$"  # for a cache of eight bits
)
"""Tensors that a checkpoint may have although its model does not: the model's forward does not use them."""
NON_TEXT_WEIGHTS = re.compile(
    r"(^|\.)(vision|visual|audio|image|multi_modal|embed_vision|embed_audio|mm_|aligner|connector)"
)
"""The same, for a multimodal checkpoint of which only the text model is loaded."""


def load_checkpoint(name: str, config: EngineConfig) -> Model:
    """Load a transformers model by name; with a tensor_parallel_size over 1, as rank 0. Raises as `load` does."""
    return _load_tensor_parallel(name, config) if config.tensor_parallel_size > 1 else _load(name, config)


def outline(name: str, config: EngineConfig) -> nn.Module:
    """The network that `load` would make, on the device `meta`: shapes and dtypes, and no weights.

    Raises ValueError if there is none.
    """
    from transformers import AutoModelForCausalLM

    trusted = config.trust_remote_code
    path = Path(resolve_model(name))
    with _refusing(path), torch.device("meta"):
        whole = model_config(path, config.device, trust_remote_code=trusted)
        text = whole.get_text_config(decoder=True)
        check_rope(text)
        chosen = _tower_config(whole, text) if _is_tower(whole, text) else whole
        network: nn.Module = AutoModelForCausalLM.from_config(
            chosen, dtype=dtype_of(whole, config), trust_remote_code=trusted
        )
    return network


def load_shard(
    name: str, config: EngineConfig, ranks: TensorParallelGroup, plan: TpPlan | None = None
) -> TransformersModel:
    """Load one rank's part of a model, by its own plan if there is none yet. Raises as `load` does."""
    from paceline.model.parallel.sharding import Sharding

    shard = _load(name, config, Sharding(plan or _plan(name, config), ranks))
    ranks.barrier(shard.numerics)
    return shard


def _load_tensor_parallel(name: str, config: EngineConfig) -> Model:
    from paceline.model.parallel.rendezvous import RankConfig, create_rank_group
    from paceline.model.tensor_parallel_model import TensorParallelModel

    plan = _plan(name, config)  # a model that cannot be shared fails before rank 0 waits for the others
    group = create_rank_group(RankConfig(model=name, engine=config))
    try:
        return TensorParallelModel(load_shard(name, config, group.ranks, plan), group)
    except BaseException:
        group.abort()
        raise


def _plan(name: str, config: EngineConfig) -> TpPlan:
    from paceline.model.parallel.sharding import tp_plan_for

    if use_device(config.device).type == "cpu" and torch.accelerator.is_available():
        raise ValueError(
            "transformers shares a model among a machine's accelerators if it has any: name them as devices, or hide "
            "them, for example with CUDA_VISIBLE_DEVICES="
        )
    path = Path(resolve_model(name))
    if is_gguf(path):
        raise ValueError("a GGUF file cannot be shared by ranks yet: set tensor_parallel_size to 1")
    with _refusing(path):
        settings = model_config(path)
    return tp_plan_for(settings, config.tensor_parallel_size)


def _load(name: str, config: EngineConfig, sharding: Sharding | None = None) -> TransformersModel:
    path = Path(resolve_model(name))
    with load_phase("weights read"):
        network = _read(path, config, sharding)
    eos_token_ids = end_tokens(path, network.config)
    with load_phase("network built"):
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
    """Make a model of a transformers network and a new KV cache. Freezes the parameters and moves them to the device.

    `sharding`: how ranks share the network, if they do.

    Raises ValueError if the network cannot be run over rows, or has fewer positions than `config.max_model_len`.
    """
    set_up_transformers()
    settings: Any = network.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    device = use_device(config.device)
    use_whole_sums(device)
    network = network.to(device).eval().requires_grad_(False)
    positions = positions_of(settings, name, config.max_model_len)
    max_model_len = config.max_model_len or positions
    fix_rope_frequencies(network, max_model_len)
    with _refusing_kind(name, type(network).__name__):
        head: Any = network.get_output_embeddings()  # type: ignore[operator]
        info = ModelInfo(
            name=name,
            vocabulary_size=head.out_features,
            max_model_len=max_model_len,
            layers=int(settings.num_hidden_layers),
            slots=config.slot_count,
            eos_token_ids=tuple(eos_token_ids),
            fingerprint=fingerprint,
            folder=Path(name if folder is None else folder),
            **settings_of(config),
        )
        model = make_model(network, info, positions, sharding, verify=config.verify)
    model.numerics = numerics_of(model, quantization_of(network.config))
    return model


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """What a `ModelInfo` has of the engine's settings."""
    return {
        "kv_cache_dtype": config.kv_cache_dtype,
        "requests": config.max_num_seqs,
        "rows": config.max_num_batched_rows,
        "snapshots": config.state_snapshots if config.enable_prefix_caching else 0,
        "snapshot_interval": config.state_snapshot_interval,
    }


@contextmanager
def _refusing_kind(name: str, kind: str) -> Iterator[None]:
    """Refuse an unforeseen architecture, which may fail in any way: the exit code then prevents restarts."""
    try:
        yield
    except (RendezvousError, RankLostError):
        raise
    except Exception as error:
        log.debug("%s is refused", name, exc_info=True)
        cause = "" if isinstance(error, ValueError) else "its own code fails when it is called as here: "
        raise ValueError(f"{name} is a {kind}, which cannot be run here: {cause}{first_sentence(error)}") from error


def positions_of(settings: Any, name: str, max_model_len: int | None) -> int:
    """A model's positions; `max_model_len` if its configuration does not say. Raises ValueError if neither says, or if
    there are fewer than `max_model_len`."""
    positions = positions_in(settings) or max_model_len
    if positions is None:
        raise ValueError(f"{name} does not say how many positions it has: set max_model_len")
    if max_model_len is not None and max_model_len > positions:
        raise ValueError(f"max_model_len {max_model_len} exceeds the {positions} positions of {name}: lower it")
    return positions


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Raise what transformers raises about a folder as an error of one sentence: it may fail in any way.

    The exit code of such an error prevents restarts.
    """
    try:
        yield
    except (CheckpointError, GgufError, ModelNotFoundError, RendezvousError, RankLostError):
        raise
    except (MemoryError, torch.OutOfMemoryError):  # another try may find more
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"the model in {path} needs code from its folder, which would have all rights of this service: read it "
                "and give --trust-remote-code if you trust it"
            ) from error
        log.debug("%s is refused", path, exc_info=True)
        if path.is_dir():
            try:
                check_files(path)
            except BrokenFileError as fault:
                raise BrokenCheckpointError(str(fault)) from error
        key = isinstance(error, KeyError) and " " not in str(error)
        cause = f"{error} is not known here" if key else first_sentence(error)
        kind = ValueError if isinstance(error, (ImportError, RuntimeError)) else BrokenCheckpointError
        raise kind(f"the model in {path} cannot be loaded: {cause}") from error


def _read(path: Path, engine: EngineConfig, sharding: Sharding | None = None) -> nn.Module:
    """Read the network in a folder, or a rank's part of it. Code from the folder runs only with trust_remote_code.

    Raises ValueError if it cannot be read, lacks weights, or has weights that the network does not.
    """
    options: dict[str, Any] = {} if sharding is None else {"distributed_config": sharding.distributed_config()}
    trusted = engine.trust_remote_code
    with _refusing(path):
        config = model_config(path, engine.device, trust_remote_code=trusted)
        text = config.get_text_config(decoder=True)
        check_rope(text)
        if is_gguf(path):
            return read_gguf(path, config, dtype_of(config, engine))
        _check_layers(str(path), text)  # before many gigabytes are read
        dtype = dtype_of(config, engine)
        tower = _is_tower(config, text)
        if tower:
            options["key_mapping"] = TEXT_KEY_MAPPING
        loaded_config: Any = _tower_config(config, text) if tower else config
        weights = _dequantized(path, config, text, dtype)
        if weights is not None and sharding is not None:
            raise ValueError("a quantised checkpoint cannot be shared by ranks yet: set tensor_parallel_size to 1")
        options |= {"ignore_mismatched_sizes": True, "trust_remote_code": trusted}
        network, report = _from_pretrained(path, loaded_config, dtype, weights, **options)
    _check_weights(path, type(network).__name__, report, lambda key: is_harmless(key, text, tower=tower))
    if sharding is not None:
        sharding.unwrap_dtensors(network)
    return network


def _from_pretrained(
    folder: Path, config: Any, dtype: torch.dtype, weights: Mapping[str, Tensor] | None, **options: Any
) -> tuple[nn.Module, Mapping[str, Any]]:
    """transformers' network of a folder, or of these weights, and its report of loading."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    options |= {"config": config, "dtype": dtype, "local_files_only": True, "output_loading_info": True}
    if weights is None:
        network, report = AutoModelForCausalLM.from_pretrained(folder, **options)
    else:  # AutoModelForCausalLM does not take them
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        network, report = kind.from_pretrained(None, state_dict=weights, **options)
    return network, report


def _check_weights(path: Path, network: str, report: Mapping[str, Any], harmless: Callable[[str], bool]) -> None:
    """`report`: transformers', of loading. Raises ValueError if weights are missing, of other sizes, or unknown."""
    check_sizes(path, report["mismatched_keys"])
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"the model in {path} lacks weights ({', '.join(missing[:3])}, ...): download it again")
    if unknown := sorted(key for key in report["unexpected_keys"] if not harmless(key)):
        raise ValueError(
            f"the model in {path} has weights that {network} does not have "
            f"({', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}); without them its output would be wrong: "
            "its format is not supported"
        )


def read_gguf(path: Path, config: Any, dtype: torch.dtype) -> nn.Module:
    """The network of a GGUF file, dequantised. Raises `CheckpointError`, or ValueError."""
    checkpoint = Checkpoint(path)
    weights = {
        name: checkpoint.tensor(name, torch.float32 if FLOAT32_WEIGHTS.search(name) else dtype)
        for name in checkpoint.names
    }
    size = sum(each.nbytes for each in weights.values())
    network, report = _from_pretrained(path, config, dtype, weights)
    if faults := sorted([*report["missing_keys"], *report["unexpected_keys"]]):
        raise GgufError(
            f"{path} and {type(network).__name__} differ in {', '.join(faults[:3])}: its format is not supported"
        )
    log_once(f"{path.name}: dequantised to {str(dtype).removeprefix('torch.')}: {gigabytes(size)}")
    return network


def _dequantized(path: Path, config: Any, text: Any, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """The weights of a checkpoint with a quantisation that this code reads, and remove it from the configuration; None
    for any other checkpoint."""
    settings = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    modelopt = path / "hf_quant_config.json"  # of older ModelOpt checkpoints
    if settings is None and modelopt.is_file():
        settings = {"quant_method": "modelopt", **json_object(modelopt).get("quantization", {})}
    if settings is None or not is_dequantized_at_load(settings):
        return None
    weights = dequantized_weights(Checkpoint(path), settings, dtype)
    for each in (config, text):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    log_once(f"{settings['quant_method']} weights are dequantised to {str(dtype).removeprefix('torch.')}")
    return weights


def _is_tower(whole: Any, text: Any) -> bool:
    """Whether only the text model of a multimodal checkpoint is loaded."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return (
        text is not whole
        and TEXT_MODEL_TYPES.get(text.model_type, text.model_type) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )


def _tower_config(whole: Any, text: Any) -> Any:
    """The configuration of a multimodal checkpoint's text model."""
    from transformers import AutoConfig

    settings = text.to_dict()
    kind = TEXT_MODEL_TYPES.get(text.model_type, text.model_type)
    if kind != text.model_type:
        rope = {
            key: value for key, value in (settings.get("rope_parameters") or {}).items() if not key.startswith("mrope")
        }
        settings = {**settings, "model_type": kind, "rope_parameters": rope, "architectures": None}
    settings["tie_word_embeddings"] = whole.tie_word_embeddings
    return AutoConfig.for_model(**settings)


def is_harmless(key: str, settings: Any, *, tower: bool) -> bool:
    """Whether the model computes the same without this tensor. `tower`: it is the text model of a multimodal one."""
    if IGNORED_WEIGHTS.search(key) or (tower and NON_TEXT_WEIGHTS.search(key)):
        return True
    layer = re.search(r"\blayers\.(\d+)\.", key)  # DeepSeek's and GLM's MTP layers follow the others
    mtp = getattr(settings, "num_nextn_predict_layers", 0) or getattr(settings, "mtp_num_hidden_layers", 0)
    return layer is not None and int(layer[1]) >= settings.num_hidden_layers and bool(mtp)


def dtype_of(config: Any, engine: EngineConfig) -> torch.dtype:
    """The dtype of weights, keys and values. Raises ValueError for float16 on a CPU."""
    on_cpu = use_device(engine.device).type == "cpu"
    if engine.dtype == "float16" and on_cpu:
        raise ValueError("float16 takes a GPU: set dtype to bfloat16 or float32")
    if engine.dtype != "auto":
        return DTYPES[engine.dtype]
    stored = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype or torch.float32
    if isinstance(stored, str):  # of a GGUF file
        return DTYPES[stored]
    if stored == torch.float16 and on_cpu:
        stored = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
        log_once(f"a CPU cannot compute in float16: {str(stored).removeprefix('torch.')} instead")
    result: torch.dtype = stored
    return result


def _check_layers(name: str, settings: Any) -> None:
    """Raises ValueError if a layer is of a kind that is not known here."""
    if others := sorted(set(getattr(settings, "layer_types", None) or ()) - KNOWN_LAYERS):
        raise ValueError(f"{name} has layers of the kind {others[0]}, and known are {', '.join(sorted(KNOWN_LAYERS))}")


def end_tokens(path: Path, config: Any) -> list[int]:
    """From generation_config.json, else from the model's configuration; of a GGUF file, all that end an answer.

    Those that the vocabulary does not have are left out. Raises `ModelNotFoundError` or ValueError.
    """
    if is_gguf(path):
        return gguf_tokenizer.eos_token_ids(GgufFile.open(path))
    generation = path / "generation_config.json"
    eos: Any = json_object(generation).get("eos_token_id") if generation.is_file() else None
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    named = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(each) is int for each in named):
        source = generation if generation.is_file() else path / "config.json"
        raise ValueError(f"eos_token_id in {source} is {eos!r}: it has to be a token id, or a list of them")
    return existing_ends(named, int(config.get_text_config(decoder=True).vocab_size))
