"""Every key that Paceline has in Redis, all of them under one prefix.

paceline:epoch                            string: a random name of this memory, made by whoever looks first
paceline:workers:{kind}                   set of worker ids; may name workers that have expired
paceline:worker:{kind}:{id}               string: `RegisteredWorker` as JSON, for one TTL after each heartbeat
paceline:request:{id}                     string: `RequestState` as JSON, for an hour after each change
paceline:acceptance:{model}:{speculator}  hash: see `DECAY_AND_ADD` in `paceline.state.redis_acceptance`
"""

from __future__ import annotations

from urllib.parse import quote

from paceline.state.worker_registry import WorkerKind

EPOCH = "paceline:epoch"


def workers(kind: WorkerKind) -> str:
    return f"paceline:workers:{kind}"


def worker(kind: WorkerKind, worker_id: str) -> str:
    return f"paceline:worker:{kind}:{worker_id}"


def request(request_id: str) -> str:
    return f"paceline:request:{request_id}"


def acceptance(model: str, speculator: str) -> str:
    return f"paceline:acceptance:{quote(model)}:{quote(speculator)}"  # quoted, so that no name holds a colon
