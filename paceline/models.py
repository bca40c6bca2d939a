"""Model names: what a user may write where a model is asked for, and the place it stands for.

A name is a folder in the layout that transformers writes, a member of the family that ships with the package,
or `table:SIZE[:DISAGREEMENT]`: a model without weights over SIZE token ids, to measure everything else with.
"""

from __future__ import annotations

from pathlib import Path

from paceline import family

TABLE_PREFIX = "table:"


class ModelNotFoundError(Exception):
    """There is no such model; the text says what to do."""


def resolve_model(name: str) -> str:
    """The absolute folder of a model, or the name itself for a table model. Raises `ModelNotFoundError`."""
    if name.startswith(TABLE_PREFIX):
        table_size(name)
        return name
    folder = family.path(name) if name in family.NAMES else Path(name).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"no model at {folder}: a model is a folder with config.json, weights and tokenizer.json "
            f"(download one with `hf download NAME --local-dir FOLDER`), or one of {', '.join(family.NAMES)}"
        )
    return str(folder)


def table_size(name: str) -> int | None:
    """The vocabulary size of a table model, None for others. Raises `ModelNotFoundError` if it is no size."""
    if not name.startswith(TABLE_PREFIX):
        return None
    size = name.removeprefix(TABLE_PREFIX).partition(":")[0]
    if not size.isascii() or not size.isdigit() or int(size) < 2:
        raise ModelNotFoundError(
            f"{name!r} names no table model: write {TABLE_PREFIX} and a vocabulary size of 2 or more"
        )
    return int(size)
