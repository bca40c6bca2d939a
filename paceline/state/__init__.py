"""State shared by the services: the registry of workers, how many draft tokens are accepted, and finished responses.

It lives in Redis, or in the memory of one process. Its loss disturbs no running request: see `RedisAvailability`.
"""

from paceline.state.acceptance import AcceptanceCounts, AcceptanceStore
from paceline.state.acceptance_recorder import AcceptanceRecorder
from paceline.state.record_store import Append, RecordLimits, RecordStore
from paceline.state.state_errors import StateError, StateUnavailableError
from paceline.state.state_store import StateStore, open_store
from paceline.state.worker_registration import WorkerRegistration
from paceline.state.worker_registry import RegisteredWorker, WorkerKind, WorkerRecord, WorkerRegistry
from paceline.state.worker_watcher import WorkerWatcher

__all__ = [
    "AcceptanceCounts",
    "AcceptanceRecorder",
    "AcceptanceStore",
    "Append",
    "RecordLimits",
    "RecordStore",
    "RegisteredWorker",
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
