"""Options from a file; the command line overrides them, and an unknown key is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config.config_file import ConfigFileError, as_arguments, read
from paceline_services.draft.__main__ import parse_options as draft
from paceline_services.gateway.__main__ import parse as gateway
from paceline_services.target.__main__ import parse_options as target

YAML = """
model: table:64   # a comment
speculative-config:
  method: ngram
  prompt_lookup_max: 4
port: 8123
"""
TOML = """
model = "table:64"
port = 8123

[speculative_config]
method = "ngram"
prompt_lookup_max = 4
"""


@pytest.fixture(params=["yaml", "toml"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"paceline.{request.param}"
    path.write_text(YAML if request.param == "yaml" else TOML)
    return path


def test_a_service_takes_its_options_from_a_file(file: Path) -> None:
    options = target(["--config", str(file)])
    assert (options.model, options.port, options.speculative_config.prompt_lookup_max) == ("table:64", 8123, 4)
    assert target(["--config", str(file), "--port", "9"]).port == 9


def test_serve_takes_its_options_from_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []

    def stop(options: Any) -> None:
        plans.append(options)
        raise typer.Exit

    monkeypatch.setattr("paceline.cli.deployment.plan_deployment", stop)
    for more in ([], ["--port", "9"]):
        result = CliRunner().invoke(app.main, ["serve", "--config", str(file), *more])
        assert result.exit_code == 0, result.output
    assert [(each.model, each.port, each.speculation.prompt_lookup_max) for each in plans] == [
        ("table:64", 8123, 4),
        ("table:64", 9, 4),
    ]


@pytest.mark.parametrize("parse", [target, draft, gateway], ids=["target", "draft", "gateway"])
def test_an_unknown_key_is_refused_with_its_line(
    parse: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("a.yaml", "port: 1\n\nmodle: x\n"), ("a.toml", 'port = 1\n\nmodle = "x"\n')):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(SystemExit) as left:
            parse(["--config", str(path)])
        assert left.value.code == 2
        assert f"{path}, line 3: modle is no option of this command" in capsys.readouterr().err


def test_serve_refuses_an_unknown_key_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model: x\nprot: 1\n")
    result = CliRunner().invoke(app.main, ["serve", "--config", str(path)])
    assert result.exit_code == 2
    assert "line 2: prot is no option" in " ".join(result.output.replace("│", "").split())


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n- b\n", "a mapping of options"), ("a: [\n", "cannot be read"), (None, "cannot be read: No such file")],
)
def test_an_unreadable_file_is_an_error(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigFileError, match=message):
        read(path, {"a"})


def test_switches_and_lists() -> None:
    values = {"trust_remote_code": True, "quiet": False, "model": ["a", "b"], "engine_config": {"slots": 512}}
    assert as_arguments(values) == [
        "--trust-remote-code",
        "--model=a",
        "--model=b",
        '--engine-config={"slots": 512}',
    ]
