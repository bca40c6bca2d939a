"""Paceline's draft pool, and its draws, inside vLLM. See README.md in this folder.

`RemoteDrafts` is a proposer for `"method": "custom_class"`. `paceline.vllm.coupled_worker.CoupledWorker` is a worker
class whose draws do not depend on drafts.
"""

from __future__ import annotations

__all__ = ["RemoteDrafts"]


def __getattr__(name: str) -> object:
    """Import at the first use: the process of the links belongs to this package, and loads no torch."""
    if name == "RemoteDrafts":
        from paceline.vllm.remote_drafts import RemoteDrafts

        return RemoteDrafts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
