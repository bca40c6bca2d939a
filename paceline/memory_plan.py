"""Plans memory before a model is loaded, and estimates whether a draft fits beside a loaded target.

A plan divides what weights and activations leave of a device by the bytes of a slot: keys and values of target and
draft, and hidden states for drafts. All workers that share a device solve the same equation. Weights are counted from
shapes, activations by a formula; nothing is run.

A head's weights are counted as stored, in the target's dtype or packed, with copies of the target's matrices, which
loading drops. So its estimate is an upper bound.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from paceline.config import METHODS, UNPLANNED_SLOTS, EngineConfig, SpeculativeConfig
from paceline.config.engine_config import Quantization
from paceline.drafting.auto_method import mtp_layer_names
from paceline.drafting.draw_prediction import MAX_ROWS
from paceline.drafting.method_registry import UNPACKED, hidden_state_layers
from paceline.drafting.network_speculator import PREFILL_ROWS
from paceline.gguf.gguf_config import GgufSettings
from paceline.gguf.gguf_file import GgufFile, GgufTensor
from paceline.model import qwen35
from paceline.model.attention import ATTENTION, NO_HEADS, SPARE_SLOTS, Heads, KVCache
from paceline.model.checkpoint import Checkpoint
from paceline.model.decoder import discover_layers, is_llama_kind, kept_states
from paceline.model.device_memory import device_memory, gigabytes
from paceline.model.gguf_model import packed_config
from paceline.model.gpu import memory as gpu_memory
from paceline.model.gpu.memory import PassMemory
from paceline.model.gpu.packed_matrix import packed_row_bytes
from paceline.model.loading import dtype_of, outline
from paceline.model.native.native_network import head_width
from paceline.model.packed_checkpoint import packed_weight_bytes, packing_of
from paceline.model.rope import positions_in
from paceline.model.states.stored_states import intercept_states
from paceline.model.target_weights import TargetWeights
from paceline.model.transformers_setup import set_up_transformers
from paceline.model_names import ModelNotFoundError, is_fake_model, resolve_model

log = logging.getLogger(__name__)

FEWEST_SLOTS = 256
LOGIT_COPIES = 4
"""Float32 copies of a pass's logits that a draw may hold on a CPU: scaled, filtered and with noise."""
HEAD_LOGIT_COPIES = 2
"""Float32 copies of logits that a head's drafts hold on a GPU. Noise is added to a shortlist alone."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """What a process needs, in bytes."""

    weights: int = 0
    activations: int = 0
    bytes_per_slot: int = 0
    states: int = 0
    """Of layers that keep states by request: these, snapshots of them, and what is kept of guesses."""

    def __add__(self, other: WorkerMemory) -> WorkerMemory:
        """Of both together."""
        return WorkerMemory(
            self.weights + other.weights,
            self.activations + other.activations,
            self.bytes_per_slot + other.bytes_per_slot,
            self.states + other.states,
        )

    def __mul__(self, workers: int) -> WorkerMemory:
        parts = self.weights, self.activations, self.bytes_per_slot, self.states
        return WorkerMemory(*(each * workers for each in parts))

    def slots_in(self, memory: int) -> int:
        """How many slots fit into this many bytes; below 0 if not even the weights do."""
        return (memory - self.weights - self.activations - self.states) // self.bytes_per_slot - SPARE_SLOTS

    def __str__(self) -> str:
        states = f"{gigabytes(self.states)} of states, " if self.states else ""
        return (
            f"{gigabytes(self.weights)} of weights, {states}{gigabytes(self.activations)} of activations and "
            f"{self.bytes_per_slot / 1024:.1f} KiB for each position"
        )


def plan_memory(
    engine: EngineConfig, speculation: SpeculativeConfig, target_model: str | None, *, target: bool, draft: bool
) -> EngineConfig:
    """The configuration with `slots`. `target`, `draft`: which of both models this process computes.

    `slots` that are given stay. A fake model has no plan, nor has one without an outline: loading it says why. Raises
    ValueError if a target has no room for one request of `max_model_len`. Without one, the model's own length counts,
    on a CPU UNPLANNED_SLOTS of it at most. A draft starts with FEWEST_SLOTS: what has no room there is decoded plainly.
    """
    models = [name for name in (target_model, speculation.model) if name is not None]
    if engine.slots is not None or any(map(is_fake_model, models)):
        return engine
    lender, target_need = None, WorkerMemory()
    if target_model is not None:
        size = engine.tensor_parallel_size if target else 1  # in a draft worker it is the draft's
        if (found := _outlined(target_model, engine.model_copy(update={"tensor_parallel_size": size}))) is None:
            return engine
        lender, target_need = found
    draft_need, states = _planned_draft(speculation, engine, lender, worker=not target)
    target_need += states
    own = target_need * target + draft_need * draft
    if not own.bytes_per_slot:
        return engine
    targets, drafts = engine.device_workers or (int(target), int(not target))
    everyone = own * targets if target and draft else target_need * targets + draft_need * drafts
    longest = UNPLANNED_SLOTS if lender is None else lender.max_model_len
    return _with_slots(engine, own, everyone, max(longest, FEWEST_SLOTS) if target else FEWEST_SLOTS, longest)


def _with_slots(
    engine: EngineConfig, own: WorkerMemory, everyone: WorkerMemory, least: int, longest: int
) -> EngineConfig:
    """`own` must fit into what is free, `everyone` on the device into all of it, free or not: so a worker that starts
    again beside the others plans as it did at first. `longest`: positions of the longest request."""
    device, share = torch.device(engine.device), engine.device_memory_utilization
    slots = max(UNPLANNED_SLOTS, longest * (1 if device.type == "cpu" else engine.max_num_seqs))
    if (memory := device_memory(device)) is not None:
        limits = [(need, int(count * share)) for need, count in zip((own, everyone), memory, strict=True)]
        need, limit = min(limits, key=lambda each: each[0].slots_in(each[1]))
        slots = min(slots, need.slots_in(limit))
        if slots < least:
            workers = sum(engine.device_workers or (1,)) if need is everyone else 1
            raise ValueError(
                f"{least} positions do not fit into the memory of {engine.device}, which has {gigabytes(limit)} for "
                f"{workers} worker{'s' * (workers > 1)} with {need}: lower max_model_len, raise "
                f"device_memory_utilization ({share:g}), or set slots"
            )
    parts = {
        "weights": own.weights,
        "activations": own.activations,
        "states": own.states,
        "slots": own.bytes_per_slot * (slots + SPARE_SLOTS),
    }
    sizes = {f"{name}_gib": round(count / 2**30, 3) for name, count in parts.items()}
    log.info("memory planned", extra={"slots": slots, **sizes})
    return engine.model_copy(update={"slots": slots})


def _outlined(model: str, engine: EngineConfig) -> tuple[TargetWeights, WorkerMemory] | None:
    """A model as drafts see their target, without matrices, and its need; None if its code fails here."""
    try:
        if (packed := packed_config(resolve_model(model), engine)) is not None:
            dtype = dtype_of(packed, engine)
            return _as_target(packed, dtype, model, engine), packed_memory(resolve_model(model), packed, engine)
        network: Any = outline(model, engine)
        config, dtype = network.config.get_text_config(decoder=True), next(network.parameters()).dtype
        weights = packed_weight_bytes(Path(resolve_model(model)), network, engine)
        return _as_target(config, dtype, model, engine), model_memory(network, engine, weights)
    except Exception:  # code of any architecture may fail in any way; loading it says what is wrong
        log.debug("%s has no outline", model, exc_info=True)
        return None


def _unread(*_: Any) -> Any:
    raise ValueError("the target's weights are not read yet")


def _as_target(config: Any, dtype: torch.dtype, model: str, engine: EngineConfig) -> TargetWeights:
    """A CPU's memory is other programs', too: requests are longer than UNPLANNED_SLOTS only if the user says so."""
    folder, device = Path(resolve_model(model)), torch.device(engine.device)
    own = positions_in(config) or UNPLANNED_SLOTS
    length = engine.max_model_len or (own if device.type != "cpu" else min(own, UNPLANNED_SLOTS))
    return TargetWeights(_unread, _unread, folder, config, dtype, device, int(config.vocab_size), length, "")


def model_memory(network: Any, engine: EngineConfig, packed: int | None = None) -> WorkerMemory:
    """Of an outlined model's process, or of each rank. `packed`: bytes of its weights if they stay packed."""
    config = network.config.get_text_config(decoder=True)
    size, dtype = engine.tensor_parallel_size, next(network.parameters()).dtype
    weights = sum(each.nbytes // (size if "layers." in name else 1) for name, each in network.named_parameters())
    if packed is None and size == 1 and not is_llama_kind(network.config):
        return _layered_memory(network, weights, engine)
    heads = Heads.of(config)
    if size > 1:
        from paceline.model.parallel.sharding import heads_per_rank  # a model of one process does not load it

        heads = heads_per_rank(heads, network.tp_plan or {}, size)
    return _with_cache(weights if packed is None else packed, config, heads, dtype, engine)


def _layered_memory(network: Any, weights: int, engine: EngineConfig) -> WorkerMemory:
    """Of a `LayeredModel`, whose layers may differ in their heads, or keep states in place of keys and values."""
    config, dtype = network.config.get_text_config(decoder=True), next(network.parameters()).dtype
    set_up_transformers()
    if network._can_set_experts_implementation():
        network.set_experts_implementation("batched_mm")  # the shapes of transformers' default follow from numbers
    network.config.pad_token_id = None  # forwards look for it among the tokens
    intercept_states(network)
    network.set_attn_implementation(ATTENTION)
    heads, shapes = discover_layers(network, int(config.num_hidden_layers), next(network.parameters()).device)
    slots = (KVCache.bytes_per_slot(1, own, dtype, head_width(own), engine.kv_cache_dtype) for own in heads.values())
    largest = max(heads.values(), key=math.prod, default=NO_HEADS)
    return WorkerMemory(
        weights,
        _activations(config, largest, dtype, engine, graphs_have_logits=True),
        sum(slots),
        shapes.nbytes(*_kept_states(engine)),
    )


def _kept_states(engine: EngineConfig) -> tuple[int, int]:
    """States of requests and snapshots, and guesses whose inputs are kept."""
    requests, guesses = kept_states(engine.max_num_seqs, engine.max_num_batched_rows)
    return requests + (engine.state_snapshots if engine.enable_prefix_caching else 0), guesses


def packed_memory(path: str, config: GgufSettings, engine: EngineConfig) -> WorkerMemory:
    """Of a process whose model stays packed as in its file, except matrices of floats, which take the dtype."""
    heads, dtype = Heads.of(config), dtype_of(config, engine)
    device = torch.device(engine.device)
    weights = sum(_packed_bytes(each, dtype, device) for each in GgufFile.open(path).tensors.values())
    attending = qwen35.attending_layers(config)
    need = _with_cache(weights, config, heads, dtype, engine, attending)
    if attending is None:
        return need
    states = qwen35.delta_shape(config).nbytes(*_kept_states(engine), dtype)
    return need + WorkerMemory(states=(config.num_hidden_layers - attending) * states)


def _with_cache(
    weights: int,
    config: Any,
    heads: Heads,
    dtype: torch.dtype,
    engine: EngineConfig,
    attending: int | None = None,
) -> WorkerMemory:
    """`attending`: layers with keys; None: all."""
    layers = int(config.num_hidden_layers) if attending is None else attending
    slot = KVCache.bytes_per_slot(layers, heads, dtype, head_width(heads), engine.kv_cache_dtype)
    return WorkerMemory(weights, _activations(config, heads, dtype, engine), slot)


def _packed_bytes(tensor: GgufTensor, dtype: torch.dtype, device: torch.device) -> int:
    if tensor.type.is_packed and device.type != "cpu":
        return tensor.rows * packed_row_bytes(tensor.type.number, tensor.shape[-1])
    if tensor.type.is_packed or len(tensor.shape) == 1:
        return tensor.size
    return math.prod(tensor.shape) * dtype.itemsize


def _activations(
    config: Any, heads: Heads, dtype: torch.dtype, engine: EngineConfig, *, graphs_have_logits: bool = False
) -> int:
    """Of the largest pass: logits, and a layer's products; on a GPU all that `PassMemory` counts."""
    rows, vocabulary, hidden = engine.max_num_batched_rows, int(config.vocab_size), int(config.hidden_size)
    inner, device = _inner_size(config), torch.device(engine.device)
    if device.type == "cpu":
        return rows * (vocabulary * LOGIT_COPIES * 4 + (4 * hidden + 3 * inner) * dtype.itemsize)
    own = positions_in(config) or UNPLANNED_SLOTS
    largest = PassMemory(
        rows=rows,
        positions=engine.max_model_len or own,
        rotary_positions=own,
        layers=int(config.num_hidden_layers),
        hidden=hidden,
        inner=inner,
        heads=heads,
        dtype=dtype,
        vocabulary=vocabulary if graphs_have_logits else 0,
    )
    logits = rows * vocabulary * gpu_memory.LOGIT_COPIES * 4
    return logits + largest.total(by_kernel=gpu_memory.kernel_attends(heads, device))


def _inner_size(config: Any) -> int:
    """Of an MLP; four times the hidden size if the configuration names none."""
    inner = getattr(config, "intermediate_size", None)
    return inner if isinstance(inner, int) else 4 * int(config.hidden_size)


def _planned_draft(
    speculation: SpeculativeConfig, engine: EngineConfig, target: TargetWeights | None, *, worker: bool
) -> tuple[WorkerMemory, WorkerMemory]:
    """`draft_memory`, but nothing for a class of the user's own, which says only later what it reads, nor for an
    unsuitable checkpoint: building its speculator says why."""
    if speculation.method != "custom_class":
        with suppress(ValueError, OSError, ModelNotFoundError):
            return draft_memory(speculation, engine, target, worker=worker)
    return WorkerMemory(), WorkerMemory()


def draft_memory(
    speculation: SpeculativeConfig, engine: EngineConfig, target: TargetWeights | None, *, worker: bool = False
) -> tuple[WorkerMemory, WorkerMemory]:
    """Of a speculator, and of the hidden states that its target keeps by slot.

    A head reads two matrices of its target if it is in a draft worker, or if ranks share the target, each of which has
    only a part; on a GPU it has an embedding of its own beside a packed one. `worker`: in a draft worker it also counts
    a pass of the target's. Raises `CheckpointError` or `ModelNotFoundError`, for a class of the user's own as building
    it does.
    """
    none, row = WorkerMemory(), METHODS.get(speculation.method)
    if not speculation.enabled or row is None:
        return none, none
    if row.kind == "model" and speculation.model is not None:
        size = speculation.draft_tensor_parallel_size
        settings = engine.model_copy(update={"max_model_len": None, "tensor_parallel_size": size})
        found = _outlined(speculation.model, settings)
        return none if found is None else found[1], none
    if target is None:
        return none, none
    number = target.hidden_size * target.dtype.itemsize
    states = WorkerMemory(bytes_per_slot=len(hidden_state_layers(speculation, engine, lambda: target)) * number)
    head = _head_memory(speculation, target, engine) if row.kind == "head" else none
    if head.weights and (worker or engine.tensor_parallel_size > 1):
        head += WorkerMemory(2 * target.vocabulary_size * number)
    elif head.bytes_per_slot and _is_packed_on_gpu(target, engine):  # heads without a cache read no embedding
        head += WorkerMemory(target.vocabulary_size * number)
    if head.weights and worker:
        head += WorkerMemory(0, _activations(target.config, Heads.of(target.config), target.dtype, engine))
    return head, states


def _head_memory(config: SpeculativeConfig, target: TargetWeights, engine: EngineConfig) -> WorkerMemory:
    """The weights, packed if `engine` says so, the cache, and on a GPU what drafts take there. Raises `CheckpointError`
    or `ModelNotFoundError`."""
    checkpoint = Checkpoint(target.folder if config.model is None else resolve_model(config.model))
    names = mtp_layer_names(checkpoint) if config.model is None else checkpoint.names
    size = target.dtype.itemsize
    is_packed = config.method not in UNPACKED and torch.device(engine.device).type == "cpu"
    packing = engine.quantization if is_packed else None
    weights = sum(_matrix_bytes(name, checkpoint.shape(name), packing, size) for name in names)
    activations = _head_activations(config.method, checkpoint.config, target, torch.device(engine.device))
    numbers = cached_numbers(config.method, checkpoint.config, target.config.to_dict())
    return WorkerMemory(weights, activations, numbers * size)


def _head_activations(method: str, config: Any, target: TargetWeights, device: torch.device) -> int:
    """On a GPU: logits, and for a head with a cache its largest pass. On a CPU nothing. `config`: keys of the head's
    config.json."""
    if device.type == "cpu":
        return 0
    logits = MAX_ROWS * target.vocabulary_size * HEAD_LOGIT_COPIES * 4
    layers = _cached_layers(method, shape := _head_shape(config, target.config.to_dict()))
    if not layers:
        return logits
    heads, positions = Heads.of(shape), target.max_model_len
    largest = PassMemory(
        rows=PREFILL_ROWS + MAX_ROWS,
        positions=positions,
        rotary_positions=positions,
        layers=layers,
        hidden=int(shape.hidden_size),
        inner=_inner_size(shape),
        heads=heads,
        dtype=target.dtype,
    )
    return logits + largest.total(by_kernel=gpu_memory.kernel_attends(heads, device))


def _is_packed_on_gpu(target: TargetWeights, engine: EngineConfig) -> bool:
    """Whether the target's matrices stay packed on a GPU. Then `PackedModel.embedding` makes a copy for a head."""
    if torch.device(engine.device).type == "cpu":
        return False
    return packed_config(str(target.folder), engine) is not None or packing_of(target.folder, engine) is not None


def _matrix_bytes(name: str, shape: Sequence[int], packing: Quantization | None, size: int) -> int:
    """Of a head's tensor, `size` bytes a number if it is not packed."""
    if packing is None or len(shape) != 2 or not name.endswith(("_proj.weight", "lm_head.weight")):
        return math.prod(shape) * size
    from paceline.model.block_quantization import BROADEST, packed_bytes

    return shape[0] * packed_bytes(shape[1], BROADEST if name.endswith("lm_head.weight") else packing)


def cached_numbers(method: str, config: Any, target: dict[str, Any]) -> int:
    """Numbers in a slot of a draft's KV cache, in heads as wide as native code wants them. Keys missing in its
    config.json are those of the target."""
    shape = _head_shape(config, target)
    if not (layers := _cached_layers(method, shape)):
        return 0
    heads = Heads.of(shape)
    return layers * 2 * heads.kv_heads * head_width(heads)


def _head_shape(config: Any, target: dict[str, Any]) -> SimpleNamespace:
    """The settings of a draft's layers, those of the target where it has none."""
    settings = config.get("transformer_layer_config") or config.get("text_config") or config
    shape = {**target, **settings}
    if "head_dim" not in settings and "hidden_size" in settings:
        shape.pop("head_dim", None)
    return SimpleNamespace(**shape)


def _cached_layers(method: str, shape: SimpleNamespace) -> int:
    """How many of a draft's layers have a KV cache."""
    cached = METHODS[method].cached_layers
    if cached == "none":
        return 0
    return int(shape.num_hidden_layers) if cached == "all" else 1
