"""Limits of an API key over time, and the file that keys are kept in."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from paceline.api_keys import ApiKey, KeyFile, KeyFileError, digest, new_key, read, write
from paceline.cli.app import main
from paceline.telemetry.gateway_metrics import GatewayMetrics
from paceline_services.gateway.api_errors import AuthenticationError, RateLimitError
from paceline_services.gateway.auth import ANONYMOUS, ApiClient, Authenticator, RateLimitBucket


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def entry(name: str = "alice", key: str = "k", **limits: int) -> ApiKey:
    return ApiKey(name=name, sha256=digest(key), **limits)


def test_a_bucket_fills_evenly_and_not_beyond_a_minute() -> None:
    clock = Clock()
    bucket = RateLimitBucket(60, clock)
    bucket.take(60)
    assert bucket.level == 0
    clock.now += 1.5
    assert bucket.level == 1.5
    clock.now += 3600
    assert bucket.level == 60


def test_a_bucket_may_be_overdrawn_and_pays_back() -> None:
    clock = Clock()
    bucket = RateLimitBucket(60, clock)
    bucket.take(90)
    assert bucket.seconds_until(1.0) == 31
    clock.now += 31
    assert bucket.seconds_until(1.0) == 0


def test_requests_per_minute_over_an_hour() -> None:
    """At most a minute's worth plus the refill is admitted, however the requests are spread."""
    clock = Clock()
    client = ApiClient(entry(requests_per_minute=10), None, clock)
    admitted = 0
    for _ in range(3600):
        clock.now += 1.0
        try:
            with client.admit():
                admitted += 1
        except RateLimitError:
            pass
    assert 600 <= admitted <= 610


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    client = ApiClient(entry(requests_per_minute=1), None, clock)
    with client.admit():
        pass
    for _ in range(5):
        with pytest.raises(RateLimitError, match=r"60\.0 s"), client.admit():
            pass
    clock.now += 60
    with client.admit():
        pass


def test_any_end_of_a_request_frees_its_slot() -> None:
    client = ApiClient(entry(max_concurrent=1))
    for error in (ValueError, GeneratorExit):
        with pytest.raises(error), client.admit():
            raise error
    with client.admit(), pytest.raises(RateLimitError), client.admit():
        pass
    with client.admit():
        pass


def test_salts_separate_key_and_salt() -> None:
    """No pair of name and salt has the digest of another pair."""
    clients = [ANONYMOUS, *(ApiClient(entry(name)) for name in ("a", "ab", "1", "a.1"))]
    salts = [None, "a", "b", ":", "1:a", "2:ab", ":1:a"]
    digests = [client.cache_salt_for(salt) for client in clients for salt in salts]
    assert len(set(digests)) == len(digests)


def authenticator(path: Path) -> Authenticator:
    return Authenticator(path, GatewayMetrics(CollectorRegistry()).keys)


def test_every_key_is_compared(tmp_path: Path) -> None:
    """A key is found wherever it is in the file."""
    path = tmp_path / "keys.json"
    write(path, KeyFile(keys=tuple(entry(f"n{i}", f"k{i}") for i in range(5))))
    known = authenticator(path)
    assert [known.client_for(f"Bearer k{i}").name for i in range(5)] == [f"n{i}" for i in range(5)]
    for key in ("k5", "", "k", "\u00fc"):
        with pytest.raises(AuthenticationError):
            known.client_for(f"Bearer {key}")


def test_an_empty_file_admits_no_client(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, KeyFile())
    with pytest.raises(AuthenticationError):
        authenticator(path).client_for("Bearer ")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not valid JSON"),
        ('{"keys": [{"name": "a", "key": "pl-plain"}]}', "sha256"),
        ('{"keys": [{"name": "a", "sha256": "pl-plain"}]}', "sha256"),
        ('{"keys": [{"name": "a b", "sha256": "pl-plain"}]}', "name"),
        (f'{{"keys": [{{"name": "a", "sha256": "{"0" * 64}", "rpm": 5}}]}}', "rpm"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused_without_quoting_it(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=complaint) as refused:
        read(path)
    assert "pl-plain" not in str(refused.value)


def test_two_of_a_kind_are_refused(tmp_path: Path) -> None:
    for keys in ([entry("a", "1"), entry("a", "2")], [entry("a", "1"), entry("b", "1")]):
        with pytest.raises(ValueError, match="two keys have the same"):
            KeyFile(keys=tuple(keys))


def test_keys_are_long_and_never_twice() -> None:
    made = {new_key() for _ in range(1000)}
    assert len(made) == 1000
    assert all(len(key) == len("pl-") + 43 for key in made), "256 bits in base64"


def test_the_command_line_makes_and_withdraws_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    run = CliRunner().invoke
    file = ("--file", str(path))
    made = run(main, ["keys", "add", "alice", *file, "--tokens-per-minute", "5000"])
    key = made.stdout.strip()
    assert made.exit_code == 0
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert authenticator(path).client_for(f"Bearer {key}").key == entry("alice", key, tokens_per_minute=5000)
    again = run(main, ["keys", "add", "alice", *file])
    assert again.exit_code == 2
    assert "taken" in again.stderr
    assert run(main, ["keys", "remove", "bob", *file]).exit_code == 2
    assert run(main, ["keys", "remove", "alice", *file]).exit_code == 0
    assert read(path) == KeyFile()
