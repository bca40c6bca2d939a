"""Target and draft processes with certificates."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.state.embedded_redis import EmbeddedRedis
from paceline.tls import Certificates
from paceline.wire.channels import DRAFT, GATEWAY, TARGET
from paceline.wire.link_errors import TargetLost
from paceline.wire.target_link import TargetLink
from tests.helpers.certificates import Authority
from tests.helpers.service_processes import service_process
from tests.helpers.targets import collect, generation_request, link_to

LOCKSTEP = '{"method": "draft_model", "model": "table:1000", "draft_schedule": "lockstep"}'
"""Lockstep: a table model does not otherwise wait for its draft, and would finish before the first growth."""


def common(redis_url: str, tls: Certificates) -> tuple[str, ...]:
    certificates = ("--tls-cert", str(tls.certificate), "--tls-key", str(tls.key), "--tls-ca", str(tls.authority))
    return ("--redis-url", redis_url, "--speculative-config", LOCKSTEP, *certificates)


async def test_a_request_is_drafted_through_mutual_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with (
        EmbeddedRedis() as redis,
        service_process("draft", *common(redis.url, authority.issue(DRAFT))) as draft,
        service_process("target", "--model", "table:1000", *common(redis.url, authority.issue(TARGET))) as target,
    ):
        for tls in (None, authority.issue(DRAFT, file="intruder")):
            with pytest.raises(TargetLost):
                await TargetLink(target.address, tls).connect()
        async with link_to(target.address, authority.issue(GATEWAY)) as link:
            for number in range(100):
                _, last = await collect(
                    link, generation_request(f"{number}", max_tokens=40, draft_addresses=[draft.address])
                )
                assert last.speculation is not None
                if last.speculation.accepted_tokens:
                    break
            assert last.speculation.drafts
            assert last.speculation.accepted_tokens > 0
