"""What the operator's page shows: models, queues, workers and acceptance, as this gateway knows them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from paceline.state.acceptance import AcceptanceCounts
from paceline.state.state_store import StateStore
from paceline.state.worker_registry import RegisteredWorker
from paceline_services.gateway.generation.model_directory import ModelDirectory
from paceline_services.gateway.generation.served_model import ServedModel
from paceline_services.gateway.http.json_body import Json
from paceline_services.gateway.routing.circuit_breaker import Breaker, BreakerState
from paceline_services.gateway.routing.draft_workers import DraftWorkers, draft_kind
from paceline_services.gateway.routing.target_connection import TargetConnection

REFRESH_S = 1.0
"""How often the state store is read at most, however many pages are open."""

STATES = {BreakerState.CLOSED: "up", BreakerState.HALF_OPEN: "probing", BreakerState.OPEN: "failing"}
"""failing: left alone for a while; probing: one request tries it."""


class FleetReport:
    """The report of one gateway. Use it from one event loop."""

    def __init__(
        self, models: ModelDirectory, store: StateStore, gateway_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._models = models
        self._store = store
        self._gateway_id = gateway_id
        self._clock = clock
        self._read_at = float("-inf")
        self._gateways: Sequence[RegisteredWorker] = ()
        self._measured: dict[tuple[str, str], AcceptanceCounts] = {}
        """What targets measured, by model and method."""

    async def as_json(self) -> Json:
        """`at`: seconds by a clock of this gateway, for rates between two reports. Counts are totals since a start."""
        if self._clock() >= self._read_at + REFRESH_S:
            self._read_at = self._clock()
            await self._store.presence.attempt(self._read_store())
        capacity = self._models.capacity
        return {
            "at": self._clock(),
            "gateway": self._gateway_id,
            "in_flight": capacity.in_flight,
            "max_in_flight": capacity.limits.max_in_flight,
            "max_queue": capacity.limits.max_queue,
            "redis_unavailable": self._store.presence.unavailable,
            "gateways": self._gateway_list(),
            "models": [self._model(model) for model in self._models],
        }

    async def _read_store(self) -> None:
        """Raises `StateUnavailableError`. What was read before stays then."""
        self._gateways = await self._store.registry.workers("gateway")
        for model in self._models:
            for method in {target.record.method for target in model.fleet.targets.values()} - {""}:
                self._measured[model.model, method] = await self._store.acceptance.acceptance(model.model, method)

    def _gateway_list(self) -> list[Json]:
        """This gateway with its counts of now, others as of their last heartbeat."""
        gateways = [_gateway(each) for each in self._gateways]
        return [each | self._models.load if each["id"] == self._gateway_id else each for each in gateways]

    def _model(self, model: ServedModel) -> Json:
        fleet, totals = model.fleet, model.totals
        measured = [
            _acceptance(counts, method, "", "all")
            for (name, method), counts in self._measured.items()
            if name == model.model
        ]
        return {
            "model": model.model,
            "max_model_len": model.max_model_len,
            "running": model.queue.in_flight,
            "waiting": model.queue.waiting,
            "tokens": totals.tokens,
            "first_tokens": totals.first_tokens,
            "first_token_s": totals.first_token_s,
            "rejections": totals.rejections,
            "targets": [
                *(_target(target) for target in fleet.targets.values()),
                *(_unreached(key) for key in fleet.unreached),
            ],
            "drafts": [_draft(worker, fleet.drafts.breakers[worker.record.address]) for worker in fleet.drafts.workers],
            "acceptance": [*measured, *_measured_of_drafts(fleet.drafts)],
        }


def _gateway(worker: RegisteredWorker) -> Json:
    return {
        "id": worker.record.worker_id,
        "address": worker.record.address,
        "running": worker.load.get("running", 0.0),
        "tokens": worker.load.get("tokens", 0.0),
    }


def _target(target: TargetConnection) -> Json:
    """Its load from the link, which is newer, while requests of this gateway run there; else from its heartbeat."""
    description, registered_load = target.link.description, target.registered_load
    load = target.link.load if target.requests else None
    return {
        "id": target.record.worker_id,
        "address": target.record.address,
        "state": STATES[target.breaker.state] if target.up else "draining",
        "method": description.method,
        "beside": list(description.beside),
        "labels": list(description.labels),
        "slots": description.slots,
        "free_slots": load.free_slots if load else registered_load.get("free_slots", description.slots),
        "running": load.running if load else registered_load.get("running", 0.0),
        "waiting": load.waiting if load else registered_load.get("waiting", 0.0),
        "step_s": load.step_s if load else 0.0,
    }


def _unreached(key: str) -> Json:
    worker_id, _, address = key.rpartition("@")
    empty: Mapping[str, float] = dict.fromkeys(("slots", "free_slots", "running", "waiting", "step_s"), 0)
    worker = {"id": worker_id, "address": address, "state": "not reached"}
    return {**worker, "method": "", "beside": [], "labels": [], **empty}


def _draft(worker: RegisteredWorker, breaker: Breaker) -> Json:
    record = worker.record
    return {
        "id": record.worker_id,
        "address": record.address,
        "state": STATES[breaker.state],
        "method": record.method,
        "model": _base_name(record.model),
        "requests": worker.load.get("requests", 0.0),
    }


def _base_name(model: str) -> str:
    """Without the folder: where a worker has its models is nobody's business."""
    return model.rstrip("/").rpartition("/")[2]


def _measured_of_drafts(drafts: DraftWorkers) -> list[Json]:
    """What all gateways measured of each kind of draft worker."""
    kinds = {
        draft_kind(worker.record, greedy=greedy): (worker.record, greedy)
        for worker in drafts.workers
        for greedy in (True, False)
    }
    return [
        _acceptance(drafts.acceptance(kind), record.method, _base_name(record.model), "greedy" if greedy else "sampled")
        for kind, (record, greedy) in kinds.items()
    ]


def _acceptance(counts: AcceptanceCounts, method: str, model: str, requests: str) -> Json:
    """`requests`: greedy, sampled or all. Without a `model` it is what targets measured, of all their drafts together.

    `rates`: by depth, how often a guess was accepted, given that all above it were.
    """
    return {
        "method": method,
        "model": model,
        "requests": requests,
        "verifications": counts.verifications,
        "acceptance_length": counts.acceptance_length,
        "rates": counts.rates(),
    }
