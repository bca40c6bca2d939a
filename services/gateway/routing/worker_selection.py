"""The choice of a target and of drafts for a request: pure functions of the request and of the workers' state.

A target's score is the expected time to the request's first token: the rows queued at the target plus the prompt's rows
that are not cached there, over the target's rows per second. So a long prompt goes to the target that has its prefix
cached, even if that is busier, and a short prompt to the least busy target.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from statistics import fmean

PREFIX_TOKENS = 64
"""The first tokens of a prompt, which decide its home target: about a system prompt."""
SESSION_MOVE_COST_ROWS = 1024.0
"""How many more rows than elsewhere may be queued at a conversation's home before a request goes elsewhere."""
HALF_VALUE_REQUESTS = 8.0
"""Open requests at which a draft worker is expected to bring half as many tokens as an idle one."""
ROUND_ROBIN_MARGIN = 0.8
"""Drafts within this fraction of the best one take turns."""
EXPLORE_EVERY = 16
"""One request in so many starts with the least known draft."""


@dataclass(frozen=True, slots=True)
class TargetCandidate:
    """The state of a target, for one request."""

    queued_rows: float = 0.0
    """Rows left to compute for other requests: of their prompts and of their expected output."""
    cached: int = 0
    """Tokens of the prompt's longest prefix that the target has computed for this gateway."""
    has_session: bool = False
    """Whether the target is the home of the request's conversation."""
    rows_per_s: float = 0.0
    """0: unknown."""


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """The state of a draft worker, for one request."""

    requests: float = 0.0
    """Requests that it drafts for."""
    accepted: float | None = None
    """Tokens accepted per verification where its kind drafted; None: too little is known."""
    verifications: float = 0.0
    """How much that is."""
    healthy: bool = True
    """False: it failed repeatedly of late."""


def rendezvous_worker(names: Sequence[str], key: bytes) -> str | None:
    """The home of `key`: equal in every process, and unchanged when another name goes. None without names."""
    return max(names, key=lambda name: _affinity(key, name), default=None)


def prefix_key(prompt: Sequence[int], salt: str = "") -> bytes:
    """Equal for prompts with the same beginning and the same salt."""
    return salt.encode() + array("Q", prompt[:PREFIX_TOKENS]).tobytes()


def seconds_to_first_token(candidate: TargetCandidate, prompt_tokens: int, rows_per_s: float) -> float:
    """The expected time. `rows_per_s`: for a target that does not report its own. At least one row is computed."""
    own = max(1, prompt_tokens - candidate.cached)
    return (candidate.queued_rows + own) / (candidate.rows_per_s or rows_per_s)


def session_home(names: Sequence[str], session: str, salt: str = "") -> str | None:
    """The target that the requests of a conversation go to, at every gateway; None without a session."""
    return rendezvous_worker(names, f"{salt}:{session}".encode()) if session else None


def best_target(candidates: Mapping[str, TargetCandidate], prompt: Sequence[int], salt: str = "") -> str | None:
    """The name of the target for `prompt`; None without candidates.

    The prompt's first `PREFIX_TOKENS` tokens are assumed to be cached at the target that a hash of them names, the
    prefix home. So all gateways choose the same target without communication.
    """
    known = [each.rows_per_s for each in candidates.values() if each.rows_per_s]
    mean_rows_per_s = fmean(known) if known else 1.0
    prefix_home = rendezvous_worker(list(candidates), prefix_key(prompt, salt))
    in_session = any(each.has_session for each in candidates.values())

    def cost(name: str) -> tuple[float, bool]:
        each = candidates[name]
        cached = max(each.cached, min(PREFIX_TOKENS, len(prompt)) if name == prefix_home else 0)
        moving = SESSION_MOVE_COST_ROWS if in_session and not each.has_session else 0.0
        candidate = replace(each, queued_rows=each.queued_rows + moving, cached=cached)
        return seconds_to_first_token(candidate, len(prompt), mean_rows_per_s), name != prefix_home

    return min(candidates, key=cost, default=None)


def draft_order(drafts: Mapping[str, DraftCandidate], turn: int) -> list[str]:
    """All drafts, best first: by the accepted tokens per verification that one more request can expect.

    Drafts that are about equally good take turns. Every so often the least known draft comes first; failing drafts come
    last. `turn` counts the requests.
    """
    names = [name for name, each in drafts.items() if each.healthy]
    failing = [name for name, each in drafts.items() if not each.healthy]
    if not names:
        return failing
    if turn % EXPLORE_EVERY == EXPLORE_EVERY - 1:
        least_known = min(names, key=lambda name: drafts[name].verifications)
        return [
            least_known,
            *(name for name in _by_expected_tokens(drafts, names, turn) if name != least_known),
            *failing,
        ]
    return _by_expected_tokens(drafts, names, turn) + failing


def _by_expected_tokens(drafts: Mapping[str, DraftCandidate], names: Sequence[str], turn: int) -> list[str]:
    known = [each.accepted for each in drafts.values() if each.accepted is not None]
    unknown = min(known, default=1.0)

    def expected_tokens(name: str) -> float:
        each = drafts[name]
        accepted = unknown if each.accepted is None else each.accepted
        return accepted * HALF_VALUE_REQUESTS / (HALF_VALUE_REQUESTS + each.requests)

    best = max(expected_tokens(name) for name in names)
    near = [name for name in names if expected_tokens(name) >= ROUND_ROBIN_MARGIN * best]
    start = turn % len(near)
    others = sorted(set(names) - set(near), key=lambda name: (-expected_tokens(name), name))
    return near[start:] + near[:start] + others


def _affinity(key: bytes, name: str) -> bytes:
    return blake2b(key + name.encode(), digest_size=8).digest()
