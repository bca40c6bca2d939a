"""The embedded Redis server."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from redis import Redis

from paceline.state.embedded_redis import EmbeddedRedis
from paceline.state.state_errors import StateError

HOLD_ONE = """
import sys
from paceline.state.embedded_redis import EmbeddedRedis
with EmbeddedRedis() as redis:
    print(redis.url, flush=True)
    sys.stdin.read()
"""


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


def test_listens_on_loopback_only_and_keeps_nothing() -> None:
    with EmbeddedRedis() as redis, Redis.from_url(redis.url) as client:
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}
        assert client.info("server")["process_id"] == redis.pid


def test_comes_back_at_the_same_url_but_empty() -> None:
    with EmbeddedRedis() as redis, Redis.from_url(redis.url) as client:
        url = redis.url
        client.set("key", "value")
        redis.kill()
        assert not redis.running
        redis.start()
        assert redis.url == url
        assert client.get("key") is None


def test_a_second_start_changes_nothing_and_stop_frees_the_port() -> None:
    redis = EmbeddedRedis()
    with pytest.raises(StateError, match="not started"):
        _ = redis.url
    with redis:
        pid = redis.pid
        redis.start()
        assert redis.pid == pid
    redis.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port_of(redis.url))).close()


def test_the_port_of_another_redis_is_an_error() -> None:
    with EmbeddedRedis() as other, Redis.from_url(other.url) as client:
        mine = EmbeddedRedis(port_of(other.url))
        with pytest.raises(StateError), mine:
            pass
        assert not mine.running
        assert client.ping()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_dies_with_its_parent_even_if_the_parent_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        with socket.create_connection(("127.0.0.1", port_of(url))) as link:
            os.kill(parent.pid, signal.SIGKILL)
            assert link.recv(1) == b""  # the server's end of the connection closes only with the server
