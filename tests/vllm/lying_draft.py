"""A draft whose tokens are wrong, and which is sure of them."""

from __future__ import annotations

from dataclasses import replace

from paceline.config import EngineConfig, SpeculativeConfig
from tests.helpers.workers import Counting


def lying_draft(speculation: SpeculativeConfig, engine: EngineConfig) -> Counting:
    """A factory for method `custom_class`."""
    draft = Counting(vocabulary_size=4096)
    draft.description = replace(draft.description, vocabulary_fingerprint="")
    return draft
