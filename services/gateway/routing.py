"""Who serves a request: pure functions of loads and prompt.

Targets keep the keys and values of prompts they have seen. So requests that begin alike go to the same target
as long as it is about as busy as the others; which one that is follows from hashing alone, so that gateways
agree without talking to each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

PREFIX_TOKENS = 64
"""So many first tokens decide where a prompt is at home: a system prompt, and little of what follows."""
LOAD_SLACK = 4.0
"""Requests by which loads may differ and still count as equal."""


def best_target(loads: Mapping[str, float], prompt: Sequence[int]) -> str | None:
    """The name of the target that should serve `prompt`; None if there is none to choose from."""
    least = min(loads.values(), default=0.0)
    near = [name for name, load in loads.items() if load <= least + LOAD_SLACK]
    prefix = array("Q", prompt[:PREFIX_TOKENS]).tobytes()
    return max(near, key=lambda name: _affinity(prefix, name), default=None)


def draft_order(loads: Mapping[str, float], turn: int) -> list[str]:
    """All drafts, the less busy first; those about as busy take turns."""
    drafts = list(loads)
    start = turn % len(drafts) if drafts else 0
    rotated = drafts[start:] + drafts[:start]
    return sorted(rotated, key=lambda draft: loads[draft] // LOAD_SLACK)


def _affinity(prefix: bytes, name: str) -> bytes:
    return blake2b(prefix + name.encode(), digest_size=8).digest()
