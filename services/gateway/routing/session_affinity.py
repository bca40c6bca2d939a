"""Where conversations were last."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

MOST_SESSIONS = 65_536


class SessionAffinity:
    """Bounded: beyond so many conversations those that were silent for longest are forgotten."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._targets: OrderedDict[bytes, str] = OrderedDict()

    def target_of(self, session: str) -> str | None:
        """The name of the target, if any is known; a request that names no conversation has none."""
        return self._targets.get(_digest(session))

    def assign(self, session: str, target: str) -> None:
        """It is there now."""
        if not session:
            return
        key = _digest(session)
        self._targets[key] = target
        self._targets.move_to_end(key)
        if len(self._targets) > self._most:
            self._targets.popitem(last=False)


def _digest(session: str) -> bytes:
    """A name may be as long as its client likes."""
    return blake2b(session.encode(), digest_size=16).digest()
