"""Load a GGUF file as a transformers network, dequantised, and the configuration of any model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.gguf.gguf_config import transformers_config
from paceline.gguf.gguf_file import GgufError, GgufFile, is_gguf
from paceline.model.checkpoint import Checkpoint
from paceline.model.device_memory import gigabytes
from paceline.model.gguf_weights import gguf_dtype
from paceline.model.network_factory import log_once
from paceline.model.transformers_setup import set_up_transformers


def model_config(path: Path | str, device: str = "cpu", *, trust_remote_code: bool = False) -> Any:
    """transformers' configuration of a model's folder or GGUF file. Raises as transformers does, or `GgufError`.

    A file is dequantised to bfloat16 where `device` computes in it, and one in float32 stays so.
    """
    from transformers import AutoConfig

    set_up_transformers()
    if not is_gguf(path):
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    settings = transformers_config(GgufFile.open(path))
    return AutoConfig.for_model(**{**settings, "dtype": gguf_dtype(settings, device)})


def read_gguf(path: Path, config: Any, dtype: torch.dtype) -> nn.Module:
    """The network of a file, which needs no code of the file's. Raises `CheckpointError`, or ValueError."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    checkpoint = Checkpoint(path)
    weights = {name: checkpoint.tensor(name, dtype) for name in checkpoint.names}
    size = sum(each.nbytes for each in weights.values())
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    network, report = kind.from_pretrained(
        None, config=config, dtype=dtype, state_dict=weights, output_loading_info=True, local_files_only=True
    )
    if faults := sorted([*report["missing_keys"], *report["unexpected_keys"]]):
        raise GgufError(f"{path} and {kind.__name__} differ in {', '.join(faults[:3])}: its format is not supported")
    log_once(f"{path.name}: dequantised to {str(dtype).removeprefix('torch.')}: {gigabytes(size)}")
    loaded: nn.Module = network
    return loaded
