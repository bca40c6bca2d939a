"""`paceline keys`: the API keys of a gateway, and their limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.api_keys import ApiKey, KeyFile, digest, new_key, read, write
from paceline.cli.options import start_errors
from paceline.launcher import StartError
from paceline.target_features import parse_labels

keys = typer.Typer(help="Add and remove API keys; gateways see the change at once.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--file", help="The file that a gateway gets as --api-keys.")]
Limit = Annotated[int | None, typer.Option(min=1)]


@keys.command()
@start_errors()
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
    known = read(file).keys if file.exists() else ()
    key = new_key()
    try:
        parse_labels(target_labels)
    except ValueError as error:
        raise StartError(f"--target-labels: {error}") from error
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
        why = "is taken, or is no name: choose up to 64 letters, digits, dots and dashes"
        raise StartError(f"{name!r} {why}") from None
    typer.echo(f"{file.absolute()} has its hash; the key, which is not shown again:", err=True)
    typer.echo(key)


@keys.command()
@start_errors()
def remove(name: str, file: File = Path("keys.json")) -> None:
    """Remove a key."""
    known = read(file).keys
    left = tuple(key for key in known if key.name != name)
    if left == known:
        raise StartError(f"{file} has no key {name!r}; it has {', '.join(key.name for key in known) or 'none'}")
    write(file, KeyFile(keys=left))
