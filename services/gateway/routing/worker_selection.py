"""Who serves a request: pure functions of what is known about the workers, and of the request.

A target is scored by one number, the seconds until a request's first token: the rows it has to compute for others,
and those of the prompt that it does not hold already, over its rows per second. So a long prompt goes where its
beginning lies even if that target is busier, and a short one where there is least to do.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from statistics import fmean

PREFIX_TOKENS = 64
"""So many first tokens decide where a prompt is at home: a system prompt, and little of what follows."""
SESSION_MOVE_COST_ROWS = 1024.0
"""Rows that a target may have to do more than another one, and still keep its conversations."""
HALF_VALUE_REQUESTS = 8.0
"""Open requests at which a draft worker is about half as good for one more as an idle one."""
ROUND_ROBIN_MARGIN = 0.8
"""Drafts this close to the best one take turns."""
EXPLORE_EVERY = 16
"""One request in so many begins with the draft of which least is known."""


@dataclass(frozen=True, slots=True)
class TargetCandidate:
    """A target as one request finds it."""

    queued_rows: float = 0.0
    """Rows that it has to compute for other requests: of their prompts, and of what they are going to say."""
    cached: int = 0
    """Tokens that this prompt begins with and that the target was sent before."""
    has_session: bool = False
    """The conversation was there the last time."""
    rows_per_s: float = 0.0
    """0: unknown."""


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A draft worker as one request finds it."""

    requests: float = 0.0
    """Requests that it drafts for."""
    accepted: float | None = None
    """Tokens accepted per verification where its kind drafted; None: too little is known."""
    verifications: float = 0.0
    """How much that is."""
    healthy: bool = True
    """False: it failed repeatedly of late."""


def rendezvous_worker(names: Sequence[str], key: bytes) -> str | None:
    """Where `key` belongs: whoever asks is told the same, and losing another name changes nothing."""
    return max(names, key=lambda name: _affinity(key, name), default=None)


def prefix_key(prompt: Sequence[int], salt: str = "") -> bytes:
    """Prompts that begin alike have the same one, if they share what is cached: if they have the same salt."""
    return salt.encode() + array("Q", prompt[:PREFIX_TOKENS]).tobytes()


def seconds_to_first_token(candidate: TargetCandidate, prompt_tokens: int, rows_per_s: float) -> float:
    """Expected; `rows_per_s` is for a target that does not tell its own. At least one row is always computed."""
    own = max(1, prompt_tokens - candidate.cached)
    return (candidate.queued_rows + own) / (candidate.rows_per_s or rows_per_s)


def best_target(
    candidates: Mapping[str, TargetCandidate], prompt: Sequence[int], session: str = "", salt: str = ""
) -> str | None:
    """The name of the target that should serve `prompt`; None if there is none to choose from.

    Gateways that know nothing of a prompt agree on where it is at home by hashing, and take its beginning to be there:
    so they need not talk to each other. The same holds for a conversation, which `session` names.
    """
    known = [each.rows_per_s for each in candidates.values() if each.rows_per_s]
    usual = fmean(known) if known else 1.0
    at_home = rendezvous_worker(list(candidates), prefix_key(prompt, salt))
    kept: set[str | None] = {name for name, each in candidates.items() if each.has_session}
    if session and not kept:
        kept.add(rendezvous_worker(list(candidates), session.encode()))

    def cost(name: str) -> tuple[float, bool]:
        each = candidates[name]
        cached = max(each.cached, min(PREFIX_TOKENS, len(prompt)) if name == at_home else 0)
        moving = SESSION_MOVE_COST_ROWS if kept and name not in kept else 0.0
        seen = replace(each, queued_rows=each.queued_rows + moving, cached=cached)
        return seconds_to_first_token(seen, len(prompt), usual), name != at_home

    return min(candidates, key=cost, default=None)


def draft_order(drafts: Mapping[str, DraftCandidate], turn: int) -> list[str]:
    """All drafts, best first: by the tokens per verification that they are expected to bring one more request.

    Those about as good take turns. Now and then the one of which least is known comes first; those that fail, last.
    """
    names = [name for name, each in drafts.items() if each.healthy]
    doubtful = [name for name, each in drafts.items() if not each.healthy]
    if not names:
        return doubtful
    if turn % EXPLORE_EVERY == EXPLORE_EVERY - 1:
        least_known = min(names, key=lambda name: drafts[name].verifications)
        return [
            least_known,
            *(name for name in _by_expected_tokens(drafts, names, turn) if name != least_known),
            *doubtful,
        ]
    return _by_expected_tokens(drafts, names, turn) + doubtful


def _by_expected_tokens(drafts: Mapping[str, DraftCandidate], names: Sequence[str], turn: int) -> list[str]:
    known = [each.accepted for each in drafts.values() if each.accepted is not None]
    unknown = min(known, default=1.0)

    def worth(name: str) -> float:
        each = drafts[name]
        accepted = unknown if each.accepted is None else each.accepted
        return accepted * HALF_VALUE_REQUESTS / (HALF_VALUE_REQUESTS + each.requests)

    best = max(worth(name) for name in names)
    near = [name for name in names if worth(name) >= ROUND_ROBIN_MARGIN * best]
    start = turn % len(near)
    others = sorted(set(names) - set(near), key=lambda name: (-worth(name), name))
    return near[start:] + near[:start] + others


def _affinity(key: bytes, name: str) -> bytes:
    return blake2b(key + name.encode(), digest_size=8).digest()
