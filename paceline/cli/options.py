"""Options that several commands share, and how they report errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.config_file import ConfigFileError, as_text, read
from paceline.config.validation_messages import first_error
from paceline.config.vllm_options import VllmOptions
from paceline.launcher import COULD_NOT_START, StartError

DEFAULT_MODEL = "Without one: smollm2-135m-instruct, or pydoc, which ships, if that cannot be downloaded."
SettingsT = TypeVar("SettingsT", bound=BaseModel)


@contextmanager
def start_errors() -> Iterator[None]:
    """Print a `StartError` as one line and exit with code 2."""
    try:
        yield
    except StartError as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(COULD_NOT_START) from None


def parsed_json(settings: type[SettingsT]) -> Callable[[str], SettingsT]:
    """A parser for an option whose value is a JSON object with these settings."""

    def parse(text: str) -> SettingsT:
        try:
            return settings.model_validate_json(text)
        except ValidationError as error:
            raise typer.BadParameter(first_error(error)) from None

    return parse


def _from_file(context: typer.Context, file: Path | None) -> Path | None:
    """Make the options in the file the command's defaults."""
    if file is not None:
        try:
            values = read(file, {each.name or "" for each in context.command.params} - {"config"})
        except ConfigFileError as error:
            raise typer.BadParameter(str(error)) from None
        context.default_map = {
            name: value if isinstance(value, bool) else as_text(value) for name, value in values.items()
        }
    return file


Config = Annotated[
    Path | None,
    typer.Option("--config", callback=_from_file, is_eager=True, help="Options by name, in YAML or TOML."),
]
Speculation = Annotated[
    SpeculativeConfig | None,
    typer.Option(
        "--speculative-config",
        parser=parsed_json(SpeculativeConfig),
        metavar="JSON",
        help='How to draft: {"method": "draft_model", "model": ...}, {"method": "ngram"} or {"method": "none"}.',
    ),
]
Speculations = Annotated[
    list[SpeculativeConfig] | None,
    typer.Option(
        "--speculative-config",
        parser=parsed_json(SpeculativeConfig),
        metavar="JSON",
        help="A further speculator; can be given several times.",
    ),
]
Engine = Annotated[
    EngineConfig | None,
    typer.Option("--engine-config", parser=parsed_json(EngineConfig), metavar="JSON", help="dtype, device, slots, ..."),
]


EngineName = Literal["paceline", "vllm"]
"""What computes for a target."""
VllmSettings = Annotated[
    VllmOptions | None,
    typer.Option("--vllm-options", parser=parsed_json(VllmOptions), metavar="JSON", help="For --engine vllm."),
]


PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command that passes all its arguments, `--help` too, to another program."""


def become(module: str, arguments: list[str]) -> None:
    """Replace this process, so that signals and exit code are the service's own."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
