"""Load a model: a GGUF file, any transformers causal language model, or a registered fake one.

transformers takes seconds to import, so it is imported only for what needs it.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from paceline.config import EngineConfig
from paceline.model.gguf_model import load_packed
from paceline.model.gpu.memory import MOST_TABLES
from paceline.model.loading import load_checkpoint
from paceline.model.model import Model, TransformersModel
from paceline.model.native.build import NativeUnavailableError, native_library
from paceline.model.packed_checkpoint import load_packed_checkpoint
from paceline.model.row_probe import PROBED_COUNTS, is_row_invariant
from paceline.model_names import fake_model, resolve_model
from paceline.telemetry.logs import load_phase


def load(name: str, config: EngineConfig) -> Model:
    """Load the model called `name`, see `paceline.model_names`; with a tensor_parallel_size over 1, as rank 0.

    Raises `paceline.model_names.ModelNotFoundError` if there is none, ValueError if it cannot be run here, and the
    errors of `paceline.model.parallel` if the ranks do not meet.
    """
    location = resolve_model(name)
    if (scheme := fake_model(name)) is not None:
        if config.tensor_parallel_size > 1:
            raise ValueError(f"{name} has no weights to share among ranks: set tensor_parallel_size to 1")
        fake: Model = scheme.load(name, config)
        return fake
    _check_kv_cache(config)
    _check_requests(config)
    model = load_packed(location, name, config) or load_packed_checkpoint(name, config) or load_checkpoint(name, config)
    proven = isinstance(model, TransformersModel) and model.native and not config.verify  # by tests of native code
    # A CPU's products are made for any number of rows, and tests try them; a GPU's library chooses among many kernels.
    counts = () if torch.device(config.device).type == "cpu" else PROBED_COUNTS
    with nullcontext() if proven else load_phase("rows probed"):
        model.rows_invariant = proven or is_row_invariant(model, counts)
    return model


def _check_kv_cache(config: EngineConfig) -> None:
    """Raises ValueError before weights are read."""
    if config.kv_cache_dtype == "auto":
        return
    refusal = f"kv_cache_dtype {config.kv_cache_dtype} takes native code, "
    if torch.device(config.device).type != "cpu":
        raise ValueError(f"{refusal}which is for CPUs: leave it out, or set device to cpu")
    try:
        native_library()
    except NativeUnavailableError as error:
        raise ValueError(f"{refusal}and there is none: {error}") from error


def _check_requests(config: EngineConfig) -> None:
    """Raises ValueError before weights are read."""
    if config.device.startswith("cuda") and config.max_num_seqs > MOST_TABLES:
        raise ValueError(f"max_num_seqs is {config.max_num_seqs}: on a GPU at most {MOST_TABLES} requests run at once")


def limit_torch_threads(model: Model) -> None:
    """Leave the cores to the threads of native code, where it multiplies.

    Little work is left to torch's operators, and a barrier between torch's threads costs more than that work.
    """
    if isinstance(model, TransformersModel) and (model.native or model.leaves_little_to_torch):
        torch.set_num_threads(1)
