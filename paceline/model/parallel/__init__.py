"""One model on several processes, its ranks: how they meet, communicate, and end together.

Rank 0 has the engine. The other ranks have only their part of the model, and run the passes that rank 0 broadcasts.
When one rank ends, all ranks of the replica end.
"""

from __future__ import annotations


class RendezvousError(RuntimeError):
    """The ranks did not meet; the text says what to do."""


class RankLostError(RuntimeError):
    """Another rank is gone or too slow, so this rank cannot continue."""
