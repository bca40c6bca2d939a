"""`paceline keys`: the API keys of a gateway, and their limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.api_keys import ApiKey, KeyFile, KeyFileError, digest, new_key, read, write
from paceline.launcher import COULD_NOT_START
from paceline.target_labels import parse_labels

keys = typer.Typer(help="Add and remove API keys; gateways see the change at once.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--file", help="The file that a gateway gets as --api-keys.")]
Limit = Annotated[int | None, typer.Option(min=1)]


@keys.command()
def add(
    name: Annotated[str, typer.Argument(help="Its owner: letters, digits, dots, dashes.")],
    file: File = Path("keys.json"),
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    max_concurrent: Limit = None,
    target_labels: Annotated[
        str, typer.Option(help="Labels that targets of its requests must have: KEY=VALUE,KEY=VALUE.")
    ] = "",
) -> None:
    """Make a key and print it once: the file holds only its hash."""
    known = _read(file).keys if file.exists() else ()
    key = new_key()
    try:
        parse_labels(target_labels)
    except ValueError as error:
        _refuse(f"--target-labels: {error}")
    try:
        entry = ApiKey(
            name=name,
            sha256=digest(key),
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            max_concurrent=max_concurrent,
            target_labels=target_labels,
        )
        write(file, KeyFile(keys=(*known, entry)))
    except ValueError:
        _refuse(f"{name!r} is taken, or is no name: choose up to 64 letters, digits, dots and dashes")
    typer.echo(f"{file.absolute()} has its hash; the key, which is not shown again:", err=True)
    typer.echo(key)


@keys.command()
def remove(name: str, file: File = Path("keys.json")) -> None:
    """Remove a key."""
    known = _read(file).keys
    left = tuple(key for key in known if key.name != name)
    if left == known:
        _refuse(f"{file} has no key {name!r}; it has {', '.join(key.name for key in known) or 'none'}")
    write(file, KeyFile(keys=left))


def _read(file: Path) -> KeyFile:
    try:
        return read(file)
    except KeyFileError as error:
        _refuse(str(error))
        raise


def _refuse(why: str) -> None:
    typer.secho(why, fg="red", err=True)
    raise typer.Exit(COULD_NOT_START)
