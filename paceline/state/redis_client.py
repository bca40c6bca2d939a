"""How Paceline talks to Redis: short timeouts, no patience, and one kind of error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from paceline.state.state_errors import StateError, StateUnavailableError
from paceline.tls import Certificates

REDIS_TIMEOUT_S = 1.0


def connect(url: str, timeout_s: float = REDIS_TIMEOUT_S, tls: Certificates | None = None) -> Redis:
    """A client for a `redis://`, `rediss://` or `unix://` URL; nothing is sent yet. Raises `StateError`.

    A `rediss://` URL may name files itself (`?ssl_ca_certs=...&ssl_certfile=...&ssl_keyfile=...`); else `tls` does.
    They are read anew for every connection.
    """
    files = tls_files(tls) if tls is not None and url.startswith("rediss://") else {}
    try:
        return Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), retries=1),  # one, for a pooled connection that a restart has cut
            **files,
        )
    except ValueError as error:
        raise StateError(f"--redis-url {without_secrets(url)} is no Redis URL: {error}") from error


def tls_files(tls: Certificates) -> dict[str, Any]:
    """redis-py's names for them."""
    named = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key, "ssl_ca_certs": tls.authority}
    return {name: str(path) for name, path in named.items() if path is not None}


async def check(client: Redis, url: str) -> None:
    """Raises `StateError`, which says what to do, if nobody answers."""
    try:
        with unavailable_on_error():
            await client.ping()
    except StateUnavailableError as error:
        raise StateError(
            f"Redis at {without_secrets(url)} does not answer ({error}): start it, name another with "
            "--redis-url, or leave --redis-url out for an embedded one"
        ) from error


@contextmanager
def unavailable_on_error() -> Iterator[None]:
    """Whatever Redis fails with, from no connection to no memory, it is no use now: `StateUnavailableError`."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise StateUnavailableError(str(error) or type(error).__name__) from error


def without_secrets(url: str) -> str:
    """The URL as it may be logged."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
