"""The Redis client: short timeouts, one retry, one kind of error."""

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


def connect(url: str, timeout_s: float, tls: Certificates | None = None) -> Redis:
    """A client for a `redis://`, `rediss://` or `unix://` URL; it does not connect yet. Raises `StateError`.

    A `rediss://` URL may name certificate files (`?ssl_ca_certs=...&ssl_certfile=...&ssl_keyfile=...`); otherwise
    those of `tls` are used. They are read again for every connection.
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
    """The certificate files as keyword arguments of redis-py."""
    named = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key, "ssl_ca_certs": tls.authority}
    return {name: str(path) for name, path in named.items() if path is not None}


async def check(client: Redis, url: str) -> None:
    """Raises `StateError`, which says what to do, if Redis does not answer."""
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
    """Turn every error of Redis, from no connection to no memory, into `StateUnavailableError`."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise StateUnavailableError(str(error) or type(error).__name__) from error


def without_secrets(url: str) -> str:
    """The URL for logs and error messages: without user, password and query."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
