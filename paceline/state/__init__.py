"""What services share: who is there, and how well drafting works. In Redis, or in the memory of one process.

Losing it disturbs no running request: see `presence`.
"""

from paceline.state.acceptance import AcceptanceCounts, AcceptanceStore, RequestState
from paceline.state.acceptance_recorder import AcceptanceRecorder
from paceline.state.state_errors import StateError, StateUnavailableError
from paceline.state.state_store import StateStore, open_store
from paceline.state.worker_registration import WorkerRegistration
from paceline.state.worker_registry import RegisteredWorker, WorkerKind, WorkerRecord, WorkerRegistry
from paceline.state.worker_watcher import WorkerWatcher

__all__ = [
    "AcceptanceCounts",
    "AcceptanceRecorder",
    "AcceptanceStore",
    "RegisteredWorker",
    "RequestState",
    "StateError",
    "StateStore",
    "StateUnavailableError",
    "WorkerKind",
    "WorkerRecord",
    "WorkerRegistration",
    "WorkerRegistry",
    "WorkerWatcher",
    "open_store",
]
