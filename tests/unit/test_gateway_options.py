"""A gateway's command line; options that contradict each other are refused by name."""

from __future__ import annotations

import pytest

from paceline_services.gateway.__main__ import gateway_settings, parse
from paceline_services.gateway.server import GatewaySettings


def settings(*arguments: str) -> GatewaySettings:
    return gateway_settings(parse(["--redis-url", "redis://x", *arguments]))


def test_models_are_served_by_their_own_name_or_another() -> None:
    assert settings("--model", "pydoc").models == {"pydoc": "pydoc"}
    names = ("--served-model-name", "docs", "--served-model-name", "numbers")
    both = settings("--model", "pydoc", "--model", "table:512", *names, "--alias", "d=docs", "--alias", "n=numbers")
    assert both.models == {"docs": "pydoc", "numbers": "table:512"}
    assert both.aliases == {"d": "docs", "n": "numbers"}


def test_options_become_settings_and_limits() -> None:
    given = settings("--model", "pydoc", "--port", "7", "--drain-s", "3", "--max-queue", "9", "--resume-s", "2")
    assert (given.port, given.drain_s, given.limits.max_queue, given.limits.resume_s) == (7, 3.0, 9, 2.0)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--model", "a", "--model", "b", "--served-model-name", "x"), "--served-model-name"),
        (("--model", "a", "--model", "a"), "--served-model-name"),
        (("--model", "a", "--alias", "b"), "--alias b"),
        (("--model", "a", "--alias", "b=c"), "--alias b=c"),
        (("--model", "a", "--alias", "a=a"), "--alias a=a"),
        (("--model", "a", "--alias", "b=a", "--alias", "b=a"), "--alias b=a"),
        (("--model", "timed:step_ms=1", "--served-model-name", "llama"), "timed"),
        (("--model", "a", "--max-queue", "0"), "--max-queue"),
        (("--model", "a", "--max-queue", "-1"), "--max-queue"),
        (("--model", "a", "--max-queue", "many"), "--max-queue"),
    ],
)
def test_wrong_options_are_refused_by_name(
    arguments: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        settings(*arguments)
    assert option in capsys.readouterr().err
