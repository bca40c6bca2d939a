"""Clients, by API key: authentication, rate limits, and which clients share cached prefixes.

Each gateway counts for itself. Counts in Redis would put Redis into the path of every request, and without Redis a
gateway would have to refuse every request or count none.
"""

from __future__ import annotations

import hmac
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from paceline.api_keys import ApiKey, KeyFileError, digest, read
from paceline.target_features import parse_labels
from paceline.telemetry.gateway_metrics import KeyMetrics
from paceline_services.gateway.api_errors import AuthenticationError, RateLimitError

log = logging.getLogger(__name__)

Clock = Callable[[], float]
MINUTE_S = 60.0


class RateLimitBucket:
    """A token bucket: it holds `per_minute` and fills evenly within a minute.

    An amount is known only after it is used, so the bucket may be overdrawn. (Libraries for rate limits refuse to
    overdraw, and then do not count the amount.)
    """

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / MINUTE_S)
        self._at = now
        return self._level

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        return max(0.0, (level - self.level) * MINUTE_S / self.per_minute)


class ApiClient:
    """The holder of one API key, or every client of a gateway without keys."""

    def __init__(
        self, key: ApiKey | None = None, metrics: KeyMetrics | None = None, clock: Clock = time.monotonic
    ) -> None:
        self.key = key
        self.name = key.name if key is not None else ""
        self.target_labels = parse_labels(key.target_labels) if key is not None else frozenset()
        """Labels that the targets of its requests must have."""
        self._metrics = metrics
        self._running = 0
        limits = (key.requests_per_minute, key.tokens_per_minute) if key is not None else ()
        named = zip(("requests", "tokens"), limits, strict=False)
        self._buckets = {kind: RateLimitBucket(limit, clock) for kind, limit in named if limit is not None}

    @contextmanager
    def admit(self, *, generates: bool = True, resumes: bool = False) -> Iterator[None]:
        """Count one request while it is served. Raises `RateLimitError` if it exceeds a limit.

        `generates`: it may take long; otherwise only the number of requests is limited. `resumes`: it replaces a stream
        that may not have ended yet, so it may be one more than run at once.
        """
        self._check(generates=generates, resumes=resumes)
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)
        if self._metrics is not None and self.key is not None:
            self._metrics.requests.labels(self.name).inc()
        self._running += generates
        try:
            yield
        finally:
            self._running -= generates

    def count_tokens(self, tokens: int, kind: str) -> None:
        """`kind`: prompt or output."""
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens)
        if self._metrics is not None and self.key is not None:
            self._metrics.tokens.labels(self.name, kind).inc(tokens)

    def cache_salt_for(self, salt: str | None) -> str:
        """Requests share cached prefixes and learned statistics only if their key and their salt are equal.

        A digest, so that workers do not see the client's salt; "" without key and salt.
        """
        if not self.name and salt is None:
            return ""
        source = f"{len(self.name)}:{self.name}{'' if salt is None else ':' + salt}"
        return blake2b(source.encode(), digest_size=16).hexdigest()

    @property
    def headers(self) -> Mapping[str, str]:
        """What is left of the limits, in OpenAI's headers."""
        headers = {}
        for kind, bucket in self._buckets.items():
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
            headers[f"x-ratelimit-reset-{kind}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"
        return headers

    def _check(self, *, generates: bool, resumes: bool) -> None:
        limit = self.key.max_concurrent if self.key else None
        if generates and limit is not None and self._running >= limit + resumes:
            raise self._refusal("concurrent", f"{self._running} requests run, the limit of this key is {limit}", 1.0)
        for kind, bucket in self._buckets.items():
            if (generates or kind == "requests") and (wait_s := bucket.seconds_until(1.0)):
                message = f"the limit of this key is {bucket.per_minute} {kind} per minute"
                raise self._refusal(kind, message, wait_s)

    def _refusal(self, limit: str, message: str, wait_s: float) -> RateLimitError:
        if self._metrics is not None:
            self._metrics.refused.labels(self.name, limit).inc()
        return RateLimitError(message, limit, wait_s, self.headers)


ANONYMOUS = ApiClient()


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """The `Authorization` header; without one, the key in `x-api-key`, where clients of Anthropic's API may have it."""
    key = headers.get("x-api-key")
    return headers.get("authorization", None if key is None else f"Bearer {key}")


class Authenticator:
    """Admits clients whose key is in the file, which is checked for changes at every request. Without a file, all."""

    def __init__(self, path: Path | None, metrics: KeyMetrics, clock: Clock = time.monotonic) -> None:
        """Raises `KeyFileError`."""
        self._path = path
        self._metrics = metrics
        self._clock = clock
        self._clients: dict[str, ApiClient] = {}
        self._file_version: tuple[int, int, int] | None = None
        if path is not None:
            self._file_version = _file_version(path)
            self._read(path)

    @property
    def requires_key(self) -> bool:
        return self._path is not None

    def client_for(self, authorization: str | None) -> ApiClient:
        """The client with this `Authorization` header. Raises `AuthenticationError`."""
        if self._path is None:
            return ANONYMOUS
        self._refresh(self._path)
        scheme, _, key = (authorization or "").partition(" ")
        presented = digest(key.strip())
        found = None
        for known, client in self._clients.items():  # compare with every key, so that the time is always the same
            if hmac.compare_digest(known, presented):
                found = client
        if found is None or scheme.lower() != "bearer":
            self._metrics.unknown.inc()
            raise AuthenticationError(with_key=bool(authorization))
        return found

    def client_named(self, name: str) -> ApiClient | None:
        """The client with the key of this name, if there is one now."""
        if self._path is None:
            return ANONYMOUS
        self._refresh(self._path)
        return next((client for client in self._clients.values() if client.name == name), None)

    def _refresh(self, path: Path) -> None:
        """Read the file again if it has changed. An unreadable file changes nothing."""
        before, self._file_version = self._file_version, None
        try:
            self._file_version = _file_version(path)
            if self._file_version != before:
                self._read(path)
                log.info("API keys were read again", extra={"keys": len(self._clients)})
        except KeyFileError as error:
            if self._file_version != before:  # log it once
                log.error("the API keys stay as they were: %s", error)

    def _read(self, path: Path) -> None:
        """Clients whose entry is unchanged keep their counts."""
        before = {client.key: client for client in self._clients.values()}
        self._clients = {
            key.sha256: before.get(key) or ApiClient(key, self._metrics, self._clock) for key in read(path).keys
        }


def _file_version(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
