"""What transformers must know before a network of its own is read, and its configuration of any model.

Importing transformers takes seconds, so nothing that loads a model without it imports it.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

from paceline.gguf.gguf_config import transformers_config
from paceline.gguf.gguf_file import GgufFile, is_gguf
from paceline.model.gguf_weights import gguf_dtype


@cache
def set_up_transformers() -> None:
    """Register our attention and MiMo, and switch progress bars and reports off: a service logs one line for a loaded
    model, or one sentence that refuses it."""
    from transformers import AttentionInterface
    from transformers.utils.logging import disable_progress_bar

    from paceline.model.attention import ATTENTION, attention_interface
    from paceline.model.mimo import register_mimo

    AttentionInterface.register(ATTENTION, attention_interface)
    register_mimo()
    disable_progress_bar()
    # Not its level: below ERROR alone it keeps quiet about ranks.
    logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "LOAD REPORT" not in record.getMessage())
    # Functions of layers that keep states are replaced, see `paceline.model.states.recurrences`.
    logging.getLogger("transformers.integrations.hub_kernels").addFilter(
        lambda record: "falling back to its reference" not in record.getMessage()
    )


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
