"""How Paceline talks to Redis: short timeouts, no patience, and one kind of error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from paceline.state.errors import StateError, StateLostError

TIMEOUT_S = 1.0


def connect(url: str, timeout_s: float = TIMEOUT_S) -> Redis:
    """A client for a `redis://`, `rediss://` or `unix://` URL; nothing is sent yet. Raises `StateError`."""
    try:
        return Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), retries=1),  # one, for a pooled connection that a restart has cut
        )
    except ValueError as error:
        raise StateError(f"--redis-url {without_secrets(url)} is no Redis URL: {error}") from error


async def check(client: Redis, url: str) -> None:
    """Raises `StateError`, which says what to do, if nobody answers."""
    try:
        with away():
            await client.ping()
    except StateLostError as error:
        raise StateError(
            f"Redis at {without_secrets(url)} does not answer ({error}): start it, name another with "
            "--redis-url, or leave --redis-url out for an embedded one"
        ) from error


@contextmanager
def away() -> Iterator[None]:
    """Whatever Redis fails with, from no connection to no memory, it is no use now: `StateLostError`."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise StateLostError(str(error) or type(error).__name__) from error


def without_secrets(url: str) -> str:
    """The URL as it may be logged."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
