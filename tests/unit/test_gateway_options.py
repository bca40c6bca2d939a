"""What a gateway's command line means; what makes no sense is refused by name."""

from __future__ import annotations

import pytest

from paceline_services.gateway.__main__ import _settings, parse
from paceline_services.gateway.server import GatewaySettings


def settings(*arguments: str) -> GatewaySettings:
    return _settings(parse(["--redis-url", "redis://x", *arguments]))


def test_one_model_is_served_by_its_own_name_or_another() -> None:
    assert settings("--model", "pydoc").served_model_name == "pydoc"
    named = settings("--model", "pydoc", "--served-model-name", "docs")
    assert (named.model, named.served_model_name, named.more_models) == ("pydoc", "docs", [])


def test_several_models_and_further_names_for_them() -> None:
    names = ("--served-model-name", "docs", "--served-model-name", "numbers")
    both = settings("--model", "pydoc", "--model", "table:512", *names, "--alias", "d=docs", "--alias", "n=numbers")
    assert (both.model, both.served_model_name) == ("pydoc", "docs")
    assert both.more_models == [("table:512", "numbers")]
    assert both.aliases == {"d": "docs", "n": "numbers"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--model", "a", "--model", "b", "--served-model-name", "x"), "--served-model-name"),
        (("--model", "a", "--model", "a"), "--served-model-name"),
        (("--model", "a", "--alias", "b"), "--alias b"),
        (("--model", "a", "--alias", "b=c"), "--alias b=c"),
        (("--model", "a", "--alias", "a=a"), "--alias a=a"),
        (("--model", "a", "--alias", "b=a", "--alias", "b=a"), "--alias b=a"),
        (("--model", "timed:step_ms=1", "--served-model-name", "llama"), "timed"),
    ],
)
def test_names_that_contradict_each_other_are_refused(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        settings(*arguments)
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_a_queue_has_room_for_somebody(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings("--model", "a", "--max-queue", number)
    assert "--max-queue" in capsys.readouterr().err
