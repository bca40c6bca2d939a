"""Finished responses in Redis:

paceline:response:{client}:{id}  string: the record, for its time to live
paceline:responses:{client}      sorted set: `{id}/{bytes}` of the client's records, by the time at which they expire
paceline:response_bytes          hash: the sum of bytes by client

The records alone would do; the set and the hash bound their memory. Records expire by themselves, and are taken out of
the books when the bound is reached. Clients' names are quoted, so that none holds a colon.
"""

from __future__ import annotations

from urllib.parse import quote

from redis.asyncio import Redis

from paceline.state.redis_client import unavailable_on_error
from paceline.state.response_store import ResponseLimits

FORGET = """
local function forget(client, member)
    local id, bytes = string.match(member, '^(.*)/(%d+)$')
    local known = redis.call('ZREM', 'paceline:responses:' .. client, member)
    if known == 1 and redis.call('HINCRBY', 'paceline:response_bytes', client, -bytes) <= 0 then
        redis.call('HDEL', 'paceline:response_bytes', client)
    end
    return redis.call('DEL', 'paceline:response:' .. client .. ':' .. id)
end
local function forget_id(client, id)
    local bytes = redis.call('STRLEN', 'paceline:response:' .. client .. ':' .. id)
    return bytes > 0 and forget(client, id .. '/' .. bytes) or 0
end
"""
"""Functions of both scripts: they remove a record and its entries in the books, and return the number of records."""

SAVE_WITHIN_LIMIT = (
    FORGET
    + """
local client, id, record, ttl_ms, limit = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local now = redis.call('TIME')
now = now[1] + now[2] / 1e6
forget_id(client, id)
redis.call('SET', 'paceline:response:' .. client .. ':' .. id, record, 'PX', ttl_ms)
redis.call('ZADD', 'paceline:responses:' .. client, now + ttl_ms / 1000, id .. '/' .. #record)
redis.call('HINCRBY', 'paceline:response_bytes', client, #record)
local expired_are_forgotten = false
while true do
    local totals, total, most, largest = redis.call('HGETALL', 'paceline:response_bytes'), 0, 0, nil
    for i = 1, #totals, 2 do
        local bytes = tonumber(totals[i + 1])
        total = total + bytes
        if bytes > most then most, largest = bytes, totals[i] end
    end
    if total <= limit then return total end
    if not expired_are_forgotten then
        for i = 1, #totals, 2 do
            local expired = redis.call('ZRANGEBYSCORE', 'paceline:responses:' .. totals[i], '-inf', now)
            for _, member in ipairs(expired) do forget(totals[i], member) end
        end
        expired_are_forgotten = true
    else
        local oldest = redis.call('ZRANGE', 'paceline:responses:' .. largest, 0, 0)[1]
        if oldest then forget(largest, oldest) else redis.call('HDEL', 'paceline:response_bytes', largest) end
    end
end
"""
)
"""Keeps a record, then forgets records until all of them are within the limit: expired ones, then the oldest of the
client that has the most bytes.

ARGV[1], ARGV[2]: client and id
ARGV[3]: the record
ARGV[4]: its time to live, milliseconds
ARGV[5]: most bytes of all records
Returns: the bytes of all records

Its keys follow from clients, so it cannot name them in KEYS: it is not for a Redis cluster.
"""

DELETE = FORGET + "return forget_id(ARGV[1], ARGV[2])"
"""ARGV[1], ARGV[2]: client and id. Returns: the number of records that were deleted."""


class RedisResponses:
    """A `ResponseStore`."""

    def __init__(self, client: Redis, limits: ResponseLimits) -> None:
        self._limits = limits
        self._client = client
        self._save = client.register_script(SAVE_WITHIN_LIMIT)
        self._delete = client.register_script(DELETE)

    async def save(self, client: str, response_id: str, record: str) -> None:
        ttl_ms = max(1, round(1000 * self._limits.ttl_s))
        with unavailable_on_error():
            await self._save(args=[quote(client), response_id, record, ttl_ms, self._limits.max_bytes])

    async def load(self, client: str, response_id: str) -> str | None:
        with unavailable_on_error():
            record = await self._client.get(f"paceline:response:{quote(client)}:{response_id}")
        return None if record is None else str(record)

    async def delete(self, client: str, response_id: str) -> bool:
        with unavailable_on_error():
            return bool(await self._delete(args=[quote(client), response_id]))
