"""Shared state in Redis. All keys have one prefix:

paceline:epoch                            string: a random name of this Redis memory; the first reader sets it
paceline:workers:{kind}                   set of worker ids; it may name workers that have expired
paceline:worker:{kind}:{id}               string: `RegisteredWorker` as JSON, for one TTL after each heartbeat
paceline:request:{client}:{id}            string: what is known of a request, as JSON, for `REQUEST_TTL_S`
paceline:acceptance:{model}:{speculator}  hash: see `DECAY_AND_ADD`
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis

from paceline.state.acceptance import REQUEST_TTL_S, AcceptanceCounts, RequestKey
from paceline.state.redis_client import unavailable_on_error
from paceline.state.worker_registry import RegisteredWorker, WorkerKind, WorkerRecord

log = logging.getLogger(__name__)

REGISTERED_WORKER = TypeAdapter(RegisteredWorker)
EPOCH_KEY = "paceline:epoch"

DECAY_AND_ADD = """
local now = redis.call('TIME')
now = now[1] + now[2] / 1e6
local since = tonumber(redis.call('HGET', KEYS[1], 'since') or now)
local factor = 0.5 ^ (math.max(now - since, 0) / tonumber(ARGV[1]))
local totals, field = {}
for i, value in ipairs(redis.call('HGETALL', KEYS[1])) do
    if i % 2 == 1 then field = value else totals[field] = tonumber(value) * factor end
end
for i = 2, #ARGV, 2 do
    totals[ARGV[i]] = (totals[ARGV[i]] or 0) + tonumber(ARGV[i + 1])
end
totals['since'] = now
local count = 0
for field, value in pairs(totals) do
    redis.call('HSET', KEYS[1], field, string.format('%.17g', value))
    count = count + 1
end
return count
"""
"""Decays totals by their age, then adds to them.

KEYS[1]: hash of totals; field `since` is the time of the last change by Redis's clock, every other field a
    count: `drafted`, and `{name}:{index}` for the sequences of `AcceptanceCounts`
ARGV[1]: half-life, seconds
ARGV[2], ARGV[3] and on: pairs of a field and what is added to it
Returns: the number of fields
"""

SEQUENCES = ("drafted_by_depth", "accepted_by_depth", "cell_drafted", "cell_accepted")


class RedisRegistry:
    """A `WorkerRegistry`. Records expire by Redis's clock; the clocks of the workers do not matter."""

    def __init__(self, client: Redis, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._client = client

    async def register(self, record: WorkerRecord) -> None:
        await self.heartbeat(record, {})

    async def heartbeat(self, record: WorkerRecord, load: Mapping[str, float]) -> None:
        value = REGISTERED_WORKER.dump_json(RegisteredWorker(record, load))
        with unavailable_on_error():
            async with self._client.pipeline() as pipe:
                pipe.sadd(_workers_key(record.kind), record.worker_id)
                pipe.set(_worker_key(record.kind, record.worker_id), value, px=round(self.ttl_s * 1000))
                await pipe.execute()

    async def deregister(self, record: WorkerRecord) -> None:
        with unavailable_on_error():
            async with self._client.pipeline() as pipe:
                pipe.srem(_workers_key(record.kind), record.worker_id)
                pipe.delete(_worker_key(record.kind, record.worker_id))
                await pipe.execute()

    async def workers(self, kind: WorkerKind) -> list[RegisteredWorker]:
        with unavailable_on_error():
            ids = [str(id_) for id_ in await self._client.smembers(_workers_key(kind))]
            if not ids:
                return []
            values = await self._client.mget([_worker_key(kind, id_) for id_ in ids])
            expired = [id_ for id_, value in zip(ids, values, strict=True) if value is None]
            if expired:  # a worker that registers at this moment is listed again by its next heartbeat
                await self._client.srem(_workers_key(kind), *expired)
        return _parse_workers([str(value) for value in values if value is not None])

    async def epoch(self) -> str:
        with unavailable_on_error():
            async with self._client.pipeline() as pipe:
                pipe.set(EPOCH_KEY, uuid.uuid4().hex, nx=True)
                pipe.get(EPOCH_KEY)
                _, epoch = await pipe.execute()
        return str(epoch)


class RedisAcceptance:
    """An `AcceptanceStore`. Totals halve every `half_life_s` seconds, so that they follow the traffic."""

    def __init__(self, client: Redis, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._client = client
        self._decay_and_add = client.register_script(DECAY_AND_ADD)

    async def save_requests(self, reports: Mapping[RequestKey, str]) -> None:
        with unavailable_on_error():
            async with self._client.pipeline(transaction=False) as pipe:
                for key, report in reports.items():
                    pipe.set(_request_key(key), report, ex=REQUEST_TTL_S)
                await pipe.execute()

    async def request(self, key: RequestKey) -> str | None:
        with unavailable_on_error():
            report = await self._client.get(_request_key(key))
        return None if report is None else str(report)

    async def record(self, model: str, speculator: str, counts: AcceptanceCounts) -> None:
        pairs = [argument for field in _fields(counts) for argument in field]
        with unavailable_on_error():
            await self._decay_and_add(keys=[_acceptance_key(model, speculator)], args=[self._half_life_s, *pairs])

    async def acceptance(self, model: str, speculator: str) -> AcceptanceCounts:
        with unavailable_on_error():
            fields = await self._client.hgetall(_acceptance_key(model, speculator))
        try:
            return _parse_counts({str(field): float(value) for field, value in fields.items()})
        except (KeyError, ValueError) as error:  # written by another version, or damaged: it is learned again
            log.warning("acceptance of %s cannot be read", speculator, extra={"error": repr(error)})
            return AcceptanceCounts()


def _workers_key(kind: WorkerKind) -> str:
    return f"paceline:workers:{kind}"


def _worker_key(kind: WorkerKind, worker_id: str) -> str:
    return f"paceline:worker:{kind}:{worker_id}"


def _request_key(key: RequestKey) -> str:
    return f"paceline:request:{quote(key[0])}:{key[1]}"


def _acceptance_key(model: str, speculator: str) -> str:
    return f"paceline:acceptance:{quote(model)}:{quote(speculator)}"  # quoted, so that no name holds a colon


def _parse_workers(values: Sequence[str]) -> list[RegisteredWorker]:
    """Oldest first. A record that this version cannot read is logged and left out."""
    live = []
    for value in values:
        try:
            live.append(REGISTERED_WORKER.validate_json(value))
        except ValidationError as error:
            log.warning("a worker's record cannot be read", extra={"record": value, "error": str(error)})
    return sorted(live, key=lambda worker: worker.record.started_at)


def _fields(counts: AcceptanceCounts) -> Iterator[tuple[str, float]]:
    yield "drafted", counts.drafted
    for name in SEQUENCES:
        for index, count in enumerate(getattr(counts, name)):
            yield f"{name}:{index}", count


def _parse_counts(fields: Mapping[str, float]) -> AcceptanceCounts:
    """Raises KeyError if an entry of a sequence is missing."""

    def sequence(name: str) -> tuple[float, ...]:
        length = sum(field.startswith(f"{name}:") for field in fields)
        return tuple(fields[f"{name}:{index}"] for index in range(length))

    return AcceptanceCounts(fields.get("drafted", 0.0), *(sequence(name) for name in SEQUENCES))
