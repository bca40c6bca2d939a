"""Published models on the command line: downloaded where a command names one for the first time."""

from __future__ import annotations

import typer

from paceline import family
from paceline.config import SpeculativeConfig
from paceline.launcher import StartError
from paceline.published_models import PUBLISHED, SMOLLM2, NotAvailableError, download, downloaded


def download_models(model: str, speculation: SpeculativeConfig | None = None) -> None:
    """Download the target and the draft, as far as they are published models that are not here yet.

    Raises `StartError`.
    """
    draft = None if speculation is None else speculation.model
    for name in filter(None, (model, draft)):
        if name in PUBLISHED and downloaded(name) is None:
            _download(name)


def available(name: str, fallback: str | None) -> str:
    """The name once the model is downloaded; `fallback`, after a sentence, if it cannot be. Raises `StartError`."""
    if name not in PUBLISHED:
        raise StartError(f"{name} is no published model: there are {', '.join(PUBLISHED)}")
    try:
        download_models(name)
    except StartError as error:
        if fallback is None:
            raise
        typer.echo(f"{error}; {fallback} takes its place", err=True)
        return fallback
    return name


def default_model(*, takes_gguf: bool = True) -> str:
    """What is served where no model is named: a published model, or the shipped one if that cannot be downloaded.

    `takes_gguf`: whether what computes can take a GGUF file, which published models are.
    """
    return available(SMOLLM2, family.NAMES[0]) if takes_gguf else family.NAMES[0]


def offers() -> list[str]:
    """A line for each published model: its name and size."""
    width = max(map(len, PUBLISHED))
    return [f"{name:{width}}  {_size(name)}" for name in PUBLISHED]


def _size(name: str) -> str:
    """What has to be downloaded."""
    return f"{PUBLISHED[name].size / 1e6:,.0f} MB" + ("" if downloaded(name) is None else ", downloaded")


def _download(name: str) -> None:
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"downloading {name}: {_size(name)}, once")
    try:
        with console.status("downloading"):
            path = download(name)
    except NotAvailableError as error:
        raise StartError(f"{name} cannot be downloaded: {error}") from error
    console.print(f"{name} is in {path}")
