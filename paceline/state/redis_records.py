"""Finished responses and journals in Redis:

paceline:record:{client}:{id}   list: the entries of a record, for its time to live
paceline:records:{client}       sorted set: ids of the client's records, by the time at which they expire
paceline:record_sizes:{client}  hash: bytes by id
paceline:record_bytes           hash: the sum of bytes by client
paceline:background             sorted set: `{client}:{id}` of leased journals, by the time at which the lease runs out

The records alone would do; the books bound their memory. Records expire by themselves, and are taken out of the books
when the bound is reached. Clients' names are quoted, so that none holds a colon.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote, unquote

from redis.asyncio import Redis

from paceline.state.record_store import Append, RecordLimits
from paceline.state.redis_client import unavailable_on_error

REPLACE = -1
"""A position: in place of the record that there is."""

FORGET = """
local function record(client, id)
    return 'paceline:record:' .. client .. ':' .. id
end
local function forget(client, id)
    local bytes = redis.call('HGET', 'paceline:record_sizes:' .. client, id) or 0
    redis.call('HDEL', 'paceline:record_sizes:' .. client, id)
    redis.call('ZREM', 'paceline:records:' .. client, id)
    if redis.call('HINCRBY', 'paceline:record_bytes', client, 0 - bytes) <= 0 then
        redis.call('HDEL', 'paceline:record_bytes', client)
    end
    return redis.call('DEL', record(client, id))
end
"""
"""Functions of both scripts. `forget` removes a record and its entries in the books; returns the number of records."""

APPEND_WITHIN_LIMIT = (
    FORGET
    + """
local limit, now, lengths, at = tonumber(ARGV[1]), redis.call('TIME'), {}, 2
now = now[1] + now[2] / 1e6
while at <= #ARGV do
    local client, id, position = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
    local ttl_s, lease_s, count = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
    local first, last = at + 6, at + 5 + count
    if position < 0 then
        forget(client, id)
        position = 0
    end
    local key = record(client, id)
    local length = redis.call('LLEN', key)
    if length == position then
        local bytes = 0
        for i = first, last do
            redis.call('RPUSH', key, ARGV[i])
            bytes = bytes + #ARGV[i]
        end
        redis.call('PEXPIRE', key, math.max(1, math.floor(ttl_s * 1000)))
        redis.call('ZADD', 'paceline:records:' .. client, now + ttl_s, id)
        redis.call('HINCRBY', 'paceline:record_sizes:' .. client, id, bytes)
        redis.call('HINCRBY', 'paceline:record_bytes', client, bytes)
        length = length + count
    elseif count > 0 and redis.call('LINDEX', key, position) == ARGV[first] then
        length = position + count
    else
        length = -length
    end
    if lease_s and length > 0 then
        if lease_s > 0 then
            redis.call('ZADD', 'paceline:background', now + lease_s, client .. ':' .. id)
        else
            redis.call('ZREM', 'paceline:background', client .. ':' .. id)
        end
    end
    lengths[#lengths + 1] = length
    at = last + 1
end
local expired_are_forgotten = false
while true do
    local totals, total, most, largest = redis.call('HGETALL', 'paceline:record_bytes'), 0, 0, nil
    for i = 1, #totals, 2 do
        local bytes = tonumber(totals[i + 1])
        total = total + bytes
        if bytes > most then most, largest = bytes, totals[i] end
    end
    if total <= limit then return lengths end
    if not expired_are_forgotten then
        for i = 1, #totals, 2 do
            local expired = redis.call('ZRANGEBYSCORE', 'paceline:records:' .. totals[i], '-inf', now)
            for _, id in ipairs(expired) do forget(totals[i], id) end
        end
        expired_are_forgotten = true
    else
        local first = redis.call('ZRANGE', 'paceline:records:' .. largest, 0, 0)[1]
        if first then forget(largest, first) else redis.call('HDEL', 'paceline:record_bytes', largest) end
    end
end
"""
)
"""Appends to records, then forgets records until all of them are within the limit: expired ones, then of the client
that has the most bytes the one that expires first.

ARGV[1]: most bytes of all records
ARGV[2] and on, for each record: client, id, position, time to live in seconds, lease in seconds or "", the number of
    entries, the entries. Position -1 replaces the record. Lease 0 ends it
Returns: the new length of each record; minus its length, if it does not have `position` entries

Its keys follow from clients, so it cannot name them in KEYS: it is not for a Redis cluster.
"""

DELETE = FORGET + "return forget(ARGV[1], ARGV[2])"
"""ARGV[1], ARGV[2]: client and id. Returns: the number of records that were deleted."""

BACKGROUND_KEY = "paceline:background"


class RedisRecords:
    """A `RecordStore`."""

    def __init__(self, client: Redis, limits: RecordLimits) -> None:
        self._limits = limits
        self._client = client
        self._append = client.register_script(APPEND_WITHIN_LIMIT)
        self._delete = client.register_script(DELETE)

    async def save(self, client: str, record_id: str, entry: str) -> None:
        await self._run([quote(client), record_id, REPLACE, self._limits.response_s, "", 1, entry])

    async def append(self, appends: Sequence[Append]) -> list[int]:
        arguments: list[str | float] = []
        for each in appends:
            lease = "" if each.lease_s is None else each.lease_s
            arguments += [quote(each.client), each.record_id, each.position, self._limits.resumable_s, lease]
            arguments += [len(each.entries), *each.entries]
        return await self._run(arguments)

    async def load(self, client: str, record_id: str, start: int = 0) -> list[str]:
        with unavailable_on_error():
            entries = await self._client.lrange(f"paceline:record:{quote(client)}:{record_id}", start, -1)
        return [str(entry) for entry in entries]

    async def delete(self, client: str, record_id: str) -> bool:
        with unavailable_on_error():
            await self._client.zrem(BACKGROUND_KEY, f"{quote(client)}:{record_id}")
            return bool(await self._delete(args=[quote(client), record_id]))

    async def unleased(self) -> list[tuple[str, str]]:
        with unavailable_on_error():
            seconds, microseconds = await self._client.time()
            now = seconds + microseconds / 1e6
            members = await self._client.zrangebyscore(BACKGROUND_KEY, "-inf", now)
        pairs = [str(each).split(":", 1) for each in members]
        return [(unquote(client), record_id) for client, record_id in pairs]

    async def _run(self, arguments: Sequence[str | float]) -> list[int]:
        with unavailable_on_error():
            return list(await self._append(args=[self._limits.max_bytes, *arguments]))
