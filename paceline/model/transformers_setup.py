"""What transformers must know before a network of its own is read. Importing transformers takes seconds, so nothing
that loads a model without it imports it."""

from __future__ import annotations

import logging
from functools import cache


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
