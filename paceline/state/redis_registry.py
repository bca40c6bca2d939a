"""The registry in Redis."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis

from paceline.state import redis_keys
from paceline.state.redis_client import unavailable_on_error
from paceline.state.worker_registry import RegisteredWorker, WorkerKind, WorkerRecord

logger = logging.getLogger(__name__)

REGISTERED = TypeAdapter(RegisteredWorker)


class RedisRegistry:
    """Expiry is left to Redis and its clock; the clocks of the workers do not matter."""

    def __init__(self, client: Redis, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._client = client

    async def register(self, record: WorkerRecord) -> None:
        await self.heartbeat(record, {})

    async def heartbeat(self, record: WorkerRecord, load: Mapping[str, float]) -> None:
        value = REGISTERED.dump_json(RegisteredWorker(record, load))
        with unavailable_on_error():
            async with self._client.pipeline() as pipe:
                pipe.sadd(redis_keys.workers(record.kind), record.worker_id)
                pipe.set(redis_keys.worker(record.kind, record.worker_id), value, px=round(self.ttl_s * 1000))
                await pipe.execute()

    async def deregister(self, record: WorkerRecord) -> None:
        with unavailable_on_error():
            async with self._client.pipeline() as pipe:
                pipe.srem(redis_keys.workers(record.kind), record.worker_id)
                pipe.delete(redis_keys.worker(record.kind, record.worker_id))
                await pipe.execute()

    async def workers(self, kind: WorkerKind) -> list[RegisteredWorker]:
        with unavailable_on_error():
            ids = [str(id_) for id_ in await self._client.smembers(redis_keys.workers(kind))]
            if not ids:
                return []
            values = await self._client.mget([redis_keys.worker(kind, id_) for id_ in ids])
            expired = [id_ for id_, value in zip(ids, values, strict=True) if value is None]
            if expired:  # one that comes back in this moment is listed again by its next heartbeat
                await self._client.srem(redis_keys.workers(kind), *expired)
        return _parse([str(value) for value in values if value is not None])

    async def epoch(self) -> str:
        with unavailable_on_error():
            async with self._client.pipeline() as pipe:
                pipe.set(redis_keys.EPOCH, uuid.uuid4().hex, nx=True)
                pipe.get(redis_keys.EPOCH)
                _, epoch = await pipe.execute()
        return str(epoch)


def _parse(values: Sequence[str]) -> list[RegisteredWorker]:
    """Oldest first. A record that another version wrote and this one cannot read must not hide the others."""
    live = []
    for value in values:
        try:
            live.append(REGISTERED.validate_json(value))
        except ValidationError as error:
            logger.warning("a worker's record cannot be read", extra={"record": value, "error": str(error)})
    return sorted(live, key=lambda worker: worker.record.started_at)
