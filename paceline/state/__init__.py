"""What services share: who is there, and how well drafting works. In Redis, or in the memory of one process.

Losing it disturbs no running request: see `presence`.
"""

from paceline.state.acceptance import Acceptance, AcceptanceStore, RequestState
from paceline.state.errors import StateError, StateLostError
from paceline.state.recorder import Recorder
from paceline.state.registration import Registration
from paceline.state.registry import Kind, Registered, Registry, WorkerRecord
from paceline.state.store import Store, open_store
from paceline.state.watcher import Watcher

__all__ = [
    "Acceptance",
    "AcceptanceStore",
    "Kind",
    "Recorder",
    "Registered",
    "Registration",
    "Registry",
    "RequestState",
    "StateError",
    "StateLostError",
    "Store",
    "Watcher",
    "WorkerRecord",
    "open_store",
]
