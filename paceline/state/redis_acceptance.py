"""Acceptance in Redis."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

from pydantic import TypeAdapter
from redis.asyncio import Redis

from paceline.state import redis_keys
from paceline.state.acceptance import REQUEST_TTL_S, AcceptanceCounts, RequestState
from paceline.state.redis_client import unavailable_on_error

log = logging.getLogger(__name__)

REQUEST_STATE = TypeAdapter(RequestState)

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
"""Lets totals fade by their age, then adds to them.

KEYS[1]: hash of totals; field `since` is the time of the last change by Redis's clock, every other field a
    count: `drafted`, and `{name}:{index}` for the sequences of `AcceptanceCounts`
ARGV[1]: half-life, seconds
ARGV[2], ARGV[3] and on: pairs of a field and what is added to it
Returns: the number of fields
"""

SEQUENCES = ("drafted_by_depth", "accepted_by_depth", "cell_drafted", "cell_accepted")


class RedisAcceptance:
    def __init__(self, client: Redis, half_life_s: float) -> None:
        self.half_life_s = half_life_s
        self._client = client
        self._fade_and_add = client.register_script(DECAY_AND_ADD)

    async def save_requests(self, states: Iterable[RequestState], finished: Iterable[str] = ()) -> None:
        with unavailable_on_error():
            async with self._client.pipeline(transaction=False) as pipe:
                for state in states:
                    value = REQUEST_STATE.dump_json(state)
                    pipe.set(redis_keys.request(state.request_id), value, ex=round(REQUEST_TTL_S))
                for request_id in finished:
                    pipe.delete(redis_keys.request(request_id))
                await pipe.execute()

    async def save_request(self, state: RequestState) -> None:
        await self.save_requests([state])

    async def load_request(self, request_id: str) -> RequestState | None:
        with unavailable_on_error():
            value = await self._client.get(redis_keys.request(request_id))
        return None if value is None else REQUEST_STATE.validate_json(value)

    async def delete_request(self, request_id: str) -> None:
        await self.save_requests([], [request_id])

    async def record(self, model: str, speculator: str, counts: AcceptanceCounts) -> None:
        pairs = [word for field, count in _fields(counts) for word in (field, count)]
        with unavailable_on_error():
            await self._fade_and_add(keys=[redis_keys.acceptance(model, speculator)], args=[self.half_life_s, *pairs])

    async def acceptance(self, model: str, speculator: str) -> AcceptanceCounts:
        with unavailable_on_error():
            fields = await self._client.hgetall(redis_keys.acceptance(model, speculator))
        try:
            return _acceptance({str(field): float(value) for field, value in fields.items()})
        except (KeyError, ValueError) as error:  # of another version, or damaged: it is learned again
            log.warning("acceptance of %s cannot be read", speculator, extra={"error": repr(error)})
            return AcceptanceCounts()


def _fields(counts: AcceptanceCounts) -> Iterator[tuple[str, float]]:
    yield "drafted", counts.drafted
    for name in SEQUENCES:
        for index, count in enumerate(getattr(counts, name)):
            yield f"{name}:{index}", count


def _acceptance(fields: Mapping[str, float]) -> AcceptanceCounts:
    def sequence(name: str) -> tuple[float, ...]:
        length = sum(field.startswith(f"{name}:") for field in fields)
        return tuple(fields[f"{name}:{index}"] for index in range(length))

    return AcceptanceCounts(fields.get("drafted", 0.0), *(sequence(name) for name in SEQUENCES))
