"""Who calls, by API key: whether they may, how much they have used, and whom their cached prefixes are shared with.

Limits count in this process: another gateway has counts of its own. Counts shared over Redis would put Redis into the
path of every request, and make it a choice between stopping and counting nothing when it is away.
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
from paceline.telemetry.key_metrics import KeyMetrics
from paceline_services.gateway.api_errors import AuthenticationError, RateLimitError

log = logging.getLogger(__name__)

Clock = Callable[[], float]
MINUTE_S = 60.0


class RateLimitBucket:
    """So much per minute: it holds a minute's worth and fills evenly.

    What is taken is known only afterwards, so the bucket may be overdrawn; then it has to fill up first. (Libraries for
    rate limits refuse such a taking, and do not count it.)
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
    """Whoever holds one key, or everybody where no keys are asked for."""

    def __init__(
        self, key: ApiKey | None = None, metrics: KeyMetrics | None = None, clock: Clock = time.monotonic
    ) -> None:
        self.key = key
        self.name = key.name if key is not None else ""
        self._metrics = metrics
        self._running = 0
        limits = (key.requests_per_minute, key.tokens_per_minute) if key is not None else ()
        named = zip(("requests", "tokens"), limits, strict=False)
        self._buckets = {kind: RateLimitBucket(limit, clock) for kind, limit in named if limit is not None}

    @contextmanager
    def admit(self) -> Iterator[None]:
        """One request, for as long as it is being answered. Raises `RateLimitError` if it is one too many."""
        self._check()
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)
        if self._metrics is not None and self.key is not None:
            self._metrics.requests.labels(self.name).inc()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def count_tokens(self, tokens: int, kind: str) -> None:
        """`kind`: prompt or output."""
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens)
        if self._metrics is not None and self.key is not None:
            self._metrics.tokens.labels(self.name, kind).inc(tokens)

    def cache_salt_for(self, salt: str | None) -> str:
        """With whom a request shares what was computed and learned: nobody who has another key or says another salt.

        A digest, so that no worker hears the salt itself. Without either, everybody.
        """
        if not self.name and salt is None:
            return ""
        said = f"{len(self.name)}:{self.name}{'' if salt is None else ':' + salt}"
        return blake2b(said.encode(), digest_size=16).hexdigest()

    @property
    def headers(self) -> Mapping[str, str]:
        """What is left, as OpenAI says it."""
        told = {}
        for kind, bucket in self._buckets.items():
            told[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            told[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
            told[f"x-ratelimit-reset-{kind}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"
        return told

    def _check(self) -> None:
        most = self.key.max_concurrent if self.key else None
        if most is not None and self._running >= most:
            raise self._refusal("concurrent", f"{self._running} requests run, the limit of this key is {most}", 1.0)
        for kind, bucket in self._buckets.items():
            if wait_s := bucket.seconds_until(1.0):
                message = f"the limit of this key is {bucket.per_minute} {kind} per minute"
                raise self._refusal(kind, message, wait_s)

    def _refusal(self, limit: str, message: str, wait_s: float) -> RateLimitError:
        if self._metrics is not None:
            self._metrics.refused.labels(self.name, limit).inc()
        return RateLimitError(message, limit, wait_s, self.headers)


ANONYMOUS = ApiClient()


class Authenticator:
    """Who may come in: whoever has a key in the file, which is looked at for every request; without a file, anyone."""

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
        """By the header of that name. Raises `AuthenticationError`."""
        if self._path is None:
            return ANONYMOUS
        self._refresh(self._path)
        scheme, _, key = (authorization or "").partition(" ")
        presented = digest(key.strip())
        found = None
        for known, caller in self._clients.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(known, presented):
                found = caller
        if found is None or scheme.lower() != "bearer":
            self._metrics.unknown.inc()
            raise AuthenticationError(bool(authorization))
        return found

    def _refresh(self, path: Path) -> None:
        """Keys that were withdrawn are refused from the next request on. A file that is none changes nothing."""
        before, self._file_version = self._file_version, None
        try:
            self._file_version = _file_version(path)
            if self._file_version != before:
                self._read(path)
                log.info("API keys were read again", extra={"keys": len(self._clients)})
        except KeyFileError as error:
            if self._file_version != before:  # once, not for every request
                log.error("the API keys stay as they were: %s", error)

    def _read(self, path: Path) -> None:
        """Whoever's entry did not change keeps the counts."""
        before = {caller.key: caller for caller in self._clients.values()}
        self._clients = {
            key.sha256: before.get(key) or ApiClient(key, self._metrics, self._clock) for key in read(path).keys
        }


def _file_version(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
