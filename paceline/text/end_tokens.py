"""End tokens that a model's files name, and its vocabulary has."""

from __future__ import annotations

import logging
from collections.abc import Sequence

log = logging.getLogger(__name__)


def existing_ends(named: Sequence[int], vocabulary_size: int) -> list[int]:
    """Those of the vocabulary; the log names the others: a request that stops at one would be refused."""
    if unknown := [each for each in named if not 0 <= each < vocabulary_size]:
        log.warning(
            "eos_token_id names %s, which the vocabulary of %d tokens does not have: left out", unknown, vocabulary_size
        )
    return [each for each in named if 0 <= each < vocabulary_size]
