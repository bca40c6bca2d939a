"""Target and draft as processes, started with certificates as an operator would."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.state.embedded_redis import EmbeddedRedis
from paceline.tls import Certificates
from paceline.wire.credentials import DRAFT, GATEWAY, TARGET
from paceline.wire.link_errors import TargetLost
from paceline.wire.target_link import TargetLink
from tests.helpers.certificates import Authority
from tests.helpers.targets import collect, submission

LOCKSTEP = '{"method": "draft_model", "model": "table:1000", "draft_schedule": "lockstep"}'
"""A table is done before its draft has said a word, and a draft that brings nothing is paused for longer and longer."""
SPECULATION = ("--speculative-config", LOCKSTEP)


def options(tls: Certificates) -> tuple[str, ...]:
    assert tls.authority is not None
    return ("--tls-cert", str(tls.certificate), "--tls-key", str(tls.key), "--tls-ca", str(tls.authority))


@contextmanager
def started(kind: str, *arguments: str) -> Iterator[str]:
    """The address at which it is ready."""
    command = [sys.executable, "-m", f"paceline_services.{kind}", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            while f"{kind} ready on " not in (line := process.stderr.readline()):
                assert line, f"the {kind} did not start"
            yield line.split("ready on ")[1].split()[0]
        finally:
            process.terminate()
            process.stderr.read()


async def test_a_request_is_drafted_through_mutual_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with (
        EmbeddedRedis() as redis,
        started("draft", "--redis-url", redis.url, *SPECULATION, *options(authority.issue(DRAFT))) as draft,
        started(
            "target", "--model", "table:1000", "--redis-url", redis.url, *SPECULATION, *options(authority.issue(TARGET))
        ) as target,
    ):
        for tls in (None, authority.issue(DRAFT, place="intruder")):
            stranger = TargetLink(target, tls)
            with pytest.raises(TargetLost):
                await stranger.connect()
        link = TargetLink(target, authority.issue(GATEWAY))
        await link.connect(timeout_s=20.0)
        try:
            for number in range(100):
                _, last = await collect(link, submission(f"{number}", max_tokens=40, drafts=[draft]))
                assert last.speculation is not None
                if last.speculation.accepted_tokens:
                    break
            assert last.speculation.drafts
            assert last.speculation.accepted_tokens > 0
        finally:
            await link.close()


def test_an_option_that_is_missing_is_named(tmp_path: Path) -> None:
    certificate, key, _ = Authority(tmp_path).replace(TARGET)
    files = ("--tls-cert", str(certificate), "--tls-key", str(key))
    command = [sys.executable, "-m", "paceline_services.target", "--model", "table:1000", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert "--tls-ca must be given, too" in done.stderr
    assert "Traceback" not in done.stderr
